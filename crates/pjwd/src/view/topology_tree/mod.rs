//! The topology as a tree, for `topology --json` and the drawings.
//!
//! The nesting follows the machine. Usually packages contain NUMA nodes and NUMA nodes contain L3s. But a node may
//! contain packages, and an L3 may span nodes. Each core is in the tree once. A NUMA node that is the nearest node of
//! no PU (high-bandwidth memory, CXL memory) is a leaf beside the parts near it.

use std::collections::BTreeSet;

use pjw_core::cpuset::CpuSet;
use pjw_core::devices::{CoreKind, Device, Die};
use pjw_core::topology::{Core, Topology, TopologyDomain, TopologyLevel};
use pjw_ipc::wire;

use super::to_wire::saturating_u32;

/// A domain or a die, with the PUs that belong to it.
struct Part {
    kind: &'static str,
    number: u32,
    cpus: CpuSet,
    memory_bytes: u64,
}

/// Converts the topology of the machine to the tree of packages, NUMA nodes, caches and cores that clients receive.
/// The tree does not have the numbers of free cores. [`add_free_core_counts`] adds these numbers.
#[must_use]
pub fn topology_to_wire(topology: &Topology) -> wire::Topology {
    let devices = topology.details();
    let count_with_pus =
        |level| saturating_u32(topology.domains(level).filter(|domain| !domain.cpus.is_empty()).count());
    let kinds: BTreeSet<u32> = topology.cores().iter().map(|core| core.kind_index).collect();
    let smt: BTreeSet<u32> = topology.cores().iter().map(|core| saturating_u32(core.pus.len())).collect();
    let parts_by_level = parts_by_level(topology);
    let levels: Vec<&[Part]> = parts_by_level.iter().map(Vec::as_slice).collect();
    let mut tree = subtrees(topology, topology.cpus(), &levels);
    let memory_nodes = memory_nodes(topology);
    for node in &memory_nodes {
        insert_memory_node(node, &mut tree);
    }
    wire::Topology {
        packages: count_with_pus(TopologyLevel::Package),
        dies: saturating_u32(devices.dies.len()),
        numa_nodes: count_with_pus(TopologyLevel::NumaNode),
        memory_nodes: saturating_u32(memory_nodes.len()),
        l3: count_with_pus(TopologyLevel::L3),
        cores: saturating_u32(topology.cores().len()),
        pus: saturating_u32(topology.cpus().len()),
        smt: smt.into_iter().collect(),
        kinds: saturating_u32(kinds.len().max(devices.core_kinds.len())),
        core_kinds: if devices.core_kinds.len() > 1 {
            devices.core_kinds.iter().map(core_kind_to_wire).collect()
        } else {
            Vec::new()
        },
        cpus: topology.cpus().to_string(),
        offline: devices.unavailable_pus.to_string(),
        disallowed: devices.disallowed_pus.to_string(),
        devices: devices.devices.iter().map(device_to_wire).collect(),
        fits: None,
        tree,
    }
}

/// Returns `topology` with the number of free cores of each part of the machine, such as a package or an L3 cache. A
/// core is free if all its online PUs (hardware threads) are free. `pool` says which PUs are free, granted to jobs or
/// reserved for the system. `fits` has the sizes of the largest requests for cores that can be served, and is copied
/// into the field `fits` of the result.
#[must_use]
pub fn add_free_core_counts(
    mut topology: wire::Topology,
    fits: &wire::Fits,
    pool: &wire::Pool,
) -> wire::Topology {
    let parse = |list: &str| list.parse::<CpuSet>().unwrap_or_default();
    let free = parse(&pool.free);
    let online = free.union(&parse(&pool.housekeeping)).union(&parse(&pool.allocated));
    topology.fits = Some(fits.clone());
    for part in &mut topology.tree {
        set_free_cores(part, &free, &online);
    }
    topology
}

/// Sets the number of free cores of a part and its children, and returns the number for the part. A core is free if
/// it has an online PU and all its online PUs are in `free`. `online` has the online PUs.
fn set_free_cores(part: &mut wire::Domain, free: &CpuSet, online: &CpuSet) -> u32 {
    let cores = if part.kind == "core" {
        let online_pus = part.cpus.parse::<CpuSet>().unwrap_or_default().intersection(online);
        u32::from(!online_pus.is_empty() && online_pus.is_subset(free))
    } else {
        part.children.iter_mut().map(|child| set_free_cores(child, free, online)).sum()
    };
    part.fits = Some(cores);
    cores
}

/// Returns the parts of the machine that have PUs, such as packages and caches. The result has one list for each
/// level, the level with the largest parts first.
fn parts_by_level(topology: &Topology) -> Vec<Vec<Part>> {
    let mut levels: Vec<Vec<Part>> = Vec::new();
    for &level in topology.levels() {
        let to_part = |domain| domain_part(domain, topology.cpus_belonging_to(domain));
        levels.push(topology.domains(level).map(to_part).filter(|part| !part.cpus.is_empty()).collect());
        if level == TopologyLevel::Package {
            let die_part =
                |die: &Die| Part { kind: "die", number: die.number, cpus: die.cpus.clone(), memory_bytes: 0 };
            levels.push(topology.details().dies.iter().map(die_part).collect());
        }
    }
    levels
}

