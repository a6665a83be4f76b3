//! Kernels before Linux 6.2: they forget requested masks.
//!
//! Such a kernel gives every thread the whole cpuset when the cpuset is written, when the thread moves to another cgroup
//! (kernel/cgroup/cpuset.c, `update_tasks_cpumask`, `cpuset_attach`), and when a PU of the cpuset goes offline or comes
//! back (`hotplug_update_tasks`). The last happens in a work queue: up to [`HOTPLUG_DELAY`] after the PU went, and for the
//! list of active PUs, which is ahead of the list of online PUs. So a reading may find a mask that was written for a PU
//! whose change is not known yet. Linux 6.2 and later keep the request (`user_cpus_ptr`), and nothing in this file applies.

use core::time::Duration;

use crate::basics::{CpuSet, Nanos};
use crate::state::masks::entry::{MaskEntry, MaskLimits};

/// The longest delay, 3 seconds, with which a kernel before Linux 6.2 changes affinity masks after PUs went
/// offline or online.
pub const HOTPLUG_DELAY: Duration = Duration::from_secs(3);

/// Returns the earliest time at which a change of the online PUs can have affected a mask that was read at
/// the time `read_at`. It is [`HOTPLUG_DELAY`] before `read_at`, in ns since boot.
#[must_use]
pub fn hotplug_window_start(read_at: Nanos) -> Nanos {
    let delay = u64::try_from(HOTPLUG_DELAY.as_nanos()).unwrap_or(u64::MAX);
    Nanos(read_at.0.saturating_sub(delay))
}

/// Corrects the origin of a mask from the program to the kernel. Kernels before Linux 6.2 set masks when PUs
/// go offline or online. So a mask is the kernel's if it was first read less than [`HOTPLUG_DELAY`] before
/// `now`, and if it is one of the sets of PUs that `limits` allowed in this time. The origin is not corrected
/// if another thread of the same cpuset had PUs outside the mask: then the program certainly requested it.
pub fn correct_mask_writer(entry: &mut MaskEntry, limits: &MaskLimits, now: Nanos) {
    if limits.may_mask_be_reset {
        let begin = hotplug_window_start(now);
        let is_kernels = |mask: &CpuSet, read_at| read_at >= begin && limits.possible_cpus.contains(mask);
        entry.attribute_to_kernel(&limits.machine, is_kernels);
    }
}
