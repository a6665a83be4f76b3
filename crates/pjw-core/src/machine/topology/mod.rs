//! The topology: the machine as a tree of package, NUMA node, L3, core and PU.
//!
//! The tree is stored as sets: a domain is a level, a number and its PUs. NUMA nodes that contain packages,
//! and L3s that span NUMA nodes, need no special case. Cores are listed in hwloc's logical order: cores next
//! to each other in the list are next to each other in the machine. The kernel's CPU numbers often have
//! another order.
//!
//! Queries about one PU use an index that is built once. Clones of a topology share the index.

use alloc::sync::Arc;
use core::fmt;

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;
use thiserror::Error;

use crate::basics::{CpuSet, Pu, prelude::*};
use crate::machine::devices::{Device, MachineDetails};

/// A level at which the cores of a machine are grouped: L3, NUMA node, package, or the whole machine. The
/// values are ordered from small to large groups, as on most machines. [`Topology::levels`] returns the actual
/// order on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum TopologyLevel {
    /// The cores that share one L3 cache.
    L3,
    /// The cores that have the same local memory.
    NumaNode,
    /// The cores in the same package (socket).
    Package,
    /// All cores of the machine.
    Machine,
}

/// One L3 cache, NUMA node or package of a machine, with its PUs (logical CPUs).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologyDomain {
    /// Whether the domain is an L3 cache, a NUMA node or a package.
    pub level: TopologyLevel,
    /// The number of the domain. For a NUMA node or a package, it is the number in the kernel. For an L3,
    /// it is the logical index in hwloc.
    pub number: u32,
    /// The PUs (logical CPUs) of the domain.
    pub cpus: CpuSet,
    /// The size of the memory of the NUMA node, in bytes. 0 if the domain is an L3 cache or a package.
    pub memory_bytes: u64,
}

/// A physical core, with its PUs (logical CPUs, also called SMT siblings).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Core {
    /// The PUs (logical CPUs) of the core: its SMT siblings.
    pub pus: CpuSet,
    /// The kind of the core, as an index into [`MachineDetails::core_kinds`]. 0 is the most energy-efficient
    /// kind. All cores have the kind 0 if the machine has only one kind of core.
    #[serde(rename = "kind")]
    pub kind_index: u32,
}

impl TopologyLevel {
    /// Returns the name of the level for use in a sentence: `L3`, `NUMA node`, `package` or `machine`.
    #[must_use]
    pub fn display_name(self) -> &'static str {
        match self {
            TopologyLevel::L3 => "L3",
            TopologyLevel::NumaNode => "NUMA node",
            TopologyLevel::Package => "package",
            TopologyLevel::Machine => "machine",
        }
    }
}

impl fmt::Display for TopologyLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.display_name())
    }
}

impl TopologyDomain {
    /// Returns the name of this L3 cache, NUMA node or package for use in a sentence, such as `L3#2`, `NUMA node 1` or
    /// `package 0`.
    #[must_use]
    pub fn name(&self) -> String {
        match self.level {
            TopologyLevel::L3 => format!("L3#{}", self.number),
            level => format!("{level} {}", self.number),
        }
    }
}

/// The topology of a machine: its cores, and the L3s, NUMA nodes and packages that contain the cores. Cloning
/// is cheap, because clones share the data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Parts", into = "Parts")]
pub struct Topology(Arc<Machine>);

/// The content of a [`Topology`]: the domains (packages, NUMA nodes and L3 caches), cores and PUs of a machine, with
/// indexes.
#[derive(Clone, PartialEq, Eq)]
struct Machine {
    /// Packages, NUMA nodes and L3s, sorted by level and then in hwloc's order. NUMA nodes with memory only
    /// have no PUs.
    domains: Vec<TopologyDomain>,
    /// In hwloc's logical order.
    cores: Vec<Core>,
    /// All PUs, core by core.
    order: Vec<Pu>,
    cpus: CpuSet,
    /// The index in `order` of the first PU of each core, followed by the length of `order`.
    starts: Vec<usize>,
    /// See [`Topology::levels`].
    levels: Vec<TopologyLevel>,
    /// The position of each PU, indexed by PU number.
    index: Vec<PuPosition>,
    /// See [`Topology::details`].
    details: MachineDetails,
}

