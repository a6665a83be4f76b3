//! The event loop: waits for a message, a kernel event or a timer, then runs one cycle of the warden.
//!
//! The loop has a thread of its own and owns all state. No other thread shares a lock with the loop. A command is
//! answered after the cycle that executes the command, so `assign` returns when the job is on its cores.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use nix::unistd::{getpid, gettid};
use pjw_core::command::{Command, Reply};
use pjw_core::event::{Event, EventKind};
use pjw_core::plan::Warning;
use pjw_core::{
    cpuset::CpuSet, cpuset_group::CpusetHierarchy, ids::Pid, ids::Tid, refusal::Refusal,
    state::lineage::scan_queue::ScanUrgency,
};
use pjw_ipc::call::{DefragReply, PlanReply};
use pjw_linux::{node::LinuxMachine, sys::clock, sys::own_usage::trim_heap};
use tokio::sync::{oneshot, watch};
use tracing::{debug, warn};

mod borrower_records;
mod core_maps;
mod lending;
mod process_events;
mod provisions;
mod queries;
mod refusals;
mod reload;
mod reports;
mod warnings;

use borrower_records::BorrowerRecords;
use refusals::{is_user_refusal, user_refusals};

use super::daemon_records::JournalAndReports;
use super::lateness::{LongestCycleDelay, WorkDelays, reaction_time};
use super::own_mask::DaemonMask;
use super::owner_samples::OwnerCpuSampler;
use super::triggers::DueScans;
use super::{abandoned, budget::CpuBudget, dry_runs::DryRunQueue, realtime::RealtimePriority};
use crate::config::Config;
use crate::control::inbox::{EventLoopMessage, MessageReceiver, WarningOrigin};
use crate::control::query::QueryAnswer;
use crate::control::settings::ControlSettings;
use crate::host::logging::Logging;
use crate::host::notify::WatchdogPinger;
use crate::job_files::JobFiles;
use crate::metrics::meter::MetricsRecorder;
use crate::view::status::{LoopStatus, StatusPublisher};
use crate::warden::{CycleReport, Warden};

/// How long the scan of processes of jobs is delayed if none is expected to have a wrong mask. The scan then reads more
/// processes at once, and does not take a PU from a new process while the process executes its program.
const BATCH_DELAY: Duration = Duration::from_millis(5);
/// How long a scan of unassigned processes is delayed, to collect more of them.
const UNASSIGNED_DELAY: Duration = Duration::from_millis(20);
/// How long the scan of changed cgroups is delayed, to collect more changes.
const CGROUP_DELAY: Duration = Duration::from_millis(20);
/// The delay before the next cycle if a cycle left work undone.
const CONTINUE_DELAY: Duration = Duration::from_millis(2);
/// The longest wait for a message, an event or a timer.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// A cycle with at least this many actions returns unused heap memory to the kernel.
const TRIM_ACTIONS: usize = 256;

