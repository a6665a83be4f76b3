//! What the world sees: after each cycle a view that never changes again, and every event as it happens.
//!
//! JSON, text and metrics come from these values. The view is small, O(jobs + cores); details are asked of the
//! loop (see [`crate::question`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use pjw_core::allocate::{Fits, fits};
use pjw_core::cpuset::CpuSet;
use pjw_core::defrag::Defrag;
use pjw_core::event::{Event, EventKind};
use pjw_core::fortify::{Keeping, keeping_of};
use pjw_core::job::{Class, GrantedBy, Job};
use pjw_core::membership::Evidence;
use pjw_core::node::{Journal, Node};
use pjw_core::plan::{Abstained, Action, Plan};
use pjw_core::policy::{Mode, Policy};
use pjw_core::process::Uid;
use pjw_core::snapshot::UnixMillis;
use pjw_core::state::WardenState;
use pjw_core::stirred::Stirred;
use pjw_core::topology::{Level, Topology};
use pjw_core::wall::{WallAction, WallChange};
use pjw_ipc::call::{DefragReply, PlanReply};
use pjw_ipc::wire;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use crate::cycle::{Troubles, Warden};
use crate::metrics::pulse::{Load, Scene};
use crate::tally::{Counts, Tally};
use crate::tree;

/// The longest text of an event, in bytes.
const LONGEST_TEXT: usize = 1024;

/// What the loop knows of itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Feed {
    /// Whether the kernel tells of births and ends.
    pub netlink: bool,
    /// How late the loop was at most, if it doesn't keep up.
    pub behind: Option<Duration>,
}

/// Where the loop puts what happened.
#[derive(Debug)]
pub struct Publisher {
    hostname: String,
    view: watch::Sender<Arc<wire::Status>>,
    events: mpsc::UnboundedSender<Arc<wire::Event>>,
    /// The machine, made anew only when it turns out to have more PUs.
    machine: watch::Sender<Arc<wire::Topology>>,
    cores: Vec<wire::Core>,
    /// Lasting conditions that are being told of, so that each is logged when it starts and when it ends.
    told: BTreeMap<(String, String), String>,
    /// Users whose strays were told of.
    stray_users: BTreeSet<Uid>,
    tally: Tally,
}

/// Where the control server reads it.
#[derive(Debug)]
pub struct Published {
    /// The latest view.
    pub view: watch::Receiver<Arc<wire::Status>>,
    /// The machine.
    pub machine: watch::Receiver<Arc<wire::Topology>>,
    /// Events as they happen.
    pub events: mpsc::UnboundedReceiver<Arc<wire::Event>>,
}

impl Publisher {
    /// A publisher and its reading end.
    #[must_use]
    pub fn new(hostname: String, topology: &Topology) -> (Self, Published) {
        let (view, seen) = watch::channel(Arc::new(wire::Status::default()));
        let (machine, known) = watch::channel(Arc::new(tree::topology_on_the_wire(topology)));
        let (events, heard) = mpsc::unbounded_channel();
        let publisher = Self {
            hostname,
            view,
            events,
            machine,
            cores: cores(topology),
            told: BTreeMap::new(),
            stray_users: BTreeSet::new(),
            tally: Tally::default(),
        };
        (publisher, Published { view: seen, machine: known, events: heard })
    }

    /// Tells of a machine that has more PUs than were known.
    pub fn meet(&mut self, topology: &Topology) {
        self.machine.send_replace(Arc::new(tree::topology_on_the_wire(topology)));
        self.cores = cores(topology);
    }

    /// Tells what happened: one line in the log, one event for whoever listens.
    pub fn happened(&self, events: Vec<Event>) {
        for event in events {
            let told = event_on_the_wire(&event);
            let wire::Event { event: name, job, pid, cpus, text, .. } = &told;
            // journalctl shows the message alone, without its fields.
            let text = if job.is_empty() { text.clone() } else { format!("{job} {name}: {text}") };
            match event.kind {
                EventKind::Violation | EventKind::Overrun | EventKind::Revoked | EventKind::Refused => {
                    warn!(event = name, job, pid, cpus, "{text}");
                }
                _ => info!(event = name, job, pid, cpus, "{text}"),
            }
            // Nobody listens any more once the server has stopped.
            let _ = self.events.send(Arc::new(told));
        }
    }

