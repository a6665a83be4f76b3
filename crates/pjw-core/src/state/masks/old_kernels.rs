//! Kernels before Linux 6.2: they forget requested masks.
//!
//! Such a kernel gives every thread the whole cpuset when the cpuset is written, when the thread moves to another
//! cgroup (kernel/cgroup/cpuset.c, `update_tasks_cpumask`, `cpuset_attach`), and when a PU of the cpuset goes offline
//! or comes back (`hotplug_update_tasks`). In the last case, a work queue of the kernel changes the masks up to
//! [`HOTPLUG_DELAY`] after the PU went or came. The kernel takes the PUs from its list of active PUs, which changes
//! before the list of online PUs. So a scan may read a mask for a change of the PUs that pjw does not know yet. Linux
//! 6.2 and later keep the request (`user_cpus_ptr`), and nothing in this file applies.

use core::time::Duration;

use crate::basics::{CpuSet, Nanos};
use crate::state::masks::entry::MaskEntry;
use crate::state::masks::request::MaskLimits;

/// The maximum delay with which a kernel before Linux 6.2 changes affinity masks after a PU (logical CPU) went
/// offline or online: 3 s. Linux 6.2 and later do not change masks in this case.
pub const HOTPLUG_DELAY: Duration = Duration::from_secs(3);

/// Returns the time 3 s ([`HOTPLUG_DELAY`]) before `read_at`, the time at which a scan read affinity masks.
/// Both times are in ns since boot. A kernel before Linux 6.2 changes affinity masks up to 3 s after a PU
/// (logical CPU) went offline or online. The returned time separates two cases:
///
/// - The PU went offline or online before the returned time. The kernel changed the masks before the scan.
/// - The PU went offline or online later. The kernel possibly changes the masks only after the scan.
#[must_use]
pub fn hotplug_window_start(read_at: Nanos) -> Nanos {
    let delay = u64::try_from(HOTPLUG_DELAY.as_nanos()).unwrap_or(u64::MAX);
    Nanos(read_at.0.saturating_sub(delay))
}

/// Corrects the mask entry `entry` of a thread, if the entry says that the program requested the present mask although
/// the kernel may have set this mask. The corrected entry says that the kernel set the mask. A kernel before Linux 6.2
/// gives a thread all PUs (logical CPUs) of its cpuset when the cpuset or the online PUs change.
///
/// `now` is the present time, in ns since boot. `limits` must have every set of PUs that was online and in the thread's
/// cpuset since the time [`hotplug_window_start`]`(now)`. `entry` is corrected if all of these conditions hold:
///
/// 1. `limits.kernel_may_have_reset_mask` is true.
/// 2. `entry` says that the program requested the mask, and also contains an earlier request for the thread.
/// 3. The first scan that read the mask did so at most [`HOTPLUG_DELAY`] before `now`.
/// 4. The mask equals one of the sets in `limits.possible_cpus`.
/// 5. It is not certain that the program requested the mask ([`MaskEntry`] records this). It is certain if another
///    thread in the same cpuset had a PU outside the mask: then the mask is not the whole cpuset.
pub fn correct_mask_writer(entry: &mut MaskEntry, limits: &MaskLimits, now: Nanos) {
    if limits.kernel_may_have_reset_mask {
        let begin = hotplug_window_start(now);
        let is_kernels = |mask: &CpuSet, read_at| read_at >= begin && limits.possible_cpus.contains(mask);
        entry.attribute_to_kernel(&limits.machine_cpus, is_kernels);
    }
}
