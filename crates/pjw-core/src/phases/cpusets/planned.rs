//! The planned changes of cpusets, and what comes before each change: masks are written to the journal.

use crate::basics::{ProcessId, ThreadId, prelude::*};
use crate::phases::draft::CycleDraft;
use crate::state::{MaskEntry, Member, MemberThread, WardenState};
use crate::terms::{Cgroup, CpusetAction, CpusetChange, CpusetRecord, JobId};

/// The changes of cpusets that this cycle plans, and the jobs whose affinity masks are planned only after these
/// changes.
#[derive(Default)]
pub(crate) struct PendingCpusetChanges {
    /// The changes, in the order in which they are to be made.
    pub(crate) actions: Vec<CpusetAction>,
    /// The jobs whose masks are planned only after the next scan of their cpusets.
    pub(crate) waiting_jobs: BTreeSet<JobId>,
}

/// Writes affinity masks that were requested for threads to the journal (the file with which a restarted daemon
/// restores its state). Must be called before a change of the cpuset of `job` at the cgroup path `path`, because the
/// kernel may change these masks together with the cpuset. The threads are those of `job`, and of all other tracked
/// processes in the cpuset. Leaves out a thread whose original mask has every PU of the machine, unless the journal
/// already has a mask of this thread.
pub(super) fn journal_requested_masks(draft: &mut CycleDraft<'_>, job: &JobId, path: &str) {
    let bound = bound_threads(draft.state, job, path);
    bound.into_iter().for_each(|thread| draft.start_journaling(thread));
}

/// Returns the threads whose affinity masks must be in the journal before a change of the cpuset of `job` at the cgroup
/// path `path`: see [`journal_requested_masks`].
pub(super) fn bound_threads(state: &WardenState, job: &JobId, path: &str) -> Vec<ThreadId> {
    let machine = state.topology.cpus();
    // The journal may have an earlier request of a thread that has every PU now.
    let is_kept =
        |entry: &MaskEntry| !machine.is_subset(entry.original_mask()) || entry.journaled_since().is_some();
    let is_bound = |thread: &MemberThread| thread.mask_entry.as_ref().is_some_and(is_kept);
    let threads = state.processes_affected_by_cpuset(job, path).flat_map(Member::living_threads);
    threads.filter(|(_, thread)| is_bound(thread)).map(|(id, _)| id).collect()
}

/// Plans to move `process` out of the cpuset of `job` at `path`, back to its original cgroup `to`. `why` is the reason,
/// for users. If pjw has no record that it moved `process` into the cpuset, also writes `to` to the journal: children
/// that `process` forked in the cpuset have the same original cgroup.
pub(super) fn plan_move_back(
    draft: &mut CycleDraft<'_>,
    changes: &mut PendingCpusetChanges,
    job: &JobId,
    (process, path, to): (ProcessId, &str, String),
    why: String,
) {
    let from = path.to_owned();
    if !draft.state.cpusets.was_moved_into_cpuset_at(process, path) {
        draft.record_cpuset(CpusetRecord::Moved { process, from: to.clone(), to: from.clone() });
    }
    push_cpuset_change(changes, job, CpusetChange::MoveBack { process, from, to }, false, why);
}

/// Returns whether `cgroup` restricts its processes to no PUs (logical CPUs): the cgroup has no cpuset, or its cpuset
/// has every online PU and is not isolated.
pub(crate) fn allows_every_pu(state: &WardenState, cgroup: &Cgroup) -> bool {
    cgroup.cpuset.as_ref().is_none_or(|cpuset| {
        let is_unlimited = cpuset.cpus.is_empty() || state.pool.online_cpus().is_subset(&cpuset.cpus);
        is_unlimited && !cpuset.isolated
    })
}

/// Adds a change of the cpuset of `job` to `changes`. The affinity masks of the job are then planned only after the
/// next scan. `is_repair` is true if pjw had made this change before and another program undid it. `reason` is a text
/// for users.
pub(super) fn push_cpuset_change(
    changes: &mut PendingCpusetChanges,
    job: &JobId,
    change: CpusetChange,
    is_repair: bool,
    reason: String,
) {
    changes.waiting_jobs.insert(job.clone());
    changes.actions.push(CpusetAction { job: job.clone(), change, is_repair, reason });
}
