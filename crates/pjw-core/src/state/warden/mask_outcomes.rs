//! What became of the planned changes of affinity masks: made, refused by the kernel, or not attempted.

use super::WardenState;
use crate::basics::CpuSet;
use crate::state::masks::lifted::{LiftReason, LiftedBinding};
use crate::terms::{MaskAction, MaskActionKind};

impl WardenState {
    /// Records that pjw changed the affinity mask of a thread as planned in `action`. `requested_mask` is the
    /// mask that was passed to sched_setaffinity(2). `effective_mask` is the mask that the kernel reported
    /// right after this call.
    pub fn record_mask_applied(
        &mut self,
        action: &MaskAction,
        requested_mask: &CpuSet,
        effective_mask: &CpuSet,
    ) {
        let online = self.pool.online_cpus();
        let limits = self.present_mask_limits(action.thread.process.pid);
        let reason = match action.kind {
            MaskActionKind::Unbind => Some(LiftReason::Overload),
            MaskActionKind::Override => Some(LiftReason::Policy),
            _ => None,
        };
        let bound_to = reason.and_then(|_| self.binding_to_lift(&action.thread));
        let Some(thread) = self.thread_mut(&action.thread) else { return };
        thread.effective_mask = effective_mask.clone();
        if let Some(entry) = &mut thread.mask_entry {
            entry.record_request_done(requested_mask, &effective_mask.intersection(&online), &limits);
            let (lifted_at, waiting_permille_before) = (entry.last_read_at(), thread.demand.waiting_permille);
            let lifted = reason.zip(bound_to).map(|(reason, mask)| LiftedBinding {
                mask,
                reason,
                waiting_permille_before,
                lifted_at,
                is_restored: false,
            });
            match action.kind {
                MaskActionKind::Rebind => entry.record_binding_restored(),
                MaskActionKind::Restore => entry.set_lifted_binding(None),
                _ if lifted.is_some() => entry.set_lifted_binding(lifted),
                _ => {}
            }
        }
    }

    /// Records that pjw changed the affinity mask of a new thread, as planned in `action`, although the kernel may
    /// still be creating the thread by fork(2). At the end of fork(2), the kernel may give the thread the mask of its
    /// parent again. Until the next scan, pjw then does not know which of the two masks the thread has. Must be called
    /// after [`WardenState::record_mask_applied`].
    pub fn record_mask_applied_during_fork(&mut self, action: &MaskAction) {
        if let Some(entry) = self.mask_mut(&action.thread) {
            entry.record_possible_reset_by_fork();
        }
    }

    /// Records that the kernel refused to restore the original mask of a thread (the mask before pjw changed it), as
    /// planned in `action`. The kernel refuses a mask that has no PU (logical CPU) in common with the cpuset of the
    /// thread. pjw tries again only when the thread's mask, its cpuset or the online PUs change.
    pub fn record_restore_refused(&mut self, action: &MaskAction) {
        let limits = self.present_mask_limits(action.thread.process.pid);
        let Some(thread) = self.thread_mut(&action.thread) else { return };
        if let Some(entry) = &mut thread.mask_entry {
            entry.record_original_refused(&thread.effective_mask, &limits);
        }
    }

    /// Records that the kernel refused the planned mask change `action`: the thread still has the mask that it had
    /// before. Call [`WardenState::record_restore_refused`] instead if `action` restores the original mask (the mask
    /// before pjw changed it), and the kernel refused this mask with `EINVAL`.
    pub fn record_mask_refused(&mut self, action: &MaskAction) {
        if let Some(entry) = self.mask_mut(&action.thread) {
            entry.record_request_refused(&action.requested_mask);
        }
    }

    /// Records that pjw did not make the planned mask change `action`: the thread still has the mask that it
    /// had before.
    pub fn record_mask_not_attempted(&mut self, action: &MaskAction) {
        if let Some(entry) = self.mask_mut(&action.thread) {
            entry.cancel_intended_request(&action.requested_mask);
        }
    }
}
