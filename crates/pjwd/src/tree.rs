//! The machine as a tree of parts, for `topology --json` and the drawings made of it.
//!
//! Parts are nested as this machine nests them: usually packages hold NUMA nodes and those hold L3s, but a node
//! may hold packages, and an L3 may span nodes. Each core is in the tree once. A NUMA node that is the nearest of
//! no PU (fast memory beside the usual, memory behind a bus) is a leaf beside the parts it is near.

use std::collections::BTreeSet;

use pjw_core::cpuset::CpuSet;
use pjw_core::topology::fittings::{CoreKind, Device, Die};
use pjw_core::topology::{Core, Domain, Level, Topology};
use pjw_ipc::wire;

/// A domain or a die, with the PUs that count as its own.
struct Part {
    kind: &'static str,
    number: u32,
    cpus: CpuSet,
    memory_bytes: u64,
}

/// The machine as it is published.
#[must_use]
pub fn topology_on_the_wire(topology: &Topology) -> wire::Topology {
    let fittings = topology.fittings();
    let inhabited = |level| count(topology.domains(level).filter(|domain| !domain.cpus.is_empty()).count());
    let kinds: BTreeSet<u32> = topology.cores().iter().map(|core| core.kind).collect();
    let smt: BTreeSet<u32> = topology.cores().iter().map(|core| count(core.pus.len())).collect();
    let (levels, memory) = (levels(topology), memory(topology));
    let levels: Vec<&[Part]> = levels.iter().map(Vec::as_slice).collect();
    let mut tree = inside(topology, topology.cpus(), &levels);
    for node in &memory {
        hang(node, &mut tree);
    }
    wire::Topology {
        packages: inhabited(Level::Package),
        dies: count(fittings.dies.len()),
        numa_nodes: inhabited(Level::NumaNode),
        memory_nodes: count(memory.len()),
        l3: inhabited(Level::L3),
        cores: count(topology.cores().len()),
        pus: count(topology.cpus().len()),
        smt: smt.into_iter().collect(),
        kinds: count(kinds.len().max(fittings.kinds.len())),
        core_kinds: fittings.kinds.iter().filter(|_| fittings.kinds.len() > 1).map(kind).collect(),
        cpus: topology.cpus().to_string(),
        offline: fittings.offline.to_string(),
        disallowed: fittings.disallowed.to_string(),
        devices: fittings.devices.iter().map(device).collect(),
        fits: None,
        tree,
    }
}

/// The same tree with what is free now: what fits on each level, and in each part.
#[must_use]
pub fn with_fits(mut topology: wire::Topology, fits: &wire::Fits, pool: &wire::Pool) -> wire::Topology {
    let set = |list: &str| list.parse::<CpuSet>().unwrap_or_default();
    let free = set(&pool.free);
    let running = free.union(&set(&pool.housekeeping)).union(&set(&pool.allocated));
    topology.fits = Some(fits.clone());
    for part in &mut topology.tree {
        count_free(part, &free, &running);
    }
    topology
}

/// A core is free if every PU of it that runs is.
fn count_free(part: &mut wire::Domain, free: &CpuSet, running: &CpuSet) -> u32 {
    let cores = if part.kind == "core" {
        let here = part.cpus.parse::<CpuSet>().unwrap_or_default().intersection(running);
        u32::from(!here.is_empty() && here.is_subset(free))
    } else {
        part.children.iter_mut().map(|child| count_free(child, free, running)).sum()
    };
    part.fits = Some(cores);
    cores
}

/// The parts that have cores, level by level, largest first.
fn levels(topology: &Topology) -> Vec<Vec<Part>> {
    let mut levels: Vec<Vec<Part>> = Vec::new();
    for &level in topology.levels() {
        let home = |domain| part(domain, topology.home_of(domain));
        levels.push(topology.domains(level).map(home).filter(|part| !part.cpus.is_empty()).collect());
        if level == Level::Package {
            let dies = topology.fittings().dies.iter();
            let die =
                |die: &Die| Part { kind: "die", number: die.number, cpus: die.cpus.clone(), memory_bytes: 0 };
            levels.push(dies.map(die).collect());
        }
    }
    levels
}

