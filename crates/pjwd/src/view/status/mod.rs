//! The published status: one immutable snapshot after each cycle, and every event as it happens.
//!
//! JSON, text and metrics are made from these values. The status is small, O(jobs + cores). Details are queries to
//! the event loop.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use pjw_core::cpu_count_variables::CpuCountVariable;
use pjw_core::event::{Event, EventKind};
use pjw_core::lending::reason_not_to_lend;
use pjw_core::policy::{DaemonMode, Policy};
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::topology::{Topology, TopologyLevel};
use pjw_core::unassigned::oldest_unassigned_process;
use pjw_core::{
    allocate::offer::largest_requests, ids::Uid, plan::Warning, state::WardenState, state::dirty::DirtySet,
};
use pjw_ipc::wire;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

mod published;

pub use super::warnings::CycleDelay;
pub use published::PublishedStatus;

use super::counts::CpuDemand;
use super::jobs::JobViews;
use super::to_wire::{event_to_wire, largest_requests_to_wire, saturating_u32};
use super::topology_tree;
use super::warnings::{ConvertedWarnings, failure_warnings, lateness_warning};
use crate::warden::Warden;

/// The status that the event loop sent to the control server after a cycle (scan, decision and changes), together with
/// two values that only the metrics use: the CPU demand of each job, and the number of unassigned processes.
#[derive(Debug, Clone, Default)]
pub struct StatusSnapshot {
    /// The status, as clients receive it.
    pub status: Arc<PublishedStatus>,
    /// The CPU demands of the jobs, in the order of `status.jobs`.
    pub job_demands: Vec<CpuDemand>,
    /// The number of processes that belong to no job although their user has a job on this machine.
    pub unassigned_processes: usize,
}

/// The state of the event loop, for the status that clients receive: whether the loop receives process events from
/// the kernel, and how late its cycles (scan, decision and changes) are.
#[derive(Debug, Clone, Default)]
pub struct LoopStatus {
    /// Whether the kernel reports process events (fork, exec, exit) to this daemon over netlink. If false,
    /// the daemon finds new processes only by scans.
    pub has_process_events: bool,
    /// The longest delay of the recent cycles (scan, decision and changes). `None` if no cycle of the last 5 s began
    /// more than 250 ms after it was due.
    pub lateness: Option<CycleDelay>,
    /// How pjwd detects that an owner (a job that lends cores) needs its lent cores back.
    pub demand_detection: OwnerDemandDetection,
}

/// How pjwd detects that an owner (a job that lends cores) needs its lent cores back.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum OwnerDemandDetection {
    /// The event loop has not tried to load the BPF program that reports demand, because no job can borrow cores.
    #[default]
    NotLoaded,
    /// A BPF program reports when a thread of the owner wakes up.
    Reported,
    /// The event loop samples the CPU time of the owner. The text is the reason why the BPF program can't be used.
    Sampled(String),
}

/// Sends the status, the topology and the events from the event loop to the control server (the part of pjwd that
/// answers clients). The control server answers clients from these values.
#[derive(Debug)]
pub struct StatusPublisher {
    /// The host name of the machine.
    hostname: String,
    /// Sends each new status to the control server.
    status: watch::Sender<Arc<PublishedStatus>>,
    /// Sends the events of the daemon to the control server.
    events: mpsc::UnboundedSender<Arc<wire::Event>>,
    /// Sends the topology to the control server. The topology changes only when PUs are added to the machine.
    topology: watch::Sender<Arc<wire::Topology>>,
    /// The part of the status with the host name and the numbers of cores, packages, NUMA nodes and L3 caches.
    node: wire::Node,
    /// The cores of the machine, as the status lists them.
    cores: Arc<[wire::Core]>,
    /// The warnings of the last published status, except those about single jobs.
    warnings: Vec<Arc<wire::Warning>>,
    /// The warnings of the last decision and of the event loop.
    plan_warnings: ConvertedWarnings,
    /// The warning code and the job id of each warning in `warnings`. A warning is logged when it begins and when it
    /// ends.
    logged: BTreeSet<(String, String)>,
    /// The users for whom an event has reported processes that belong to no job.
    unassigned_users: BTreeSet<Uid>,
    /// The descriptions of the jobs in the status, and the warnings about single jobs.
    jobs: JobViews,
    /// The path of the directory that has a subdirectory with files for each job.
    job_files: String,
    /// The environment variables that tell a program the size of its job, as in the configuration.
    cpu_count_variables: Vec<String>,
    /// The last published status. `None` if the next status must be published even without a change.
    last: Option<StatusSnapshot>,
    /// The sizes of the largest requests for cores that the free PUs can serve. The number before them counts the
    /// changes of the free PUs up to the computation. `None` before the first computation.
    fits: Option<(u64, wire::Fits)>,
}