/// The main loop of pjwd. The loop waits for messages, process events and timers. Then the loop runs a cycle: a scan
/// of processes, a decision, and the resulting changes.
#[derive(Debug)]
pub struct EventLoop {
    warden: Warden<LinuxMachine, JournalAndReports>,
    inbox: MessageReceiver,
    /// Whether the kernel provides process events.
    has_process_events: bool,
    publisher: StatusPublisher,
    config: Config,
    config_path: Option<PathBuf>,
    watchdog: WatchdogPinger,
    triggers: DueScans,
    dry_runs: DryRunQueue<PlanReply>,
    defrags: DryRunQueue<DefragReply>,
    next_scan: Instant,
    next_rescan: Instant,
    last_overrun: Option<Instant>,
    /// The budget for process events.
    budget: CpuBudget,
    realtime: RealtimePriority,
    own_mask: DaemonMask,
    /// The arrival time of the oldest event that is not yet processed. `None` if all events are processed.
    pending_since: Option<Instant>,
    /// The arrival time of the oldest unprocessed event of a process that belongs to a job. `None` if there is none.
    job_pending_since: Option<Instant>,
    /// The time at which the loop stopped reading process events, because the CPU budget was used up. `None` if it
    /// reads events.
    netlink_paused_since: Option<Instant>,
    /// The time at which a cgroup of a job was found changed. `None` if the last scan read all changed cgroups.
    cgroups_changed_at: Option<Instant>,
    lateness: LongestCycleDelay,
    /// PUs that are online and missing in the topology, even after the topology was read again.
    unresolved_pus: CpuSet,
    /// The warnings that other parts of the daemon sent.
    sent_warnings: BTreeMap<WarningOrigin, Vec<Warning>>,
    /// Sends the settings to the control server.
    control_settings: watch::Sender<ControlSettings>,
    logging: Logging,
    meter: MetricsRecorder,
    job_files: JobFiles,
    /// The commands that no client sent, for the next cycle: the numbers of wanted cores that programs wrote, and the
    /// provisions of the configuration.
    own_commands: Vec<Command>,
    owner_samples: OwnerCpuSampler,
    /// The warnings about provisions of the configuration that were refused.
    provision_warnings: Vec<Warning>,
    borrower_records: BorrowerRecords,
    /// The process of a frozen job that was read last, to find those that were killed.
    last_frozen_read: Pid,
}

/// The parts of pjwd that a reload of the configuration needs: the configuration in force, the path of the
/// configuration file, and the parts that receive new settings.
#[derive(Debug)]
pub struct ReloadContext {
    /// The configuration in force, as read at the start or at the last reload.
    pub config: Config,
    /// The path of the configuration file, as given on the command line. `None` if the default path is used.
    pub config_path: Option<PathBuf>,
    /// Sends changed settings to the control server.
    pub control_settings: watch::Sender<ControlSettings>,
    /// The log of this process. A reload sets its level and its format.
    pub logging: Logging,
    /// Counts what pjwd does, and publishes the counts as metrics. A reload of the configuration can switch
    /// the metrics on or off.
    pub metrics_recorder: MetricsRecorder,
}

/// The descriptors that have something to read.
#[derive(Debug, Clone, Copy)]
struct Readable {
    /// A cgroup of a job may have changed.
    cgroups: bool,
    /// A file of a job may have changed.
    job_files: bool,
}

type PendingCommands = Vec<(Command, oneshot::Sender<Result<Reply, Refusal>>)>;

impl EventLoop {
    /// Makes the event loop of pjwd. `warden` scans processes and keeps them on the cores of their jobs. `inbox`
    /// receives the messages of other threads. `publisher` sends the status to the control server, which answers
    /// clients. `settings` has the configuration. `job_files` publishes the cores of jobs as files. `own_mask` sets the
    /// affinity masks of the daemon's threads. The caller must then call [`EventLoop::run_first_cycle`] and
    /// [`EventLoop::run`] on the thread of the loop.
    pub fn new(
        warden: Warden<LinuxMachine, JournalAndReports>,
        inbox: MessageReceiver,
        publisher: StatusPublisher,
        settings: ReloadContext,
        job_files: JobFiles,
        own_mask: DaemonMask,
    ) -> Self {
        let ReloadContext { config, config_path, control_settings, logging, metrics_recorder: meter } =
            settings;
        let now = Instant::now();
        let cpu_budget = config.settings().cpu_budget_permille;
        Self {
            has_process_events: warden.machine_interface().process_events_fd().is_some(),
            warden,
            inbox,
            publisher,
            config,
            config_path,
            watchdog: WatchdogPinger::from_environment(),
            triggers: DueScans::default(),
            dry_runs: DryRunQueue::new(QueryAnswer::Plan),
            defrags: DryRunQueue::new(QueryAnswer::Defrag),
            next_scan: now,
            next_rescan: now,
            last_overrun: None,
            budget: CpuBudget::new(cpu_budget, now),
            realtime: RealtimePriority::default(),
            own_mask,
            pending_since: None,
            job_pending_since: None,
            netlink_paused_since: None,
            cgroups_changed_at: None,
            lateness: LongestCycleDelay::default(),
            unresolved_pus: CpuSet::new(),
            sent_warnings: BTreeMap::new(),
            control_settings,
            logging,
            meter,
            job_files,
            own_commands: Vec::new(),
            owner_samples: OwnerCpuSampler::default(),
            provision_warnings: Vec::new(),
            borrower_records: BorrowerRecords::default(),
            last_frozen_read: Pid(0),
        }
    }

