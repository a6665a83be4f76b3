//! The machine as a tree: package > NUMA node > L3 > core > PU, and its questions.
//!
//! The tree is told by sets: a domain is a level, a number and the PUs below it, so machines where NUMA nodes
//! hold packages or L3s span nodes need no special case. Cores are listed in the machine's order (hwloc's
//! logical order): neighbours in the list are neighbours in the silicon, whatever the kernel numbered them.
//!
//! Questions about one PU are answered from an index that is made once; a copy of a topology shares it.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cpuset::{CpuSet, Pu};

pub mod fittings;

use fittings::{Device, Fittings};

/// The levels at which a machine is divided, in the order in which they are usually nested, smallest first.
/// What a given machine does is told by [`Topology::levels`].
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

impl Level {
    /// What a domain of this level is called in a sentence.
    #[must_use]
    pub fn noun(self) -> &'static str {
        match self {
            Level::L3 => "L3",
            Level::NumaNode => "NUMA node",
            Level::Package => "package",
            Level::Machine => "machine",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.noun())
    }
}

impl Domain {
    /// Its name in a sentence: `L3#2`, `NUMA node 1`, `package 0`.
    #[must_use]
    pub fn name(&self) -> String {
        match self.level {
            Level::L3 => format!("L3#{}", self.number),
            level => format!("{level} {}", self.number),
        }
    }
}

/// A machine. Copies are cheap: they share one description.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Parts", into = "Parts")]
pub struct Topology(Arc<Machine>);

#[derive(Clone, PartialEq, Eq)]
struct Machine {
    /// Packages, NUMA nodes and L3s, by level and then in the machine's order. Memory-only nodes have no PUs.
    domains: Vec<Domain>,
    /// In the machine's order.
    cores: Vec<Core>,
    /// Every PU, core by core.
    order: Vec<Pu>,
    cpus: CpuSet,
    /// Where each core's PUs begin in `order`, and after them where the last one's end.
    starts: Vec<usize>,
    /// See [`Topology::levels`].
    levels: Vec<Level>,
    /// By PU number.
    index: Vec<Whereabouts>,
    /// See [`Topology::fittings`].
    fittings: Fittings,
}

/// Without the index, which says nothing that the parts don't.
impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domains, cores, fittings, .. } = self;
        let mut shown = f.debug_struct("Machine");
        shown.field("domains", domains).field("cores", cores).field("fittings", fittings).finish()
    }
}

/// Where a PU is: places in `cores` and in `domains`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Whereabouts {
    core: Option<u32>,
    l3: Option<u32>,
    numa_node: Option<u32>,
    package: Option<u32>,
}

impl Whereabouts {
    fn domain(&mut self, level: Level) -> Option<&mut Option<u32>> {
        match level {
            Level::L3 => Some(&mut self.l3),
            Level::NumaNode => Some(&mut self.numa_node),
            Level::Package => Some(&mut self.package),
            Level::Machine => None,
        }
    }
}

/// What a machine is made of: the written form of a topology.
#[derive(Serialize, Deserialize)]
struct Parts {
    domains: Vec<Domain>,
    cores: Vec<Core>,
    #[serde(default)]
    fittings: Fittings,
}

impl TryFrom<Parts> for Topology {
    type Error = TopologyError;

    fn try_from(parts: Parts) -> Result<Self, TopologyError> {
        Ok(Self::new(parts.cores, parts.domains)?.with(parts.fittings))
    }
}

