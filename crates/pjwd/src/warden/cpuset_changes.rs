//! The changes of cpusets in a cycle. A change that takes long is completed in the background after the cycle.
//!
//! Before the kernel moves a process to another cgroup, it lets all forks in progress on the machine end. Beside very
//! many processes that fork, this takes hundreds of milliseconds. Meanwhile affinity masks keep the job on its cores,
//! and the command is answered. Only the cpuset can keep a job in an isolated partition: `pjwctl run --isolated` and
//! `pjwctl assign --isolated` wait for the cpuset.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pjw_core::command::Command;
use pjw_core::cpuset_group::{CpusetAction, CpusetChange, CpusetOutcome};
use pjw_core::job::JobId;
use pjw_core::plan::Warning;
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::report::cpuset_events;
use pjw_core::scan::ScanRequest;
use tracing::info;

use super::{cycle::Warden, report::CycleReport};
use crate::host::thaw_watcher::ThawWatcher;

/// The longest time that one cycle waits for changes of cpusets.
const MAX_WAIT: Duration = Duration::from_millis(100);

/// The longest time that a release of all jobs waits for changes of cpusets, including those of systemd. Usually
/// nothing is left of the jobs when the command is answered.
const MAX_WAIT_OF_RELEASE_ALL: Duration = Duration::from_secs(5);

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Sets how long a cycle (scan, decision and changes) can wait for changes of cpusets: 5 s if one of the `commands`
    /// releases all jobs, and 100 ms otherwise.
    pub(super) fn set_cpuset_time_limit(&mut self, commands: &[Command]) {
        let is_release_all = commands.iter().any(|command| matches!(command, Command::ReleaseAll { .. }));
        self.cpuset_time_left = if is_release_all { MAX_WAIT_OF_RELEASE_ALL } else { MAX_WAIT };
    }

    /// Records the results of changes of cpusets that began in an earlier cycle and have been completed or refused
    /// since then. The results go into the state and into `report`. The cgroups and processes that these changes
    /// concern are added to the scan `request`.
    pub(super) fn record_finished_cpuset_changes(
        &mut self,
        request: &mut ScanRequest,
        report: &mut CycleReport,
    ) {
        let finished = self.node.take_finished_cpuset_changes();
        if finished.is_empty() {
            return;
        }
        self.state.note_finished_cpuset_changes(&finished, request);
        let delayed = &self.state.cpusets.delayed_changes;
        let jobs: BTreeSet<&JobId> = finished.iter().map(|(action, _)| &action.job).collect();
        for job in jobs.into_iter().filter(|job| !delayed.has_change_for(job)) {
            info!(%job, "the delayed changes of its cpuset were made or refused");
        }
        report.events.extend(cpuset_events(&finished));
        report.cpuset_outcomes.extend(finished);
    }

    /// Makes the planned changes of cpusets in `actions`, in this order. Returns each change with its result. A change
    /// that is not complete at the time limit of the cycle continues in the background, and a later cycle records its
    /// result.
    pub(super) fn apply_cpuset_changes(
        &mut self,
        actions: Vec<CpusetAction>,
    ) -> Vec<(CpusetAction, CpusetOutcome)> {
        if actions.is_empty() {
            return Vec::new();
        }
        if actions.iter().any(freezes) {
            self.ensure_thaw_watcher_running();
        }
        let begun = Instant::now();
        let outcomes = self.node.change_cpusets(&actions, self.cpuset_time_left);
        self.cpuset_time_left = self.cpuset_time_left.saturating_sub(begun.elapsed());
        for (action, outcome) in actions.iter().zip(&outcomes) {
            if *outcome == CpusetOutcome::Delayed {
                self.log_delay(action);
            }
            self.state.cpusets.record_outcome(action, outcome);
        }
        actions.into_iter().zip(outcomes).collect()
    }

    /// Logs that the change `action` of a cpuset is delayed. Logs nothing if another change for the same job is
    /// delayed already.
    fn log_delay(&self, action: &CpusetAction) {
        let (job, cpusets) = (&action.job, &self.state.cpusets);
        if cpusets.delayed_changes.has_change_for(job) {
            return;
        }
        let is_isolated = cpusets.has_isolated_partition(job);
        let meanwhile = match &action.change {
            CpusetChange::Remove { .. }
            | CpusetChange::RemoveLimits { .. }
            | CpusetChange::MoveBack { .. } => "its processes leave the cpuset later",
            _ if is_isolated => "until then its processes may run on other CPUs",
            _ => "until then masks keep the processes outside of the cpuset on its cores",
        };
        info!(%job, "a change of its cpuset was not complete at the end of the cycle: {meanwhile}");
    }

    /// Sets the thaw watcher: the process that thaws the frozen jobs if pjwd is killed. The warden starts this process
    /// itself before it freezes the first job. `None` means that no such process is needed.
    pub fn set_thaw_watcher(&mut self, watcher: Option<ThawWatcher>) {
        self.thaw_watcher = watcher;
    }

    /// Starts the thaw watcher (the process that thaws the frozen jobs if pjwd is killed), unless this process runs
    /// already. Must be called regularly while a job is frozen, because the process can have ended.
    pub fn ensure_thaw_watcher_running(&mut self) {
        if let Some(watcher) = &mut self.thaw_watcher {
            watcher.ensure_running(Instant::now());
            self.policy.thaw_watcher_pid = watcher.pid();
        }
    }

    /// Returns the warning that no process thaws the frozen jobs if the daemon is killed. `None` if such a process
    /// runs, or if none is needed.
    pub fn thaw_watcher_warning(&self) -> Option<Warning> {
        self.thaw_watcher.as_ref().and_then(ThawWatcher::warning)
    }

    /// Ends the thaw watcher (the process that thaws the frozen jobs if pjwd is killed). Must be called only when pjwd
    /// stops, after all jobs were thawed.
    pub fn end_thaw_watcher(&mut self) {
        if let Some(watcher) = &mut self.thaw_watcher {
            watcher.end();
        }
    }
}

/// Whether the change freezes the processes of a job, or keeps them frozen.
fn freezes(action: &CpusetAction) -> bool {
    matches!(&action.change, CpusetChange::Create { job_cpuset, .. } if job_cpuset.spec.frozen)
}