/// Prints the parts without the index, which is computed from the parts.
impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domains, cores, details, .. } = self;
        let mut shown = f.debug_struct("Machine");
        shown.field("domains", domains).field("cores", cores).field("details", details).finish()
    }
}

/// The position of a PU: indexes into `cores` and `domains`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct PuPosition {
    core: Option<u32>,
    /// The domain of each level below [`TopologyLevel::Machine`], in the order of [`TopologyLevel`].
    domains: [Option<u32>; 3],
}

impl PuPosition {
    fn domain(&self, level: TopologyLevel) -> Option<u32> {
        self.domains.get(level as usize).copied().flatten()
    }
}

/// The serialised form of a topology.
#[derive(Serialize, Deserialize)]
struct Parts {
    domains: Vec<TopologyDomain>,
    cores: Vec<Core>,
    #[serde(default, rename = "fittings")]
    details: MachineDetails,
}

impl TryFrom<Parts> for Topology {
    type Error = TopologyError;

    fn try_from(parts: Parts) -> Result<Self, TopologyError> {
        Ok(Self::new(parts.cores, parts.domains)?.with_details(parts.details))
    }
}

impl From<Topology> for Parts {
    fn from(topology: Topology) -> Self {
        let Machine { domains, cores, details, .. } = &*topology.0;
        Self { domains: domains.clone(), cores: cores.clone(), details: details.clone() }
    }
}

/// The reason why [`Topology::new`] can't build a topology: no core has a PU (logical CPU), or two cores have the same
/// PU.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TopologyError {
    /// No core has a PU.
    #[error("the topology has no core with an online PU")]
    Empty,
    /// The same PU is in two cores.
    #[error("PU {pu} is in two cores")]
    PuInTwoCores {
        /// The PU that is in two cores.
        pu: Pu,
    },
}

/// The shape of a regular machine, given by five counts: packages, NUMA nodes per package, L3s per NUMA node, cores per
/// L3, and PUs (logical CPUs) per core. Used in tests and for capacity planning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegularShape {
    /// The number of packages (sockets) of the machine.
    pub packages: u32,
    /// The number of NUMA nodes in each package.
    pub numa_nodes_per_package: u32,
    /// The number of L3 caches in each NUMA node.
    pub l3s_per_numa_node: u32,
    /// The number of cores that share each L3 cache.
    pub cores_per_l3: u32,
    /// The number of PUs (hardware threads) of each core.
    pub pus_per_core: u32,
}

impl Topology {
    /// Builds a topology from `cores` and `domains` (L3s, NUMA nodes and packages), both in hwloc's logical order.
    /// Cores without PUs (logical CPUs) are ignored.
    ///
    /// Several domains of one level may contain the same PU, for example a NUMA node of fast memory and a NUMA node of
    /// slow memory. The PU then belongs to the domain with the fewest PUs. If several of these domains have the fewest
    /// PUs, the PU belongs to the first of them.
    ///
    /// # Errors
    /// If no core has a PU, or if two cores have the same PU.
    pub fn new(mut cores: Vec<Core>, mut domains: Vec<TopologyDomain>) -> Result<Self, TopologyError> {
        cores.retain(|core| !core.pus.is_empty());
        let mut cpus = CpuSet::new();
        let mut order = Vec::new();
        let mut starts = vec![0];
        for core in &cores {
            for pu in core.pus.iter() {
                if !cpus.insert(pu) {
                    return Err(TopologyError::PuInTwoCores { pu });
                }
                order.push(pu);
            }
            starts.push(order.len());
        }
        let Some(last) = cpus.last() else { return Err(TopologyError::Empty) };
        domains.retain(|domain| domain.level != TopologyLevel::Machine);
        domains.sort_by_key(|domain| domain.level);
        let mut index = vec![PuPosition::default(); last.0 as usize + 1];
        for (core_index, core) in (0..).zip(&cores) {
            for pu in core.pus.iter() {
                index[pu.0 as usize].core = Some(core_index);
            }
        }
        // A PU belongs to the smallest domain of a level that contains it.
        let mut smallest_first: Vec<(u32, &TopologyDomain)> = (0..).zip(&domains).collect();
        smallest_first.sort_by_key(|(_, domain)| domain.cpus.len());
        for (domain_index, domain) in smallest_first {
            for pu in domain.cpus.iter() {
                let entry = index.get_mut(pu.0 as usize).filter(|entry| entry.core.is_some());
                if let Some(slot) = entry.and_then(|entry| entry.domains.get_mut(domain.level as usize)) {
                    slot.get_or_insert(domain_index);
                }
            }
        }
        let levels = sort_levels_by_size(&domains, &index);
        let details = MachineDetails::default();
        Ok(Self(Arc::new(Machine { domains, cores, order, cpus, starts, levels, index, details })))
    }

