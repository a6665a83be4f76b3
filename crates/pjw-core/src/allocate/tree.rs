//! The available cores as seats, and the groups that the levels of a machine divide them into.

use std::collections::BTreeMap;

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
