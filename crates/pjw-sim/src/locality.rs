//! The location of each PU in the machine, and the number of domains that a set of PUs uses.
//!
//! This code uses the topology only and shares nothing with the allocator. So a measurement does not depend on the
//! code that is measured.

use std::collections::BTreeSet;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::topology::{Topology, TopologyLevel};

/// What a processor is in a job log: a core, or a PU (logical CPU). A job log contains the number of processors
/// of each job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessorUnit {
    /// Whole cores.
    Core,
    /// Single PUs (hardware threads). The PUs of one core may be granted to several jobs.
    Pu,
}

/// The location of a PU (logical CPU) in the machine: the indexes of the core, L3 cache, NUMA node and package
/// that contain the PU. Each index counts from 0 in the topology's list of objects of the same kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PuLocation {
    /// The index of the core in the topology's list of cores.
    pub core: u32,
    /// The index of the L3 cache in the topology's list of L3 caches. `None` if the PU is in no L3 cache.
    pub l3: Option<u32>,
    /// The index of the NUMA node in the topology's list of NUMA nodes. `None` if the PU is in no NUMA node.
    /// If several NUMA nodes contain the PU, such as one with fast and one with slow memory, the lowest
    /// index.
    pub numa_node: Option<u32>,
    /// The index of the package in the topology's list of packages. `None` if the PU is in no package.
    pub package: Option<u32>,
}

/// The locations of all PUs (logical CPUs) of a machine. With the locations, the simulation counts how many L3
/// caches, NUMA nodes and packages a set of PUs uses.
#[derive(Debug, Clone)]
pub struct PuLocations {
    /// The location of each PU, by its number. `None` for a number without a PU.
    by_pu: Vec<Option<PuLocation>>,
    /// The PUs of each core.
    cores: Vec<CpuSet>,
}

/// How many packages, NUMA nodes and L3 caches a set of PUs (logical CPUs) uses, and how many cores the set
/// splits. A set splits a core if it contains some, but not all PUs of the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LocalityCounts {
    /// The number of packages that contain at least one PU of the set of PUs.
    pub packages: u32,
    /// The number of NUMA nodes that contain at least one PU of the set of PUs.
    pub numa_nodes: u32,
    /// The number of L3 caches that contain at least one PU of the set of PUs.
    pub l3_caches: u32,
    /// The number of cores of which some PUs, but not all, are in the set of PUs.
    pub split_cores: u32,
}

impl PuLocations {
    /// Determines the core, the L3 cache, the NUMA node and the package of each PU (logical CPU) of the machine with
    /// the topology `topology`.
    #[must_use]
    pub fn from_topology(topology: &Topology) -> Self {
        let length = topology.cpus().last().map_or(0, |last| last.0 as usize + 1);
        let mut by_pu: Vec<Option<PuLocation>> = vec![None; length];
        for (core, pus) in (0..).zip(topology.pus_by_core()) {
            for pu in pus {
                by_pu[pu.0 as usize] = Some(PuLocation { core, l3: None, numa_node: None, package: None });
            }
        }
        for level in [TopologyLevel::L3, TopologyLevel::NumaNode, TopologyLevel::Package] {
            for (index, domain) in (0..).zip(topology.domains(level)) {
                for pu in domain.cpus.iter() {
                    let Some(Some(location)) = by_pu.get_mut(pu.0 as usize) else { continue };
                    if let Some(domain_index) = location.domain_index_mut(level) {
                        domain_index.get_or_insert(index);
                    }
                }
            }
        }
        Self { by_pu, cores: topology.cores().iter().map(|core| core.pus.clone()).collect() }
    }

    /// Returns the location of the PU (logical CPU) `pu`. `None` if the machine has no such PU.
    #[must_use]
    pub fn location_of(&self, pu: Pu) -> Option<PuLocation> {
        self.by_pu.get(pu.0 as usize).copied().flatten()
    }

    /// Returns all cores of the machine in hwloc's logical order. For each core, returns the location of its
    /// first PU (logical CPU), and the set of all its PUs.
    pub fn cores(&self) -> impl Iterator<Item = (PuLocation, &CpuSet)> {
        self.cores.iter().filter_map(|pus| Some((self.location_of(pus.first()?)?, pus)))
    }

