//! One cycle: observe, reconcile, audit, journal, apply; repeated until no work is left.
//!
//! The cycle is generic over the node and the journal, so that the same code runs on the kernel and on a fake kernel.
//! A cycle has several short rounds for two reasons. A decision may need more detail, such as the threads of a new
//! member. And threads may be created while others are confined; the next round finds them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pjw_core::command::Command;
use pjw_core::ids::{Pid, ProcessId, ThreadId};
use pjw_core::policy::Policy;
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::reconcile::reconcile;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::snapshot::{AffinityRequest, BatchIdentity, Observed, ProcessEventBatch, Snapshot};
use pjw_core::{
    audit::GrantAudit, command_scan::command_scan_request, cpuset::CpuSet, job::JobId, record::Record,
    state::WardenState, state::dirty::DirtySet, time::Nanos, topology::Topology,
};
use pjw_sources::LocalHost;

use super::report::{
    CycleReport, EventCount, FirstMaskWrite, OngoingFailures, is_release, refuse_unrecorded_commands,
};
use crate::host::thaw_watcher::ThawWatcher;

/// The largest number of rounds per cycle. The next cycle continues, so a job that forks all the time does not delay
/// other jobs.
pub(super) const MAX_ROUNDS: usize = 8;

/// The part of pjwd that keeps the processes of each job on the cores of the job. A warden has the state of pjwd and
/// runs its cycles. A cycle scans processes, decides which affinity masks and cpusets must change, and changes them.
/// `N` is the interface to the machine, and `J` is the journal (the records of all changes). Tests use simulations of
/// both.
#[derive(Debug)]
pub struct Warden<N, J> {
    pub(super) node: N,
    pub(super) journal: J,
    pub(super) state: WardenState,
    pub(super) policy: Policy,
    /// The host name and the other properties of this machine by which jobs are recognised.
    host: LocalHost,
    pub(super) ongoing_failures: OngoingFailures,
    /// The process events that were read since the event loop last took this value.
    events_read: EventCount,
    /// The batch identities that are not in the state yet, because the scan that read them was part of a dry run or of
    /// an undone cycle. A batch identity names the jobs to which a process may belong. It is read only once for each
    /// process.
    pub(super) pending_identities: BTreeMap<ProcessId, BatchIdentity>,
    /// The calls of sched_setaffinity(2) that scans of dry runs reported. Each call is reported only once.
    pub(super) affinity_requests: Vec<AffinityRequest>,
    /// The online PUs that the topology lacks.
    unknown_pus: CpuSet,
    /// The last check that the cores granted to jobs obey the rules, with the number of changes of the grants up to the
    /// check.
    pub(super) audited_grants: Option<(u64, GrantAudit)>,
    /// The threads whose affinity masks are not in the journal, because it could not be written. Empty after each
    /// successful write.
    pub(super) unrecorded_masks: BTreeSet<ThreadId>,
    /// The time for which this cycle may still wait for changes of cpusets.
    pub(super) cpuset_time_left: Duration,
    /// The results of the corrections of the masks of forked processes since the last cycle. The next cycle reports
    /// them.
    pub(super) fork_report: CycleReport,
    /// The masks of forked processes that were set before the present decision about these processes.
    pub(super) first_mask_writes: BTreeMap<Pid, FirstMaskWrite>,
    /// The process that thaws the frozen jobs if the daemon is killed. `None` if none is needed.
    pub(super) thaw_watcher: Option<ThawWatcher>,
}

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Makes a warden (the part of pjwd that keeps processes on the cores of their jobs), which continues where an
    /// earlier daemon stopped. Scans and changes nothing yet. `machine_interface` is the interface to the machine.
    /// `journal` stores the records of pjwd's changes. `state` is the initial state, without jobs. `records` are the
    /// records of the earlier daemon's journal, oldest first. The function applies them to `state`. `policy` has the
    /// configured rules. `host` has the facts about this machine by which pjwd recognises jobs, such as the host name.
    pub fn new(
        machine_interface: N,
        journal: J,
        mut state: WardenState,
        records: Vec<Record>,
        policy: Policy,
        host: LocalHost,
    ) -> Self {
        for record in records {
            state.apply_record(record);
        }
        Self {
            node: machine_interface,
            journal,
            state,
            policy,
            host,
            ongoing_failures: OngoingFailures::default(),
            events_read: EventCount::default(),
            pending_identities: BTreeMap::new(),
            affinity_requests: Vec::new(),
            unknown_pus: CpuSet::new(),
            audited_grants: None,
            unrecorded_masks: BTreeSet::new(),
            cpuset_time_left: Duration::ZERO,
            fork_report: CycleReport::default(),
            first_mask_writes: BTreeMap::new(),
            thaw_watcher: None,
        }
    }

    /// Returns the state after the last cycle (scan, decision and changes): the jobs, their processes, and the PUs
    /// (logical CPUs) granted to the jobs.
    pub fn state(&self) -> &WardenState {
        &self.state
    }

    /// Returns the failures that still existed at the end of the last cycle (scan, decision and changes), such as a
    /// failed write of the journal (the records of pjwd's changes).
    pub fn ongoing_failures(&self) -> &OngoingFailures {
        &self.ongoing_failures
    }

    /// Returns the policy in force: the configured settings on which the decisions depend.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns a mutable reference to the state (the jobs and their processes), and the policy in force (the
    /// configured rules).
    pub fn state_and_policy(&mut self) -> (&mut WardenState, &Policy) {
        (&mut self.state, &self.policy)
    }

    /// Returns the interface to the machine, through which pjwd scans processes and changes affinity masks and
    /// cpusets.
    pub fn machine_interface(&self) -> &N {
        &self.node
    }

    /// Returns a mutable reference to the interface to the machine, for example to change its settings. pjwd scans
    /// processes and changes affinity masks and cpusets through this interface.
    pub fn machine_interface_mut(&mut self) -> &mut N {
        &mut self.node
    }

    /// Returns a mutable reference to the state: the jobs, their processes, and the PUs (logical CPUs) granted to the
    /// jobs. The event loop needs this reference between cycles, for example to take processes out of the scan queue in
    /// the state.
    pub fn state_mut(&mut self) -> &mut WardenState {
        &mut self.state
    }

    /// Sets the time since when pjwd has received every fork event of the kernel. For each process that was forked
    /// later, pjwd knows the parent. `complete_since` is this time in ns since boot. It is `None` if pjwd receives no
    /// fork events, or if the kernel is still dropping events.
    ///
    /// Must be called at the start, and after each loss of events. The next periodic scan (configuration key
    /// `rescan_interval`) then reads every process, because earlier forks are possibly unknown.
    pub fn set_fork_events_complete_since(&mut self, complete_since: Option<Nanos>) {
        self.state.fork_events_complete_since = complete_since;
        self.state.full_scan_due = true;
    }

    /// Reads the pending process events (fork, exec, exit) of the kernel into the state. The event loop calls this
    /// function each time it wakes up. A cycle calls the function after each scan, so that the fork of every scanned
    /// process is known. If events were lost, the parents of new processes count as unknown until
    /// [`Warden::set_fork_events_complete_since`] is called with `Some(time)`.
    pub fn read_process_events(&mut self) {
        let ProcessEventBatch { events, events_lost, still_dropping } = self.node.read_process_events();
        let exited = self.state.usage.pids_with_exit_times_to_read(&events);
        if !exited.is_empty() {
            // The times of an exited process can be read only until its parent waits for it.
            let read_from = self.node.time_since_boot();
            let observed = self.node.read_cpu_times(&exited).into_iter();
            let times = observed.filter_map(|(pid, times)| Some((pid, *times.present()?))).collect();
            self.state.usage.note_exit_times(&events, times, read_from);
        }
        // An event for which there is no room counts as lost.
        let events_lost = self.state.apply_process_events(&events) || events_lost;
        if events_lost {
            self.state.forget_fork_records();
            // The next decision may be about a process whose fork event was lost.
            self.state.fork_events_complete_since = None;
            self.events_read.events_lost = true;
        }
        self.events_read.count += events.len();
        self.events_read.still_dropping = still_dropping;
    }

    /// Returns how many process events (fork, exec, exit) were read since the last call of this function, and whether
    /// events were lost in this time. Resets the count to zero.
    pub fn take_event_count(&mut self) -> EventCount {
        let still_dropping = self.events_read.still_dropping;
        std::mem::replace(&mut self.events_read, EventCount { still_dropping, ..EventCount::default() })
    }

    /// Finds the leftover cpusets, and adds them to the state. A leftover cpuset is a cpuset that an earlier daemon
    /// wrote for a job and that still exists, but has no record in the journal (the records of pjwd's changes). Must be
    /// called once, before the first cycle.
    ///
    /// After the next scan of every process, pjwd either gives the cpuset to its job again, or removes it.
    /// [`LeftoverCpuset`](pjw_core::cpuset_group::LeftoverCpuset) describes the rules and exceptions.
    pub fn find_leftover_cpusets(&mut self) {
        for cpuset in self.node.list_job_cpusets(&self.policy.own_cgroups) {
            self.state.add_leftover_cpuset(cpuset);
        }
    }

    /// Returns the journal: the storage in which pjwd records each change before it makes the change.
    pub fn journal(&self) -> &J {
        &self.journal
    }

    /// Replaces the policy (the configured rules), from the next cycle (scan, decision and changes) on. The fields
    /// `own_pid`, `thaw_watcher_pid`, `only_managed_user`, `may_grant`, `cpuset_support` and `own_cgroups` keep their
    /// values, because these do not come from the configuration.
    pub fn set_policy(&mut self, policy: Policy) {
        let Policy { own_pid, thaw_watcher_pid, only_managed_user, may_grant, .. } = self.policy;
        let cpuset_support = std::mem::take(&mut self.policy.cpuset_support);
        let own_cgroups = std::mem::take(&mut self.policy.own_cgroups);
        self.state.pool.set_housekeeping(&policy.housekeeping_cpus);
        self.policy = Policy {
            own_pid,
            thaw_watcher_pid,
            only_managed_user,
            may_grant,
            cpuset_support,
            own_cgroups,
            ..policy
        };
        self.audited_grants = None;
        self.state.dirty = DirtySet::everything();
        self.state.full_scan_due = true;
    }

    /// Returns the online PUs (logical CPUs) that the known topology of the machine lacks. These PUs were offline
    /// when the topology was read.
    pub fn pus_missing_in_topology(&self) -> &CpuSet {
        &self.unknown_pus
    }

    /// Replaces the topology of the machine after PUs (logical CPUs) were added. Also replaces the policy, because
    /// its housekeeping PUs (the PUs reserved for the system) depend on the topology. Jobs keep their cores.
    pub fn replace_topology(&mut self, topology: Topology, policy: Policy) {
        self.state.set_topology(topology, &policy.housekeeping_cpus);
        self.set_policy(policy);
    }

    /// Runs one cycle: scans the processes in `request`, executes the `commands` of users, decides which affinity
    /// masks and cpusets must change, and changes them. Returns the results, with one reply for each command.
    ///
    /// A decision can require another scan, for example because processes were forked during the changes. The cycle
    /// then repeats the scan, the decision and the changes, up to 8 times in total. If a further scan is required
    /// after that, [`CycleReport::has_unfinished_work`] is true, and the caller must run another cycle. While the
    /// journal (the records of pjwd's changes) can't be written, jobs are only released: other commands are refused,
    /// masks and cpusets are only put back, and no job gets cores of its own. Cores are lent and taken back also then.
    pub fn run_cycle(&mut self, request: ScanRequest, commands: &[Command]) -> CycleReport {
        if self.ongoing_failures.journal_error.is_some() {
            self.ongoing_failures.journal_error =
                self.write_records(&[]).err().map(|fault| fault.to_string());
        }
        let mut report = std::mem::take(&mut self.fork_report);
        let mut request = request;
        self.set_cpuset_time_limit(commands);
        let mut is_fork_scan_due = commands.iter().any(changes_process_masks);
        // A released job is kept only so that it is not found again. If it is assigned again, it counts as a new job.
        let is_existing = |id: &JobId| self.state.jobs.get(id).is_some_and(|job| !job.was_released);
        let existing_jobs: BTreeSet<JobId> = commands
            .iter()
            .filter_map(|command| match command {
                Command::Assign(assign) if is_existing(&assign.job) => Some(assign.job.clone()),
                _ => None,
            })
            .collect();
        if let Some(fault) = self.confine_forks(&mut report) {
            // The records of the forked processes are missing, so the next write has the whole state.
            self.state.full_scan_due = true;
            if !commands.is_empty() && !commands.iter().any(is_release) {
                report.replies = refuse_unrecorded_commands(commands, &fault);
                return report;
            }
        }
        // After the confinement of the forks: that decision reads no cgroups, so it must not know of these changes.
        self.record_finished_cpuset_changes(&mut request, &mut report);
        let mut next = Some(request);
        let mut round_commands = commands;
        for round in 0..=MAX_ROUNDS {
            let Some(request) = next.take() else { break };
            if round == MAX_ROUNDS {
                report.has_unfinished_work = true;
                break;
            }
            next = self.run_round(&request, round_commands, &mut report);
            round_commands = &[];
            if next.is_none() && is_fork_scan_due {
                is_fork_scan_due = false;
                next = self.forked_process_scan(commands);
            }
        }
        // Drop the processes that ended before a scan read them.
        report.confined_new_processes.retain(|fork| self.state.processes.contains_key(&fork.pid));
        self.release_unenforceable_jobs(commands, &existing_jobs, &mut report);
        report.refuse_ended_jobs(commands, &self.state);
        self.forget_ended_threads();
        report
    }

    /// Returns the scan of the processes that were forked while `commands` confined or released their parents, and that
    /// no scan has read yet. `None` if there are no such processes. Returns a scan of all processes if it is not known
    /// which processes were forked. First reads the pending process events.
    fn forked_process_scan(&mut self, commands: &[Command]) -> Option<ScanRequest> {
        self.read_process_events();
        let request = command_scan_request(&mut self.state, commands);
        let ScanScope::Partial(mut forked) = request.scope else { return Some(request) };
        forked.retain(|pid| !self.state.processes.contains_key(pid));
        forked.extend(self.state.lineage.scan_queue.take_urgent_pids());
        if forked.is_empty() {
            return None;
        }
        Some(ScanRequest {
            scope: ScanScope::Partial(forked.clone()),
            pids_to_read_threads_of: forked,
            active_threads: BTreeMap::new(),
            cgroups: BTreeSet::new(),
            idle_watch: Arc::default(),
        })
    }

    /// Runs one round (scan, decision and changes), which scans the processes in `request` and executes `commands`.
    /// Adds its results to `report`. Returns the next scan if there is more to do.
    pub(super) fn run_round(
        &mut self,
        request: &ScanRequest,
        commands: &[Command],
        report: &mut CycleReport,
    ) -> Option<ScanRequest> {
        let mut snapshot = self.scan_processes(request);
        snapshot.affinity_requests.splice(..0, std::mem::take(&mut self.affinity_requests));
        let next = self.decide_and_apply(&snapshot, commands, report);
        let can_write = self.ongoing_failures.journal_error.is_none();
        // If the journal can be written again since this decision, the next one grants the cores that this one left
        // free. If it can't be written since this decision, the next one makes the changes that need no record.
        let is_decided_again =
            if can_write { !self.policy.may_grant } else { self.policy.may_grant && commands.is_empty() };
        if !is_decided_again {
            return next;
        }
        Some(next.unwrap_or_else(|| command_scan_request(&mut self.state, &[])))
    }

    /// Makes a decision from `snapshot`, the result of a scan, and from `commands`. Writes its records to the journal,
    /// and makes the decided changes. Adds the results to `report`. Returns the next scan if there is more to do.
    pub(super) fn decide_and_apply(
        &mut self,
        snapshot: &Snapshot,
        commands: &[Command],
        report: &mut CycleReport,
    ) -> Option<ScanRequest> {
        self.unknown_pus = snapshot.online.difference(self.state.topology.cpus());
        self.policy.may_grant = self.ongoing_failures.journal_error.is_none();
        let rollback_state = self.prepare_rollback(commands);
        let decision = reconcile(&mut self.state, snapshot, commands, &self.policy);
        report.plan_warnings.clone_from(&decision.warnings);
        if decision.newly_planned.contains_everything() {
            // All grants are audited again, in case a change was missed.
            self.audited_grants = None;
        }
        report.newly_planned.extend(&decision.newly_planned);
        self.carry_out(decision, snapshot, commands, rollback_state, report)
    }

    /// Scans the processes in `request`. Adds to each process its CPU times and the jobs that its attributes name, such
    /// as its environment variables.
    pub(super) fn scan_processes(&mut self, request: &ScanRequest) -> Snapshot {
        let mut snapshot = self.node.scan(request);
        for observed in snapshot.processes.values_mut() {
            let Observed::Present(process) = observed else { continue };
            if let Some(attributes) = &process.attributes {
                let identity =
                    pjw_sources::recognise_jobs(&process.comm, attributes, &self.host, &self.policy.sources);
                self.pending_identities.insert(process.id, identity);
            }
            process.batch_identity = self.pending_identities.get(&process.id).cloned();
        }
        self.read_process_events();
        self.read_usage(request, &mut snapshot);
        snapshot
    }

    /// Removes the refused masks of threads that have ended or left their job.
    fn forget_ended_threads(&mut self) {
        let is_in_job = |thread: &ThreadId| {
            let member = self.state.members.get(&thread.process.pid);
            let member_thread = member.and_then(|member| member.threads.get(&thread.tid));
            member_thread.is_some_and(|member_thread| member_thread.start == thread.start)
        };
        self.ongoing_failures.refused_masks.retain(|thread, _| is_in_job(thread));
    }
}

/// Returns whether `command` changes the affinity masks of running processes. If true, another scan must follow,
/// because such a process can fork during the change.
fn changes_process_masks(command: &Command) -> bool {
    match command {
        Command::Assign(assign) => !assign.pids.is_empty() || assign.session.is_some(),
        Command::Want { .. } => false,
        // Processes that a changed rule no longer recognises leave their job.
        Command::Provision(_)
        | Command::Release { .. }
        | Command::Undo { .. }
        | Command::ReleaseAll { .. }
        | Command::Defrag { .. } => true,
    }
}
