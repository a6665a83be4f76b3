//! Synthetic machines, and invalid input.

use pjw_core::topology::TopologyLevel;

use super::*;

fn synthetic(text: &str) -> Topology {
    load_topology(TopologySource::Synthetic(text)).unwrap()
}

fn counts(topology: &Topology) -> [usize; 5] {
    let count = |level| topology.domains(level).count();
    let (packages, nodes, l3) =
        (count(TopologyLevel::Package), count(TopologyLevel::NumaNode), count(TopologyLevel::L3));
    [packages, nodes, l3, topology.cores().len(), topology.cpus().len()]
}

fn refusal(source: TopologySource<'_>) -> String {
    load_topology(source).expect_err("the topology is invalid").to_string()
}

#[test]
fn the_live_machine_has_the_online_pus() {
    let topology = load_topology(TopologySource::Live).unwrap();
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    assert_eq!(topology.cpus(), &online.parse().unwrap());
}

#[test]
fn synthetic_machines_have_any_nesting() {
    for (text, expected) in [
        ("pack:4 numa:2 l3:8 core:16 pu:2", [4, 8, 64, 1024, 2048]),
        ("pack:2 l3:2 numa:2 core:2 pu:1", [2, 8, 4, 16, 16]),
        ("numa:2 pack:2 l3:1 core:2 pu:4", [4, 2, 4, 8, 32]),
        ("pack:1 core:3 pu:8", [1, 1, 0, 3, 24]),
        ("pack:2(memory=1GB) [numa(memory=4GB)] [numa(memory=1GB)] core:2 pu:1", [2, 4, 0, 4, 4]),
        ("pack:2 die:2 l3:1 core:2 pu:2", [2, 1, 4, 8, 16]),
        ("core:1 pu:1", [0, 1, 0, 1, 1]),
    ] {
        assert_eq!(counts(&synthetic(text)), expected, "{text}");
    }
    // hwloc names levels without names.
    assert_eq!(synthetic("2 2 2").cpus().len(), 8);
}

#[test]
fn dies_are_listed_if_a_package_has_several() {
    let dies = |text| synthetic(text).details().dies.iter().map(|d| d.cpus.to_string()).collect::<Vec<_>>();
    assert_eq!(dies("pack:2 die:2 core:2 pu:1"), ["0-1", "2-3", "4-5", "6-7"]);
    assert!(dies("pack:2 core:2 pu:1").is_empty());
}

#[test]
fn a_very_large_machine_is_loaded_and_a_too_large_one_refused() {
    let large = synthetic("pack:8 numa:4 l3:8 core:32 pu:2");
    assert_eq!(large.cpus().to_string(), "0-16383");
    for text in ["pack:32 numa:4 l3:16 core:32 pu:2", "core:4294967296 pu:4294967296", "1000000"] {
        let error = refusal(TopologySource::Synthetic(text));
        assert!(error.contains("more than 65536 PUs"), "{error}");
    }
}

#[test]
fn an_invalid_description_is_refused_with_the_cause_and_an_example() {
    let long = "pack:1 ".repeat(1000);
    for (text, what) in [
        ("", "it is empty"),
        (" \n ", "it is empty"),
        ("pack:two", "\"pack:two\" has no number"),
        ("core:0", "\"core:0\" has no number"),
        ("pack:-1", "no number"),
        ("\0", "no number"),
        ("pu:2 core:2", "not in this order"),
        ("cheese:2 pu:2", "hwloc does not know these levels"),
        ("core:8", "its last level is not that of the PUs: add pu:1"),
        ("pack:2 core:4", "its last level is not that of the PUs: add pu:1"),
        ("pack:2(", "hwloc does not know these levels"),
        ("core:2 pu:1(indexes=0,4000000000)", "PU 4000000000 is beyond 65535"),
        (&long, "longer than 4096"),
    ] {
        let error = refusal(TopologySource::Synthetic(text));
        assert!(error.contains(what) && error.contains("write it as in"), "{text:?}: {error}");
        assert!(error.len() < 400, "{error}");
    }
}

/// The error message for a file with this content.
fn refusal_of(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("machine.xml");
    std::fs::write(&path, bytes).unwrap();
    let error = refusal(TopologySource::Xml(&path));
    assert!(error.contains("machine.xml") && error.contains("lstopo"), "file and remedy: {error}");
    assert!(error.len() < 400 && !error.contains('\n'), "one line: {error}");
    error
}

