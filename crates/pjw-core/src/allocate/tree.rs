//! The available cores of the machine, grouped by the domains of each level.

use core::cmp::Reverse;

use smallvec::SmallVec;

use crate::basics::{Pu, prelude::*};
use crate::machine::Topology;

/// The PUs (logical CPUs) of one core that are available for a request.
pub(super) type CorePus = SmallVec<[Pu; 4]>;

/// The way in which the allocator counts and gives out PUs (logical CPUs).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AllocationUnit {
    /// Whole cores with any number of PUs.
    Core,
    /// PUs that are given out as whole cores: at least the requested number.
    Pu,
    /// PUs that are given out one by one: exactly the requested number.
    AnyPu,
}

impl AllocationUnit {
    /// Returns the number of units in `pus` (logical CPUs of one core): 1 for [`AllocationUnit::Core`], otherwise the
    /// number of PUs (logical CPUs).
    pub(super) fn count_in_core(self, pus: &[Pu]) -> u32 {
        match self {
            AllocationUnit::Core => 1,
            AllocationUnit::Pu | AllocationUnit::AnyPu => u32::try_from(pus.len()).unwrap_or(u32::MAX),
        }
    }
}

/// A set of cores at one level of the machine (L3 cache, NUMA node or package): the cores of one domain, or the cores
/// that are in no domain of the level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CoreGroup {
    /// The cores of the domain with this index in [`Topology`].
    Domain(u32),
    /// The cores that are in no domain of the level. The index names the next larger domain around them;
    /// `None` stands for the machine.
    Outside(Option<u32>),
}

impl CoreGroup {
    /// Returns the groups of cores in which `pu` lies: one group for each level, in the order of [`Topology::levels`].
    pub(super) fn groups_of_pu(topology: &Topology, pu: Pu) -> SmallVec<[CoreGroup; 3]> {
        let mut around = None;
        let levels = topology.levels().iter();
        levels
            .map(|&level| match topology.domain_index(level, pu) {
                Some(index) => {
                    around = Some(index);
                    CoreGroup::Domain(index)
                }
                None => CoreGroup::Outside(around),
            })
            .collect()
    }

    /// Returns true if the group has the cores of one domain (an L3 cache, a NUMA node or a package). Returns false if
    /// the group has cores that are in no domain of the level.
    pub(super) fn is_domain(self) -> bool {
        matches!(self, CoreGroup::Domain(_))
    }
}

/// A core that is available for a request, with all or some of its PUs (logical CPUs).
#[derive(Debug)]
pub(super) struct FreeCore {
    /// The index of the core in hwloc's order.
    pub(super) position: u32,
    /// The available PUs of the core.
    pub(super) pus: CorePus,
    /// The size, in the unit of the request.
    pub(super) size: u32,
    /// The kind of the core: see `Core::kind_index`.
    pub(super) kind: u32,
    /// Whether the job holds these PUs already. Such cores are preferred.
    pub(super) held: bool,
    /// Whether all online PUs of the core are available. If single PUs are given out, a core of which the job holds
    /// some, but not all, of the available PUs has two entries. The entry with the other PUs is never whole.
    pub(super) whole: bool,
    /// The group of the core at each level of the machine.
    pub(super) groups: SmallVec<[CoreGroup; 3]>,
}

/// Returns the number of units in `free_cores`, in the unit of the request (cores or logical CPUs).
pub(super) fn total_units(free_cores: &[&FreeCore]) -> u32 {
    free_cores.iter().map(|free_core| free_core.size).sum()
}

/// Groups `free_cores` by the domains of one level (L3 cache, NUMA node or package) in which the cores lie. `depth` is
/// the index of the level in [`Topology::levels`]. Cores in no domain of the level have groups of their own.
pub(super) fn cores_by_group<'s>(
    free_cores: &[&'s FreeCore],
    depth: usize,
) -> BTreeMap<CoreGroup, Vec<&'s FreeCore>> {
    let mut groups: BTreeMap<CoreGroup, Vec<&FreeCore>> = BTreeMap::new();
    for run in runs(free_cores, depth) {
        groups.entry(run[0].groups[depth]).or_default().extend_from_slice(run);
    }
    groups
}

/// Returns the number of units (cores or logical CPUs) of `free_cores` in each domain of one level (L3 cache, NUMA node
/// or package). `depth` is the index of the level in [`Topology::levels`]. Cores in no domain of the level have groups
/// of their own.
pub(super) fn units_by_group(free_cores: &[&FreeCore], depth: usize) -> BTreeMap<CoreGroup, u32> {
    let mut sizes = BTreeMap::new();
    for run in runs(free_cores, depth) {
        *sizes.entry(run[0].groups[depth]).or_default() += total_units(run);
    }
    sizes
}