impl From<Topology> for Parts {
    fn from(topology: Topology) -> Self {
        let Machine { domains, cores, fittings, .. } = &*topology.0;
        Self { domains: domains.clone(), cores: cores.clone(), fittings: fittings.clone() }
    }
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
    /// Makes a machine of its cores, in the machine's order, and its domains. Where several domains of a level
    /// have a PU in common (nodes of fast and of slow memory), the smallest counts as the PU's, the first of
    /// equal ones: memory that hangs on a whole package is nobody's home where a die has memory of its own.
    ///
    /// # Errors
    /// If there is no core with a PU, or a PU is in two.
    pub fn new(mut cores: Vec<Core>, mut domains: Vec<Domain>) -> Result<Self, TopologyError> {
        cores.retain(|core| !core.pus.is_empty());
        let mut cpus = CpuSet::new();
        let mut order = Vec::new();
        let mut starts = vec![0];
        for core in &cores {
            for pu in core.pus.iter() {
                if !cpus.insert(pu) {
                    return Err(TopologyError::TwoCores { pu });
                }
                order.push(pu);
            }
            starts.push(order.len());
        }
        let Some(last) = cpus.last() else { return Err(TopologyError::Empty) };
        domains.retain(|domain| domain.level != Level::Machine);
        domains.sort_by_key(|domain| domain.level);
        let mut index = vec![Whereabouts::default(); last.0 as usize + 1];
        for (core, pus) in (0..).zip(&cores) {
            for pu in pus.pus.iter() {
                index[pu.0 as usize].core = Some(core);
            }
        }
        let mut claims: Vec<(u32, &Domain)> = (0..).zip(&domains).collect();
        claims.sort_by_key(|(_, domain)| domain.cpus.len());
        for (at, domain) in claims {
            for pu in domain.cpus.iter() {
                let entry = index.get_mut(pu.0 as usize).filter(|entry| entry.core.is_some());
                if let Some(place) = entry.and_then(|entry| entry.domain(domain.level)) {
                    place.get_or_insert(at);
                }
            }
        }
        let levels = nesting(&domains, &index);
        let fittings = Fittings::default();
        Ok(Self(Arc::new(Machine { domains, cores, order, cpus, starts, levels, index, fittings })))
    }

    /// The same machine with these fittings.
    #[must_use]
    pub fn with(mut self, fittings: Fittings) -> Self {
        let machine = Arc::make_mut(&mut self.0);
        machine.fittings = fittings;
        self
    }

    /// A regular machine whose PUs are numbered as x86 firmware does: first every core's first PU, then every
    /// core's second.
    #[must_use]
    pub fn regular(shape: Regular) -> Self {
        let cores_total = shape.packages * shape.numa_per_package * shape.l3_per_numa * shape.cores_per_l3;
        let pus_of = |core: u32| -> CpuSet {
            (0..shape.pus_per_core).map(|sibling| Pu(sibling * cores_total + core)).collect()
        };
        let cores: Vec<Core> = (0..cores_total).map(|core| Core { pus: pus_of(core), kind: 0 }).collect();
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
        Self::new(cores, domains).unwrap_or_else(|_| Self::single())
    }

    /// One core with one PU and nothing else: the least a machine can be, and what a regular one without any
    /// core is taken for.
    fn single() -> Self {
        let index = vec![Whereabouts { core: Some(0), ..Whereabouts::default() }];
        let cores = vec![Core { pus: Pu(0).into(), kind: 0 }];
        let (order, starts, levels) = (vec![Pu(0)], vec![0, 1], Vec::new());
        Self(Arc::new(Machine {
            domains: Vec::new(),
            cores,
            order,
            cpus: Pu(0).into(),
            starts,
            levels,
            index,
            fittings: Fittings::default(),
        }))
    }

    /// The levels that this machine has, largest domains first. Usually packages hold NUMA nodes and those
    /// hold L3s, but nodes may hold packages, and an L3 may span nodes.
    #[must_use]
    pub fn levels(&self) -> &[Level] {
        &self.0.levels
    }

    /// The domains of one level, in the machine's order.
    pub fn domains(&self, level: Level) -> impl Iterator<Item = &Domain> {
        self.0.domains.iter().filter(move |domain| domain.level == level)
    }

    /// What the machine has beside cores and domains.
    #[must_use]
    pub fn fittings(&self) -> &Fittings {
        &self.0.fittings
    }

    /// The device of that name or PCI address.
    #[must_use]
    pub fn device(&self, name: &str) -> Option<&Device> {
        self.0.fittings.devices.iter().find(|device| device.is_called(name))
    }

    /// The PUs whose domain of that level this is. None for memory that no PU has as its nearest: a NUMA node
    /// without PUs, or a second one beside the node of the same PUs.
    #[must_use]
    pub fn home_of(&self, domain: &Domain) -> CpuSet {
        let here = |&pu: &Pu| self.domain_of(domain.level, pu).is_some_and(|own| own.number == domain.number);
        domain.cpus.iter().filter(here).collect()
    }

    /// The domain of that level that holds `pu`.
    #[must_use]
    pub fn domain_of(&self, level: Level, pu: Pu) -> Option<&Domain> {
        self.0.domains.get(self.place(level, pu)? as usize)
    }

