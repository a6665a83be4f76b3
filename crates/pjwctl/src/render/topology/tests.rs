//! The machine, drawn.

use insta::assert_snapshot;

use super::super::samples::{self, PLAIN};
use super::*;

fn domain(kind: &str, number: u32, cpus: &str, children: Vec<Domain>) -> Domain {
    let memory_bytes = if kind == "numa_node" { 33_600_000_000 } else { 0 };
    Domain { kind: kind.into(), number, cpus: cpus.into(), memory_bytes, children }
}

/// The machine of [`samples::status`].
fn machine() -> Topology {
    let package = |n: u32| {
        let core = |m: u32| domain("core", m, &format!("{}-{}", m * 2, m * 2 + 1), vec![]);
        let cpus = format!("{}-{}", n * 8, n * 8 + 7);
        let cores = (n * 4..n * 4 + 4).map(core).collect();
        let l3 = domain("l3", n, &cpus, cores);
        domain("package", n, &cpus, vec![domain("numa_node", n, &cpus, vec![l3])])
    };
    Topology {
        packages: 2,
        numa_nodes: 2,
        l3: 2,
        cores: 8,
        pus: 16,
        kinds: 1,
        cpus: "0-15".into(),
        tree: vec![package(0), package(1)],
    }
}

#[test]
fn a_machine_is_a_tree() {
    assert_snapshot!(topology(&machine(), None, PLAIN), @r"
    machine: 2 packages, 2 NUMA nodes, 2 L3s, 8 cores, 16 PUs, CPUs 0-15
    ├─ package 0: CPUs 0-7
    │  └─ NUMA node 0: CPUs 0-7, 31 GiB
    │     └─ L3#0: CPUs 0-7
    │        └─ 4 cores of 2 PUs
    └─ package 1: CPUs 8-15
       └─ NUMA node 1: CPUs 8-15, 31 GiB
          └─ L3#1: CPUs 8-15
             └─ 4 cores of 2 PUs
    ");
}

#[test]
fn with_a_warden_it_says_who_holds_what() {
    assert_snapshot!(topology(&machine(), Some(&samples::status()), PLAIN), @r"
    machine: 2 packages, 2 NUMA nodes, 2 L3s, 8 cores, 16 PUs, CPUs 0-15
    ├─ package 0: CPUs 0-7
    │  └─ NUMA node 0: CPUs 0-7, 31 GiB
    │     └─ L3#0: CPUs 0-7
    │        ├─ 4 cores of 2 PUs
    │        ├─ manual:a: CPUs 2-5
    │        ├─ housekeeping: CPUs 0-1
    │        └─ free: CPUs 6-7
    └─ package 1: CPUs 8-15
       └─ NUMA node 1: CPUs 8-15, 31 GiB
          └─ L3#1: CPUs 8-15
             ├─ 4 cores of 2 PUs
             └─ free: CPUs 8-15
    ");
}

#[test]
fn sorts_of_cores_are_counted_apart() {
    let cores = vec![
        domain("core", 0, "0-1", vec![]),
        domain("core", 1, "2", vec![]),
        domain("core", 2, "3", vec![]),
    ];
    let tree = vec![domain("package", 0, "0-3", cores)];
    let hybrid =
        Topology { packages: 1, cores: 3, pus: 4, kinds: 2, cpus: "0-3".into(), tree, ..Topology::default() };
    assert_snapshot!(topology(&hybrid, None, PLAIN), @r"
    machine: 1 package, 0 NUMA nodes, 0 L3s, 3 cores, 4 PUs, 2 kinds of core, CPUs 0-3
    └─ package 0: CPUs 0-3
       └─ 1 core of 2 PUs, 2 cores of 1 PU
    ");
}

#[test]
fn memory_is_told_in_the_largest_unit() {
    assert_eq!(
        [1 << 20, 33_600_000_000, 2 << 40, 5_000].map(memory),
        ["1.0 MiB", "31 GiB", "2.0 TiB", "4.8 KiB"]
    );
}