    /// Replaces the details of the machine by `details`, and returns the topology. The details are the dies, the kinds
    /// of core, the PCI devices, and the PUs (logical CPUs) that can't be used.
    #[must_use]
    pub fn with_details(mut self, details: MachineDetails) -> Self {
        Arc::make_mut(&mut self.0).details = details;
        self
    }

    /// Builds the topology of a regular machine. PUs (logical CPUs) are numbered as on x86: first the first PU of every
    /// core, then the second PU of every core, and so on. If the shape has no cores, the result is a machine with one
    /// core and one PU.
    #[must_use]
    pub fn from_shape(shape: RegularShape) -> Self {
        let cores_total =
            shape.packages * shape.numa_nodes_per_package * shape.l3s_per_numa_node * shape.cores_per_l3;
        let pus_of = |core: u32| -> CpuSet {
            (0..shape.pus_per_core).map(|sibling| Pu(sibling * cores_total + core)).collect()
        };
        let cores: Vec<Core> =
            (0..cores_total).map(|core| Core { pus: pus_of(core), kind_index: 0 }).collect();
        let mut domains = Vec::new();
        let mut add_domains = |level, size: u32| {
            for number in 0..cores_total / size.max(1) {
                let cpus = (number * size..(number + 1) * size)
                    .flat_map(|core| pus_of(core).iter().collect::<Vec<_>>())
                    .collect();
                let memory_bytes = if level == TopologyLevel::NumaNode { 16 << 30 } else { 0 };
                domains.push(TopologyDomain { level, number, cpus, memory_bytes });
            }
        };
        add_domains(TopologyLevel::L3, shape.cores_per_l3);
        add_domains(TopologyLevel::NumaNode, shape.cores_per_l3 * shape.l3s_per_numa_node);
        add_domains(
            TopologyLevel::Package,
            shape.cores_per_l3 * shape.l3s_per_numa_node * shape.numa_nodes_per_package,
        );
        Self::new(cores, domains).unwrap_or_else(|_| Self::single())
    }

    /// Returns the smallest topology: one core with one PU. Also used for a [`RegularShape`] without cores.
    fn single() -> Self {
        let index = vec![PuPosition { core: Some(0), ..PuPosition::default() }];
        let cores = vec![Core { pus: Pu(0).into(), kind_index: 0 }];
        let (order, starts, levels) = (vec![Pu(0)], vec![0, 1], Vec::new());
        Self(Arc::new(Machine {
            domains: Vec::new(),
            cores,
            order,
            cpus: Pu(0).into(),
            starts,
            levels,
            index,
            details: MachineDetails::default(),
        }))
    }

    /// Returns the levels (L3, NUMA node, package) that this machine has, from the level with the largest groups of
    /// cores to the level with the smallest. For example, L3 is missing on a machine without L3 caches. The order
    /// differs between machines: usually a package contains NUMA nodes, but on some machines a NUMA node contains
    /// packages.
    #[must_use]
    pub fn levels(&self) -> &[TopologyLevel] {
        &self.0.levels
    }

    /// Iterates over the domains (L3 caches, NUMA nodes or packages) of one level, in hwloc's logical order. Yields
    /// nothing for [`TopologyLevel::Machine`].
    pub fn domains(&self, level: TopologyLevel) -> impl Iterator<Item = &TopologyDomain> {
        self.0.domains.iter().filter(move |domain| domain.level == level)
    }

    /// Returns the details of the machine: dies, kinds of core, PCI devices, the offline PUs (logical CPUs), and the
    /// PUs outside of the cpuset of the process that read the topology.
    #[must_use]
    pub fn details(&self) -> &MachineDetails {
        &self.0.details
    }

