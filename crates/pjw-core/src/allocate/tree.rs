//! The available cores of the machine, grouped by the domains of each level.

use core::cmp::Reverse;

use smallvec::SmallVec;

use crate::basics::{Pu, prelude::*};
use crate::machine::Topology;

/// The PUs of one available core.
pub(super) type Pus = SmallVec<[Pu; 4]>;

/// The unit in which the allocator counts: a whole core or one PU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Whole cores with any number of PUs.
    Core,
    /// PUs that are given out as whole cores: at least the requested number.
    Pu,
    /// PUs that are given out one by one: exactly the requested number.
    AnyPu,
}

impl Unit {
    /// Returns the number of units in these PUs of one core.
    pub(super) fn size(self, pus: &[Pu]) -> u32 {
        match self {
            Unit::Core => 1,
            Unit::Pu | Unit::AnyPu => u32::try_from(pus.len()).unwrap_or(u32::MAX),
        }
    }
}

/// The cores of one domain, or the cores that are in no domain of a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Group {
    /// The cores of the domain with this index in [`Topology`].
    Domain(u32),
    /// The cores that are in no domain of the level. The index names the next larger domain around them;
    /// `None` stands for the machine.
    Outside(Option<u32>),
}

impl Group {
    /// Returns the groups of a PU, one for each level in [`Topology::levels`].
    pub(super) fn of_pu(topology: &Topology, pu: Pu) -> SmallVec<[Group; 3]> {
        let mut around = None;
        let levels = topology.levels().iter();
        levels
            .map(|&level| match topology.domain_index(level, pu) {
                Some(place) => {
                    around = Some(place);
                    Group::Domain(place)
                }
                None => Group::Outside(around),
            })
            .collect()
    }

    /// Whether the group is a domain.
    pub(super) fn is_domain(self) -> bool {
        matches!(self, Group::Domain(_))
    }
}

/// An available core, or the available part of a core.
#[derive(Debug)]
pub(super) struct FreeCore {
    /// The index of the core in hwloc's order.
    pub(super) position: u32,
    /// The available PUs of the core.
    pub(super) pus: Pus,
    /// The size, in the unit of the request.
    pub(super) size: u32,
    /// The kind of the core: see `Core::kind_index`.
    pub(super) kind: u32,
    /// Whether the job holds these PUs already. Such cores are preferred.
    pub(super) held: bool,
    /// Whether all online PUs of the core are available, and the job holds none of them.
    pub(super) whole: bool,
    /// The group of the core at each level of the machine.
    pub(super) groups: SmallVec<[Group; 3]>,
}

/// Returns the number of units in these cores.
pub(super) fn total_units(free_cores: &[&FreeCore]) -> u32 {
    free_cores.iter().map(|free_core| free_core.size).sum()
}

/// Groups available cores by the domains of one level. `depth` is the index of the level in [`Topology::levels`].
pub(super) fn cores_by_group<'s>(
    free_cores: &[&'s FreeCore],
    depth: usize,
) -> BTreeMap<Group, Vec<&'s FreeCore>> {
    let mut groups: BTreeMap<Group, Vec<&FreeCore>> = BTreeMap::new();
    for run in runs(free_cores, depth) {
        groups.entry(run[0].groups[depth]).or_default().extend_from_slice(run);
    }
    groups
}

/// Returns the number of available units in each domain of one level. `depth` is the index of the level in
/// [`Topology::levels`].
pub(super) fn units_by_group(free_cores: &[&FreeCore], depth: usize) -> BTreeMap<Group, u32> {
    let mut sizes = BTreeMap::new();
    for run in runs(free_cores, depth) {
        *sizes.entry(run[0].groups[depth]).or_default() += total_units(run);
    }
    sizes
}

fn runs<'a, 's>(free_cores: &'a [&'s FreeCore], depth: usize) -> impl Iterator<Item = &'a [&'s FreeCore]> {
    free_cores.chunk_by(move |one, other| one.groups[depth] == other.groups[depth])
}

/// Returns the number of cores of a hole that would be used in part if `n` PUs were taken from the hole.
pub(super) fn count_split_cores(hole: &[&FreeCore], n: u32) -> u32 {
    let (mut wholes, mut parts) = (Vec::new(), Vec::new());
    for free_core in hole {
        if free_core.whole { wholes.push(free_core.size) } else { parts.push(free_core.size) }
    }
    let mut left = n;
    wholes.sort_unstable_by_key(|&size| Reverse(size));
    // The cores that remain in the list are larger than the rest.
    wholes.retain(|&size| {
        let fits = size <= left;
        left -= if fits { size } else { 0 };
        !fits
    });
    parts.sort_unstable_by_key(|&size| Reverse(size));
    count_to_cover(parts.into_iter().chain(wholes), left)
}

/// Returns how many of the cores of these sizes are needed for `n` units, if they are used in this order. If all of them
/// are not enough, returns their number.
pub(super) fn count_to_cover(sizes: impl IntoIterator<Item = u32>, n: u32) -> u32 {
    let mut left = n;
    let is_needed = |size: &u32| {
        let is_needed = left > 0;
        left = left.saturating_sub(*size);
        is_needed
    };
    sizes.into_iter().take_while(is_needed).fold(0, |count, _| count + 1)
}

/// Chooses `n` units from neighbouring cores: whole cores first. If the rest is smaller than any core, the
/// smallest remaining core is added.
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

/// Returns `n` PUs from the same domains as `chosen` that share fewer cores with other jobs, if there are
/// such PUs; else `chosen`. The rest of a domain that was used up may be half a core.
pub(super) fn with_fewest_split_cores<'s>(
    free_cores: &[&'s FreeCore],
    chosen: Vec<&'s FreeCore>,
    n: u32,
) -> Vec<&'s FreeCore> {
    let groups: BTreeSet<&[Group]> = chosen.iter().map(|free_core| free_core.groups.as_slice()).collect();
    let around: Vec<&FreeCore> =
        free_cores.iter().copied().filter(|free_core| groups.contains(free_core.groups.as_slice())).collect();
    let split_count = |free_cores: &[&FreeCore]| {
        let cut = u32::from(
            total_units(free_cores) > n && free_cores.last().is_some_and(|free_core| free_core.whole),
        );
        free_cores.iter().map(|free_core| u32::from(!free_core.whole)).sum::<u32>() + cut
    };
    let other = take_cores(&around, n);
    if split_count(&other) < split_count(&chosen) { other } else { chosen }
}
