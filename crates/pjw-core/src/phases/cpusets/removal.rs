//! Removes the cpusets that no job needs: first their limits, then their processes, then the cgroup.

use crate::basics::prelude::*;
use crate::phases::cpusets::moves::processes_with_origin;
use crate::phases::cpusets::planned::{
    PendingCpusetChanges, allows_every_pu, journal_requested_masks, plan_move_back, push_cpuset_change,
};
use crate::phases::draft::CycleDraft;
use crate::terms::{CgroupCreator, CpusetChange, CpusetRecord, Observed};

/// Plans the removal of the cpuset at the cgroup path `path`, which no job needs. Adds these changes to `changes`:
///
/// 1. The limits of the cpuset are removed.
/// 2. Its processes are moved back to their original cgroups, if these are known.
/// 3. Its cgroup is removed, if no process will be left in it.
///
/// If a batch system made the cgroup, only the limits are removed, and only if pjw wrote them. If the cgroup is gone,
/// only records that. Does nothing if no scan has read the cpuset, or while another change for its job is delayed. A
/// change that the kernel or systemd refused is tried again after the next scan of all processes.
pub(super) fn plan_cpuset_removal(
    draft: &mut CycleDraft<'_>,
    path: &str,
    changes: &mut PendingCpusetChanges,
) {
    let state = &*draft.state;
    let Some(managed) = state.cpusets.cpuset_at(path).cloned() else { return };
    let job_cpuset = managed.job_cpuset.clone();
    // A process that is being moved in would be left behind.
    if state.cpusets.delayed_changes.has_change_for(&job_cpuset.job) {
        return;
    }
    let cgroup = match state.cgroups.get(path) {
        None => return,
        Some(Observed::Gone) => {
            draft.record_cpuset(CpusetRecord::Removed { path: path.to_owned() });
            return;
        }
        // A cpuset that could not be read is neither widened nor removed.
        Some(Observed::Present(cgroup)) if cgroup.cpuset.is_none() && !cgroup.has_no_cpuset() => return,
        Some(Observed::Present(cgroup)) => cgroup.clone(),
    };
    let is_in_scheduler_cgroup = job_cpuset.creator == CgroupCreator::Scheduler;
    let is_unlimited = allows_every_pu(state, &cgroup);
    // If the scheduler has written the cpuset since pjw wrote it, the scheduler's content stays.
    let is_written_by_pjw = cgroup.cpuset.as_ref().is_some_and(|cpuset| managed.has_cpus_from_pjw(cpuset));
    if is_in_scheduler_cgroup && (is_unlimited || !is_written_by_pjw) {
        draft.record_cpuset(CpusetRecord::Removed { path: path.to_owned() });
        return;
    }
    let has_limits_to_remove = !is_unlimited && !draft.state.cpusets.has_failed_removal(path);
    // A second attempt, after a refusal, changes the cpuset at another time.
    if !managed.must_be_removed || has_limits_to_remove {
        journal_requested_masks(draft, &job_cpuset.job, path);
        draft.record_cpuset(CpusetRecord::Unwanted { path: path.to_owned() });
    }
    if has_limits_to_remove {
        let why = format!("{} needs {path} no longer", job_cpuset.job);
        push_cpuset_change(
            changes,
            &job_cpuset.job,
            CpusetChange::RemoveLimits { job_cpuset: job_cpuset.clone() },
            false,
            why,
        );
    }
    if is_in_scheduler_cgroup {
        return;
    }
    let processes = processes_with_origin(draft.state, path);
    let are_all_returning = processes.iter().all(|(_, origin)| origin.is_some());
    let is_any_returning = processes.iter().any(|(_, origin)| origin.is_some());
    for (process, to) in processes.into_iter().filter_map(|(process, origin)| Some((process, origin?))) {
        let why = format!("process {} came from {to}", process.pid);
        plan_move_back(draft, changes, &job_cpuset.job, (process, path, to), why);
    }
    // Where the cpuset controller was switched off, no cpuset limits the processes that have no cgroup to return to.
    if cgroup.has_no_cpuset() && !is_any_returning && !are_all_returning {
        draft.record_cpuset(CpusetRecord::Removed { path: path.to_owned() });
        return;
    }
    let will_be_empty = are_all_returning && (is_any_returning || !cgroup.populated);
    if will_be_empty && !draft.state.cpusets.has_failed_removal(path) {
        let why = format!("no process is left in {path}");
        let job = job_cpuset.job.clone();
        push_cpuset_change(changes, &job, CpusetChange::Remove { job_cpuset }, false, why);
    }
}