    /// Returns the device that has `name_or_address` as a name or as its PCI address. `None` if the machine has
    /// no such device.
    #[must_use]
    pub fn device_by_name(&self, name_or_address: &str) -> Option<&Device> {
        self.0.details.devices.iter().find(|device| device.has_name(name_or_address))
    }

    /// Returns the PUs (logical CPUs) that belong to `domain` (an L3, NUMA node or package). These are the PUs for
    /// which [`Topology::domain_of`] returns `domain`.
    ///
    /// Two domains of the same level may contain the same PU, for example a NUMA node of fast memory and a
    /// NUMA node of slow memory. The PU belongs to one of them only. The result is therefore empty for a NUMA
    /// node whose PUs all belong to other NUMA nodes.
    #[must_use]
    pub fn cpus_belonging_to(&self, domain: &TopologyDomain) -> CpuSet {
        let here = |&pu: &Pu| self.domain_of(domain.level, pu).is_some_and(|own| own.number == domain.number);
        domain.cpus.iter().filter(here).collect()
    }

    /// Returns the domain (L3 cache, NUMA node or package) of `level` to which the PU (logical CPU) `pu` belongs.
    /// `None` if no domain of this level contains `pu`, and for [`TopologyLevel::Machine`].
    ///
    /// If several domains of this level contain `pu`, the PU belongs to the domain with the fewest PUs. If several
    /// domains have the fewest PUs, the PU belongs to the first of them in hwloc's logical order.
    #[must_use]
    pub fn domain_of(&self, level: TopologyLevel, pu: Pu) -> Option<&TopologyDomain> {
        self.0.domains.get(self.domain_index(level, pu)? as usize)
    }

    /// Returns the domain of `level` to which the PU (logical CPU) `pu` belongs, as an index into the list of all
    /// domains (L3 caches, NUMA nodes and packages) of the machine. `None` if no domain of this level contains `pu`.
    /// Comparing indexes is cheaper than comparing domains.
    pub(crate) fn domain_index(&self, level: TopologyLevel, pu: Pu) -> Option<u32> {
        self.0.index.get(pu.0 as usize)?.domain(level)
    }

    /// Returns the domain (L3 cache, NUMA node or package) with the index `index`, as returned by
    /// [`Topology::domain_index`]. `None` if the machine has no domain with this index.
    pub(crate) fn domain_by_index(&self, index: u32) -> Option<&TopologyDomain> {
        self.0.domains.get(index as usize)
    }

    /// Returns the physical cores of the machine, in hwloc's logical order.
    #[must_use]
    pub fn cores(&self) -> &[Core] {
        &self.0.cores
    }

    /// Iterates over the cores in hwloc's logical order. Each item is the list of the PUs (logical CPUs) of one core.
    pub fn pus_by_core(&self) -> impl Iterator<Item = &[Pu]> {
        self.0.starts.windows(2).map(|ends| &self.0.order[ends[0]..ends[1]])
    }

    /// Returns all PUs (logical CPUs) of the machine, core by core, in hwloc's logical order.
    #[must_use]
    pub fn pus_in_logical_order(&self) -> &[Pu] {
        &self.0.order
    }

    /// Returns the set of all PUs (logical CPUs) of the machine. PUs that were offline when the topology was read are
    /// not included.
    #[must_use]
    pub fn cpus(&self) -> &CpuSet {
        &self.0.cpus
    }

    /// Returns the PUs (logical CPUs) of the core to which `pu` belongs, `pu` included. Empty if the machine does not
    /// have the PU `pu`.
    #[must_use]
    pub fn core_cpus(&self, pu: Pu) -> CpuSet {
        let core = self.0.index.get(pu.0 as usize).and_then(|entry| entry.core);
        core.and_then(|core| self.0.cores.get(core as usize)).map(|core| core.pus.clone()).unwrap_or_default()
    }

