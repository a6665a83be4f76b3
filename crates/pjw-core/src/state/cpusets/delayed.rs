//! The changes of cpusets that the kernel or systemd has not completed yet.
//!
//! While a change for a job is delayed, no other change of a cpuset is planned for the job, and affinity masks keep its
//! processes on its cores. If the cpuset is an isolated partition, masks have to wait for the change too, and the
//! processes run elsewhere until then. When the change is complete, a scan reads what became of it, and the job is
//! planned again.

use crate::basics::{ProcessId, prelude::*};
use crate::terms::{CpusetAction, CpusetChange, JobId};

/// The delayed changes of cpusets: changes that the kernel or systemd has begun and has not completed. While a change
/// is delayed, the daemon plans no other change of the same job's cpuset.
///
/// The type also lists the cpusets whose PUs (logical CPUs) a delayed change has written since the last decision of the
/// daemon. pjw knows when it requested such a write, but not when the write took place. So the next decision records
/// its own time as the time of the write.
#[derive(Debug, Clone, Default)]
pub struct DelayedChanges {
    /// The number of delayed changes, for each job that has any.
    jobs: BTreeMap<JobId, usize>,
    /// The processes that are being moved, each with the path of the new cgroup in every change that moves
    /// it. Two changes may move the same process: the change that creates a systemd scope, and the move into
    /// the scope.
    moves: BTreeMap<ProcessId, Vec<String>>,
    /// The paths of the cpusets whose PUs are being written.
    being_written: BTreeSet<String>,
    /// The paths of the cpusets whose PUs were written since the last decision.
    written: BTreeSet<String>,
}

impl DelayedChanges {
    /// Adds `action` to the delayed changes. `action` is a change of the cpuset of a job. The kernel or systemd has
    /// begun this change and has not completed it. The daemon plans no other change of the cpuset of the same job until
    /// [`DelayedChanges::remove`] is called with `action`.
    pub fn add(&mut self, action: &CpusetAction) {
        *self.jobs.entry(action.job.clone()).or_default() += 1;
        match &action.change {
            CpusetChange::Create { job_cpuset, initial_processes, .. } => {
                self.being_written.insert(job_cpuset.path.clone());
                initial_processes.iter().for_each(|&process| self.add_move(process, &job_cpuset.path));
            }
            CpusetChange::RemoveLimits { job_cpuset } => {
                self.being_written.insert(job_cpuset.path.clone());
            }
            CpusetChange::MoveIn { process, to, .. } | CpusetChange::MoveBack { process, to, .. } => {
                self.add_move(*process, to);
            }
            CpusetChange::Remove { .. } => {}
        }
    }

    /// Removes the change `action` of a cpuset from the list of delayed changes. Must be called after the
    /// kernel or systemd has completed or refused this change. Does not undo the change.
    pub fn remove(&mut self, action: &CpusetAction) {
        if let Some(count) = self.jobs.get_mut(&action.job) {
            *count -= 1;
            if *count == 0 {
                self.jobs.remove(&action.job);
            }
        }
        match &action.change {
            CpusetChange::Create { job_cpuset, initial_processes, .. } => {
                self.finish_writing(&job_cpuset.path);
                initial_processes.iter().for_each(|&process| self.remove_move(process, &job_cpuset.path));
            }
            CpusetChange::RemoveLimits { job_cpuset } => self.finish_writing(&job_cpuset.path),
            CpusetChange::MoveIn { process, to, .. } | CpusetChange::MoveBack { process, to, .. } => {
                self.remove_move(*process, to);
            }
            CpusetChange::Remove { .. } => {}
        }
    }

    fn add_move(&mut self, process: ProcessId, to: &str) {
        self.moves.entry(process).or_default().push(to.to_owned());
    }

    /// Removes one move of the process. Another change may still move it to the same cgroup.
    fn remove_move(&mut self, process: ProcessId, to: &str) {
        let Some(moves) = self.moves.get_mut(&process) else { return };
        if let Some(index) = moves.iter().position(|destination| destination == to) {
            moves.remove(index);
        }
        if moves.is_empty() {
            self.moves.remove(&process);
        }
    }

    fn finish_writing(&mut self, path: &str) {
        if let Some(path) = self.being_written.take(path) {
            self.written.insert(path);
        }
    }

    /// Whether a change of the job's cpuset is delayed: the kernel or systemd has begun the change and has
    /// not completed it. While the result is true, the daemon plans no other change of this cpuset.
    #[must_use]
    pub fn has_change_for(&self, job: &JobId) -> bool {
        self.jobs.contains_key(job)
    }

    /// Whether no change of a cpuset is delayed.
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Iterates over the paths of the cgroups into which delayed changes move the process `process`.
    pub(crate) fn move_destinations_of(&self, process: ProcessId) -> impl Iterator<Item = &str> {
        self.moves.get(&process).into_iter().flatten().map(String::as_str)
    }

    /// Returns whether a delayed change moves the process `process` into another cgroup.
    pub(crate) fn is_moving(&self, process: ProcessId) -> bool {
        self.moves.contains_key(&process)
    }

    /// Returns whether a delayed change writes the PUs (logical CPUs) of the cpuset at the cgroup path `path`.
    pub(crate) fn is_writing(&self, path: &str) -> bool {
        self.being_written.contains(path)
    }

    /// Returns the cgroup paths of the cpusets whose PUs (logical CPUs) a delayed change may have written since the
    /// last call of this function. A cpuset that is still being written is returned by each call, and once more after
    /// the write.
    pub(crate) fn take_written_cpusets(&mut self) -> BTreeSet<String> {
        let mut written = core::mem::take(&mut self.written);
        written.extend(self.being_written.iter().cloned());
        written
    }
}
