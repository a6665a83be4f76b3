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

/// How long after a change of the online PUs a kernel before 6.2 may still change affinity masks because of it: 3
/// seconds.
pub const HOTPLUG_DELAY: Duration = Duration::from_secs(3);

/// Returns the start of the hotplug window of a reading at the time `read_at`, in ns since boot: [`HOTPLUG_DELAY`]
/// before `read_at`. Only changes of the online PUs within the window can have affected the mask that was read.
#[must_use]
pub fn hotplug_window_start(read_at: Nanos) -> Nanos {
    let delay = u64::try_from(HOTPLUG_DELAY.as_nanos()).unwrap_or(u64::MAX);
    Nanos(read_at.0.saturating_sub(delay))
}

/// Corrects the writer of a mask that was attributed to the program, but that a kernel before 6.2 set when PUs went
/// offline or online. That is so if the mask was first read in the hotplug window before `now`, and has all PUs that
/// `limits` (since the start of the window) allowed at some moment. Exception: the program is certain to have
/// requested the mask, because another thread of the same cpuset had PUs outside of it.
pub fn correct_mask_writer(entry: &mut MaskEntry, limits: &MaskLimits, now: Nanos) {
    if limits.may_be_reset {
        let begin = hotplug_window_start(now);
        let is_kernels = |mask: &CpuSet, read_at| read_at >= begin && limits.possible.contains(mask);
        entry.attribute_to_kernel(&limits.machine, is_kernels);
    }
}
