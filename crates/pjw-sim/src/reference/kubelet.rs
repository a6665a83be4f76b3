//! Kubernetes' static CPU manager: `takeByTopologyNUMAPacked` of `pkg/kubelet/cm/cpumanager/cpu_assignment.go`.
//!
//! The outer domains are the larger ones by the rule of that code: NUMA nodes if there are at least as many packages,
//! else packages. The inner domains are the others. Domains are always tried with the fewest free cells first, then by
//! number. Inner domains are ordered within their outer domain. A domain is free if all its cells are free, also those
//! of housekeeping.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::topology::TopologyLevel;

use super::cells::{Cell, all_cells};
use crate::locality::{ProcessorUnit, PuLocations};

/// A domain of a level. Cells without a domain count as one domain.
type Domain = Option<u32>;

/// Chooses `count` of the cells in `free` by the rules of the kubelet's static CPU manager. `free` must contain at
/// least `count` cells. `unit` says whether a cell is a core or a PU (logical CPU). `locality` has the location of each
/// PU. If `by_l3` is true, cells in the same L3 cache are preferred.
pub(super) fn choose_cells(
    count: u32,
    unit: ProcessorUnit,
    free: Vec<Cell>,
    locality: &PuLocations,
    by_l3: bool,
) -> Vec<Cell> {
    let all = all_cells(unit, locality);
    let domain_count = |level| {
        all.iter().filter_map(|cell| cell.location.domain_index(level)).collect::<BTreeSet<_>>().len()
    };
    let is_numa_outer = domain_count(TopologyLevel::Package) >= domain_count(TopologyLevel::NumaNode);
    let (outer, inner) = if is_numa_outer {
        (TopologyLevel::NumaNode, TopologyLevel::Package)
    } else {
        (TopologyLevel::Package, TopologyLevel::NumaNode)
    };
    let l3s = domain_count(TopologyLevel::L3);
    let mean_l3_size = all.len().checked_div(l3s).unwrap_or(0);
    let mut taker = Taker { all, free, outer, inner, taken: Vec::new(), needed: count as usize };
    taker.take_full_domains(&[outer]);
    taker.take_full_domains(&[outer, inner]);
    if by_l3 && l3s > 0 {
        taker.take_l3s(mean_l3_size);
    }
    taker.take_full_cores();
    taker.take_remaining();
    taker.taken
}

/// The state of one allocation: the cells (cores or PUs) of the machine, and those that were taken so far.
struct Taker {
    all: Vec<Cell>,
    free: Vec<Cell>,
    outer: TopologyLevel,
    inner: TopologyLevel,
    taken: Vec<Cell>,
    /// The number of cells that the request still needs.
    needed: usize,
}

impl Taker {
    /// Takes free domains of the last level in `levels`, as long as the request needs a whole domain.
    fn take_full_domains(&mut self, levels: &[TopologyLevel]) {
        let Some(&level) = levels.last() else { return };
        for domain in self.ordered_domains(levels).into_iter().filter(Option::is_some) {
            self.take_whole(|cell| cell.location.domain_index(level) == domain);
        }
    }

    /// Takes all cells for which `inside` returns true, if all of them are free and needed.
    fn take_whole(&mut self, inside: impl Fn(&Cell) -> bool) {
        let size = self.all.iter().filter(|cell| inside(cell)).count();
        let free = self.free.iter().filter(|cell| inside(cell)).count();
        if free == size && self.needed >= size {
            self.take_free_cells(inside, size);
        }
    }

    /// Takes whole free L3 caches as long as at least `mean_size` cells are needed: the mean number of cells in an L3
    /// cache. Takes the remaining cells from the first L3 cache that has enough whole free cores, if there is one.
    fn take_l3s(&mut self, mean_size: usize) {
        let levels = [self.outer, self.inner, TopologyLevel::L3];
        for l3 in self.ordered_domains(&levels) {
            if self.needed >= mean_size {
                self.take_full_domains(&levels);
            }
            if self.needed == 0 {
                return;
            }
            if l3.is_some() {
                self.take_part_of_l3(l3);
            }
        }
    }

    /// Takes all needed cells from whole free cores of the L3 cache `l3`, if it has enough of them. Of the last core,
    /// takes only the needed cells.
    fn take_part_of_l3(&mut self, l3: Domain) {
        let whole_cores = self.whole_cores();
        let is_eligible = |cell: &Cell| cell.location.l3 == l3 && whole_cores.contains(&cell.location.core);
        if self.free.iter().filter(|cell| is_eligible(cell)).count() >= self.needed {
            self.take_free_cells(is_eligible, self.needed);
        }
    }

