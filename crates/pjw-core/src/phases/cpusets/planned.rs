//! The planned changes of cpusets, and what comes before each change: masks are written to the journal.

use crate::basics::{ProcessId, ThreadId, prelude::*};
use crate::phases::draft::Draft;
use crate::state::{MaskEntry, Member, MemberThread, WardenState};
use crate::terms::{Cgroup, CpusetAction, CpusetChange, CpusetRecord, JobId};

/// The planned changes of cpusets, and the jobs that wait for them.
#[derive(Default)]
pub(crate) struct PendingCpusetChanges {
    /// The changes, in the order in which they are to be made.
    pub(crate) actions: Vec<CpusetAction>,
    /// The jobs whose masks are planned only after the next scan of their cpusets.
    pub(crate) waiting_jobs: BTreeSet<JobId>,
}

/// Writes the requested masks of threads to the journal before a change of the cpuset at `path`, because the kernel may
/// change the masks of these threads with the cpuset.
pub(super) fn keep_masks(draft: &mut Draft<'_>, job: &JobId, path: &str) {
    let machine = draft.state.topology.cpus();
    // The journal may have an earlier request of a thread that has every PU now.
    let is_kept =
        |entry: &MaskEntry| !machine.is_subset(entry.original_mask()) || entry.journaled_since().is_some();
    let is_bound = |thread: &MemberThread| thread.mask_entry.as_ref().is_some_and(is_kept);
    let threads = draft.state.concerned_by_cpuset(job, path).flat_map(Member::living_threads);
    let bound: Vec<ThreadId> = threads.filter(|(_, thread)| is_bound(thread)).map(|(id, _)| id).collect();
    bound.into_iter().for_each(|thread| draft.start_journaling(thread));
}

/// Plans the move of a process out of the cpuset at `path` to its original cgroup `to`. Also records this cgroup for
/// the process. The children of the process that were forked in the cpuset have the same original cgroup.
pub(super) fn move_back(
    draft: &mut Draft<'_>,
    changes: &mut PendingCpusetChanges,
    job: &JobId,
    (process, path, to): (ProcessId, &str, String),
    why: String,
) {
    let from = path.to_owned();
    if !draft.state.cpusets.was_moved_into_cpuset_at(process, path) {
        draft.record_cpuset(CpusetRecord::Moved { process, from: to.clone(), to: from.clone() });
    }
    push(changes, job, CpusetChange::MoveBack { process, from, to }, false, why);
}

/// Returns whether the cgroup limits no process: its cpuset has every online PU, or the cgroup has no cpuset.
pub(crate) fn allows_every_pu(state: &WardenState, cgroup: &Cgroup) -> bool {
    cgroup.cpuset.as_ref().is_none_or(|cpuset| {
        let is_unlimited = cpuset.cpus.is_empty() || state.pool.online_cpus().is_subset(&cpuset.cpus);
        is_unlimited && !cpuset.isolated
    })
}

/// Adds a change of the cpuset of `job`. The masks of the job are planned only after the next scan.
pub(super) fn push(
    changes: &mut PendingCpusetChanges,
    job: &JobId,
    change: CpusetChange,
    is_repair: bool,
    reason: String,
) {
    changes.waiting_jobs.insert(job.clone());
    changes.actions.push(CpusetAction { job: job.clone(), change, is_repair, reason });
}
