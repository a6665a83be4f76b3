//! Writes the affinity mask of a thread.

use nix::errno::Errno;
use pjw_core::{cpuset::CpuSet, ids::Tid, plan::MaskAction};

use crate::sys::affinity;

/// Sets a mask and returns the effective mask. If the mask contains all online PUs, sets a mask with every
/// possible PU, which also includes PUs that come online later.
pub(super) fn set_mask(tid: Tid, to: &CpuSet, online: &CpuSet) -> Result<CpuSet, Errno> {
    if online.is_subset(to) {
        affinity::set_full_mask(tid)?;
    } else {
        affinity::set_mask(tid, to)?;
    }
    affinity::get_mask(tid)
}

/// Lets a thread use its whole cpuset (the mask of all PUs), if its effective mask is then `to`. Otherwise sets the
/// mask `to`.
pub(super) fn set_mask_or_inherit(tid: Tid, to: &CpuSet, online: &CpuSet) -> Result<CpuSet, Errno> {
    affinity::set_full_mask(tid)?;
    let allowed = affinity::get_mask(tid)?;
    if allowed == to.intersection(online) { Ok(allowed) } else { set_mask(tid, to, online) }
}

/// Returns a text for users why the kernel refused a mask change.
pub(super) fn refusal_reason(errno: Errno, action: &MaskAction) -> String {
    let (tid, to) = (action.thread.tid, &action.target_mask);
    let why = match errno {
        Errno::EPERM => {
            return format!("thread {tid} belongs to another user: run pjwd as root, or with CAP_SYS_NICE");
        }
        Errno::EINVAL => "the cpuset of its cgroup has none of these PUs",
        other => &other.to_string(),
    };
    format!("the mask of thread {tid} can't be set to {to}: {why}")
}
