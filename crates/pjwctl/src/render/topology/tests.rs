//! The machine as text.

use insta::assert_snapshot;
use pjw_ipc::wire::{CoreKind, Job};

use super::super::samples::{self, PLAIN_TERMINAL};
use super::*;

fn domain(kind: &str, number: u32, cpus: &str, children: Vec<Domain>) -> Domain {
    let memory_bytes = if kind == "numa_node" { 33_600_000_000 } else { 0 };
    Domain { kind: kind.into(), number, cpus: cpus.into(), memory_bytes, children, ..Domain::default() }
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
        ..Topology::default()
    }
}

#[test]
fn parts_that_are_alike_come_as_one_line() {
    assert_snapshot!(topology_text(&machine(), None, PLAIN_TERMINAL), @r"
    machine: 2 packages, 2 NUMA nodes, 2 L3s, 8 cores, 16 PUs, CPUs 0-15
    └─ 2 x package 0-1
       └─ 2 x NUMA node 0-1, 31 GiB
          └─ 2 x L3#0-1, 4 cores of 2 PUs, CPUs 0-15
    ");
}

#[test]
fn with_a_warden_holders_and_the_largest_requests_are_shown() {
    assert_snapshot!(topology_text(&machine(), Some(&samples::status()), PLAIN_TERMINAL), @r"
    machine: 2 packages, 2 NUMA nodes, 2 L3s, 8 cores, 16 PUs, CPUs 0-15
    largest request that still fits, in cores: 4 in one L3, 4 in one NUMA node, 4 in
      one package, 5 in the machine
    ├─ package 0
    │  └─ NUMA node 0, 31 GiB
    │     └─ L3#0, 4 cores of 2 PUs: manual:a 2-5, housekeeping 0-1, free 6-7
    └─ package 1
       └─ NUMA node 1, 31 GiB
          └─ L3#1, 4 cores of 2 PUs: free 8-15
    ");
}

#[test]
fn a_lent_core_is_shown_with_its_owner_and_its_borrower() {
    let mut status = samples::status();
    status.jobs = vec![
        Job { lent: "2-3".into(), ..samples::job("manual:own", "2-5") },
        Job { borrowed: "2-3,6-7".into(), ..samples::job("manual:batch", "2-3,6-7") },
    ];
    let mut one = machine();
    one.tree.truncate(1);
    assert_snapshot!(topology_text(&one, Some(&status), PLAIN_TERMINAL), @r"
    machine: 2 packages, 2 NUMA nodes, 2 L3s, 8 cores, 16 PUs, CPUs 0-15
    largest request that still fits, in cores: 4 in one L3, 4 in one NUMA node, 4 in
      one package, 5 in the machine
    └─ package 0
       └─ NUMA node 0, 31 GiB
          └─ L3#0, 4 cores of 2 PUs
             ├─ manual:own 4-5
             ├─ manual:batch 6-7
             ├─ manual:own 2-3 (lent to manual:batch)
             └─ housekeeping 0-1
    ");
}

#[test]
fn many_holders_take_a_line_each() {
    let mut status = samples::status();
    status.jobs = vec![
        samples::job("slurm:4711.a-long-name-of-a-server", "2-3"),
        samples::job("manual:a-long-name-too", "4-5"),
    ];
    let mut one = machine();
    one.tree.truncate(1);
    assert_snapshot!(topology_text(&one, Some(&status), PLAIN_TERMINAL), @r"
    machine: 2 packages, 2 NUMA nodes, 2 L3s, 8 cores, 16 PUs, CPUs 0-15
    largest request that still fits, in cores: 4 in one L3, 4 in one NUMA node, 4 in
      one package, 5 in the machine
    └─ package 0
       └─ NUMA node 0, 31 GiB
          └─ L3#0, 4 cores of 2 PUs
             ├─ slurm:4711.a-long-name-of-a-server 2-3
             ├─ manual:a-long-name-too 4-5
             ├─ housekeeping 0-1
             └─ free 6-7
    ");
}

#[test]
fn devices_memory_and_offline_pus_are_shown_at_their_place() {
    let mut machine = machine();
    let device = |class: &str, names: &[&str], address: &str, cpus: &str| Device {
        class: class.into(),
        names: names.iter().map(|&name| name.to_owned()).collect(),
        address: address.into(),
        cpus: cpus.into(),
        ..Device::default()
    };
    machine.devices = vec![
        device("gpu", &["card0", "cuda0"], "0000:03:00.0", "0-7"),
        device("network", &[], "0000:04:00.0", "0-7"),
        device("storage", &["sda"], "", "0-15"),
    ];
    machine.tree.push(domain("numa_node", 2, "", vec![]));
    machine.tree[1].children.push(domain("numa_node", 3, "8-15", vec![]));
    machine.offline = "16-17".into();
    machine.disallowed = "15".into();
    assert_snapshot!(topology_text(&machine, None, PLAIN_TERMINAL), @r"
    machine: 2 packages, 2 NUMA nodes, 2 L3s, 8 cores, 16 PUs, CPUs 0-15
    offline or hidden: CPUs 16-17
    forbidden to pjwd: CPU 15
    ├─ storage sda
    ├─ package 0
    │  └─ NUMA node 0, 31 GiB
    │     ├─ gpu card0 cuda0, network 0000:04:00.0
    │     └─ L3#0, 4 cores of 2 PUs, CPUs 0-7
    ├─ package 1, 4 cores of 2 PUs, CPUs 8-15
    │  ├─ NUMA node 1, 31 GiB
    │  │  └─ L3#1, 4 cores of 2 PUs, CPUs 8-15
    │  └─ NUMA node 3, 31 GiB, memory alone, near CPUs 8-15
    └─ NUMA node 2, 31 GiB, memory alone
    ");
}

#[test]
fn cores_outside_of_all_parts_are_shown_too() {
    let cores = |from: u32| (from..from + 2).map(|n| domain("core", n, &n.to_string(), vec![])).collect();
    let mut tree: Vec<Domain> = cores(0);
    let l3 = domain("l3", 0, "4-5", cores(4));
    let mut inside: Vec<Domain> = cores(2);
    inside.push(l3);
    tree.push(domain("package", 0, "2-5", inside));
    let odd = Topology { cores: 6, pus: 6, cpus: "0-5".into(), tree, ..Topology::default() };
    assert_snapshot!(topology_text(&odd, Some(&samples::status()), PLAIN_TERMINAL), @r"
    machine: 6 cores, 6 PUs, CPUs 0-5
    largest request that still fits, in cores: 5 in the machine
    ├─ 2 cores of 1 PU: housekeeping 0-1
    └─ package 0, 4 cores of 1 PU, CPUs 2-5
       ├─ 2 cores of 1 PU: manual:a 2-3
       └─ L3#0, 2 cores of 1 PU: manual:a 4-5
    ");
}

#[test]
fn kinds_of_cores_are_counted_separately() {
    let core =
        |number, cpus: &str, kind| Domain { core_kind: Some(kind), ..domain("core", number, cpus, vec![]) };
    let cores = vec![core(0, "0-1", 1), core(1, "2", 0), core(2, "3", 0)];
    let tree = vec![domain("package", 0, "0-3", cores)];
    let kind = |name: &str| CoreKind { name: name.into(), ..CoreKind::default() };
    let core_kinds = vec![kind("efficiency"), kind("performance")];
    let hybrid = Topology {
        packages: 1,
        cores: 3,
        pus: 4,
        kinds: 2,
        core_kinds,
        cpus: "0-3".into(),
        tree,
        ..Topology::default()
    };
    assert_snapshot!(topology_text(&hybrid, None, PLAIN_TERMINAL), @r"
    machine: 1 package, 3 cores, 4 PUs, 2 kinds of core, CPUs 0-3
    └─ package 0, 1 performance core of 2 PUs, 2 efficiency cores of 1 PU, CPUs 0-3
    ");
}

#[test]
fn memory_has_the_largest_suitable_unit() {
    assert_eq!(
        [1 << 20, 33_600_000_000, 2 << 40, 5_000].map(memory_size_text),
        ["1.0 MiB", "31 GiB", "2.0 TiB", "4.8 KiB"]
    );
}