    /// Starts the thread that changes cpusets. Returns its name and id, or `None` without cpusets or after a failure.
    fn start_cpuset_change_thread(&mut self) -> Option<(&'static str, Tid)> {
        if matches!(self.warden.policy().cpuset_support.hierarchy, CpusetHierarchy::Unavailable { .. }) {
            return None;
        }
        match self.warden.machine_interface_mut().start_cpuset_change_thread() {
            Ok(tid) => Some(("thread for cpusets", tid)),
            Err(error) => {
                warn!("the event loop changes cpusets itself, which may delay it: {error}");
                None
            }
        }
    }

    /// Runs the first cycle (scan, decision and changes), which scans all processes. The published status is complete
    /// only after this cycle. So the caller must not serve clients earlier. Also gives the daemon's threads a
    /// real-time priority if the configuration says so. `start_warnings` are the warnings about problems that pjwd
    /// found while it started. Each later status contains them.
    pub fn run_first_cycle(&mut self, start_warnings: Vec<Warning>) {
        self.sent_warnings.insert(WarningOrigin::Start, start_warnings);
        let tids = [("event loop", gettid()), ("control server", getpid())];
        let threads = tids.map(|(name, tid)| (name, Tid(tid.as_raw().cast_unsigned())));
        let threads: Vec<_> = threads.into_iter().chain(self.start_cpuset_change_thread()).collect();
        self.realtime = RealtimePriority::new(&threads, Instant::now());
        self.realtime.set_enabled(self.config.settings().use_realtime_priority);
        self.triggers.job_processes_scan_due = true;
        self.triggers.full_scan_due = true;
        let event_source = if self.has_process_events { "netlink" } else { "polling" };
        self.restart_fork_tracking();
        self.warden.find_leftover_cpusets();
        let text = format!("pjwd {} watches this machine ({event_source})", env!("CARGO_PKG_VERSION"));
        self.publisher.publish_events(vec![Event::new(EventKind::Started, text)]);
        self.run_cycle(Vec::new());
        self.remove_reports_of_running_jobs();
        self.job_files.remove_leftovers();
        self.make_provisions();
    }