/// The receiving end of a [`StatusPublisher`], in the control server (the part of pjwd that answers clients).
/// Receives the latest status, the latest topology, and new events.
#[derive(Debug)]
pub struct StatusReceiver {
    /// The latest published status.
    pub status: watch::Receiver<Arc<PublishedStatus>>,
    /// The latest topology of the machine.
    pub topology: watch::Receiver<Arc<wire::Topology>>,
    /// The events of the daemon, each as soon as it is published.
    pub events: mpsc::UnboundedReceiver<Arc<wire::Event>>,
}

impl StatusPublisher {
    /// Makes the publisher for the event loop, and the receiver for the control server (the part of pjwd that answers
    /// clients). The published status contains `hostname` and the counts of the cores, packages, NUMA nodes and L3
    /// caches in `topology`.
    #[must_use]
    pub fn new(hostname: String, topology: &Topology) -> (Self, StatusReceiver) {
        let (status, status_receiver) = watch::channel(Arc::new(PublishedStatus::default()));
        let wire_topology = Arc::new(topology_tree::topology_to_wire(topology));
        let (topology_sender, topology_receiver) = watch::channel(wire_topology);
        let (events, event_receiver) = mpsc::unbounded_channel();
        let publisher = Self {
            node: node_to_wire(&hostname, topology),
            hostname,
            status,
            events,
            topology: topology_sender,
            cores: cores_to_wire(topology),
            warnings: Vec::new(),
            plan_warnings: ConvertedWarnings::default(),
            logged: BTreeSet::new(),
            unassigned_users: BTreeSet::new(),
            jobs: JobViews::default(),
            job_files: String::new(),
            cpu_count_variables: Vec::new(),
            fits: None,
            last: None,
        };
        let receiver =
            StatusReceiver { status: status_receiver, topology: topology_receiver, events: event_receiver };
        (publisher, receiver)
    }

    /// Sets the directory that contains a subdirectory with files for each job. The published status contains the
    /// path `directory`, so that programs can find the files of their job.
    pub fn set_job_files_directory(&mut self, directory: &Path) {
        self.job_files = directory.display().to_string();
    }

    /// Sets the list of environment variables in the published status. These variables tell a program how many cores
    /// or PUs (logical CPUs) its job has. `variables` is the list in the configuration.
    pub fn set_cpu_count_variables(&mut self, variables: &[CpuCountVariable]) {
        self.cpu_count_variables = variables.iter().map(ToString::to_string).collect();
        self.last = None;
    }

    /// Publishes the new topology of the machine to the control server (the part of pjwd that answers clients). Must
    /// be called after PUs (logical CPUs) were added to the machine.
    pub fn publish_topology(&mut self, topology: &Topology) {
        self.topology.send_replace(Arc::new(topology_tree::topology_to_wire(topology)));
        (self.node, self.cores) = (node_to_wire(&self.hostname, topology), cores_to_wire(topology));
        self.last = None;
    }

    /// Writes each event to the log, and sends each event to the control server (the part of pjwd that answers
    /// clients). Must be called after [`StatusPublisher::publish_status`] for the same cycle (scan, decision and
    /// changes), because the control server finds the jobs of the events in this status.
    pub fn publish_events(&self, events: Vec<Event>) {
        for event in events {
            let wire_event = event_to_wire(&event);
            let wire::Event { event: name, job, pid, cpus, text, .. } = &wire_event;
            // journalctl shows the message without its fields.
            let text = if job.is_empty() { text.clone() } else { format!("{job} {name}: {text}") };
            match event.kind {
                EventKind::Violation | EventKind::Overrun | EventKind::Revoked | EventKind::Refused => {
                    warn!(event = name, job, pid, cpus, "{text}");
                }
                _ => info!(event = name, job, pid, cpus, "{text}"),
            }
            // The control server may have stopped.
            let _ = self.events.send(Arc::new(wire_event));
        }
    }