    /// Iterates over the cores of the machine that have at least one PU (logical CPU) in `cpus`, in hwloc's logical
    /// order. For each of these cores, yields the set of those of its PUs that are in `cpus`.
    pub fn split_by_core<'a>(&'a self, cpus: &'a CpuSet) -> impl Iterator<Item = CpuSet> + 'a {
        // A job may call this for its few PUs on a machine of hundreds of cores.
        let core_of = |pu: Pu| self.0.index.get(pu.0 as usize)?.core;
        let mut cores: Vec<_> = cpus.iter().filter_map(core_of).collect();
        cores.sort_unstable();
        cores.dedup();
        let cores = cores.into_iter().filter_map(|core| self.0.cores.get(core as usize));
        cores.map(|core| core.pus.intersection(cpus))
    }

    /// Returns the number of cores whose PUs (logical CPUs) are all in `cpus`.
    #[must_use]
    pub fn whole_core_count(&self, cpus: &CpuSet) -> u32 {
        let whole = self.pus_by_core().filter(|pus| pus.iter().all(|&pu| cpus.contains(pu))).count();
        u32::try_from(whole).unwrap_or(u32::MAX)
    }

    /// Returns the number of cores that have at least one PU (logical CPU) in `cpus`.
    #[must_use]
    pub fn overlapping_core_count(&self, cpus: &CpuSet) -> u32 {
        let mut cores: Vec<u32> =
            cpus.iter().filter_map(|pu| self.0.index.get(pu.0 as usize)?.core).collect();
        cores.sort_unstable();
        cores.dedup();
        u32::try_from(cores.len()).unwrap_or(u32::MAX)
    }

    /// Returns the PUs (logical CPUs) of `cpus` in hwloc's logical order, so that PUs of the same core, L3 and NUMA
    /// node are neighbours in the list. PUs that the machine does not have are omitted.
    #[must_use]
    pub fn sort_in_logical_order(&self, cpus: &CpuSet) -> Vec<Pu> {
        self.0.order.iter().copied().filter(|&pu| cpus.contains(pu)).collect()
    }

    /// Returns the PUs (logical CPUs) of `cpus`, sorted so that one PU of every core comes before the second PU of any
    /// core. If threads are pinned to PUs in this order, two threads share a core only if there are more threads than
    /// cores. PUs that the machine does not have are omitted.
    #[must_use]
    pub fn sort_one_per_core_first(&self, cpus: &CpuSet) -> Vec<Pu> {
        let mut ranked: Vec<(usize, usize, Pu)> = Vec::new();
        for (index, pus) in self.pus_by_core().enumerate() {
            let inside = pus.iter().copied().filter(|&pu| cpus.contains(pu));
            ranked.extend(inside.enumerate().map(|(sibling, pu)| (sibling, index, pu)));
        }
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, _, pu)| pu).collect()
    }
}

/// Returns the levels that have PUs, the level with the largest domains first. `domains` has all domains (packages,
/// NUMA nodes and L3 caches), and `index` the position of each PU. To compare two levels, each PU is counted with the
/// size of its domain, and these sizes are summed. A PU in no domain of a level is counted with its domain of the
/// next larger level. So a level that lies inside another one always comes after it.
fn sort_levels_by_size(domains: &[TopologyDomain], index: &[PuPosition]) -> Vec<TopologyLevel> {
    let mut sizes = vec![0u64; domains.len()];
    // For each PU, the size of its domain at the last level at which it has one. At first, the size of the machine.
    let mut sizes_around = vec![index.len() as u64; index.len()];
    let mut levels: Vec<(u64, TopologyLevel)> = Vec::new();
    for level in [TopologyLevel::Package, TopologyLevel::NumaNode, TopologyLevel::L3] {
        let domain_indices: Vec<Option<u32>> = index.iter().map(|entry| entry.domain(level)).collect();
        if domain_indices.iter().all(Option::is_none) {
            continue;
        }
        domain_indices.iter().flatten().for_each(|&domain| sizes[domain as usize] += 1);
        for (domain, size_around) in domain_indices.iter().zip(&mut sizes_around) {
            *size_around = domain.map_or(*size_around, |domain| sizes[domain as usize]);
        }
        let on_machine = index.iter().zip(&sizes_around).filter(|(entry, _)| entry.core.is_some());
        levels.push((on_machine.map(|(_, size)| size).sum(), level));
    }
    levels.sort_by_key(|&(size, level)| (core::cmp::Reverse(size), core::cmp::Reverse(level)));
    levels.into_iter().map(|(_, level)| level).collect()
}

#[cfg(test)]
mod tests;
