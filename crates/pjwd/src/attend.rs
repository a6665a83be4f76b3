//! The loop: waits for mail, kernel events or the timer, and lets the warden run one cycle at a time.
//!
//! It runs on a thread of its own and owns all state; nobody shares a lock with it. Its sleep is its inbox. The
//! cycle that a command causes answers it, so `assign` returns when the job is on its cores.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pjw_core::command::{Assign, Command, Refusal, Reply};
use pjw_core::cpuset::CpuSet;
use pjw_core::defrag::defrag;
use pjw_core::event::{Event, EventKind};
use pjw_core::job::JobId;
use pjw_ipc::call::{DefragReply, PlanReply};
use pjw_linux::clock;
use pjw_linux::node::LinuxNode;
use pjw_linux::own_cost::give_memory_back;
use pjw_linux::proc_events::{Drained, ProcEvent, ProcEvents};
use pjw_linux::topology::{TopologySource, load};
use tokio::sync::{oneshot, watch};
use tracing::{debug, warn};

use crate::admission::Rules;
use crate::budget::Budget;
use crate::config::{Config, Problem};
use crate::cycle::{Report, Warden};
use crate::dry_runs::DryRuns;
use crate::events::{Causes, Inbox, Message, Urgency};
use crate::journal::FileJournal;
use crate::logging::Logging;
use crate::metrics::pulse::Meter;
use crate::notify::Watchdog;
use crate::pace::{Pace, reactions};
use crate::publish::{Feed, Publisher, defrag_on_the_wire, plan_on_the_wire};
use crate::question::{self, Answer, Question};
use crate::task_scan;

/// So long the look at processes of nobody's job waits for more of them.
const PATIENCE: Duration = Duration::from_millis(20);
/// A cycle that had to leave something undone is followed by another so soon.
const BREATH: Duration = Duration::from_millis(2);
/// A cycle of so many actions, or of people's wishes, may leave megabytes that the next ones don't need.
const MANY_ACTIONS: usize = 256;
/// So many intervals without a lost event end an episode of losing them.
const OVERRUN_EPISODE: u32 = 10;

/// The loop and all it owns.
#[derive(Debug)]
pub struct Attendant {
    warden: Warden<LinuxNode, FileJournal>,
    inbox: Inbox,
    /// The kernel's process events, where it may be had.
    kernel: Option<ProcEvents>,
    publisher: Publisher,
    config: Config,
    config_path: Option<PathBuf>,
    watchdog: Watchdog,
    causes: Causes,
    dry_runs: DryRuns<PlanReply>,
    defrags: DryRuns<DefragReply>,
    next_look: Instant,
    next_rescan: Instant,
    last_overrun: Option<Instant>,
    budget: Budget,
    /// When events that nobody has looked at yet came in.
    heard: Option<Instant>,
    /// Since when events have been left in the kernel, for the budget was spent.
    deaf_since: Option<Instant>,
    pace: Pace,
    /// PUs that are online and that even a new look at the machine didn't find.
    strange_pus: CpuSet,
    /// Tells the control server what it may decide.
    rules: watch::Sender<Rules>,
    logging: Logging,
    meter: Meter,
}

/// The configuration in force, and what follows it at a reload.
#[derive(Debug)]
pub struct InForce {
    /// The configuration.
    pub config: Config,
    /// The file that was named, if one was.
    pub config_path: Option<PathBuf>,
    /// Tells the control server what it may decide.
    pub rules: watch::Sender<Rules>,
    /// The log.
    pub logging: Logging,
    /// The metrics.
    pub meter: Meter,
}

type Waiting = Vec<(Command, oneshot::Sender<Result<Reply, Refusal>>)>;

impl Attendant {
    /// A loop that has not run yet.
    pub fn new(
        warden: Warden<LinuxNode, FileJournal>,
        inbox: Inbox,
        kernel: Option<ProcEvents>,
        publisher: Publisher,
        settings: InForce,
    ) -> Self {
        let InForce { config, config_path, rules, logging, meter } = settings;
        let now = Instant::now();
        let cpu_budget = config.settings().cpu_budget_permille;
        Self {
            warden,
            inbox,
            kernel,
            publisher,
            config,
            config_path,
            watchdog: Watchdog::from_environment(),
            causes: Causes::default(),
            dry_runs: DryRuns::new(Answer::Plan),
            defrags: DryRuns::new(Answer::Defrag),
            next_look: now,
            next_rescan: now,
            last_overrun: None,
            budget: Budget::new(cpu_budget, now),
            heard: None,
            deaf_since: None,
            pace: Pace::default(),
            strange_pus: CpuSet::new(),
            rules,
            logging,
            meter,
        }
    }

