//! Groups of PUs that a job keeps first when it shrinks: those on which threads of one address space run.

use core::cmp::Reverse;

use crate::allocate::tree::{AllocationUnit, FreeCore, take_cores, total_units};
use crate::basics::{CpuSet, prelude::*};

/// Divides `held`, the cores that a job holds, when the job is to hold fewer. The first list of the result has the
/// cores that the job keeps for its `groups`. The second list has all other cores. A group is a set of PUs (logical
/// CPUs) on which threads with a common address space run.
///
/// - The job requests `n` units (cores or PUs). `unit` says how units are counted and given out.
/// - Whole groups are kept, the largest first. A group is not kept if the first list then had more cores than `n`
///   units need.
/// - If no whole group can be kept, a part of the largest group is kept.
pub(super) fn split_at_groups<'s>(
    groups: &[CpuSet],
    held: Vec<&'s FreeCore>,
    n: u32,
    unit: AllocationUnit,
) -> (Vec<&'s FreeCore>, Vec<&'s FreeCore>) {
    let mut in_order: Vec<&CpuSet> = groups.iter().collect();
    in_order.sort_by_key(|group| (Reverse(group.len()), group.first()));
    let is_in = |free_core: &FreeCore, group: &CpuSet| free_core.pus.iter().any(|&pu| group.contains(pu));
    let mut kept: Vec<&FreeCore> = Vec::new();
    let mut others = held;
    for group in &in_order {
        let (of_group, outside): (Vec<&FreeCore>, Vec<_>) =
            others.iter().copied().partition(|free_core| is_in(free_core, group));
        let kept_with_group = [kept.as_slice(), of_group.as_slice()].concat();
        if fits(&kept_with_group, n, unit) {
            kept = kept_with_group;
            others = outside;
        }
    }
    if let Some(largest) = in_order.first().filter(|_| kept.is_empty()) {
        let of_group: Vec<&FreeCore> =
            others.iter().copied().filter(|free_core| is_in(free_core, largest)).collect();
        kept = take_cores(&of_group, n);
        others.retain(|other| !kept.iter().any(|taken| taken.position == other.position));
    }
    (kept, others)
}

/// Whether a request for `n` units (cores or PUs) needs all of `free_cores`. A request for PUs that gets whole cores
/// may get more PUs than it asks for: 7 PUs are 4 cores of 2 PUs.
fn fits(free_cores: &[&FreeCore], n: u32, unit: AllocationUnit) -> bool {
    let surplus = total_units(free_cores).saturating_sub(n);
    let smallest = free_cores.iter().map(|free_core| free_core.size).min().unwrap_or(0);
    match unit {
        AllocationUnit::Core | AllocationUnit::AnyPu => surplus == 0,
        AllocationUnit::Pu => surplus < smallest.max(1),
    }
}