    /// Computes the status after a cycle (scan, decision and changes). Publishes the status to the control server,
    /// and returns the status. If nothing changed since the last status, publishes nothing and returns the last
    /// status. Logs each warning that is new, and each warning that has ended.
    ///
    /// - `warden` has the jobs and processes after the cycle, and the failures of the cycle.
    /// - `plan_warnings` are warnings for users, from the decision of the cycle and from the event loop. An example
    ///   is that another program removed the socket of the daemon.
    /// - `dirty` names the jobs and processes that have possibly changed in the cycle.
    /// - `loop_status` says whether the event loop receives process events, and how late its cycles are.
    pub fn publish_status<N: MachineInterface, J: Journal>(
        &mut self,
        warden: &Warden<N, J>,
        plan_warnings: &[Arc<Warning>],
        dirty: &DirtySet,
        loop_status: &LoopStatus,
    ) -> StatusSnapshot {
        let state = warden.state();
        let changes = self.jobs.update(state, warden.policy(), dirty);
        changes.begun.iter().for_each(|warning| log_begun(warning));
        changes.ended.iter().for_each(|warning| log_ended(&warning.code, &warning.job));
        let failures = failure_warnings(warden.ongoing_failures(), &warden.policy().own_cgroups);
        let mut warnings: Vec<_> = failures.into_iter().map(Arc::new).collect();
        let failure_count = warnings.len();
        warnings.extend_from_slice(self.plan_warnings.update(plan_warnings));
        warnings.extend(loop_status.lateness.map(lateness_warning).map(Arc::new));
        let has_same_warnings = self.warnings == warnings;
        if !has_same_warnings {
            self.log_changes(&warnings);
        }
        self.report_unassigned(state, plan_warnings);
        let fits = self.fits(state);
        let discovery = if loop_status.has_process_events { "netlink" } else { "polling" };
        let mode = match warden.policy().mode {
            DaemonMode::Observe => "observe",
            DaemonMode::Enforce => "enforce",
        };
        let lending = lending_to_wire(warden.policy(), &loop_status.demand_detection);
        let is_unchanged = |last: &StatusSnapshot| {
            let summary = &last.status.summary;
            let has_same_summary = summary.lending.as_ref() == Some(&lending)
                && summary.fits == fits
                && summary.discovery == discovery
                && summary.mode == mode;
            has_same_summary && has_same_warnings && !changes.is_any
        };
        if let Some(last) = self.last.as_ref().filter(|last| is_unchanged(last)) {
            return last.clone();
        }
        // The warnings about single jobs come after those about failures.
        let (before, after) = warnings.split_at(failure_count);
        let all_warnings = before.iter().chain(self.jobs.warnings()).chain(after).cloned().collect();
        self.warnings = warnings;
        let summary = wire::Status {
            schema: wire::SCHEMA_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            mode: mode.to_owned(),
            discovery: discovery.to_owned(),
            node: self.node.clone(),
            pool: wire::Pool {
                housekeeping: state.pool.housekeeping_cpus().to_string(),
                free: state.pool.free_cpus().to_string(),
                allocated: state.pool.allocated_cpus().to_string(),
                lent: state.pool.lent_cpus().to_string(),
            },
            fits,
            job_files: self.job_files.clone(),
            variables: Some(self.cpu_count_variables.clone()),
            lending: Some(lending),
            ..wire::Status::default()
        };
        let jobs = self.jobs.jobs();
        let status = Arc::new(PublishedStatus::new(summary, jobs, all_warnings, Arc::clone(&self.cores)));
        self.status.send_replace(Arc::clone(&status));
        let (job_demands, unassigned_processes) = (self.jobs.demands(), self.jobs.unassigned_count());
        let snapshot = StatusSnapshot { status, job_demands, unassigned_processes };
        self.last = Some(snapshot.clone());
        snapshot
    }

    /// Returns the sizes of the largest requests that can be served now. Computes them again only if the pool changed.
    fn fits(&mut self, state: &WardenState) -> wire::Fits {
        let version = state.pool.change_count();
        if self.fits.as_ref().is_none_or(|(computed_at, _)| *computed_at != version) {
            self.fits =
                Some((version, largest_requests_to_wire(largest_requests(&state.pool, &state.topology))));
        }
        self.fits.as_ref().map(|(_, fits)| fits.clone()).unwrap_or_default()
    }

