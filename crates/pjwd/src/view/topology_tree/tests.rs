//! Trees of real machines: each core once, each part in its place.

use std::path::Path;

use pjw_linux::topology::{TopologySource, load_topology};

use super::*;

fn real(file: &str) -> Topology {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pjw-linux/tests/topologies");
    load_topology(TopologySource::Xml(&dir.join(file))).unwrap()
}

/// `package 0 [numa_node 0 [4 core] memory 7]`: the first part of each kind, and the number of cores.
fn outline(parts: &[wire::Domain]) -> String {
    let mut words: Vec<String> = Vec::new();
    let cores = parts.iter().filter(|part| part.kind == "core").count();
    if cores > 0 {
        words.push(format!("{cores} core"));
    }
    for part in parts.iter().filter(|part| part.kind != "core") {
        let inner = outline(&part.children);
        let name = format!("{} {}", part.kind, part.number);
        words.push(if inner.is_empty() { format!("{name} empty") } else { format!("{name} [{inner}]") });
    }
    words.join(" ")
}

fn cores_in(parts: &[wire::Domain]) -> Vec<u32> {
    let own = |part: &wire::Domain| {
        if part.kind == "core" { vec![part.number] } else { cores_in(&part.children) }
    };
    parts.iter().flat_map(own).collect()
}

#[test]
fn every_real_machine_has_each_core_once() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pjw-linux/tests/topologies");
    let mut seen = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "xml") {
            let told = topology_to_wire(&load_topology(TopologySource::Xml(&path)).unwrap());
            let mut cores = cores_in(&told.tree);
            cores.sort_unstable();
            assert_eq!(cores, (0..told.cores).collect::<Vec<_>>(), "{}", path.display());
            seen += 1;
        }
    }
    assert_eq!(seen, 18);
}

#[test]
fn memory_only_nodes_are_beside_the_parts_near_them() {
    let knl = topology_to_wire(&real("64intel64-fakeKNL-SNC4-hybrid.xml"));
    assert_eq!((knl.numa_nodes, knl.memory_nodes), (8, 4));
    assert!(
        outline(&knl.tree).starts_with(
            "package 0 [numa_node 0 [l3 0 [4 core]] numa_node 7 empty numa_node 1 [l3 1 [4 core]] numa_node 4 empty"
        ),
        "{}",
        outline(&knl.tree)
    );
    let far = topology_to_wire(&real("32amd64-4s2n4c-cgroup2.xml"));
    assert_eq!((far.numa_nodes, far.memory_nodes, far.offline.as_str()), (2, 4, "6-31"));
    let outline = outline(&far.tree);
    assert!(outline.ends_with("numa_node 2 empty numa_node 3 empty numa_node 4 empty numa_node 5 empty"));
}

#[test]
fn parts_are_nested_as_in_the_machine() {
    let made =
        |text| outline(&topology_to_wire(&load_topology(TopologySource::Synthetic(text)).unwrap()).tree);
    assert_eq!(
        made("pack:2 die:2 core:1 pu:2"),
        "numa_node 0 [package 0 [die 0 [1 core] die 1 [1 core]] package 1 [die 2 [1 core] die 3 [1 core]]]"
    );
    assert_eq!(made("l3:1 numa:2 core:1 pu:2"), "l3 0 [numa_node 0 [1 core] numa_node 1 [1 core]]");
    assert_eq!(
        made("pack:2 [numa(memory=1GB)] l3:2 [numa] core:1 pu:1").replace("numa_node", "node"),
        "package 0 [node 0 [l3 0 [1 core]] node 1 [l3 1 [1 core]] node 2 empty] \
         package 1 [node 3 [l3 2 [1 core]] node 4 [l3 3 [1 core]] node 5 empty]"
    );
}

#[test]
fn each_part_has_its_free_cores() {
    let machine = topology_to_wire(&load_topology(TopologySource::Synthetic("pack:2 core:2 pu:2")).unwrap());
    let fits = wire::Fits { l3: 2, numa_node: 2, package: 2, machine: 2 };
    // A PU of package 1 is offline. Only the other PU of its core counts.
    let pool = wire::Pool {
        free: "1,4-6".into(),
        housekeeping: "0".into(),
        allocated: "2-3".into(),
        ..Default::default()
    };
    let told = add_free_core_counts(machine, &fits, &pool);
    assert_eq!(told.fits, Some(fits));
    let packages = &told.tree[0].children;
    assert_eq!(packages.iter().map(|part| part.fits).collect::<Vec<_>>(), [Some(0), Some(2)]);
    assert_eq!(packages[1].children[1].fits, Some(1));
}

#[test]
fn hybrid_machines_have_core_kinds() {
    let hybrid = topology_to_wire(&real("20em64t-hybrid-1p6c2t+2ca4co1t.xml"));
    assert_eq!((hybrid.kinds, hybrid.smt.as_slice()), (2, &[1, 2][..]));
    let names: Vec<_> = hybrid.core_kinds.iter().map(|kind| kind.name.as_str()).collect();
    assert_eq!(names, ["efficiency", "performance"]);
    let plain = topology_to_wire(&load_topology(TopologySource::Synthetic("core:2 pu:1")).unwrap());
    assert_eq!((plain.kinds, plain.core_kinds.len()), (1, 0));
}
