//! Topologies of regular and irregular machines.

use super::*;
use crate::testing::cpu_set;
use std::borrow::ToOwned;
use std::string::String;
use std::string::ToString;
use std::vec::Vec;

fn domain(level: TopologyLevel, number: u32, cpus: &str) -> TopologyDomain {
    TopologyDomain { level, number, cpus: cpu_set(cpus), memory_bytes: 0 }
}

fn flat(cores: u32, domains: Vec<TopologyDomain>) -> Topology {
    let cores = (0..cores).map(|n| Core { pus: Pu(n).into(), kind_index: 0 }).collect();
    Topology::new(cores, domains).unwrap()
}

fn large() -> Topology {
    let shape = RegularShape {
        packages: 8,
        numa_nodes_per_package: 4,
        l3s_per_numa_node: 16,
        cores_per_l3: 8,
        pus_per_core: 2,
    };
    Topology::from_shape(shape)
}

#[test]
fn the_index_agrees_with_the_sets_on_8192_pus() {
    let machine = large();
    assert_eq!(machine.cpus().len(), 8192);
    for &pu in machine.pus_in_logical_order().iter().step_by(97) {
        assert_eq!(machine.core_cpus(pu), [pu.0 % 4096, pu.0 % 4096 + 4096].map(Pu).into_iter().collect());
        for level in [TopologyLevel::L3, TopologyLevel::NumaNode, TopologyLevel::Package] {
            let by_set = machine.domains(level).find(|domain| domain.cpus.contains(pu));
            assert_eq!(machine.domain_of(level, pu), by_set, "{level} of {pu}");
        }
    }
    assert_eq!(machine.whole_core_count(machine.cpus()), 4096);
    assert_eq!(machine.sort_one_per_core_first(machine.cpus())[4095..4097], [Pu(4095), Pu(4096)]);
}

#[test]
fn an_unknown_pu_has_no_core_and_no_domain() {
    let machine = large();
    assert_eq!(machine.core_cpus(Pu(8192)), CpuSet::new());
    assert_eq!(machine.domain_of(TopologyLevel::L3, Pu(8192)), None);
    assert_eq!(machine.domain_of(TopologyLevel::Machine, Pu(0)), None);
    let sparse = flat(2, vec![domain(TopologyLevel::Package, 0, "0-63")]);
    assert_eq!(sparse.domain_of(TopologyLevel::Package, Pu(5)), None, "PU 5 of package 0 is not there");
}

#[test]
fn levels_are_in_the_order_of_this_machine() {
    assert_eq!(large().levels(), [TopologyLevel::Package, TopologyLevel::NumaNode, TopologyLevel::L3]);
    let nodes_hold_packages = flat(
        4,
        vec![
            domain(TopologyLevel::NumaNode, 0, "0-3"),
            domain(TopologyLevel::Package, 0, "0-1"),
            domain(TopologyLevel::Package, 1, "2-3"),
        ],
    );
    assert_eq!(nodes_hold_packages.levels(), [TopologyLevel::NumaNode, TopologyLevel::Package]);
    let nodes_in_l3 = flat(
        4,
        vec![
            domain(TopologyLevel::L3, 0, "0-3"),
            domain(TopologyLevel::NumaNode, 0, "0-1"),
            domain(TopologyLevel::NumaNode, 1, "2-3"),
            domain(TopologyLevel::NumaNode, 2, ""),
        ],
    );
    assert_eq!(nodes_in_l3.levels(), [TopologyLevel::L3, TopologyLevel::NumaNode]);
    assert_eq!(flat(3, Vec::new()).levels(), []);
}

#[test]
fn of_two_nodes_with_the_same_pus_the_first_is_used() {
    let fast_memory =
        flat(2, vec![domain(TopologyLevel::NumaNode, 0, "0-1"), domain(TopologyLevel::NumaNode, 8, "0-1")]);
    assert_eq!(fast_memory.domain_of(TopologyLevel::NumaNode, Pu(1)).map(|node| node.number), Some(0));
}

#[test]
fn a_pu_in_two_cores_and_an_empty_topology_are_errors() {
    let core = |list| Core { pus: cpu_set(list), kind_index: 0 };
    let twice = Topology::new(vec![core("0-1"), core("1-2")], Vec::new());
    assert_eq!(twice, Err(TopologyError::PuInTwoCores { pu: Pu(1) }));
    assert_eq!(Topology::new(vec![core("")], Vec::new()), Err(TopologyError::Empty));
}

#[test]
fn domains_have_names_for_sentences() {
    let names = [TopologyLevel::L3, TopologyLevel::NumaNode, TopologyLevel::Package]
        .map(|level| domain(level, 2, "").name());
    assert_eq!(names, ["L3#2", "NUMA node 2", "package 2"]);
}

#[test]
fn a_pu_belongs_to_the_smallest_of_overlapping_numa_nodes() {
    let nodes = [(0, "0-3"), (1, "0-1"), (2, "2-3"), (3, "0-1"), (4, "")];
    let machine = flat(4, nodes.map(|(number, cpus)| domain(TopologyLevel::NumaNode, number, cpus)).to_vec());
    let homes: Vec<String> = machine
        .domains(TopologyLevel::NumaNode)
        .map(|node| machine.cpus_belonging_to(node).to_string())
        .collect();
    assert_eq!(homes, ["", "0-1", "2-3", "", ""]);
}

#[test]
fn devices_are_serialised_and_found_by_each_name() {
    let gpu = Device {
        class: crate::machine::devices::DeviceClass::Gpu,
        names: vec!["card0".to_owned(), "cuda0".to_owned()],
        pci_address: "0000:03:00.0".to_owned(),
        model: String::new(),
        local_cpus: cpu_set("2-3"),
        numa_nodes: vec![1],
    };
    let devices =
        MachineDetails { devices: vec![gpu], unavailable_pus: cpu_set("4-7"), ..MachineDetails::default() };
    let machine = flat(4, Vec::new()).with_details(devices.clone());
    assert_eq!(machine.details(), &devices);
    for name in ["card0", "cuda0", "0000:03:00.0"] {
        assert_eq!(
            machine.device_by_name(name).map(|device| &device.local_cpus),
            Some(&cpu_set("2-3")),
            "{name}"
        );
    }
    assert_eq!((machine.device_by_name("card1"), machine.device_by_name("")), (None, None));
}