    /// The first cycle: finds everything that is there. After it the daemon is ready.
    pub fn start(&mut self) {
        self.causes.timer = true;
        self.causes.full = true;
        let polling = if self.kernel.is_some() { "netlink" } else { "polling" };
        self.hear_births_from_now_on();
        let text = format!("pjwd {} watches this machine ({polling})", env!("CARGO_PKG_VERSION"));
        self.publisher.happened(vec![Event::new(EventKind::Started, text)]);
        self.cycle(Vec::new());
    }

    /// Runs until it is told to stop.
    pub fn run(&mut self) {
        loop {
            self.wait();
            let mut waiting = Waiting::new();
            for message in self.inbox.take() {
                match message {
                    Message::Command { command, reply } => waiting.push((command, reply)),
                    Message::Question { question, answer } => self.answer(question, answer),
                    Message::Reload { reply } => {
                        let _ = reply.send(self.reload());
                    }
                    Message::Stop => {
                        self.stop(waiting);
                        return;
                    }
                }
                // Many messages must not look like a loop that hangs.
                self.watchdog.pat();
            }
            self.hear_kernel();
            let now = Instant::now();
            self.causes.timer |= now >= self.next_look;
            self.causes.rescan |= now >= self.next_rescan;
            if self.causes.are_due() || !waiting.is_empty() || self.events_are_due(now) {
                self.cycle(waiting);
            }
            self.watchdog.pat();
            let Self { dry_runs, defrags, warden, .. } = self;
            dry_runs.answer(Instant::now, || {
                let (plan, abstained) = warden.dry_run();
                plan_on_the_wire(&plan, &abstained)
            });
            defrags.answer(Instant::now, || defrag_on_the_wire(&defrag(warden.state(), warden.policy())));
            self.watchdog.pat();
        }
    }

    /// Whether the events that came in are to be looked at now: strangers can wait for more, and everybody until it was
    /// earned what that costs.
    fn events_are_due(&mut self, now: Instant) -> bool {
        self.events_due(now).is_some_and(|due| due <= now)
    }

    fn events_due(&mut self, now: Instant) -> Option<Instant> {
        let heard = self.heard.unwrap_or(now);
        let due = match self.causes.events()? {
            Urgency::Jobs => now,
            Urgency::Strangers => heard + PATIENCE,
        };
        Some(due.max(now + self.budget.wait(now)))
    }

    fn wait(&mut self) {
        let now = Instant::now();
        let mut next = self.next_look.min(self.next_rescan).min(self.watchdog.next());
        let owed = self.budget.wait(now);
        if !owed.is_zero() {
            next = next.min(now + owed);
        }
        if let Some(due) = self.events_due(now) {
            next = next.min(due);
        }
        // Whoever owes lets the events pile up in the kernel.
        let bell = self.inbox.bell();
        let mut fds = vec![PollFd::new(bell, PollFlags::POLLIN)];
        let kernel = self.kernel.as_ref().filter(|_| owed.is_zero());
        if self.kernel.is_some() && kernel.is_none() {
            self.deaf_since.get_or_insert(now);
        }
        fds.extend(kernel.map(|kernel| PollFd::new(kernel.as_fd(), PollFlags::POLLIN)));
        let left = next.saturating_duration_since(now);
        let timeout =
            PollTimeout::try_from(left.as_millis().saturating_add(1).min(60_000)).unwrap_or(PollTimeout::MAX);
        // An interrupted wait is a short one.
        let _ = poll(&mut fds, timeout);
    }

    fn hear_kernel(&mut self) {
        let Some(kernel) = &mut self.kernel else { return };
        let mut events: Vec<ProcEvent> = Vec::new();
        let Drained { overrun, congested } = kernel.drain(&mut events);
        self.meter.heard(events.len(), overrun);
        // What can't be remembered is as good as lost.
        let overrun = self.causes.note(&events, self.warden.state()) || overrun;
        let waited_since = self.deaf_since.take();
        if self.causes.events().is_some() {
            self.heard.get_or_insert_with(|| waited_since.unwrap_or_else(Instant::now));
        }
        if congested {
            self.warden.hears_births_since(None);
        } else if overrun {
            self.hear_births_from_now_on();
        }
        if overrun {
            self.causes.forget_lines();
            self.make_up_for_lost_events();
        }
    }

