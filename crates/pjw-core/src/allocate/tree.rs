//! The available cores as seats, and the groups that the levels of a machine divide them into.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use crate::cpuset::Pu;
use crate::topology::Topology;

/// The PUs of one seat.
pub(super) type Pus = SmallVec<[Pu; 4]>;

/// What a request is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Whole cores, whatever their number of PUs.
    Core,
    /// PUs, given out as whole cores: at least as many as were asked for.
    Pu,
    /// PUs, given out one by one: exactly as many as were asked for.
    AnyPu,
}

impl Unit {
    /// How many units these PUs of one core are.
    pub(super) fn size(self, pus: &[Pu]) -> u32 {
        match self {
            Unit::Core => 1,
            Unit::Pu | Unit::AnyPu => u32::try_from(pus.len()).unwrap_or(u32::MAX),
        }
    }
}

/// The cores of one domain, or those that are in no domain of a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Group {
    /// Those of the domain at this place of [`Topology`].
    Domain(u32),
    /// Those of the next larger domain, or of the machine, that are in no domain of the level.
    Outside(Option<u32>),
}

impl Group {
    /// The groups of a PU, one for each of [`Topology::levels`].
    pub(super) fn of_pu(topology: &Topology, pu: Pu) -> SmallVec<[Group; 3]> {
        let mut around = None;
        let levels = topology.levels().iter();
        levels
            .map(|&level| match topology.place(level, pu) {
                Some(place) => {
                    around = Some(place);
                    Group::Domain(place)
                }
                None => Group::Outside(around),
            })
            .collect()
    }

    pub(super) fn is_domain(self) -> bool {
        matches!(self, Group::Domain(_))
    }
}

/// An available core, or the available part of one.
#[derive(Debug)]
pub(super) struct Seat {
    /// The core's place in the machine's order.
    pub(super) position: u32,
    pub(super) pus: Pus,
    /// In the request's unit.
    pub(super) size: u32,
    pub(super) kind: u32,
    /// Whether it is to be preferred to all that are not.
    pub(super) held: bool,
    /// Whether it is a whole core that nobody uses.
    pub(super) whole: bool,
    /// Its group at each of the machine's levels.
    pub(super) groups: SmallVec<[Group; 3]>,
}

/// How many units these are.
pub(super) fn total(seats: &[&Seat]) -> u32 {
    seats.iter().map(|seat| seat.size).sum()
}

/// The holes of one level among these cores. Neighbours are nearly always in the same one.
pub(super) fn split<'s>(seats: &[&'s Seat], depth: usize) -> BTreeMap<Group, Vec<&'s Seat>> {
    let mut groups: BTreeMap<Group, Vec<&Seat>> = BTreeMap::new();
    for run in runs(seats, depth) {
        groups.entry(run[0].groups[depth]).or_default().extend_from_slice(run);
    }
    groups
}

/// How large each hole of one level is.
pub(super) fn sizes(seats: &[&Seat], depth: usize) -> BTreeMap<Group, u32> {
    let mut sizes = BTreeMap::new();
    for run in runs(seats, depth) {
        *sizes.entry(run[0].groups[depth]).or_default() += total(run);
    }
    sizes
}

fn runs<'a, 's>(seats: &'a [&'s Seat], depth: usize) -> impl Iterator<Item = &'a [&'s Seat]> {
    seats.chunk_by(move |one, other| one.groups[depth] == other.groups[depth])
}

/// Of how many cores of a hole `n` PUs would be some and not all.
pub(super) fn split_cores(hole: &[&Seat], n: u32) -> u32 {
    let (mut wholes, mut parts) = (Vec::new(), Vec::new());
    for seat in hole {
        if seat.whole { wholes.push(seat.size) } else { parts.push(seat.size) }
    }
    let mut left = n;
    wholes.sort_unstable_by_key(|&size| Reverse(size));
    // What stays in the list is larger than what is left.
    wholes.retain(|&size| {
        let fits = size <= left;
        left -= if fits { size } else { 0 };
        !fits
    });
    parts.sort_unstable_by_key(|&size| Reverse(size));
    let mut split = 0;
    for size in parts.into_iter().chain(wholes) {
        if left == 0 {
            break;
        }
        left = left.saturating_sub(size);
        split += 1;
    }
    split
}

/// `n` units of neighbours: whole cores first, and for a rest that is less than any core, the smallest
/// one.
pub(super) fn fill<'s>(seats: &[&'s Seat], n: u32) -> Vec<&'s Seat> {
    let mut sorted = seats.to_vec();
    sorted.sort_by_key(|seat| (!seat.whole, seat.position));
    let mut left = n;
    let mut skipped: Vec<&Seat> = Vec::new();
    let mut chosen: Vec<&Seat> = Vec::new();
    for seat in sorted {
        if left == 0 {
            break;
        }
        if seat.size <= left {
            left -= seat.size;
            chosen.push(seat);
        } else {
            skipped.push(seat);
        }
    }
    if left > 0 {
        chosen.extend(skipped.into_iter().min_by_key(|seat| (seat.size, seat.position)));
    }
    chosen
}

/// The same number of PUs from the same domains, if that shares fewer cores with other jobs: what is left over of a
/// domain that was emptied may be half a core.
pub(super) fn with_fewest_split<'s>(seats: &[&'s Seat], chosen: Vec<&'s Seat>, n: u32) -> Vec<&'s Seat> {
    let groups: BTreeSet<&[Group]> = chosen.iter().map(|seat| seat.groups.as_slice()).collect();
    let around: Vec<&Seat> =
        seats.iter().copied().filter(|seat| groups.contains(seat.groups.as_slice())).collect();
    let split = |seats: &[&Seat]| {
        let cut = u32::from(total(seats) > n && seats.last().is_some_and(|seat| seat.whole));
        seats.iter().map(|seat| u32::from(!seat.whole)).sum::<u32>() + cut
    };
    let other = fill(&around, n);
    if split(&other) < split(&chosen) { other } else { chosen }
}
