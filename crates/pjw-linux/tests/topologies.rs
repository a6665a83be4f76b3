//! Topologies of real machines. The expected counts in `index.json` are those that the tools of hwloc print.
#![expect(clippy::unwrap_used, reason = "a missing fixture is a failure")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use pjw_core::devices::DeviceClass;
use pjw_core::topology::{Topology, TopologyLevel};
use pjw_linux::topology::{TopologySource, load_topology};
use serde::Deserialize;

#[derive(Deserialize)]
struct ExpectedCounts {
    file: String,
    packages: usize,
    numa_nodes: usize,
    l3: usize,
    cores: usize,
    pus: usize,
    core_kinds: usize,
    smt: Smt,
    oddities: Vec<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Smt {
    Same(usize),
    Several(BTreeSet<usize>),
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/topologies")
}

fn machine(file: &str) -> Topology {
    load_topology(TopologySource::Xml(&directory().join(file))).unwrap()
}

#[test]
fn every_topology_has_the_counts_that_the_tools_of_hwloc_print() {
    let index = std::fs::read_to_string(directory().join("index.json")).unwrap();
    let index: Vec<ExpectedCounts> = serde_json::from_str(&index).unwrap();
    assert_eq!(index.len(), 18);
    for expected in index {
        let machine = machine(&expected.file);
        let with_pus = |level| machine.domains(level).filter(|domain| !domain.cpus.is_empty()).count();
        let found = [
            with_pus(TopologyLevel::Package),
            with_pus(TopologyLevel::NumaNode),
            with_pus(TopologyLevel::L3),
            machine.cores().len(),
            machine.cpus().len(),
            machine.details().core_kinds.len(),
        ];
        let ExpectedCounts { packages, numa_nodes, l3, cores, pus, core_kinds, .. } = expected;
        assert_eq!(found, [packages, numa_nodes, l3, cores, pus, core_kinds], "{}", expected.file);
        let smt = match expected.smt {
            Smt::Same(pus) => BTreeSet::from([pus]),
            Smt::Several(pus) => pus,
        };
        let found: BTreeSet<usize> = machine.cores().iter().map(|core| core.pus.len()).collect();
        assert_eq!(found, smt, "{}", expected.file);
        for oddity in &expected.oddities {
            if let Some((number, _)) = oddity.split_once(" PUs offline or hidden") {
                assert_eq!(machine.details().unavailable_pus.len().to_string(), number, "{}", expected.file);
            }
        }
    }
}

#[test]
fn no_pus_belong_to_a_numa_node_that_is_only_memory() {
    let memory = |file: &str| {
        let machine = machine(file);
        let nodes = machine
            .domains(TopologyLevel::NumaNode)
            .filter(|node| machine.cpus_belonging_to(node).is_empty());
        nodes.map(|node| node.number).collect::<Vec<_>>()
    };
    assert_eq!(memory("64intel64-fakeKNL-SNC4-hybrid.xml"), [7, 4, 5, 6]);
    assert_eq!(memory("32amd64-4s2n4c-cgroup2.xml"), [2, 3, 4, 5]);
    assert!(memory("48amd64-4pa2n6c-sparse.xml").is_empty());
}

#[test]
fn the_kinds_of_cores_of_a_hybrid_machine_are_efficiency_and_performance_in_this_order() {
    for file in ["20em64t-hybrid-1p6c2t+2ca4co1t.xml", "Intel-RaptorLake-Corei7-1370P.xml"] {
        let machine = machine(file);
        let names: Vec<&str> = machine.details().core_kinds.iter().map(|kind| kind.name.as_str()).collect();
        assert_eq!(names, ["efficiency", "performance"], "{file}");
        let fast = machine.cores().iter().filter(|core| core.kind_index == 1);
        assert!(fast.clone().all(|core| core.pus.len() == 2) && fast.count() == 6, "{file}");
    }
}

/// The devices of a machine as lines such as `gpu card0 cuda0 near 0-15 count_of_class [0]`.
fn devices(file: &str) -> Vec<String> {
    let machine = machine(file);
    let mut lines = Vec::new();
    for device in &machine.details().devices {
        assert!(
            !device.local_cpus.is_empty() && device.local_cpus.is_subset(machine.cpus()),
            "{file}: {device:?}"
        );
        let names = if device.names.is_empty() { device.pci_address.clone() } else { device.names.join(" ") };
        lines.push(format!(
            "{} {names} near {} of {:?}",
            device.class.name(),
            device.local_cpus,
            device.numa_nodes
        ));
    }
    lines
}

#[test]
fn each_device_has_all_its_names_and_the_pus_near_it() {
    assert_eq!(
        devices("28intel64-2p2g7c-CoDgroups.xml"),
        [
            "storage sda near 0-6 of [0]",
            "network enp6s0 near 0-6 of [0]",
            "network 0000:07:00.0 near 0-6 of [0]",
            "network enp12s0 near 0-6 of [0]",
            "network 0000:0d:00.0 near 0-6 of [0]",
        ]
    );
    let power8 = devices("power8gpudistances.xml");
    assert_eq!(power8[0], "gpu cuda0 opencl0d0 nvml0 near 0-1,8-9,16-17,24-25 of [0]");
    assert_eq!(power8[3], "gpu cuda3 opencl0d3 nvml3 near 80-81,88-89,96-97,104-105 of [1]");
    let both = devices("32em64t-2n8c2t-pci-normalio.xml");
    assert!(both.contains(&"network ib0 mlx5_0 near 8-15,24-31 of [1]".to_owned()), "{both:?}");
    let count_of_class = |file: &str, class| {
        let machine = machine(file);
        machine.details().devices.iter().filter(|device| device.class == class).count()
    };
    assert_eq!(count_of_class("power8gpudistances.xml", DeviceClass::Gpu), 4);
    assert_eq!(count_of_class("nvidiagpunumanodes.xml", DeviceClass::Gpu), 6);
}