    /// Publishes the view of the state after a cycle, and returns what it published.
    pub fn publish<N: Node, J: Journal>(
        &mut self,
        warden: &Warden<N, J>,
        abstained: &[Abstained],
        stirred: &Stirred,
        feed: Feed,
    ) -> Scene {
        let state = warden.state();
        self.tally.renew(state, stirred);
        let mut warnings = warnings(state, warden.policy(), abstained, warden.troubles(), &self.tally);
        warnings.extend(feed.behind.map(behind));
        self.log_changes(&warnings);
        self.tell_strays(state, abstained);
        let (jobs, loads, strays) = jobs(state, warden.policy(), &self.tally);
        let status = Arc::new(wire::Status {
            schema: wire::SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            mode: match warden.policy().mode {
                Mode::Observe => "observe",
                Mode::Enforce => "enforce",
            }
            .to_owned(),
            discovery: if feed.netlink { "netlink" } else { "polling" }.to_owned(),
            node: node(&self.hostname, &state.topology),
            pool: wire::Pool {
                housekeeping: state.pool.housekeeping().to_string(),
                free: state.pool.free().to_string(),
                allocated: state.pool.allocated().to_string(),
            },
            fits: fits_on_the_wire(fits(&state.pool, &state.topology)),
            jobs,
            warnings,
            cores: self.cores.clone(),
        });
        self.view.send_replace(Arc::clone(&status));
        Scene { status, loads, strays }
    }

    /// One event when a user's first stray is seen, and another only after there were none.
    fn tell_strays(&mut self, state: &WardenState, abstained: &[Abstained]) {
        let mut users = BTreeSet::new();
        let mut news = Vec::new();
        for abstained in abstained.iter().filter(|abstained| abstained.code == EventKind::Stray.name()) {
            let Some(pid) = abstained.pid else { continue };
            let Some(known) = state.processes.get(&pid) else { continue };
            let user = known.process.uid;
            users.insert(user);
            if !self.stray_users.contains(&user) {
                news.push(Event::new(EventKind::Stray, abstained.why.clone()).at(pid));
            }
        }
        self.stray_users = users;
        self.happened(news);
    }

    fn log_changes(&mut self, warnings: &[wire::Warning]) {
        let key = |warning: &wire::Warning| (warning.code.clone(), warning.job.clone());
        let now: BTreeMap<_, _> =
            warnings.iter().map(|warning| (key(warning), warning.text.clone())).collect();
        for warning in warnings.iter().filter(|warning| !self.told.contains_key(&key(warning))) {
            warn!(condition = %warning.code, job = %warning.job, remedy = %warning.remedy, "{}", warning.text);
        }
        for ((code, job), _) in self.told.iter().filter(|(key, _)| !now.contains_key(key)) {
            info!(condition = %code, job = %job, "no longer the case");
        }
        self.told = now;
    }
}

