//! The machine as a tree of parts, for `topology --json`.

use pjw_core::cpuset::CpuSet;
use pjw_core::topology::{Level, Topology};
use pjw_ipc::wire;

const LEVELS: [(Level, &str); 3] =
    [(Level::Package, "package"), (Level::NumaNode, "numa_node"), (Level::L3, "l3")];

/// The machine as it is published.
#[must_use]
pub fn topology_on_the_wire(topology: &Topology) -> wire::Topology {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let count = |level| number(topology.domains(level).count());
    let mut kinds: Vec<u32> = topology.cores().iter().map(|core| core.kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    wire::Topology {
        packages: count(Level::Package),
        numa_nodes: count(Level::NumaNode),
        l3: count(Level::L3),
        cores: number(topology.cores().len()),
        pus: number(topology.cpus().len()),
        kinds: number(kinds.len()),
        cpus: topology.cpus().to_string(),
        tree: inside(topology, topology.cpus(), &LEVELS),
    }
}

/// The parts of `cpus`, largest first: domains of the first of these levels, and what is in none of them.
fn inside(topology: &Topology, cpus: &CpuSet, levels: &[(Level, &str)]) -> Vec<wire::Domain> {
    let Some(((level, kind), below)) = levels.split_first() else { return cores(topology, cpus) };
    let mut left = cpus.clone();
    let mut parts = Vec::new();
    for domain in topology.domains(*level) {
        let mine = domain.cpus.intersection(cpus);
        // A memory-only node is shown once, at the top.
        let memory_only = domain.cpus.is_empty() && cpus == topology.cpus();
        if mine.is_empty() && !memory_only {
            continue;
        }
        left = left.difference(&mine);
        parts.push(wire::Domain {
            kind: (*kind).to_owned(),
            number: domain.number,
            cpus: mine.to_string(),
            memory_bytes: domain.memory_bytes,
            children: if mine.is_empty() { Vec::new() } else { inside(topology, &mine, below) },
        });
    }
    if !left.is_empty() {
        parts.extend(inside(topology, &left, below));
    }
    parts
}

fn cores(topology: &Topology, cpus: &CpuSet) -> Vec<wire::Domain> {
    let here = (0..).zip(topology.cores()).filter(|(_, core)| core.pus.intersects(cpus));
    here.map(|(number, core)| wire::Domain {
        kind: "core".to_owned(),
        number,
        cpus: core.pus.to_string(),
        ..wire::Domain::default()
    })
    .collect()
}