#[test]
fn an_invalid_file_is_refused_with_the_line_and_the_cause() {
    let object = "<object type=\"Machine\" os_index=\"0\" cpuset=\"0x1\"";
    let deep = format!("<topology>{}", "<object type=\"Group\">".repeat(100));
    let absurd = format!("<topology>\n{object}>\n<object type=\"PU\" os_index=\"4294967290\"/>");
    let long = format!("<topology><object cpuset=\"{}\">", "0x00000001,".repeat(3000));
    for (text, what) in [
        ("", "it is empty"),
        ("not xml", "line 1: it is not XML"),
        ("PK\u{3}\u{4}", "it is not XML"),
        ("\n\n<html></html>", "line 3: it begins with <html>"),
        ("<topology version=\"2.0\">\n<object\n type=\"Machine\"", "line 3: it is cut off"),
        ("<topology>\n<object type=\"Mach", "cut off inside the value of type"),
        (&format!("<topology>\n{object}>\n<info/>\n"), "cut off: <object> of line 2 has no end tag"),
        ("<topology>\n<object></topology>", "line 2: </topology> where <object>"),
        ("<topology></topology><topology></topology>", "more than one topology"),
        ("<topology></topology> and more", "text after the topology"),
        ("<topology <", "something else than an attribute"),
        ("<topology version>", "version has no value"),
        ("<!DOCTYPE topology [<!ENTITY a \"b\">]><topology/>", "has an entity declaration"),
        (&deep, "nested more than 64 deep"),
        (&absurd, "line 3: PU number 4294967290 is not one from 0 to 65535"),
        (&long, "cpuset is longer than 65536 bits"),
        ("<topology><object cpuset=\"zebra\">", "zebra is no word of the set cpuset"),
        ("<topology version=\"2.0\"></topology>", "hwloc rejects its content"),
        ("<topology version=\"9.0\"><object type=\"Machine\"/></topology>", "hwloc rejects"),
    ] {
        let error = refusal_of(text.as_bytes());
        assert!(error.contains(what), "{text:.60}: {error}");
    }
    assert!(refusal_of(b"<topology>\xff").contains("byte 10 is invalid"));
}

/// Each of these files would make hwloc abort or read invalid memory.
#[test]
fn a_contradictory_file_is_refused_with_the_line() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/topologies/fakecpukinds.xml");
    let whole = std::fs::read_to_string(path).unwrap();
    for (old, new, what) in [
        ("type=\"Machine\"", "type=\"Package\"", "line 4: it begins with a Package"),
        ("type=\"Package\"", "type=\"Machine\"", "line 6: a Machine is in another object"),
        ("type=\"Core\"", "type=\"NUMANode\"", "line 9: a PU is in a NUMANode"),
        ("type=\"Core\"", "type=\"Misc\"", "line 9: a PU is in a Misc"),
        (
            "type=\"PU\" os_index=\"2\"",
            "type=\"PU\" os_index=\"1\"",
            "the cpuset of a PU is 2 and not its number",
        ),
        ("cpuset=\"0x00000005\"", "cpuset=\"0x00000001\"", "line 10: CPUs 2 of a PU are not all in the Core"),
        (
            "complete_cpuset=\"0x00000005\"",
            "",
            "line 8: the cpuset of a Core is not part of its complete_cpuset",
        ),
        ("cpuset=\"0x0000000a\"", "cpuset=\"0x0000000f\"", "line 12: CPUs 0-3 of a Core are in another Core"),
        ("cpuset=\"0x00000005\" complete_cpuset=\"0x00000005\"", "", "line 8: a Core has no cpuset"),
        ("cpuset=\"0x00000005\"", "cpuset=\"0x00000050\"", "CPUs 4,6 of a Core are not all in the Package"),
        ("cpuset=\"0x0000000f\"", "cpuset=\"0x0000001f\"", "nothing in a Package has its CPUs 4"),
        ("gp_index=\"5\"", "gp_index=\"2\"", "line 9: two objects have the gp_index 2"),
        ("os_index=\"2\"", "", "line 10: a PU has no number"),
    ] {
        let changed = whole.replace(old, new);
        assert_ne!(changed, whole, "{old}");
        let error = refusal_of(changed.as_bytes());
        assert!(error.contains(what), "{old} -> {new}: {error}");
    }
}

#[test]
fn an_unreadable_file_gives_the_error_of_the_system() {
    let dir = tempfile::tempdir().unwrap();
    let missing = refusal(TopologySource::Xml(&dir.path().join("machine.xml")));
    assert!(missing.contains("machine.xml: No such file"), "{missing}");
    assert!(refusal(TopologySource::Xml(dir.path())).contains("Is a directory"));
    assert!(refusal(TopologySource::Xml(Path::new("/dev/null"))).contains("it is empty"));
}

#[test]
fn a_too_large_file_is_not_read_to_its_end() {
    let error = refusal(TopologySource::Xml(Path::new("/dev/zero")));
    assert!(error.contains("larger than 256 MiB"), "{error}");
}

/// A truncated file is never accepted as a smaller machine.
#[test]
fn a_truncated_file_is_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/topologies/16em64t-4s2c2t-offlines.xml");
    let whole = std::fs::read_to_string(path).unwrap();
    assert_eq!(document::check_topology_xml(&whole), Ok(()));
    let end = whole.trim_end().len();
    for cut in (1..end).rev().filter(|&cut| whole.is_char_boundary(cut)) {
        let error = document::check_topology_xml(&whole[..cut]).expect_err("the file is truncated");
        assert!(error.problem.contains("cut off"), "{cut}: {error}");
    }
}