/// A time as people and scripts read it.
#[must_use]
pub fn rfc3339(time: UnixMillis) -> String {
    let time = Timestamp::from_millisecond(time.0).unwrap_or(Timestamp::UNIX_EPOCH);
    // Always three digits: columns stay columns, and text sorts as time does.
    format!("{time:.3}")
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn node(hostname: &str, topology: &Topology) -> wire::Node {
    let inhabited = |level| count(topology.domains(level).filter(|domain| !domain.cpus.is_empty()).count());
    wire::Node {
        hostname: hostname.to_owned(),
        cpus: topology.cpus().to_string(),
        cores: count(topology.cores().len()),
        packages: inhabited(Level::Package),
        numa_nodes: inhabited(Level::NumaNode),
        l3: inhabited(Level::L3),
    }
}

fn cores(topology: &Topology) -> Vec<wire::Core> {
    let number = |level, core: &pjw_core::topology::Core| {
        let pu = core.pus.first()?;
        topology.domain_of(level, pu).map(|domain| domain.number)
    };
    let core = |core| wire::Core {
        cpus: pjw_core::topology::Core::clone(core).pus.to_string(),
        package: number(Level::Package, core),
        numa_node: number(Level::NumaNode, core),
        l3: number(Level::L3, core),
    };
    topology.cores().iter().map(core).collect()
}

/// The jobs, what their threads want, and how many processes are strays.
fn jobs(state: &WardenState, policy: &Policy, tally: &Tally) -> (Vec<wire::Job>, Vec<Load>, usize) {
    let lent: Vec<&Job> =
        state.jobs.values().filter(|job| job.grant.as_ref().is_some_and(|grant| grant.shared)).collect();
    let job = |job: &Job| {
        let mut counts = tally.of(&job.id);
        counts.strays += state.strays.get(&job.owner).map_or(0, |pids| count(pids.len()));
        // Who is behind a wall needs no second look, and these may be many.
        let unwalled = Some(state.members_of(&job.id)).filter(|_| counts.unwalled > 0);
        let enforcement = match keeping_of(state, policy, job, unwalled.into_iter().flatten()) {
            Keeping::Cpuset { .. } => "cpuset",
            Keeping::Affinity { .. } => "affinity",
            Keeping::Nothing => "none",
        };
        let shared = lent.iter().any(|other| holds_some_of(other, job));
        let told = job_on_the_wire(job, counts, &state.topology, enforcement);
        (wire::Job { shared: shared || told.shared, ..told }, counts.load)
    };
    let (jobs, loads) = state.jobs.values().map(job).unzip();
    (jobs, loads, state.strays.values().map(BTreeSet::len).sum())
}

/// Whether there is a PU that both hold.
fn holds_some_of(one: &Job, other: &Job) -> bool {
    let both = one.grant.as_ref().zip(other.grant.as_ref());
    both.is_some_and(|(one, other)| one.cpus.intersects(&other.cpus))
}

fn job_on_the_wire(job: &Job, counts: Counts, topology: &Topology, enforcement: &str) -> wire::Job {
    let grant = job.grant.as_ref();
    let requested = job.request.as_ref().map(|request| request.amount.in_cores(topology));
    let state = match (&job.request, grant) {
        _ if job.let_go => "released",
        (None, None) => "observed",
        (Some(_), None) => "waiting",
        (_, Some(_)) if counts.processes == 0 => "reserved",
        (_, Some(_)) => "running",
    };
    let class = job.request.as_ref().map_or(Class::Normal, |request| request.class);
    wire::Job {
        id: job.id.to_string(),
        source: job.id.source().to_string(),
        owner: job.owner.0,
        state: state.to_owned(),
        class: match class {
            Class::Guaranteed => "guaranteed",
            Class::Normal => "normal",
            Class::Besteffort => "besteffort",
        }
        .to_owned(),
        requested_cores: requested.unwrap_or(0),
        cpus: grant.map(|grant| grant.cpus.to_string()).unwrap_or_default(),
        granted_by: match grant.map(|grant| grant.granted_by) {
            Some(GrantedBy::Scheduler) => "scheduler",
            Some(GrantedBy::Warden) | None => "warden",
        }
        .to_owned(),
        shared: grant.is_some_and(|grant| grant.shared),
        enforcement: enforcement.to_owned(),
        processes: counts.processes,
        threads: counts.threads,
        hot: counts.hot,
        pinned: counts.pinned,
        violations: counts.outside,
        strays: counts.strays,
        since: rfc3339(job.since),
    }
}

fn warnings(
    state: &WardenState,
    policy: &Policy,
    abstained: &[Abstained],
    troubles: &Troubles,
    tally: &Tally,
) -> Vec<wire::Warning> {
    let warning = |code: &str, job: String, text: String, remedy: &str| wire::Warning {
        code: code.to_owned(),
        job,
        text,
        remedy: remedy.to_owned(),
    };
    let mut warnings = Vec::new();
    for (job, violation) in &troubles.audit {
        let job = job.as_ref().map(ToString::to_string).unwrap_or_default();
        let remedy = "this is a bug of pjw: nothing is changed for this job; please report it with the log";
        warnings.push(warning("audit", job, violation.clone(), remedy));
    }
    if let Some(fault) = &troubles.journal {
        let text = format!("nothing is changed, because it can't be recorded: {fault}");
        warnings.push(warning(
            "journal",
            String::new(),
            text,
            "jobs run on as they are; it is tried again each cycle",
        ));
    }
    let mut refused: BTreeMap<String, (usize, String)> = BTreeMap::new();
    for refusal in troubles.refused.values() {
        let entry = refused.entry(refusal.job.to_string()).or_insert_with(|| (0, refusal.hint.clone()));
        entry.0 += 1;
    }
    for (job, (threads, hint)) in refused {
        let text = format!("{threads} threads can't be put on their cores: {hint}");
        warnings.push(warning("unconfined", job, text, "it is tried again each cycle"));
    }
    for job in state.jobs.values() {
        warnings.extend(overlap(job).map(|text| {
            warning(
                "overlap",
                job.id.to_string(),
                text,
                "release one of the jobs, or set on_exhausted = \"refuse\"",
            )
        }));
        warnings.extend(kept_from_the_system(job, &policy.housekeeping).map(|text| {
            let remedy = "they become housekeeping when the job ends or is released";
            warning("housekeeping", job.id.to_string(), text, remedy)
        }));
        warnings.extend(oversubscribed(job, tally.of(&job.id)).map(|text| {
            let remedy =
                "it slows down only itself; ask for more cores, or start fewer threads (OMP_NUM_THREADS)";
            warning("oversubscribed", job.id.to_string(), text, remedy)
        }));
    }
    warnings.extend(abstained.iter().map(|abstained| {
        let job = abstained.job.as_ref().map(ToString::to_string).unwrap_or_default();
        warning(abstained.code, job, abstained.why.clone(), &abstained.remedy)
    }));
    warnings
}

fn behind(by: Duration) -> wire::Warning {
    wire::Warning {
        code: "behind".to_owned(),
        job: String::new(),
        text: format!("the warden is behind: what was due waited up to {} ms", by.as_millis()),
        remedy: "nothing is lost; see what starts so many processes, or raise cpu_budget_permille".to_owned(),
    }
}

fn overlap(job: &Job) -> Option<String> {
    let grant = job.grant.as_ref().filter(|grant| grant.shared)?;
    Some(format!("{} holds {}, of which other jobs hold some too", job.id, grant.cpus))
}

/// What of the system's CPUs a job held before the configuration said so. A scheduler's word on its jobs stands above it.
fn kept_from_the_system(job: &Job, housekeeping: &CpuSet) -> Option<String> {
    let grant = job.grant.as_ref().filter(|grant| grant.granted_by == GrantedBy::Warden)?;
    let both = grant.cpus.intersection(housekeeping);
    (!both.is_empty()).then(|| format!("{} holds {both} of the CPUs that are set for housekeeping", job.id))
}

fn oversubscribed(job: &Job, counts: Counts) -> Option<String> {
    let pus = job.grant.as_ref()?.cpus.len();
    let hot = usize::try_from(counts.hot).unwrap_or(usize::MAX);
    let cpus = if pus == 1 { "1 CPU".to_owned() } else { format!("{pus} CPUs") };
    (hot > pus).then(|| format!("{} runs {hot} threads on {cpus}", job.id))
}

/// How a process is known to be a member, as it is published.
#[must_use]
pub fn evidence_on_the_wire(evidence: Evidence) -> &'static str {
    match evidence {
        Evidence::Registered => "registered",
        Evidence::Cgroup => "cgroup",
        Evidence::Parent => "parent",
        Evidence::Session => "session",
        Evidence::Environment => "environment",
        Evidence::Adopted => "adopted",
    }
}

