//! The changes of cpusets that the kernel or systemd refused, or that failed.

use crate::basics::{ProcessId, is_cgroup_within, prelude::*};
use crate::state::cpusets::CpusetRegistry;
use crate::terms::{CgroupCreator, CpusetAction, CpusetChange, CpusetOutcome};

impl CpusetRegistry {
    /// Records that the kernel or systemd refused the change `action` of a cpuset. `reason` is the reason, as text for
    /// users. pjw tries the change again after the next scan of all processes.
    ///
    /// There is one exception: a refused move of a process out of a cpuset that pjw itself created, back to the
    /// original cgroup of the process (the cgroup before pjw moved it). This cgroup may no longer exist. So pjw next
    /// moves the process to the root cgroup, without waiting for a scan of all processes. If the original cgroup is the
    /// root cgroup, pjw tries the move again after the next scan of all processes.
    pub fn record_refusal(&mut self, action: &CpusetAction, reason: &str) {
        match &action.change {
            CpusetChange::Create { job_cpuset, .. } => {
                self.refused.insert(job_cpuset.job.clone(), reason.to_owned());
                self.take_back_write(&job_cpuset.path);
                if let Some(managed) = self.managed.get_mut(&job_cpuset.path) {
                    managed.was_refused = true;
                }
            }
            CpusetChange::MoveIn { process, .. } => {
                self.move_errors.insert(*process, reason.to_owned());
            }
            CpusetChange::MoveBack { process, from, to } => {
                self.note_move_back_refusal(*process, from, to, reason);
            }
            CpusetChange::RemoveLimits { job_cpuset } => {
                self.failed_removals.insert(job_cpuset.path.clone(), reason.to_owned());
                self.take_back_write(&job_cpuset.path);
            }
            CpusetChange::Remove { job_cpuset } => {
                self.failed_removals.insert(job_cpuset.path.clone(), reason.to_owned());
            }
        }
    }

    /// Updates the list of the processes that are not in the cpuset of their job. `action` is a change of a cpuset,
    /// and `outcome` is its outcome. The list changes as follows:
    ///
    /// - A new cpuset: adds its initial processes, until a scan finds them there. systemd moves these processes, and
    ///   does not report a process that it could not move.
    /// - A move into the cpuset: removes the process if the move was done. Otherwise adds the process, if the move
    ///   was not a repair.
    /// - A move back out of the cpuset that was done: adds the process.
    ///
    /// If the change was delayed (it ended after the daemon had gone on), must be called before the change is removed
    /// from the list of delayed changes.
    pub(super) fn record_move_attempt(&mut self, action: &CpusetAction, outcome: &CpusetOutcome) {
        let is_done = matches!(outcome, CpusetOutcome::Done { .. });
        match &action.change {
            // A scan may have found the processes in the cpuset before a delayed change ends.
            CpusetChange::Create { job_cpuset, initial_processes, .. }
                if !self.delayed_changes.is_writing(&job_cpuset.path) =>
            {
                self.unmoved.extend(initial_processes);
            }
            CpusetChange::MoveIn { process, .. } => {
                if is_done {
                    self.unmoved.remove(process);
                } else if !action.is_repair {
                    self.unmoved.insert(*process);
                }
            }
            CpusetChange::MoveBack { process, .. } if is_done => {
                self.unmoved.insert(*process);
            }
            _ => {}
        }
    }

    /// Records that the first scan of the process `process` by this run of the daemon found it in the cgroup `cgroup`.
    /// An earlier run may have journaled a move of the process and not made it, because the memory of the process was
    /// locked or because the daemon was killed. Then the process still is in the cgroup from which it was to be moved:
    /// its original cgroup, or the cpuset of another job. A process that another program moved there while no daemon
    /// ran counts as never moved, too.
    pub(crate) fn note_first_cgroup(&mut self, process: ProcessId, cgroup: Option<&str>) {
        let Some((moved, cgroup)) = self.moved.get(&process).zip(cgroup) else { return };
        let enclosing = self.enclosing_cpuset(cgroup);
        let is_in_other_cpuset = enclosing.is_some_and(|enclosing| enclosing.job_cpuset.path != moved.to);
        if cgroup == moved.from || is_in_other_cpuset {
            self.unmoved.insert(process);
        }
    }

    /// Records that a scan found the process `process` in another cgroup than before: `cgroup`.
    pub(crate) fn note_move(&mut self, process: ProcessId, cgroup: Option<&str>) {
        let destination = self.last_move_destination(process).zip(cgroup);
        if destination.is_some_and(|(path, cgroup)| is_cgroup_within(cgroup, path)) {
            self.unmoved.remove(&process);
        }
    }

    /// Records that the cpuset at `path` still has the PUs that it had before the last write, which was refused. If the
    /// cpuset has other PUs, the next scan reads them: [`CpusetRegistry::record_cpus_read`].
    fn take_back_write(&mut self, path: &str) {
        if let Some(history) = self.history.get_mut(path) {
            history.undo_last_replacement();
        }
    }

    /// Handles the refused move of a process back to its original cgroup, which may no longer exist. If pjw itself
    /// created the cpuset, pjw next moves the process to the root instead. A systemd scope has no such alternative: the
    /// process stays. If the job has ended or was released, the scope allows all PUs. If the job goes on, because the
    /// process left a provision, the scope limits the process to the PUs of the job, with a warning.
    fn note_move_back_refusal(&mut self, process: ProcessId, from: &str, to: &str, reason: &str) {
        let managed = self.managed.get(from);
        if managed.is_some_and(|managed| managed.job_cpuset.creator == CgroupCreator::Warden) && to != "/" {
            self.record_move(process, "/".to_owned(), from.to_owned());
        } else {
            self.move_errors.insert(process, reason.to_owned());
        }
    }
}
