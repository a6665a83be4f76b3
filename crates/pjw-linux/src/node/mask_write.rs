//! Writes the affinity mask of a thread.

use nix::errno::Errno;
use pjw_core::{cpuset::CpuSet, ids::Tid, plan::MaskAction};

use crate::sys::affinity;

/// Sets the affinity mask of the thread `tid` to `to`, and returns the effective mask. If `to` contains all PUs
/// (logical CPUs) in `online`, sets the mask of all possible PUs, so that the thread can also use PUs that come
/// online later.
pub(super) fn set_mask(tid: Tid, to: &CpuSet, online: &CpuSet) -> Result<CpuSet, Errno> {
    if online.is_subset(to) {
        affinity::set_full_mask(tid)?;
    } else {
        affinity::set_mask(tid, to)?;
    }
    affinity::get_mask(tid)
}

/// Sets the affinity mask of the thread `tid` so that its effective mask is `to`, and returns the effective mask.
/// First sets the mask of all possible PUs (logical CPUs), so that the thread can use its whole cpuset. If the
/// effective mask is then not `to`, sets the mask `to`. `online` has the online PUs.
pub(super) fn set_mask_or_inherit(tid: Tid, to: &CpuSet, online: &CpuSet) -> Result<CpuSet, Errno> {
    affinity::set_full_mask(tid)?;
    let allowed = affinity::get_mask(tid)?;
    if allowed == to.intersection(online) { Ok(allowed) } else { set_mask(tid, to, online) }
}

/// Returns one sentence for users that says why the kernel refused the mask change `action` with the error `errno`.
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
