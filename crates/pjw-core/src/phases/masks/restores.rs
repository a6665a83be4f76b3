//! The restoring of original masks: in a job that holds no cores, and of processes that have left their job.

use crate::basics::{ProcessId, ThreadId, prelude::*};
use crate::phases::draft::CycleDraft;
use crate::state::{Member, WardenState};
use crate::terms::{JobId, MaskAction, MaskActionKind};

/// Returns the changes that restore the original masks (the masks before pjw changed them) of the threads of the job
/// `id`. The job holds no cores, so its threads must not stay on the cores of other jobs. Its processes stay members.
/// Writes the changes to the journal. After a full scan, also writes which threads have their original masks again.
pub(super) fn restore_masks_of_job(draft: &mut CycleDraft<'_>, id: &JobId) -> Vec<MaskAction> {
    let Some(members) = draft.state.members.members_to_plan(&draft.state.dirty, id) else {
        return Vec::new();
    };
    let (actions, without_action): (Vec<_>, Vec<_>) =
        members.into_iter().map(|member| mask_restore_actions(draft.state, member)).unzip();
    let actions = actions.concat();
    // Until a full scan, an unknown child may still have a mask that pjw had set for its parent.
    if draft.full {
        without_action.concat().into_iter().for_each(|thread| draft.stop_journaling(thread));
    }
    draft.journal_mask_requests(&actions);
    actions
}

/// Returns the actions that restore the original masks (the masks before pjw changed them) of the threads of `member`.
/// Also returns the threads that need no action: the mask need not be restored, the kernel refuses the original mask,
/// or the original mask has no online PU. Threads whose masks were not yet read are in neither list.
fn mask_restore_actions(state: &WardenState, member: &Member) -> (Vec<MaskAction>, Vec<ThreadId>) {
    let online = state.pool.online_cpus();
    let mut actions = Vec::new();
    let mut without_action = Vec::new();
    for (id, known) in member.living_threads() {
        let Some(entry) = &known.mask_entry else { continue };
        let target = entry.original_mask().clone();
        // A mask without an online PU can't be requested.
        if entry.needs_no_restore() || !target.intersects(&online) {
            without_action.push(id);
            continue;
        }
        let why = format!("{} has no cores of its own: back to {target}", member.job);
        let kind = MaskActionKind::Restore;
        actions.push(MaskAction::with_exact_mask(kind, &member.job, id, &known.effective_mask, target, why));
    }
    (actions, without_action)
}

/// Plans the changes of affinity masks that give the threads of released processes (processes that have left their job)
/// their original masks back. Leaves out processes that are kept off the cores of jobs.
///
/// After a full scan, pjw no longer keeps track of the processes with restored masks. Until then, an unknown child may
/// still have a mask that pjw had set for its parent. pjw also keeps track of a process while it is in a cpuset of pjw,
/// because kernels before Linux 6.2 replace the mask when the process leaves the cpuset.
pub(crate) fn plan_mask_restores(draft: &mut CycleDraft<'_>) -> Vec<MaskAction> {
    draft.state.record_ongoing_restores(draft.now.since_boot);
    let mut actions = Vec::new();
    let mut restored: Vec<ProcessId> = Vec::new();
    let released = draft
        .state
        .processes_to_restore
        .values()
        .filter(|member| !draft.state.pids_kept_off_job_cpus.contains(&member.id.pid));
    for member in released {
        let (restores, _) = mask_restore_actions(draft.state, member);
        let is_unread =
            member.threads.values().all(|thread| thread.mask_entry.is_none() && thread.is_alive());
        let cgroup = draft.state.process(member.id.pid).and_then(|process| process.cgroup.as_deref());
        let is_in_cpuset =
            cgroup.is_some_and(|cgroup| draft.state.cpusets.enclosing_cpuset(cgroup).is_some());
        let is_mask_hidden = |thread| draft.state.may_cpuset_hide_mask(member.id.pid, thread);
        let may_hide_mask = is_in_cpuset || member.threads.values().any(is_mask_hidden);
        if restores.is_empty() && !is_unread && !may_hide_mask {
            restored.push(member.id);
        }
        actions.extend(restores);
    }
    draft.journal_mask_requests(&actions);
    if !draft.full {
        return actions;
    }
    for process in restored {
        let Some(member) = draft.state.processes_to_restore.get(&process.pid) else { continue };
        let journaled: Vec<ThreadId> = member.journaled_masks().map(|(thread, _)| thread).collect();
        journaled.into_iter().for_each(|thread| draft.stop_journaling(thread));
        if let Some(member) = draft.state.processes_to_restore.remove(&process.pid) {
            let is_settled = !draft.state.released_masks.contains_key(&member.job);
            draft.state.lineage.record_masks_restored(&member, is_settled);
        }
    }
    actions
}
