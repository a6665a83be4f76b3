//! Groups of PUs that a job keeps first when it shrinks: those on which threads of one address space run.

use core::cmp::Reverse;

use crate::allocate::tree::{FreeCore, take_cores, total_units};
use crate::basics::{CpuSet, prelude::*};

/// Divides `held`, the cores that a job holds, into two lists. The first list has the cores that the job keeps for its
/// `groups`, with at most `n` units (cores or PUs). The second list has all other cores. A group is a set of PUs
/// (logical CPUs) on which threads with a common address space run. Keeps whole groups, the largest first. If no whole
/// group fits into `n` units, keeps a part of the largest group.
pub(super) fn split_at_groups<'s>(
    groups: &[CpuSet],
    held: Vec<&'s FreeCore>,
    n: u32,
) -> (Vec<&'s FreeCore>, Vec<&'s FreeCore>) {
    let mut in_order: Vec<&CpuSet> = groups.iter().collect();
    in_order.sort_by_key(|group| (Reverse(group.len()), group.first()));
    let is_of = |free_core: &FreeCore, group: &CpuSet| free_core.pus.iter().any(|&pu| group.contains(pu));
    let mut first: Vec<&FreeCore> = Vec::new();
    let mut others = held;
    for group in &in_order {
        let (own, rest): (Vec<&FreeCore>, Vec<_>) =
            others.iter().copied().partition(|free_core| is_of(free_core, group));
        if total_units(&first).saturating_add(total_units(&own)) <= n {
            first.extend(own);
            others = rest;
        }
    }
    if let Some(largest) = in_order.first().filter(|_| first.is_empty()) {
        let own: Vec<&FreeCore> =
            others.iter().copied().filter(|free_core| is_of(free_core, largest)).collect();
        first = take_cores(&own, n);
        others.retain(|other| !first.iter().any(|taken| taken.position == other.position));
    }
    (first, others)
}
