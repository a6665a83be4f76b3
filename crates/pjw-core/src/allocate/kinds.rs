//! Kinds of cores: a job gets cores of one kind where one kind has enough.

use crate::allocate::tree::{FreeCore, total_units};
use crate::basics::prelude::*;

/// Returns the kind of `free_cores` (the index of the CPU core type, such as performance cores) if all of these cores
/// are of one kind. Returns `None` if the kinds differ or the list is empty.
pub(super) fn common_core_kind(free_cores: &[&FreeCore]) -> Option<u32> {
    let kind = free_cores.first()?.kind;
    free_cores.iter().all(|free_core| free_core.kind == kind).then_some(kind)
}

/// Chooses cores of the kind `kind` (the index of the CPU core type) from `free_cores`. If these cores have fewer than
/// `n` units (cores or logical CPUs), chooses the fastest kind that has `n` units instead. Returns the kind and its
/// cores. If no kind has `n` units, returns `None` and all cores.
pub(super) fn prefer_core_kind(
    free_cores: Vec<&FreeCore>,
    kind: u32,
    n: u32,
) -> (Option<u32>, Vec<&FreeCore>) {
    let same_kind: Vec<&FreeCore> =
        free_cores.iter().copied().filter(|free_core| free_core.kind == kind).collect();
    if total_units(&same_kind) >= n {
        (Some(kind), same_kind)
    } else {
        fastest_sufficient_kind(free_cores, n)
    }
}

/// Chooses the cores of the fastest kind (CPU core type) that has enough cores in `free_cores`. The kind must have
/// `n` units (cores or logical CPUs). Returns the kind and its cores. If no kind has `n` units, returns `None` and
/// all cores. One kind is better, because a job on cores of two kinds runs at the speed of the slower kind.
pub(super) fn fastest_sufficient_kind(free_cores: Vec<&FreeCore>, n: u32) -> (Option<u32>, Vec<&FreeCore>) {
    let mut units: BTreeMap<u32, u32> = BTreeMap::new();
    for free_core in &free_cores {
        *units.entry(free_core.kind).or_default() += free_core.size;
    }
    let kind = units.into_iter().rev().find(|&(_, units)| units >= n).map(|(kind, _)| kind);
    (
        kind,
        free_cores.into_iter().filter(|free_core| kind.is_none_or(|kind| free_core.kind == kind)).collect(),
    )
}