/// Returns the NUMA nodes without PUs of their own, with the PUs near them.
fn memory_nodes(topology: &Topology) -> Vec<Part> {
    let without_pus =
        topology.domains(TopologyLevel::NumaNode).filter(|node| topology.cpus_belonging_to(node).is_empty());
    without_pus.map(|node| domain_part(node, node.cpus.clone())).collect()
}

fn domain_part(domain: &TopologyDomain, cpus: CpuSet) -> Part {
    Part { kind: domain.level.into(), number: domain.number, cpus, memory_bytes: domain.memory_bytes }
}

/// Returns subtrees that together contain the cores of the PUs in `cpus`. `levels` has the parts of the machine by
/// level, the largest parts first, such as packages, then NUMA nodes, then L3 caches.
///
/// - Each part of the first level that contains some of the PUs becomes the root of a subtree. The next levels give its
///   children.
/// - PUs that are in no part of the first level follow, in subtrees of the next levels.
/// - If `levels` is empty, each core is a subtree of its own.
fn subtrees(topology: &Topology, cpus: &CpuSet, levels: &[&[Part]]) -> Vec<wire::Domain> {
    let Some((&level, lower_levels)) = levels.split_first() else { return core_domains(topology, cpus) };
    let mut remaining = cpus.clone();
    let mut trees = Vec::new();
    for part in level {
        let part_cpus = part.cpus.intersection(&remaining);
        if part_cpus.is_empty() {
            continue;
        }
        remaining = remaining.difference(&part_cpus);
        let children = subtrees(topology, &part_cpus, lower_levels);
        trees.push(wire::Domain { children, ..part_to_wire(part, &part_cpus) });
    }
    if !remaining.is_empty() {
        trees.extend(subtrees(topology, &remaining, lower_levels));
    }
    trees
}

/// Inserts `node`, a NUMA node without PUs of its own, into `tree`. The node becomes a child of the smallest part
/// that contains all PUs near the node. There, it follows the last child that has such PUs. If no part contains all
/// these PUs, the node is inserted at the top level.
fn insert_memory_node(node: &Part, tree: &mut Vec<wire::Domain>) {
    let cpus = |part: &wire::Domain| part.cpus.parse::<CpuSet>().unwrap_or_default();
    let can_contain_node = |part: &wire::Domain| {
        let has_parts = part.children.iter().any(|child| child.kind != "core");
        let is_equal = part.kind == "numa_node" && cpus(part) == node.cpus;
        has_parts && !is_equal && !node.cpus.is_empty() && node.cpus.is_subset(&cpus(part))
    };
    if let Some(at) = tree.iter().position(can_contain_node) {
        return insert_memory_node(node, &mut tree[at].children);
    }
    let is_near = |part: &wire::Domain| node.cpus.intersects(&cpus(part));
    let index = tree.iter().rposition(is_near).map_or(tree.len(), |at| at + 1);
    tree.insert(index, part_to_wire(node, &node.cpus));
}

fn part_to_wire(part: &Part, cpus: &CpuSet) -> wire::Domain {
    wire::Domain {
        kind: part.kind.to_owned(),
        number: part.number,
        cpus: cpus.to_string(),
        memory_bytes: part.memory_bytes,
        ..wire::Domain::default()
    }
}

/// Returns the cores whose first PU is in `cpus`, in the form for the tree.
fn core_domains(topology: &Topology, cpus: &CpuSet) -> Vec<wire::Domain> {
    let has_several_kinds = topology.details().core_kinds.len() > 1;
    let is_included = |core: &Core| core.pus.first().is_some_and(|pu| cpus.contains(pu));
    let included = (0..).zip(topology.cores()).filter(|(_, core)| is_included(core));
    included
        .map(|(number, core)| wire::Domain {
            kind: "core".to_owned(),
            number,
            cpus: core.pus.to_string(),
            core_kind: has_several_kinds.then_some(core.kind_index),
            ..wire::Domain::default()
        })
        .collect()
}

fn core_kind_to_wire(kind: &CoreKind) -> wire::CoreKind {
    wire::CoreKind { name: kind.name.clone(), cpus: kind.cpus.to_string() }
}

fn device_to_wire(device: &Device) -> wire::Device {
    wire::Device {
        class: device.class.name().to_owned(),
        names: device.names.clone(),
        address: device.pci_address.clone(),
        model: device.model.clone(),
        cpus: device.local_cpus.to_string(),
        numa_nodes: device.numa_nodes.clone(),
    }
}

#[cfg(test)]
mod tests;