    fn hear_births_from_now_on(&mut self) {
        let now = self.kernel.is_some().then(|| clock::now().since_boot);
        self.warden.hears_births_since(now);
    }

    /// Everything is looked at again, but not more often than the timer looks: where events are lost all the time,
    /// looking at everything all the time would lose more. It is told when it begins.
    fn make_up_for_lost_events(&mut self) {
        let now = Instant::now();
        let interval = self.config.interval();
        let since = self.last_overrun.replace(now).map(|last| now.saturating_duration_since(last));
        if since.is_none_or(|since| since > interval * OVERRUN_EPISODE) {
            let text = "process events were lost; everything is looked at again";
            self.publisher.happened(vec![Event::new(EventKind::Overrun, text)]);
        }
        if since.is_none_or(|since| since > interval) {
            self.causes.full = true;
        } else {
            self.next_rescan = self.next_rescan.min(now + interval);
        }
    }

    fn cycle(&mut self, waiting: Waiting) {
        let (commands, replies): (Vec<Command>, Vec<_>) = waiting.into_iter().unzip();
        // Without events nobody tells of new processes; and a wish may name one that no look has seen.
        self.causes.wishes = !commands.is_empty();
        self.causes.full |= !commands.is_empty() || (self.causes.timer && self.kernel.is_none());
        let look = self.warden.look_for(&self.causes);
        self.warden.note_births(self.causes.births());
        let was_rescan = self.causes.is_rescan();
        let was_timer = self.causes.timer;
        let running = self.meter.begin(&self.causes, &look.scope, self.next_look);
        self.causes.clear();
        let begun = Instant::now();
        // A look that begins before the next one was due is not late.
        let look_due = was_timer.then(|| self.next_look + self.config.interval());
        let due = self.heard.take().into_iter().chain(look_due);
        let waited = due.map(|due| begun.saturating_duration_since(due)).max();
        self.pace.note(waited.unwrap_or_default(), begun);

        let report = self.warden.cycle(look, &commands);
        self.meter.count(running, &report, self.warden.troubles());
        let now = (Instant::now(), clock::monotonic());
        for (pid, took) in reactions(&report.births, &report.welcomed, now) {
            debug!(pid = pid.0, us = took.as_micros(), "a process that was born outside is right");
            self.meter.reacted(took);
        }
        let Report { replies: results, mut events, abstained, outcomes, unfinished, stirred, .. } = report;
        let of_users = refusals_of_users(&commands, &results);
        // Those are the control server's to tell.
        events.retain(|event| !is_among(event, &of_users));
        let now = Instant::now();
        if was_timer || was_rescan {
            self.next_look = now + self.config.interval();
        }
        if was_rescan {
            self.next_rescan = now + self.config.rescan_interval();
        }
        if unfinished {
            self.next_look = now + BREATH;
        }
        if self.warden.journal().is_long()
            && let Err(fault) = self.warden.rewrite_journal()
        {
            self.meter.journal_fault();
            warn!(%fault, "the journal can't be written anew");
        }
        self.publisher.happened(events);
        self.meet_new_pus();
        let feed = Feed { netlink: self.kernel.is_some(), behind: self.pace.behind(now) };
        let scene = self.publisher.publish(&self.warden, &abstained, &stirred, feed);
        self.meter.publish(scene, self.warden.state());
        for (reply, result) in replies.into_iter().zip(results) {
            let _ = reply.send(result);
        }
        if !commands.is_empty() || outcomes.len() >= MANY_ACTIONS {
            drop(outcomes);
            give_memory_back();
        }
        // The timer and people are bounded by themselves; what they cost must not make a birth wait.
        if !was_timer && !was_rescan && commands.is_empty() {
            let now = Instant::now();
            self.budget.spend(now.saturating_duration_since(begun), now);
        }
    }

    fn answer(&mut self, question: Question, answer: oneshot::Sender<Answer>) {
        let (state, policy) = (self.warden.state(), self.warden.policy());
        let told = match question {
            Question::Members { job, after, limit } => question::members(state, &job, after, limit),
            Question::Job(id) => question::job(state, policy, &id),
            Question::Process { pid, after } => question::process(state, policy, pid, after),
            Question::Plan { fresh } => return self.dry_runs.ask(answer, fresh),
            Question::Defrag { fresh } => return self.defrags.ask(answer, fresh),
        };
        // Whoever asked may have hung up.
        let _ = answer.send(told);
    }

