//! The smallest number of domains that a request can use with the free cores: it checks the promise of the allocator.
//! It shares no code with the allocator and uses another algorithm.
//!
//! A machine is a tree of domains. For each subtree and each number of units up to the request, the algorithm
//! computes the lowest cost of taking that many units from the subtree. The costs of a parent follow from those of
//! its children, by trying every division of the units between them. The search is complete, so the result is the
//! minimum. The work is bounded by the units times the size of the machine. Costs are compared level by level,
//! largest domains first (mostly packages, NUMA nodes, L3s): a request never uses one package more to use one L3
//! less.

use pjw_core::cpuset::CpuSet;
use pjw_core::topology::{Topology, TopologyLevel};

use pjw_sim::locality::{LocalityCounts, ProcessorUnit, PuLocation, PuLocations};

/// Bits of a cost for each level: enough for more domains than any machine has.
const BITS: u32 = 20;
/// The cost of units that are not available.
const UNAVAILABLE: u64 = u64::MAX;

/// A machine whose domains nest, so that the minimum can be computed.
#[derive(Debug)]
pub(crate) struct FewestDomains<'t> {
    topology: &'t Topology,
    locality: PuLocations,
    /// The levels, largest domains first.
    levels: Vec<TopologyLevel>,
}

/// A free unit: its location and the kind of its core.
#[derive(Debug, Clone, Copy)]
struct FreeUnit {
    location: PuLocation,
    kind: u32,
}

impl<'t> FewestDomains<'t> {
    /// `None` if domains of the machine overlap without nesting.
    pub(crate) fn new(topology: &'t Topology) -> Option<Self> {
        let locality = PuLocations::from_topology(topology);
        let mut levels = [TopologyLevel::Package, TopologyLevel::NumaNode, TopologyLevel::L3]
            .map(|level| (level, mean(&locality, level)));
        levels.sort_by_key(|&(_, size)| std::cmp::Reverse(size));
        let levels = levels.map(|(level, _)| level).to_vec();
        let fewest_domains = Self { topology, locality, levels };
        fewest_domains.nests().then_some(fewest_domains)
    }

    /// The domains that the best choice for `n` units uses. `None` if fewer than `n` units are free. If one kind of
    /// core has enough units, only the fastest such kind counts: one kind comes before few domains.
    pub(crate) fn of(&self, n: u32, unit: ProcessorUnit, free: &CpuSet) -> Option<LocalityCounts> {
        let mut free_units = self.free_units(unit, free);
        let mut kinds: Vec<u32> = free_units.iter().map(|free_unit| free_unit.kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let enough = |kind: &&u32| {
            free_units.iter().filter(|free_unit| free_unit.kind == **kind).count() >= n as usize
        };
        if let Some(&kind) = kinds.iter().rev().find(enough) {
            free_units.retain(|free_unit| free_unit.kind == kind);
        }
        let cost = *costs(&free_units, &self.levels, n as usize)
            .get(n as usize)
            .filter(|&&cost| cost != UNAVAILABLE)?;
        let count = |level| {
            let at = self.levels.iter().position(|&other| other == level)?;
            u32::try_from(cost / cost_of(self.levels.len() - 1 - at) % (1 << BITS)).ok()
        };
        Some(LocalityCounts {
            packages: count(TopologyLevel::Package)?,
            numa_nodes: count(TopologyLevel::NumaNode)?,
            l3_caches: count(TopologyLevel::L3)?,
            split_cores: 0,
        })
    }

    fn free_units(&self, unit: ProcessorUnit, free: &CpuSet) -> Vec<FreeUnit> {
        let cores = self.locality.cores().zip(self.topology.cores());
        let units = |pus: &CpuSet| match unit {
            ProcessorUnit::Core => usize::from(pus.is_subset(free)),
            ProcessorUnit::Pu => pus.intersection(free).len(),
        };
        cores
            .flat_map(|((location, pus), core)| {
                vec![FreeUnit { location, kind: core.kind_index }; units(pus)]
            })
            .collect()
    }

    /// Whether each domain lies in one domain of the next larger level, or outside of all of them.
    fn nests(&self) -> bool {
        let locality: Vec<PuLocation> = self.locality.cores().map(|(location, _)| location).collect();
        self.levels.windows(2).all(|pair| {
            let mut around: Vec<(u32, Option<u32>)> = locality
                .iter()
                .filter_map(|location| {
                    Some((location.domain_index(pair[1])?, location.domain_index(pair[0])))
                })
                .collect();
            around.sort_unstable();
            around.dedup();
            around.windows(2).all(|two| two[0].0 != two[1].0)
        })
    }
}

/// The mean number of cores in the domain of a core, in thousandths. A core in no domain counts as a domain of its
/// own.
fn mean(locality: &PuLocations, level: TopologyLevel) -> usize {
    let domains: Vec<Option<u32>> =
        locality.cores().map(|(location, _)| location.domain_index(level)).collect();
    let around = |domain: &Option<u32>| domains.iter().filter(|other| *other == domain).count();
    domains.iter().map(|domain| if domain.is_some() { around(domain) } else { 1 }).sum::<usize>() * 1_000
        / domains.len().max(1)
}

fn cost_of(levels_below: usize) -> u64 {
    1 << (BITS * u32::try_from(levels_below).unwrap_or(0))
}

/// The lowest cost of taking 0, 1, 2, ... at most `n` of these units.
fn costs(free_units: &[FreeUnit], levels: &[TopologyLevel], n: usize) -> Vec<u64> {
    let Some((&level, below)) = levels.split_first() else { return vec![0; free_units.len().min(n) + 1] };
    let mut sorted = free_units.to_vec();
    sorted.sort_by_key(|free_unit| free_unit.location.domain_index(level));
    let parts =
        sorted.chunk_by(|one, other| one.location.domain_index(level) == other.location.domain_index(level));
    parts.fold(vec![0], |all, part| {
        let mut own = costs(part, below, n);
        if part[0].location.domain_index(level).is_some() {
            own.iter_mut().skip(1).for_each(|cost| *cost += cost_of(below.len()));
        }
        combine(&all, &own, n)
    })
}

/// The lowest cost of taking each number of units from two parts together.
fn combine(one: &[u64], other: &[u64], n: usize) -> Vec<u64> {
    let mut all = vec![UNAVAILABLE; (one.len() + other.len() - 1).min(n + 1)];
    for (taken, cost) in one.iter().enumerate() {
        for (units, more) in all.iter_mut().skip(taken).zip(other) {
            *units = (*units).min(cost + more);
        }
    }
    all
}

#[cfg(test)]
mod tests;
