//! Kernels before Linux 6.2: they forget requested masks.
//!
//! Such a kernel gives every thread the whole cpuset when the cpuset is written, when the thread moves to another cgroup
//! (kernel/cgroup/cpuset.c, `update_tasks_cpumask`, `cpuset_attach`), and when a PU of the cpuset goes offline or comes
//! back (`hotplug_update_tasks`). The last happens in a work queue: up to [`HOTPLUG_DELAY`] after the PU went, and for the
//! list of active PUs, which is ahead of the list of online PUs. So a reading may find a mask that was written for a PU
//! whose change is not known yet. Linux 6.2 and later keep the request (`user_cpus_ptr`), and nothing in this file applies.

use core::time::Duration;

use crate::basics::{CpuSet, Nanos};
use crate::state::masks::entry::{Limits, MaskEntry};

/// The longest time between a change of the online PUs and the last mask that the kernel changes because of it.
pub const HOTPLUG_DELAY: Duration = Duration::from_secs(3);

/// The start of the hotplug window: a change of the online PUs before this time can't affect a mask that is first
/// read after `read_at`.
#[must_use]
pub fn hotplug_window(read_at: Nanos) -> Nanos {
    let delay = u64::try_from(HOTPLUG_DELAY.as_nanos()).unwrap_or(u64::MAX);
    Nanos(read_at.0.saturating_sub(delay))
}

/// Corrects an entry whose masks were attributed to the program before a change of the online PUs was known. A mask
/// that was first read in the hotplug window before `now`, and that equals all possible PUs of some moment in it, was
/// written by the kernel. Except a mask that another thread of the same cpuset exceeded at that moment: the kernel
/// gives the same mask to all threads of a cpuset. `limits` are the limits since the start of the hotplug window.
/// `machine` is every PU of the machine.
pub fn correct_writer(entry: &mut MaskEntry, limits: &Limits, machine: &CpuSet, now: Nanos) {
    if limits.may_be_reset {
        let begin = hotplug_window(now);
        entry
            .attribute_to_kernel(|mask, read_at| read_at >= begin && limits.possible.contains(mask), machine);
    }
}
