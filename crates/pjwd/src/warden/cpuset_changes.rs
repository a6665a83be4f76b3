//! The changes of cpusets in a cycle. A change that takes long is completed by the node after the cycle.
//!
//! Before the kernel moves a process to another cgroup, it lets all forks in progress on the machine end. Beside very many
//! processes that fork, that takes hundreds of milliseconds. Meanwhile affinity masks keep the job on its cores, and the
//! command is answered.

use std::time::{Duration, Instant};

use pjw_core::command::Command;
use pjw_core::cpuset_group::{CpusetAction, CpusetOutcome};
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::report::cpuset_events;
use pjw_core::scan::ScanRequest;

use super::{cycle::Warden, report::CycleReport};

/// The longest time that one cycle waits for changes of cpusets.
const MAX_WAIT: Duration = Duration::from_millis(100);

/// The longest time that a release of all jobs waits for changes of cpusets, including those of systemd: usually nothing is
/// left of the jobs when it is answered.
const MAX_WAIT_OF_RELEASE_ALL: Duration = Duration::from_secs(5);

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Sets how long a cycle with these commands may wait for changes of cpusets.
    pub(super) fn set_cpuset_time(&mut self, commands: &[Command]) {
        let is_release_all = commands.iter().any(|command| matches!(command, Command::ReleaseAll { .. }));
        self.cpuset_time_left = if is_release_all { MAX_WAIT_OF_RELEASE_ALL } else { MAX_WAIT };
    }

    /// Records the changes of cpusets that were completed since the last cycle. Adds the processes and cgroups that
    /// these changed to the scan `request`.
    pub(super) fn note_finished_cpuset_changes(
        &mut self,
        request: &mut ScanRequest,
        report: &mut CycleReport,
    ) {
        let finished = self.node.take_finished_cpuset_changes();
        if !finished.is_empty() {
            self.state.note_finished_cpuset_changes(&finished, request);
            report.events.extend(cpuset_events(&finished));
            report.cpuset_outcomes.extend(finished);
        }
    }

    /// Makes the planned changes of cpusets. If the time limit of this cycle is exceeded, the remaining changes are
    /// completed later.
    pub(super) fn apply_cpuset_changes(
        &mut self,
        actions: Vec<CpusetAction>,
    ) -> Vec<(CpusetAction, CpusetOutcome)> {
        let mut outcomes = Vec::with_capacity(actions.len());
        for action in actions {
            let begun = Instant::now();
            let outcome = self.node.change_cpuset(&action, self.cpuset_time_left);
            self.cpuset_time_left = self.cpuset_time_left.saturating_sub(begun.elapsed());
            self.state.cpusets.record_outcome(&action, &outcome);
            outcomes.push((action, outcome));
        }
        outcomes
    }
}