/// An event that happens now, as it is published.
#[must_use]
pub fn event_on_the_wire(event: &Event) -> wire::Event {
    wire::Event {
        time: rfc3339(pjw_linux::clock::now().wall),
        event: event.kind.name().to_owned(),
        job: event.job.as_ref().map(ToString::to_string).unwrap_or_default(),
        text: cut(&event.text),
        pid: event.pid.map(|pid| pid.0),
        tid: event.tid.map(|tid| tid.0),
        cpus: event.cpus.as_ref().map(ToString::to_string),
    }
}

/// A sentence may repeat what somebody asked for, who may have asked for very much.
fn cut(text: &str) -> String {
    if text.len() <= LONGEST_TEXT {
        return text.to_owned();
    }
    let mut end = LONGEST_TEXT - '…'.len_utf8();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}

/// What would be done and what would not, as it is published.
#[must_use]
pub fn plan_on_the_wire(plan: &Plan, abstained: &[Abstained]) -> PlanReply {
    let walls = plan.walls.iter().map(wall_action_on_the_wire);
    PlanReply {
        actions: walls.chain(plan.actions.iter().map(action_on_the_wire)).collect(),
        abstained: abstained.iter().map(abstained_on_the_wire).collect(),
    }
}

/// The moves that would heal fragmentation, or did, as they are published.
#[must_use]
pub fn defrag_on_the_wire(healing: &Defrag) -> DefragReply {
    let moves = healing.moves.iter().map(|moved| wire::Move {
        job: moved.job.to_string(),
        from: moved.from.to_string(),
        to: moved.to.to_string(),
        why: moved.why.clone(),
    });
    DefragReply {
        moves: moves.collect(),
        fits_before: fits_on_the_wire(healing.fits_before),
        fits_after: fits_on_the_wire(healing.fits_after),
    }
}