    /// Puts a new configuration in force, or leaves the old one if the new one is bad.
    fn reload(&mut self) -> Result<Vec<String>, String> {
        let topology = self.warden.state().topology.clone();
        let loaded = Config::load(self.config_path.as_deref())
            .and_then(|config| config.policy(&topology).map(|policy| (config, policy)));
        match loaded {
            Ok((config, policy)) => {
                let changes = self.config.changes(&config);
                self.warden.set_policy(policy);
                self.rules.send_replace(Rules::from(config.settings()));
                self.logging.apply(config.settings());
                if config.settings().scan != self.config.settings().scan {
                    task_scan::choose(config.settings().scan, self.warden.node_mut());
                }
                self.budget.set(config.settings().cpu_budget_permille);
                self.meter.apply(config.settings());
                self.config = config;
                // Who asked for it looks next, and should see it.
                self.causes.timer = true;
                self.cycle(Vec::new());
                let text = if changes.is_empty() { "nothing changed".to_owned() } else { changes.join("; ") };
                self.publisher.happened(vec![Event::new(EventKind::Reloaded, text)]);
                Ok(changes)
            }
            Err(problems) => {
                for problem in &problems {
                    warn!("{}", problem.summary());
                }
                warn!("the new configuration is bad; the old one stays in force");
                Err(stays_in_force(&problems))
            }
        }
    }

    /// Reads the machine again when PUs are online that it didn't have at the start. Those that hwloc doesn't know
    /// either, as in a cpuset that leaves them out, are asked for once.
    fn meet_new_pus(&mut self) {
        let unknown = self.warden.unknown_pus();
        if unknown.is_subset(&self.strange_pus) {
            return;
        }
        self.strange_pus = unknown.clone();
        let read = load(TopologySource::Live).map_err(|fault| fault.to_string()).and_then(|topology| {
            let policy = self.config.policy(&topology);
            let policy =
                policy.map_err(|problems| problems.iter().map(ToString::to_string).collect::<String>());
            policy.map(|policy| (topology, policy))
        });
        let (topology, policy) = match read {
            Ok(read) => read,
            Err(why) => {
                warn!(cpus = %self.strange_pus, "the new CPUs are left alone: {why}");
                return;
            }
        };
        let new = topology.cpus().difference(self.warden.state().topology.cpus());
        if new.is_empty() {
            return;
        }
        self.publisher.meet(&topology);
        self.warden.set_machine(topology, policy);
        let text = format!("CPUs {new} were not known and are online: they are free now");
        self.publisher.happened(vec![Event::new(EventKind::Hotplug, text).with_cpus(&new)]);
        self.causes.timer = true;
    }

    /// Jobs keep their cores and masks: a restart is not a release.
    fn stop(&mut self, waiting: Waiting) {
        for (_, reply) in waiting {
            let _ = reply.send(Err(Refusal::Stopping));
        }
        if let Err(fault) = self.warden.rewrite_journal() {
            warn!(%fault, "the journal can't be written anew");
        }
        self.publisher.happened(vec![Event::new(EventKind::Stopped, "pjwd stops; jobs keep their cores")]);
    }
}

/// Where a new configuration is wrong. What stands there is for the log: who asks over the socket may not be allowed to
/// read the file.
fn stays_in_force(problems: &[Problem]) -> String {
    let first = problems.first().map(Problem::whereabouts).unwrap_or_default();
    let more = match problems.len().saturating_sub(1) {
        0 => String::new(),
        1 => " (and one more mistake)".to_owned(),
        more => format!(" (and {more} more mistakes)"),
    };
    format!(
        "the old configuration stays in force: {first} is wrong{more}; pjwctl check-config FILE says why, and so does pjwd's log"
    )
}

/// The refused wishes of who is no administrator: for which job, and in which words.
fn refusals_of_users(commands: &[Command], results: &[Result<Reply, Refusal>]) -> BTreeSet<(JobId, String)> {
    let refused = |(command, result): (&Command, &Result<Reply, Refusal>)| match (command, result) {
        (Command::Assign(Assign { job, caller, .. }) | Command::Release { job, caller }, Err(refusal)) => {
            (!caller.admin).then(|| (job.clone(), refusal.to_string()))
        }
        _ => None,
    };
    commands.iter().zip(results).filter_map(refused).collect()
}

fn is_among(event: &Event, refusals: &BTreeSet<(JobId, String)>) -> bool {
    let job = event.job.as_ref().filter(|_| event.kind == EventKind::Refused);
    job.is_some_and(|job| refusals.contains(&(job.clone(), event.text.clone())))
}
