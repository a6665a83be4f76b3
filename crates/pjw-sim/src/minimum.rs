//! The fewest domains that a request could have touched, given what was free: the checker of the allocator's
//! promise. It shares no code with the allocator, whose way of searching is another one.
//!
//! A machine is a tree of domains. For a subtree and every number of units up to the request, the least price of
//! taking so many from it is a row of numbers; the row of a parent is made from those of its children by trying every
//! division of the units between them. Nothing is left out, so the result is the minimum, and the work is bounded by
//! the units times the size of the machine. Prices are compared in the order of the machine's levels, largest first
//! (packages, NUMA nodes, L3s on most): a request never touches a package more to touch an L3 less.

use pjw_core::cpuset::CpuSet;
use pjw_core::topology::{Level, Topology};

use crate::places::{Place, Places, Touched};
use crate::replay::Unit;

/// Bits of a price for each level: more domains than any machine has.
const BITS: u32 = 20;
/// The price of what can't be had.
const NEVER: u64 = u64::MAX;

/// A machine whose domains nest, so that a minimum can be told.
#[derive(Debug)]
pub struct Minimum<'t> {
    topology: &'t Topology,
    places: Places,
    /// Largest domains first.
    levels: Vec<Level>,
}

/// A unit that is free: where it is, and of which kind.
#[derive(Debug, Clone, Copy)]
struct Seat {
    place: Place,
    kind: u32,
}

impl<'t> Minimum<'t> {
    /// `None` if domains cross each other: no tree, no minimum.
    #[must_use]
    pub fn new(topology: &'t Topology) -> Option<Self> {
        let places = Places::of(topology);
        let mut levels =
            [Level::Package, Level::NumaNode, Level::L3].map(|level| (level, mean(&places, level)));
        levels.sort_by_key(|&(_, size)| std::cmp::Reverse(size));
        let levels = levels.map(|(level, _)| level).to_vec();
        let minimum = Self { topology, places, levels };
        minimum.nests().then_some(minimum)
    }

    /// What the best choice for `n` units touches; `None` if so many aren't free. Where one kind of core has
    /// enough, only the fastest such kind counts: one kind comes before few domains.
    #[must_use]
    pub fn of(&self, n: u32, unit: Unit, free: &CpuSet) -> Option<Touched> {
        let mut seats = self.seats(unit, free);
        let mut kinds: Vec<u32> = seats.iter().map(|seat| seat.kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let enough = |kind: &&u32| seats.iter().filter(|seat| seat.kind == **kind).count() >= n as usize;
        if let Some(&kind) = kinds.iter().rev().find(enough) {
            seats.retain(|seat| seat.kind == kind);
        }
        let price =
            *row(&seats, &self.levels, n as usize).get(n as usize).filter(|&&price| price != NEVER)?;
        let count = |level| {
            let at = self.levels.iter().position(|&other| other == level)?;
            u32::try_from(price / price_of(self.levels.len() - 1 - at) % (1 << BITS)).ok()
        };
        Some(Touched {
            packages: count(Level::Package)?,
            numa_nodes: count(Level::NumaNode)?,
            l3: count(Level::L3)?,
            split_cores: 0,
        })
    }

    fn seats(&self, unit: Unit, free: &CpuSet) -> Vec<Seat> {
        let cores = self.places.cores().zip(self.topology.cores());
        let units = |pus: &CpuSet| match unit {
            Unit::Core => usize::from(pus.is_subset(free)),
            Unit::Pu => pus.intersection(free).len(),
        };
        cores.flat_map(|((place, pus), core)| vec![Seat { place, kind: core.kind }; units(pus)]).collect()
    }

    /// Whether each domain lies in one domain of the next larger level, or wholly outside them.
    fn nests(&self) -> bool {
        let places: Vec<Place> = self.places.cores().map(|(place, _)| place).collect();
        self.levels.windows(2).all(|pair| {
            let mut around: Vec<(u32, Option<u32>)> = places
                .iter()
                .filter_map(|place| Some((place.domain(pair[1])?, place.domain(pair[0]))))
                .collect();
            around.sort_unstable();
            around.dedup();
            around.windows(2).all(|two| two[0].0 != two[1].0)
        })
    }
}

/// How many cores, in thousandths, a core of the machine finds in its domain of a level on average; those that are
/// in none find themselves alone.
fn mean(places: &Places, level: Level) -> usize {
    let domains: Vec<Option<u32>> = places.cores().map(|(place, _)| place.domain(level)).collect();
    let around = |domain: &Option<u32>| domains.iter().filter(|other| *other == domain).count();
    domains.iter().map(|domain| if domain.is_some() { around(domain) } else { 1 }).sum::<usize>() * 1_000
        / domains.len().max(1)
}

fn price_of(levels_below: usize) -> u64 {
    1 << (BITS * u32::try_from(levels_below).unwrap_or(0))
}

/// The least price of taking 0, 1, 2, … at most `n` of these.
fn row(seats: &[Seat], levels: &[Level], n: usize) -> Vec<u64> {
    let Some((&level, below)) = levels.split_first() else { return vec![0; seats.len().min(n) + 1] };
    let mut sorted = seats.to_vec();
    sorted.sort_by_key(|seat| seat.place.domain(level));
    let parts = sorted.chunk_by(|one, other| one.place.domain(level) == other.place.domain(level));
    parts.fold(vec![0], |all, part| {
        let mut own = row(part, below, n);
        if part[0].place.domain(level).is_some() {
            own.iter_mut().skip(1).for_each(|price| *price += price_of(below.len()));
        }
        both(&all, &own, n)
    })
}

/// The least price of taking so many from two parts together.
fn both(one: &[u64], other: &[u64], n: usize) -> Vec<u64> {
    let mut all = vec![NEVER; (one.len() + other.len() - 1).min(n + 1)];
    for (taken, price) in one.iter().enumerate() {
        for (units, more) in all.iter_mut().skip(taken).zip(other) {
            *units = (*units).min(price + more);
        }
    }
    all
}

#[cfg(test)]
mod tests;