fn fits_on_the_wire(Fits { l3, numa_node, package, machine }: Fits) -> wire::Fits {
    wire::Fits { l3, numa_node, package, machine }
}

fn action_on_the_wire(action: &Action) -> wire::Action {
    wire::Action {
        action: action.kind.name().to_owned(),
        job: action.job.to_string(),
        pid: action.thread.process.pid.0,
        tid: action.thread.tid.0,
        from: action.from.to_string(),
        to: action.to.to_string(),
        why: action.why.clone(),
    }
}

/// A change to a wall; one that moves no process has the numbers 0.
fn wall_action_on_the_wire(action: &WallAction) -> wire::Action {
    let pid = action.process().map_or(0, |process| process.pid.0);
    let (from, to) = match &action.change {
        WallChange::Raise { wall, .. } => (wall.path.clone(), wall.bounds.cpus.to_string()),
        WallChange::Admit { from, to, .. } | WallChange::Return { from, to, .. } => {
            (from.clone(), to.clone())
        }
        WallChange::Open { wall } | WallChange::Raze { wall } => (wall.path.clone(), String::new()),
    };
    let (job, why) = (action.job.to_string(), action.why.clone());
    wire::Action { action: action.name().to_owned(), job, pid, tid: pid, from, to, why }
}

fn abstained_on_the_wire(abstained: &Abstained) -> wire::Abstained {
    wire::Abstained {
        code: abstained.code.to_owned(),
        job: abstained.job.as_ref().map(ToString::to_string).unwrap_or_default(),
        pid: abstained.pid.map(|pid| pid.0),
        why: abstained.why.clone(),
        remedy: abstained.remedy.clone(),
    }
}

#[cfg(test)]
#[path = "publish/tests.rs"]
mod tests;