    /// Waits for messages, process events and timers, and handles them. Blocks the calling thread until a message
    /// [`EventLoopMessage::Stop`] arrives. Then thaws the frozen jobs. The jobs keep their cores and affinity masks.
    /// Returns whether changes remain that a later `pjwd --release-all` can undo, such as changed affinity masks.
    pub fn run(&mut self) -> bool {
        loop {
            let cpu_before = clock::own_thread_cpu_time();
            let readable = self.wait_for_work();
            // The masks of new processes come first: they run outside of their job's cores until then.
            self.drain_events();
            let mut pending = PendingCommands::new();
            let messages = self.inbox.take_messages();
            let has_messages = !messages.is_empty();
            for message in messages {
                match message {
                    EventLoopMessage::Command { command, reply } if reply.is_closed() => {
                        self.publisher
                            .publish_events(abandoned::dropped_command_event(&command).into_iter().collect());
                    }
                    EventLoopMessage::Command { command, reply } => pending.push((command, reply)),
                    EventLoopMessage::Query { query, answer } => self.answer_query(query, answer),
                    EventLoopMessage::Reload { reply } => drop(reply.send(self.reload())),
                    EventLoopMessage::CheckJournal => {
                        self.warden.recreate_journal_if_removed();
                        self.triggers.job_processes_scan_due |=
                            self.warden.ongoing_failures().journal_error.is_some();
                    }
                    EventLoopMessage::MemoryWasRead { job, since, figures } => {
                        self.store_memory_figures(&job, &since, &figures);
                    }
                    EventLoopMessage::Warnings { origin, warnings } => {
                        self.sent_warnings.insert(origin, warnings);
                        self.triggers.job_processes_scan_due = true;
                    }
                    EventLoopMessage::Stop => return self.stop(pending),
                }
                // A long queue of messages must not trigger the watchdog.
                self.watchdog.ping_if_due();
            }
            let now = Instant::now();
            self.read_wanted_cores(readable.job_files, now);
            if readable.cgroups && self.warden.machine_interface_mut().has_cgroup_changes() {
                self.cgroups_changed_at.get_or_insert(now);
            }
            self.triggers.job_processes_scan_due |= now >= self.next_scan;
            self.triggers.unassigned_scan_due |= now >= self.next_rescan;
            let events_are_due = self.events_due(now).is_some_and(|due| due <= now);
            let are_changes_finished = self.warden.machine_interface_mut().has_finished_cpuset_changes();
            let would_change_loans = self.sample_owner_cpu_use(now);
            let has_commands = !pending.is_empty() || !self.own_commands.is_empty();
            let is_due_without_events =
                self.triggers.is_cycle_due() || are_changes_finished || would_change_loans;
            if is_due_without_events || has_commands || events_are_due {
                // Each scan reads the changed cgroups.
                self.cgroups_changed_at = None;
                self.run_cycle(pending);
            }
            // Timer cycles and messages have their own limits. They must not delay the confinement of new processes.
            if !has_messages && !is_due_without_events {
                let used = clock::own_thread_cpu_time().saturating_sub(cpu_before);
                self.budget.spend(used, Instant::now());
            }
            self.watchdog.ping_if_due();
            self.answer_dry_runs();
            self.watchdog.ping_if_due();
        }
    }

    /// Returns the time at which pending events must be handled, `None` without pending events. Events are delayed if
    /// no new process has a wrong mask. All events wait while the CPU budget is overdrawn. An environment that must be
    /// read again counts as an event too.
    fn events_due(&mut self, now: Instant) -> Option<Instant> {
        let pending_since = self.pending_since.unwrap_or(now);
        let processes_due = self.warden.state().lineage.scan_queue.urgency().map(|urgency| match urgency {
            ScanUrgency::Immediate => now,
            ScanUrgency::Batched => self.job_pending_since.unwrap_or(now) + BATCH_DELAY,
            ScanUrgency::Deferred => pending_since + UNASSIGNED_DELAY,
        });
        let cgroups_due = self.cgroups_changed_at.map(|since| since + CGROUP_DELAY);
        let environments_due = self.environment_retry_due(now);
        let due = processes_due.into_iter().chain(cgroups_due).chain(environments_due).min()?;
        Some(due.max(now + self.budget.wait_time(now)))
    }