    /// Publishes an event for each user with an unassigned process: a process that belongs to no job, although its
    /// user has a job. There is no event if the user already had such a process at the last call. `plan_warnings` are
    /// the warnings of the cycle, which name the unassigned processes. The event has the pid of the oldest one.
    fn report_unassigned(&mut self, state: &WardenState, plan_warnings: &[Arc<Warning>]) {
        let mut users = BTreeSet::new();
        let mut events = Vec::new();
        for warning in plan_warnings.iter().filter(|warning| warning.code == EventKind::Stray.name()) {
            let Some(pid) = warning.pid else { continue };
            let Some(known_process) = state.processes.get(&pid) else { continue };
            let user = known_process.process.uid;
            users.insert(user);
            if !self.unassigned_users.contains(&user) {
                let oldest = oldest_unassigned_process(state, user).unwrap_or(pid);
                events.push(Event::new(EventKind::Stray, warning.text.clone()).with_pid(oldest));
            }
        }
        self.unassigned_users = users;
        self.publish_events(events);
    }

    /// Logs which of the `warnings` have begun since the last call, and which warnings have ended.
    fn log_changes(&mut self, warnings: &[Arc<wire::Warning>]) {
        let key = |warning: &wire::Warning| (warning.code.clone(), warning.job.clone());
        let now: BTreeSet<_> = warnings.iter().map(|warning| key(warning)).collect();
        let begun = warnings.iter().filter(|warning| !self.logged.contains(&key(warning)));
        begun.for_each(|warning| log_begun(warning));
        self.logged.difference(&now).for_each(|(code, job)| log_ended(code, job));
        self.logged = now;
    }
}

fn log_begun(warning: &wire::Warning) {
    warn!(condition = %warning.code, job = %warning.job, remedy = %warning.remedy, "{}", warning.text);
}

fn log_ended(code: &str, job: &str) {
    info!(condition = %code, job = %job, "no longer the case");
}

/// Returns the part of the status about the lending of cores.
fn lending_to_wire(policy: &Policy, demand_detection: &OwnerDemandDetection) -> wire::Lending {
    let (demand, why_sampled) = match demand_detection {
        OwnerDemandDetection::NotLoaded => ("unknown", String::new()),
        OwnerDemandDetection::Reported => ("reported", String::new()),
        OwnerDemandDetection::Sampled(why) => ("sampled", why.clone()),
    };
    let why_not = reason_not_to_lend(policy).unwrap_or_default();
    wire::Lending { why_not, demand: demand.to_owned(), why_sampled }
}

/// Returns the description of the machine for clients: its name, its CPUs, and the numbers of cores, packages, NUMA
/// nodes and L3 caches. Parts without CPUs do not count.
fn node_to_wire(hostname: &str, topology: &Topology) -> wire::Node {
    let count_with_cpus =
        |level| saturating_u32(topology.domains(level).filter(|domain| !domain.cpus.is_empty()).count());
    wire::Node {
        hostname: hostname.to_owned(),
        cpus: topology.cpus().to_string(),
        cores: saturating_u32(topology.cores().len()),
        packages: count_with_cpus(TopologyLevel::Package),
        numa_nodes: count_with_cpus(TopologyLevel::NumaNode),
        l3: count_with_cpus(TopologyLevel::L3),
    }
}

/// Returns the cores of the machine for clients, each with the numbers of its package, NUMA node and L3 cache.
fn cores_to_wire(topology: &Topology) -> Arc<[wire::Core]> {
    let number = |level, core: &pjw_core::topology::Core| {
        let pu = core.pus.first()?;
        topology.domain_of(level, pu).map(|domain| domain.number)
    };
    let core_to_wire = |core: &pjw_core::topology::Core| wire::Core {
        cpus: core.pus.to_string(),
        package: number(TopologyLevel::Package, core),
        numa_node: number(TopologyLevel::NumaNode, core),
        l3: number(TopologyLevel::L3, core),
    };
    topology.cores().iter().map(core_to_wire).collect()
}

#[cfg(test)]
mod tests;