/// The NUMA nodes that are memory alone, with the PUs near them.
fn memory(topology: &Topology) -> Vec<Part> {
    let alone = topology.domains(Level::NumaNode).filter(|node| topology.home_of(node).is_empty());
    alone.map(|node| part(node, node.cpus.clone())).collect()
}

fn part(domain: &Domain, cpus: CpuSet) -> Part {
    Part { kind: kind_of(domain.level), number: domain.number, cpus, memory_bytes: domain.memory_bytes }
}

fn kind_of(level: Level) -> &'static str {
    match level {
        Level::L3 => "l3",
        Level::NumaNode => "numa_node",
        Level::Package => "package",
        Level::Machine => "machine",
    }
}

/// The parts of `cpus`, largest first: those of the first of these levels, and what is in none of them.
fn inside(topology: &Topology, cpus: &CpuSet, levels: &[&[Part]]) -> Vec<wire::Domain> {
    let Some((&level, below)) = levels.split_first() else { return cores(topology, cpus) };
    let mut left = cpus.clone();
    let mut found = Vec::new();
    for part in level {
        let mine = part.cpus.intersection(&left);
        if mine.is_empty() {
            continue;
        }
        left = left.difference(&mine);
        found.push(wire::Domain { children: inside(topology, &mine, below), ..on_the_wire(part, &mine) });
    }
    if !left.is_empty() {
        found.extend(inside(topology, &left, below));
    }
    found
}

/// Puts memory as deep into the tree as all the PUs near it are together, behind the parts that it is near.
fn hang(node: &Part, tree: &mut Vec<wire::Domain>) {
    let cpus = |part: &wire::Domain| part.cpus.parse::<CpuSet>().unwrap_or_default();
    let around = |part: &wire::Domain| {
        let has_parts = part.children.iter().any(|child| child.kind != "core");
        let is_equal = part.kind == "numa_node" && cpus(part) == node.cpus;
        has_parts && !is_equal && !node.cpus.is_empty() && node.cpus.is_subset(&cpus(part))
    };
    if let Some(at) = tree.iter().position(around) {
        return hang(node, &mut tree[at].children);
    }
    let near = |part: &wire::Domain| node.cpus.intersects(&cpus(part));
    let place = tree.iter().rposition(near).map_or(tree.len(), |at| at + 1);
    tree.insert(place, on_the_wire(node, &node.cpus));
}

fn on_the_wire(part: &Part, cpus: &CpuSet) -> wire::Domain {
    wire::Domain {
        kind: part.kind.to_owned(),
        number: part.number,
        cpus: cpus.to_string(),
        memory_bytes: part.memory_bytes,
        ..wire::Domain::default()
    }
}

fn cores(topology: &Topology, cpus: &CpuSet) -> Vec<wire::Domain> {
    let several = topology.fittings().kinds.len() > 1;
    let is_here = |core: &Core| core.pus.first().is_some_and(|pu| cpus.contains(pu));
    let here = (0..).zip(topology.cores()).filter(|(_, core)| is_here(core));
    here.map(|(number, core)| wire::Domain {
        kind: "core".to_owned(),
        number,
        cpus: core.pus.to_string(),
        core_kind: several.then_some(core.kind),
        ..wire::Domain::default()
    })
    .collect()
}

fn kind(kind: &CoreKind) -> wire::CoreKind {
    wire::CoreKind { name: kind.name.clone(), cpus: kind.cpus.to_string() }
}

fn device(device: &Device) -> wire::Device {
    wire::Device {
        class: device.class.name().to_owned(),
        names: device.names.clone(),
        address: device.address.clone(),
        model: device.model.clone(),
        cpus: device.cpus.to_string(),
        numa_nodes: device.numa_nodes.clone(),
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[path = "tree/tests.rs"]
mod tests;