    /// Takes whole free cores, as long as the request needs a whole core.
    fn take_full_cores(&mut self) {
        for core in self.cores() {
            self.take_whole(|cell| cell.location.core == core);
        }
    }

    /// Takes single cells. In each pair of domains, the cores with the fewest free cells come first: those in use.
    fn take_remaining(&mut self) {
        for core in self.cores() {
            self.take_free_cells(|cell| cell.location.core == core, self.needed);
        }
    }

    /// Returns the cores with free cells, in the order in which cells are taken.
    fn cores(&self) -> Vec<u32> {
        self.ordered_in_pairs(|cell| cell.location.core)
    }

    /// Returns the places of the free cells in each pair of an outer and an inner domain, pair after pair. `place`
    /// returns the place of a cell: a domain or a core.
    fn ordered_in_pairs<K: Ord + Copy>(&self, place: impl Fn(&Cell) -> K) -> Vec<K> {
        let is_in = |cell: &Cell, (outer, inner)| {
            cell.location.domain_index(self.outer) == outer && cell.location.domain_index(self.inner) == inner
        };
        let places_in = |pair| fewest_first(&self.free, |cell| is_in(cell, pair), &place);
        self.domain_pairs().into_iter().flat_map(places_in).collect()
    }

    /// Returns the numbers of the cores of which all cells (PUs, or the core itself) are free.
    fn whole_cores(&self) -> BTreeSet<u32> {
        let mut missing: BTreeMap<u32, isize> = BTreeMap::new();
        for cell in &self.all {
            *missing.entry(cell.location.core).or_default() += 1;
        }
        for cell in &self.free {
            *missing.entry(cell.location.core).or_default() -= 1;
        }
        missing.into_iter().filter(|&(_, missing)| missing == 0).map(|(core, _)| core).collect()
    }

    /// Returns the pairs of an outer domain and an inner domain that have free cells. The pairs are in the order in
    /// which cells are taken. The two levels are those of NUMA nodes and packages.
    fn domain_pairs(&self) -> Vec<(Domain, Domain)> {
        let outers = fewest_first(&self.free, |_| true, |cell| cell.location.domain_index(self.outer));
        let inners = |outer: Domain| {
            let inside = move |cell: &Cell| cell.location.domain_index(self.outer) == outer;
            fewest_first(&self.free, inside, |cell| cell.location.domain_index(self.inner))
                .into_iter()
                .map(move |inner| (outer, inner))
        };
        outers.into_iter().flat_map(inners).collect()
    }

    /// Returns the domains of the last level in `levels`, in the order in which cells are taken. `levels` is the outer
    /// level alone, the outer and the inner level, or these two and L3.
    fn ordered_domains(&self, levels: &[TopologyLevel]) -> Vec<Domain> {
        match levels {
            [outer] => fewest_first(&self.free, |_| true, |cell| cell.location.domain_index(*outer)),
            [_, _] => self.domain_pairs().into_iter().map(|(_, inner)| inner).collect(),
            [_, _, level, ..] => self.ordered_in_pairs(|cell| cell.location.domain_index(*level)),
            [] => Vec::new(),
        }
    }

    /// Takes free cells (cores or single PUs) for the request: moves them from `free` to `taken`, and subtracts their
    /// number from `needed`. Takes only cells for which `is_eligible` returns true: the first `max_count` of them, but
    /// not more than are still needed.
    fn take_free_cells(&mut self, is_eligible: impl Fn(&Cell) -> bool, max_count: usize) {
        let mut left = max_count.min(self.needed);
        let (mut kept, mut taken) = (Vec::new(), Vec::new());
        for cell in self.free.drain(..) {
            if left > 0 && is_eligible(&cell) {
                left -= 1;
                taken.push(cell);
            } else {
                kept.push(cell);
            }
        }
        self.free = kept;
        self.needed -= taken.len();
        self.taken.append(&mut taken);
    }
}

/// Returns the places of the cells in `free` for which `inside` returns true. `place` returns the place of a cell: a
/// domain or a core. The place with the fewest such cells comes first. Places with equally many cells are in the
/// order of their numbers.
fn fewest_first<K: Ord + Copy>(
    free: &[Cell],
    inside: impl Fn(&Cell) -> bool,
    place: impl Fn(&Cell) -> K,
) -> Vec<K> {
    let mut counts: BTreeMap<K, usize> = BTreeMap::new();
    for cell in free.iter().filter(|cell| inside(cell)) {
        *counts.entry(place(cell)).or_default() += 1;
    }
    let mut ordered: Vec<K> = counts.keys().copied().collect();
    ordered.sort_by_key(|place| counts[place]);
    ordered
}
