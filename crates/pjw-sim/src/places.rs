//! Where each PU of a machine lies, and how many parts of the machine a set of PUs touches.
//!
//! Made from the topology's lists alone and shared with nothing in the allocator: what is measured and checked
//! here doesn't depend on what made the choice.

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::topology::{Level, Topology};

/// Where a PU lies. Domains are told by their place among those of their level; a PU may be in none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The place of its core in the machine's order.
    pub core: u32,
    /// Its L3.
    pub l3: Option<u32>,
    /// Its NUMA node; the first one where slow and fast memory have the same PUs.
    pub numa_node: Option<u32>,
    /// Its package.
    pub package: Option<u32>,
}

/// Where every PU lies.
#[derive(Debug, Clone)]
pub struct Places {
    by_pu: Vec<Option<Place>>,
    cores: Vec<CpuSet>,
}

/// How many parts of the machine a set of PUs touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Touched {
    /// Packages.
    pub packages: u32,
    /// NUMA nodes.
    pub numa_nodes: u32,
    /// L3s.
    pub l3: u32,
    /// Cores of which the set has some PUs and not all.
    pub split_cores: u32,
}

impl Places {
    /// The places of a machine.
    #[must_use]
    pub fn of(topology: &Topology) -> Self {
        let length = topology.cpus().last().map_or(0, |last| last.0 as usize + 1);
        let mut by_pu: Vec<Option<Place>> = vec![None; length];
        for (core, pus) in (0..).zip(topology.pus_by_core()) {
            for pu in pus {
                by_pu[pu.0 as usize] = Some(Place { core, l3: None, numa_node: None, package: None });
            }
        }
        for level in [Level::L3, Level::NumaNode, Level::Package] {
            for (number, domain) in (0..).zip(topology.domains(level)) {
                for pu in domain.cpus.iter() {
                    let Some(Some(place)) = by_pu.get_mut(pu.0 as usize) else { continue };
                    place.domain_mut(level).get_or_insert(number);
                }
            }
        }
        Self { by_pu, cores: topology.cores().iter().map(|core| core.pus.clone()).collect() }
    }

    /// The place of one PU; `None` if the machine hasn't got it.
    #[must_use]
    pub fn of_pu(&self, pu: Pu) -> Option<Place> {
        self.by_pu.get(pu.0 as usize).copied().flatten()
    }

    /// The cores of the machine, in its order, each with its place.
    pub fn cores(&self) -> impl Iterator<Item = (Place, &CpuSet)> {
        self.cores.iter().filter_map(|pus| Some((self.of_pu(pus.first()?)?, pus)))
    }

    /// How many parts of the machine these PUs touch.
    #[must_use]
    pub fn touched(&self, cpus: &CpuSet) -> Touched {
        let places: Vec<Place> = cpus.iter().filter_map(|pu| self.of_pu(pu)).collect();
        let mut cores: Vec<u32> = places.iter().map(|place| place.core).collect();
        cores.dedup();
        cores.sort_unstable();
        cores.dedup();
        let split = cores.iter().filter(|&&core| !self.cores[core as usize].is_subset(cpus));
        Touched {
            packages: distinct(places.iter().map(|place| place.package)),
            numa_nodes: distinct(places.iter().map(|place| place.numa_node)),
            l3: distinct(places.iter().map(|place| place.l3)),
            split_cores: u32::try_from(split.count()).unwrap_or(u32::MAX),
        }
    }
}

impl Place {
    /// Its domain of a level.
    #[must_use]
    pub fn domain(mut self, level: Level) -> Option<u32> {
        if level == Level::Machine { None } else { *self.domain_mut(level) }
    }

    fn domain_mut(&mut self, level: Level) -> &mut Option<u32> {
        match level {
            Level::L3 => &mut self.l3,
            Level::NumaNode => &mut self.numa_node,
            Level::Package | Level::Machine => &mut self.package,
        }
    }
}

fn distinct(numbers: impl Iterator<Item = Option<u32>>) -> u32 {
    let mut numbers: Vec<u32> = numbers.flatten().collect();
    numbers.dedup();
    numbers.sort_unstable();
    numbers.dedup();
    u32::try_from(numbers.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use pjw_core::topology::{Core, Domain, Regular};

    use super::*;

    #[test]
    fn every_level_is_counted_and_half_cores_too() {
        let machine = Topology::regular(Regular {
            packages: 2,
            numa_per_package: 2,
            l3_per_numa: 2,
            cores_per_l3: 2,
            pus_per_core: 2,
        });
        let places = Places::of(&machine);
        for (cpus, packages, numa_nodes, l3, split_cores) in [
            ("", 0, 0, 0, 0),
            ("0,16", 1, 1, 1, 0),
            ("0-1", 1, 1, 1, 2),
            ("0-3,16-18", 1, 1, 2, 1),
            ("1-4,17-20", 1, 2, 3, 0),
            ("0-31", 2, 4, 8, 0),
            ("40", 0, 0, 0, 0),
        ] {
            let expected = Touched { packages, numa_nodes, l3, split_cores };
            assert_eq!(places.touched(&cpus.parse().unwrap()), expected, "{cpus}");
        }
    }

    #[test]
    fn two_nodes_with_the_same_pus_count_once_and_no_domain_not_at_all() {
        let core = |pu| Core { pus: Pu(pu).into(), kind: 0 };
        let node =
            |number| Domain { level: Level::NumaNode, number, cpus: "0-1".parse().unwrap(), memory_bytes: 1 };
        let machine = Topology::new(vec![core(0), core(1)], vec![node(0), node(1)]).unwrap();
        let touched = Places::of(&machine).touched(machine.cpus());
        assert_eq!(touched, Touched { packages: 0, numa_nodes: 1, l3: 0, split_cores: 0 });
    }
}