    /// Counts the domains that the PUs (logical CPUs) in `cpus` use. A domain is a package, a NUMA node or an L3
    /// cache. A domain is used if `cpus` contains at least one of its PUs. Also counts the split cores: the cores
    /// of which some, but not all PUs are in `cpus`.
    #[must_use]
    pub fn domains_used(&self, cpus: &CpuSet) -> LocalityCounts {
        let locations: Vec<PuLocation> = cpus.iter().filter_map(|pu| self.location_of(pu)).collect();
        let cores: BTreeSet<u32> = locations.iter().map(|location| location.core).collect();
        let split = cores.into_iter().filter(|&core| !self.cores[core as usize].is_subset(cpus));
        LocalityCounts {
            packages: count_distinct(locations.iter().map(|location| location.package)),
            numa_nodes: count_distinct(locations.iter().map(|location| location.numa_node)),
            l3_caches: count_distinct(locations.iter().map(|location| location.l3)),
            split_cores: u32::try_from(split.count()).unwrap_or(u32::MAX),
        }
    }
}

impl PuLocation {
    /// Returns the index of the domain that contains this PU (logical CPU). A domain is an L3 cache, a NUMA node
    /// or a package. `level` selects one of these three kinds. The index counts from 0 in the topology's list of
    /// domains of this kind. `None` if no domain of this kind contains the PU, or if `level` is
    /// [`TopologyLevel::Machine`].
    #[must_use]
    pub fn domain_index(mut self, level: TopologyLevel) -> Option<u32> {
        *self.domain_index_mut(level)?
    }

    /// Returns the field for the domains of `level`. `None` for [`TopologyLevel::Machine`], which has no field.
    fn domain_index_mut(&mut self, level: TopologyLevel) -> Option<&mut Option<u32>> {
        match level {
            TopologyLevel::L3 => Some(&mut self.l3),
            TopologyLevel::NumaNode => Some(&mut self.numa_node),
            TopologyLevel::Package => Some(&mut self.package),
            TopologyLevel::Machine => None,
        }
    }
}

fn count_distinct(numbers: impl Iterator<Item = Option<u32>>) -> u32 {
    u32::try_from(numbers.flatten().collect::<BTreeSet<u32>>().len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use pjw_core::testing::regular_topology;
    use pjw_core::topology::{Core, TopologyDomain};

    use super::*;

    #[test]
    fn every_level_is_counted_and_half_cores_too() {
        let machine = regular_topology(2, 2, 2, 2, 2);
        let locality = PuLocations::from_topology(&machine);
        for (cpus, packages, numa_nodes, l3_caches, split_cores) in [
            ("", 0, 0, 0, 0),
            ("0,16", 1, 1, 1, 0),
            ("0-1", 1, 1, 1, 2),
            ("0-3,16-18", 1, 1, 2, 1),
            ("1-4,17-20", 1, 2, 3, 0),
            ("0-31", 2, 4, 8, 0),
            ("40", 0, 0, 0, 0),
        ] {
            let expected = LocalityCounts { packages, numa_nodes, l3_caches, split_cores };
            assert_eq!(locality.domains_used(&cpus.parse().unwrap()), expected, "{cpus}");
        }
    }

    #[test]
    fn two_nodes_with_the_same_pus_count_once_and_no_domain_not_at_all() {
        let core = |pu| Core { pus: Pu(pu).into(), kind_index: 0 };
        let node = |number| TopologyDomain {
            level: TopologyLevel::NumaNode,
            number,
            cpus: "0-1".parse().unwrap(),
            memory_bytes: 1,
        };
        let machine = Topology::new(vec![core(0), core(1)], vec![node(0), node(1)]).unwrap();
        let domains_used = PuLocations::from_topology(&machine).domains_used(machine.cpus());
        assert_eq!(domains_used, LocalityCounts { packages: 0, numa_nodes: 1, l3_caches: 0, split_cores: 0 });
    }
}
