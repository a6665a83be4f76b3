//! The machine as a tree: package > NUMA node > L3 > core > PU, and its questions.
//!
//! The tree is told by sets: a domain is a level, a number and the PUs below it, so machines where NUMA nodes
//! hold packages or L3s span nodes need no special case. Cores are listed in the machine's order (hwloc's
//! logical order): neighbours in the list are neighbours in the silicon, whatever the kernel numbered them.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cpuset::{CpuSet, Pu};

/// The levels at which a machine is divided, smallest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Cores that share a last-level cache.
    L3,
    /// Cores with the same local memory.
    NumaNode,
    /// A socket.
    Package,
    /// All of it.
    Machine,
}

/// A part of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Domain {
    /// What it is.
    pub level: Level,
    /// Its number: the kernel's for NUMA nodes and packages, hwloc's logical one for L3s.
    pub number: u32,
    /// Its PUs.
    pub cpus: CpuSet,
    /// Its local memory in bytes; 0 for levels other than NUMA nodes.
    pub memory_bytes: u64,
}

/// A physical core.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Core {
    /// Its PUs, siblings of each other.
    pub pus: CpuSet,
    /// Its kind, 0 the most efficient (hwloc's CPU kinds); 0 where all cores are alike.
    pub kind: u32,
}

/// A machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Packages, NUMA nodes and L3s, by level and then in the machine's order. Memory-only nodes have no PUs.
    domains: Vec<Domain>,
    /// In the machine's order.
    cores: Vec<Core>,
    /// Every PU, core by core.
    order: Vec<Pu>,
    cpus: CpuSet,
}

/// Why parts are not a machine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TopologyError {
    /// No core at all.
    #[error("the topology has no core with an online PU")]
    Empty,
    /// A PU in two cores.
    #[error("PU {pu} is in two cores")]
    TwoCores {
        /// The PU.
        pu: Pu,
    },
}

/// A regular machine, for tests and plans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Regular {
    /// Packages.
    pub packages: u32,
    /// NUMA nodes in each package.
    pub numa_per_package: u32,
    /// L3s in each NUMA node.
    pub l3_per_numa: u32,
    /// Cores on each L3.
    pub cores_per_l3: u32,
    /// PUs of each core.
    pub pus_per_core: u32,
}

impl Topology {
    /// Makes a machine of its cores, in the machine's order, and its domains.
    ///
    /// # Errors
    /// If there is no core, or a PU is in two.
    pub fn new(cores: Vec<Core>, mut domains: Vec<Domain>) -> Result<Self, TopologyError> {
        let mut cpus = CpuSet::new();
        let mut order = Vec::new();
        for pu in cores.iter().flat_map(|core| core.pus.iter()) {
            if !cpus.insert(pu) {
                return Err(TopologyError::TwoCores { pu });
            }
            order.push(pu);
        }
        if cpus.is_empty() {
            return Err(TopologyError::Empty);
        }
        domains.retain(|domain| domain.level != Level::Machine);
        domains.sort_by_key(|domain| domain.level);
        Ok(Self { domains, cores, order, cpus })
    }

    /// A regular machine whose PUs are numbered as x86 firmware does: first every core's first PU, then every
    /// core's second.
    #[must_use]
    pub fn regular(shape: Regular) -> Self {
        let cores_total = shape.packages * shape.numa_per_package * shape.l3_per_numa * shape.cores_per_l3;
        let pus_of = |core: u32| -> CpuSet {
            (0..shape.pus_per_core).map(|sibling| Pu(sibling * cores_total + core)).collect()
        };
        let cores = (0..cores_total).map(|core| Core { pus: pus_of(core), kind: 0 }).collect();
        let mut domains = Vec::new();
        let mut split = |level, size: u32| {
            for number in 0..cores_total / size.max(1) {
                let cpus = (number * size..(number + 1) * size)
                    .flat_map(|core| pus_of(core).iter().collect::<Vec<_>>())
                    .collect();
                let memory_bytes = if level == Level::NumaNode { 16 << 30 } else { 0 };
                domains.push(Domain { level, number, cpus, memory_bytes });
            }
        };
        split(Level::L3, shape.cores_per_l3);
        split(Level::NumaNode, shape.cores_per_l3 * shape.l3_per_numa);
        split(Level::Package, shape.cores_per_l3 * shape.l3_per_numa * shape.numa_per_package);
        let order = (0..cores_total).flat_map(|core| pus_of(core).iter().collect::<Vec<_>>()).collect();
        let cpus = (0..cores_total * shape.pus_per_core).map(Pu).collect();
        Self { domains, cores, order, cpus }
    }

    /// The domains of one level, in the machine's order.
    pub fn domains(&self, level: Level) -> impl Iterator<Item = &Domain> {
        self.domains.iter().filter(move |domain| domain.level == level)
    }

    /// The domain of that level that holds `pu`.
    #[must_use]
    pub fn domain_of(&self, level: Level, pu: Pu) -> Option<&Domain> {
        self.domains(level).find(|domain| domain.cpus.contains(pu))
    }

    /// The cores, in the machine's order.
    #[must_use]
    pub fn cores(&self) -> &[Core] {
        &self.cores
    }

    /// Every PU in the machine's order: core by core, siblings together.
    #[must_use]
    pub fn order(&self) -> &[Pu] {
        &self.order
    }

    /// Every PU.
    #[must_use]
    pub fn cpus(&self) -> &CpuSet {
        &self.cpus
    }

    /// The siblings of `pu` on its core, itself included; empty if it is not on this machine.
    #[must_use]
    pub fn core_of(&self, pu: Pu) -> CpuSet {
        self.cores.iter().find(|core| core.pus.contains(pu)).map(|core| core.pus.clone()).unwrap_or_default()
    }

    /// How many whole cores lie inside `cpus`.
    #[must_use]
    pub fn whole_cores_in(&self, cpus: &CpuSet) -> u32 {
        let whole = self.cores.iter().filter(|core| core.pus.is_subset(cpus)).count();
        u32::try_from(whole).unwrap_or(u32::MAX)
    }

    /// The PUs of `cpus` in the machine's order.
    #[must_use]
    pub fn ordered(&self, cpus: &CpuSet) -> Vec<Pu> {
        self.order.iter().copied().filter(|&pu| cpus.contains(pu)).collect()
    }

    /// The PUs of `cpus` such that one PU of every core comes before a second of any: the order in which
    /// running threads are spread.
    #[must_use]
    pub fn cores_first(&self, cpus: &CpuSet) -> Vec<Pu> {
        let mut ranked: Vec<(usize, usize, Pu)> = Vec::new();
        for (index, core) in self.cores.iter().enumerate() {
            for (sibling, pu) in core.pus.iter().filter(|&pu| cpus.contains(pu)).enumerate() {
                ranked.push((sibling, index, pu));
            }
        }
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, _, pu)| pu).collect()
    }
}