    /// The place of that domain among all domains of the machine: a name for it that is cheap to compare.
    pub(crate) fn place(&self, level: Level, pu: Pu) -> Option<u32> {
        let mut entry = *self.0.index.get(pu.0 as usize)?;
        *entry.domain(level)?
    }

    /// The domain at a place.
    pub(crate) fn domain_at(&self, place: u32) -> Option<&Domain> {
        self.0.domains.get(place as usize)
    }

    /// The cores, in the machine's order.
    #[must_use]
    pub fn cores(&self) -> &[Core] {
        &self.0.cores
    }

    /// The PUs of each core, core by core in the machine's order.
    pub fn pus_by_core(&self) -> impl Iterator<Item = &[Pu]> {
        self.0.starts.windows(2).map(|ends| &self.0.order[ends[0]..ends[1]])
    }

    /// Every PU in the machine's order: core by core, siblings together.
    #[must_use]
    pub fn order(&self) -> &[Pu] {
        &self.0.order
    }

    /// Every PU.
    #[must_use]
    pub fn cpus(&self) -> &CpuSet {
        &self.0.cpus
    }

    /// The siblings of `pu` on its core, itself included; empty if it is not on this machine.
    #[must_use]
    pub fn core_of(&self, pu: Pu) -> CpuSet {
        let core = self.0.index.get(pu.0 as usize).and_then(|entry| entry.core);
        core.and_then(|core| self.0.cores.get(core as usize)).map(|core| core.pus.clone()).unwrap_or_default()
    }

    /// How many whole cores lie inside `cpus`.
    #[must_use]
    pub fn whole_cores_in(&self, cpus: &CpuSet) -> u32 {
        let whole = self.pus_by_core().filter(|pus| pus.iter().all(|&pu| cpus.contains(pu))).count();
        u32::try_from(whole).unwrap_or(u32::MAX)
    }

    /// How many cores have a PU in `cpus`.
    #[must_use]
    pub fn cores_touched_by(&self, cpus: &CpuSet) -> u32 {
        let mut cores: Vec<u32> =
            cpus.iter().filter_map(|pu| self.0.index.get(pu.0 as usize)?.core).collect();
        cores.sort_unstable();
        cores.dedup();
        u32::try_from(cores.len()).unwrap_or(u32::MAX)
    }

    /// The PUs of `cpus` in the machine's order.
    #[must_use]
    pub fn ordered(&self, cpus: &CpuSet) -> Vec<Pu> {
        self.0.order.iter().copied().filter(|&pu| cpus.contains(pu)).collect()
    }

    /// The PUs of `cpus` such that one PU of every core comes before a second of any: the order in which
    /// running threads are spread.
    #[must_use]
    pub fn cores_first(&self, cpus: &CpuSet) -> Vec<Pu> {
        let mut ranked: Vec<(usize, usize, Pu)> = Vec::new();
        for (index, pus) in self.pus_by_core().enumerate() {
            let inside = pus.iter().copied().filter(|&pu| cpus.contains(pu));
            ranked.extend(inside.enumerate().map(|(sibling, pu)| (sibling, index, pu)));
        }
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, _, pu)| pu).collect()
    }
}

/// The levels that have a PU, by the size of the domain that a PU finds itself in, summed over all PUs; one
/// that is in no domain of a level counts as in the next larger one. Nested levels always come out in order.
fn nesting(domains: &[Domain], index: &[Whereabouts]) -> Vec<Level> {
    let mut sizes = vec![0u64; domains.len()];
    let mut around = vec![index.len() as u64; index.len()];
    let mut levels: Vec<(u64, Level)> = Vec::new();
    for level in [Level::Package, Level::NumaNode, Level::L3] {
        let place = |entry: &Whereabouts| entry.clone().domain(level).and_then(|place| *place);
        for at in index.iter().filter_map(place) {
            sizes[at as usize] += 1;
        }
        if !index.iter().any(|entry| place(entry).is_some()) {
            continue;
        }
        for (entry, around) in index.iter().zip(&mut around) {
            *around = place(entry).map_or(*around, |at| sizes[at as usize]);
        }
        let on_machine = index.iter().zip(&around).filter(|(entry, _)| entry.core.is_some());
        levels.push((on_machine.map(|(_, size)| size).sum(), level));
    }
    levels.sort_by_key(|&(size, level)| (std::cmp::Reverse(size), std::cmp::Reverse(level)));
    levels.into_iter().map(|(_, level)| level).collect()
}

#[cfg(test)]
#[path = "topology/tests.rs"]
mod tests;