    /// Sleeps until a message, an event or a timer is due. Before, enforces the limits of the real-time priority, and
    /// updates the affinity masks of the daemon's threads. Returns whether cgroups or files of jobs may have changed.
    fn wait_for_work(&mut self) -> Readable {
        let now = Instant::now();
        self.realtime.enforce_limits(now);
        self.own_mask.update_masks(&self.warden.state().pool, self.realtime.lowered_threads(), now);
        let mut next = self.next_scan.min(self.next_rescan).min(self.watchdog.next_ping_at());
        next = self.realtime.next_check_at(now).map_or(next, |check| next.min(check));
        let owed = self.budget.wait_time(now);
        if !owed.is_zero() {
            next = next.min(now + owed);
        }
        let lending_due = self.lending_due_at(now);
        for due in self.events_due(now).into_iter().chain(self.job_files.next_read_at()).chain(lending_due) {
            next = next.min(due);
        }
        // While the CPU budget is overdrawn, events stay in the kernel's queue.
        let wake_fd = self.inbox.wake_fd();
        let mut fds = vec![PollFd::new(wake_fd, PollFlags::POLLIN)];
        let events_fd = self.warden.machine_interface().process_events_fd().filter(|_| owed.is_zero());
        if self.has_process_events && events_fd.is_none() {
            self.netlink_paused_since.get_or_insert(now);
        }
        fds.extend(events_fd.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let changes_fd = self.warden.machine_interface().cpuset_changes_fd();
        fds.extend(changes_fd.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let cgroups_index = fds.len();
        let cgroups_fd = self.warden.machine_interface().cgroup_changes_fd();
        // A further change of a cgroup need not wake the loop if the scan of changed cgroups is due already.
        let cgroups_fd = cgroups_fd.filter(|_| owed.is_zero() && self.cgroups_changed_at.is_none());
        fds.extend(cgroups_fd.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let (job_files_index, job_files_fd) = (fds.len(), self.job_files.changes_fd());
        fds.extend(job_files_fd.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        fds.extend(self.owner_samples.fd().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        // In nanoseconds: poll(2) would round the short intervals of samples up to whole milliseconds.
        let left = next.saturating_duration_since(now).min(MAX_WAIT);
        // An interrupted wait ends early. The loop then waits again.
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(left)), None);
        let is_readable = |index: usize| fds.get(index).and_then(PollFd::any).unwrap_or(false);
        let cgroups = cgroups_index < job_files_index && is_readable(cgroups_index);
        Readable { cgroups, job_files: is_readable(job_files_index) }
    }

    /// Runs one cycle (scan, decision and changes), and replies to the commands `pending`. Publishes the new status.
    fn run_cycle(&mut self, pending: PendingCommands) {
        let (mut commands, replies): (Vec<Command>, Vec<_>) = pending.into_iter().unzip();
        // The own commands come last: no caller waits for their replies.
        commands.append(&mut self.own_commands);
        // Without process events, a new process is found only by a full scan.
        self.triggers.full_scan_due |= self.triggers.job_processes_scan_due && !self.has_process_events;
        // A cycle for commands scans only what they concern. The scans that are due follow in the next cycle.
        let is_only_commands = !commands.is_empty() && !self.triggers.full_scan_due;
        let triggers =
            if is_only_commands { DueScans::default() } else { std::mem::take(&mut self.triggers) };
        let request = self.take_scan_request(triggers, &commands);
        let (rescanned, was_timer) = (triggers.scans_unassigned_processes(), triggers.job_processes_scan_due);
        self.restore_lost_idle_priority(rescanned);
        let scheduled = was_timer.then_some(self.next_scan);
        self.job_pending_since = None;
        let running = self.meter.begin_cycle(triggers.cycle_cause(&request.scope), scheduled);
        let begun = Instant::now();
        // A scan that begins before the next scan was due is not late.
        let scan_due = was_timer.then(|| self.next_scan + self.config.scan_interval());
        let waited = |due: Option<Instant>| due.map(|due| begun.saturating_duration_since(due));
        let [events, scan] = [self.pending_since.take(), scan_due].map(|due| waited(due).unwrap_or_default());
        self.lateness.record(WorkDelays { events, scan, longest_put_off: self.budget.longest_wait() }, begun);

        let report = self.run_reporting_cycle(request, &commands);
        self.record_events_read(None);
        self.meter.end_cycle(running, &report, self.warden.ongoing_failures());
        let now = (Instant::now(), clock::now().since_boot);
        for fork in &report.confined_new_processes {
            let took = reaction_time(fork, now);
            debug!(
                pid = fork.pid.0,
                us = took.as_micros(),
                "a new process outside its job's cores was confined"
            );
            self.meter.count_reaction(took);
        }
        let CycleReport {
            replies: results,
            mut events,
            plan_warnings,
            mask_outcomes,
            has_unfinished_work,
            newly_planned,
            ..
        } = report;
        self.update_provision_warnings(commands.iter().zip(&results).skip(replies.len()));
        let refusals_of_users = user_refusals(&commands, &results);
        // The control server publishes the events about these refusals.
        events.retain(|event| !is_user_refusal(event, &refusals_of_users));
        let now = Instant::now();
        self.plan_next_scans(now, was_timer, rescanned, has_unfinished_work);
        self.maintain_journal(rescanned);
        self.publish_core_maps(&newly_planned, rescanned);
        self.update_lending_after_cycle(&events, was_timer);
        let plan_warnings = self.with_event_loop_warnings(plan_warnings);
        self.add_new_pus();
        let health = self.loop_status(now);
        let snapshot = self.publisher.publish_status(&self.warden, &plan_warnings, &newly_planned, &health);
        self.publisher.publish_events(events);
        self.meter.publish(snapshot, self.warden.state());
        for (reply, result) in replies.into_iter().zip(results) {
            if let Err(unsent) = reply.send(result) {
                abandoned::log_unanswered_assignment(&unsent);
            }
        }
        if mask_outcomes.len() >= TRIM_ACTIONS {
            drop(mask_outcomes);
            trim_heap();
        }
    }

    /// The state of this loop at the time `now`, for the status.
    fn loop_status(&mut self, now: Instant) -> LoopStatus {
        let lateness = self.lateness.max_delay(now);
        let demand_detection = self.owner_samples.demand_detection();
        LoopStatus { has_process_events: self.has_process_events, lateness, demand_detection }
    }

    /// Sets the times of the next scan and the next rescan after a cycle. `was_timer` says whether the cycle was a
    /// periodic scan, `was_rescan` whether it also scanned the processes without a job. `has_unfinished_work` says
    /// whether the cycle has left work: the next scan then follows after [`CONTINUE_DELAY`].
    fn plan_next_scans(
        &mut self,
        now: Instant,
        was_timer: bool,
        was_rescan: bool,
        has_unfinished_work: bool,
    ) {
        if was_timer || was_rescan {
            self.next_scan = now + self.config.scan_interval();
        }
        if was_rescan {
            self.next_rescan = now + self.config.rescan_interval();
        }
        if has_unfinished_work {
            self.next_scan = now + CONTINUE_DELAY;
        }
    }

    /// Rewrites the journal if it has become long. If `is_rescan` is true, also makes its removed files again.
    fn maintain_journal(&mut self, is_rescan: bool) {
        if is_rescan {
            self.warden.journal_mut().reports.restore_removed_file();
            self.warden.recreate_journal_if_removed();
        }
        if self.warden.journal().journal.needs_rewrite()
            && let Err(fault) = self.warden.rewrite_journal()
        {
            self.meter.count_journal_rewrite_failure();
            warn!(%fault, "the journal can't be rewritten");
        }
    }

    /// Refuses the commands `pending`, writes the journal, thaws the frozen jobs and publishes the stop. Jobs keep
    /// their cores and masks. Returns true if the journal has records of changes that are still to be undone.
    fn stop(&mut self, pending: PendingCommands) -> bool {
        for (_, reply) in pending {
            let _ = reply.send(Err(Refusal::Stopping));
        }
        if let Err(fault) = self.warden.rewrite_journal() {
            warn!(%fault, "the journal can't be rewritten");
        }
        // A change of a cpuset that is not complete could freeze a job. The watcher then thaws it after pjwd has ended.
        if self.thaw_frozen_jobs_at_stop() {
            self.warden.end_thaw_watcher();
        }
        self.publisher
            .publish_events(vec![Event::new(EventKind::Stopped, "pjwd stops; jobs keep their cores")]);
        !self.warden.state().records().is_empty()
    }
}