/// Divides `free_cores` into runs of consecutive cores that are in the same group at the level with the index `depth`.
fn runs<'a, 's>(free_cores: &'a [&'s FreeCore], depth: usize) -> impl Iterator<Item = &'a [&'s FreeCore]> {
    free_cores.chunk_by(move |one, other| one.groups[depth] == other.groups[depth])
}

/// Returns how many cores a job would use only in part. The job would get `n` PUs (logical CPUs) of `hole`, whole
/// cores first. `hole` has the available cores of one domain (L3 cache, NUMA node or package).
pub(super) fn count_split_cores(hole: &[&FreeCore], n: u32) -> u32 {
    let (mut wholes, mut parts) = (Vec::new(), Vec::new());
    for free_core in hole {
        if free_core.whole { wholes.push(free_core.size) } else { parts.push(free_core.size) }
    }
    let mut left = n;
    wholes.sort_unstable_by_key(|&size| Reverse(size));
    // The job uses all of each whole core that fits. A core that remains in the list has more than `left` PUs.
    wholes.retain(|&size| {
        let fits = size <= left;
        left -= if fits { size } else { 0 };
        !fits
    });
    parts.sort_unstable_by_key(|&size| Reverse(size));
    count_to_cover(parts.into_iter().chain(wholes), left)
}

/// Returns how many cores are needed for `n` units (cores or logical CPUs). `sizes` has the number of units of each
/// core. The cores are used in the order of `sizes`. If all cores together have fewer than `n` units, returns the
/// number of all cores.
pub(super) fn count_to_cover(sizes: impl IntoIterator<Item = u32>, n: u32) -> u32 {
    let mut left = n;
    let mut count = 0;
    for size in sizes {
        if left == 0 {
            break;
        }
        left = left.saturating_sub(size);
        count += 1;
    }
    count
}

/// Chooses cores with at least `n` units (cores or logical CPUs) from `free_cores`.
///
/// - Cores that are available as a whole ([`FreeCore::whole`]) come before the others. Otherwise, the cores follow
///   each other in hwloc's order, in which neighbouring cores are next to each other.
/// - A core that has more units than are still missing is skipped. If units are missing at the end, the smallest
///   skipped core is added.
/// - If all cores together have fewer than `n` units, all of them are chosen.
pub(super) fn take_cores<'s>(free_cores: &[&'s FreeCore], n: u32) -> Vec<&'s FreeCore> {
    let mut sorted = free_cores.to_vec();
    sorted.sort_by_key(|free_core| (!free_core.whole, free_core.position));
    let mut left = n;
    let mut skipped: Vec<&FreeCore> = Vec::new();
    let mut chosen: Vec<&FreeCore> = Vec::new();
    for free_core in sorted {
        if left == 0 {
            break;
        }
        if free_core.size <= left {
            left -= free_core.size;
            chosen.push(free_core);
        } else {
            skipped.push(free_core);
        }
    }
    if left > 0 {
        chosen.extend(skipped.into_iter().min_by_key(|free_core| (free_core.size, free_core.position)));
    }
    chosen
}

/// Replaces `chosen` by a choice that has fewer partly used cores, if there is one. The other choice has `n` PUs
/// (logical CPUs) from the same domains (L3 caches, NUMA nodes and packages) as `chosen`. Otherwise, returns
/// `chosen`. `free_cores` has all available cores, and `n` is the number of requested PUs.
pub(super) fn with_fewest_split_cores<'s>(
    free_cores: &[&'s FreeCore],
    chosen: Vec<&'s FreeCore>,
    n: u32,
) -> Vec<&'s FreeCore> {
    let groups: BTreeSet<&[CoreGroup]> = chosen.iter().map(|free_core| free_core.groups.as_slice()).collect();
    let candidates: Vec<&FreeCore> =
        free_cores.iter().copied().filter(|free_core| groups.contains(free_core.groups.as_slice())).collect();
    let split_count = |free_cores: &[&FreeCore]| {
        let last_is_cut = u32::from(
            total_units(free_cores) > n && free_cores.last().is_some_and(|free_core| free_core.whole),
        );
        free_cores.iter().map(|free_core| u32::from(!free_core.whole)).sum::<u32>() + last_is_cut
    };
    let other = take_cores(&candidates, n);
    if split_count(&other) < split_count(&chosen) { other } else { chosen }
}
