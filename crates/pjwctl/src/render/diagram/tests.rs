//! The drawing: well-formed, nested, every box inside its outer box, no box over another.

use insta::assert_snapshot;
use pjw_ipc::wire::{Core, CoreKind, Device, Domain, Node, Pool};
use roxmltree::{Document, Node as Element};

use super::super::samples::{self, job};
use super::*;

fn part(kind: &str, number: u32, cpus: &str, children: Vec<Domain>) -> Domain {
    let memory_bytes = if kind == "numa_node" { 32 << 30 } else { 0 };
    Domain { kind: kind.into(), number, cpus: cpus.into(), memory_bytes, children, ..Domain::default() }
}

/// Two cores of two PUs in an L3 of a package, memory without CPUs, a GPU, and an offline PU.
fn small() -> Topology {
    let cores = vec![part("core", 0, "0,2", vec![]), part("core", 1, "1,3", vec![])];
    let tree =
        vec![part("package", 0, "0-3", vec![part("l3", 0, "0-3", cores)]), part("numa_node", 1, "", vec![])];
    let gpu = Device {
        class: "gpu".into(),
        names: vec!["card0".into()],
        cpus: "0-3".into(),
        numa_nodes: vec![0],
        ..Device::default()
    };
    Topology {
        packages: 1,
        l3: 1,
        cores: 2,
        pus: 4,
        kinds: 1,
        cpus: "0-3".into(),
        offline: "4".into(),
        devices: vec![gpu],
        tree,
        ..Topology::default()
    }
}

/// A machine of this many packages of eight L3s of eight cores of two PUs.
fn large(packages: u32) -> Topology {
    let cores_total = packages * 64;
    let cpus = |first: u32, cores: u32| {
        let (last, other) = (first + cores - 1, first + cores_total);
        format!("{first}-{last},{other}-{}", last + cores_total)
    };
    let core = |n: u32| part("core", n, &format!("{n},{}", n + cores_total), vec![]);
    let l3 = |n: u32| part("l3", n, &cpus(n * 8, 8), (n * 8..n * 8 + 8).map(core).collect());
    let package = |n: u32| part("package", n, &cpus(n * 64, 64), (n * 8..n * 8 + 8).map(l3).collect());
    Topology {
        packages,
        l3: packages * 8,
        cores: cores_total,
        pus: cores_total * 2,
        kinds: 1,
        cpus: format!("0-{}", cores_total * 2 - 1),
        tree: (0..packages).map(package).collect(),
        ..Topology::default()
    }
}

fn attribute(element: Element<'_, '_>, name: &str) -> u32 {
    element.attribute(name).and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Left, top, right, bottom of the rectangle of a group.
fn bounds(group: Element<'_, '_>) -> Option<[u32; 4]> {
    let rect = group.children().find(|child| child.has_tag_name("rect"))?;
    let [x, y, width, height] = ["x", "y", "width", "height"].map(|name| attribute(rect, name));
    Some([x, y, x + width, y + height])
}

/// Checks that boxes are inside their outer box and beside each other, and that texts are inside their box.
fn check(group: Element<'_, '_>, outer: [u32; 4]) {
    let own = bounds(group).unwrap_or(outer);
    assert!(
        own[0] >= outer[0] && own[1] >= outer[1] && own[2] <= outer[2] && own[3] <= outer[3],
        "{group:?}"
    );
    let inner: Vec<_> = group.children().filter(|child| child.has_tag_name("g")).collect();
    let boxes: Vec<[u32; 4]> = inner.iter().filter_map(|group| bounds(*group)).collect();
    for (n, a) in boxes.iter().enumerate() {
        for b in &boxes[n + 1..] {
            assert!(a[2] <= b[0] || b[2] <= a[0] || a[3] <= b[1] || b[3] <= a[1], "{a:?} over {b:?}");
        }
    }
    for text in group.children().filter(|child| child.has_tag_name("text")) {
        let width = svg::text_width(text.text().unwrap_or_default(), attribute(text, "font-size"));
        let x = attribute(text, "x");
        let (left, right) = match text.attribute("text-anchor") {
            Some("middle") => (x - width / 2, x + width / 2),
            Some("end") => (x - width, x),
            _ => (x, x + width),
        };
        let room = if bounds(group).is_some_and(|own| own[0] <= x && x <= own[2]) { own } else { outer };
        assert!(left >= room[0] && right <= room[2] + 2, "{:?} in {room:?}", text.text());
    }
    inner.into_iter().for_each(|inner| check(inner, own));
}

fn checked(svg: &str) -> Document<'_> {
    let document = Document::parse(svg).unwrap();
    let root = document.root_element();
    let page = [0, 0, attribute(root, "width"), attribute(root, "height")];
    let view = format!("0 0 {} {}", page[2], page[3]);
    assert_eq!(root.attribute("viewBox"), Some(view.as_str()));
    for group in root.children().filter(|child| child.has_tag_name("g")) {
        check(group, page);
    }
    for text in root.children().filter(|child| child.has_tag_name("text")) {
        let width = svg::text_width(text.text().unwrap_or_default(), attribute(text, "font-size"));
        assert!(attribute(text, "x") + width <= page[2], "{:?} is cut off", text.text());
    }
    document
}

fn hints(document: &Document<'_>) -> Vec<String> {
    let titles = document.descendants().filter(|element| element.has_tag_name("title"));
    titles.filter_map(|title| title.text().map(str::to_owned)).collect()
}

/// The boxes with their texts, indented as they are nested.
fn outline(element: Element<'_, '_>, depth: usize, lines: &mut String) {
    for group in element.children().filter(|child| child.has_tag_name("g")) {
        let words: Vec<&str> = group
            .children()
            .filter(|child| child.has_tag_name("text"))
            .filter_map(|text| text.text())
            .collect();
        let fill = group.children().find(|child| child.has_tag_name("rect"));
        let fill = fill.and_then(|rect| rect.attribute("fill")).unwrap_or("-");
        let line = format!("{}{fill} {}", "  ".repeat(depth), words.join(" | "));
        lines.push_str(line.trim_end());
        lines.push('\n');
        outline(group, depth + 1, lines);
    }
}

#[test]
fn boxes_are_nested_as_the_machine_is() {
    let svg = svg_drawing("small", &small(), None);
    let document = checked(&svg);
    let mut lines = String::new();
    outline(document.root_element(), 0, &mut lines);
    assert_snapshot!(lines, @r"
    -
      #eceff1 package 0
        #fbfbfb L3#0
          #ffffff C0
            #ffffff 0
            #ffffff 2
          #ffffff C1
            #ffffff 1
            #ffffff 3
        #e6efe0 gpu card0
      #efe3c4 NUMA node 1, 32 GiB, memory alone
      #c9c9c9 offline or hidden: CPUs 4
    ");
}

#[test]
fn colours_and_the_legend_show_the_holders() {
    let mut status = samples::status();
    status.pool =
        Pool { housekeeping: "0,2".into(), free: "3".into(), allocated: "1".into(), ..Pool::default() };
    status.jobs = vec![job("slurm:<42>&\"", "1"), job("manual:waits", "")];
    let svg = svg_drawing("node7", &small(), Some(&status));
    let document = checked(&svg);
    let hints = hints(&document);
    for expected in [
        "CPU 0: core 0, L3#0, package 0; housekeeping",
        "CPU 1: core 1, L3#0, package 0; slurm:<42>&\"",
        "CPU 3: core 1, L3#0, package 0; free",
        "slurm:<42>&\": CPUs 1",
        "housekeeping: 2 CPUs, CPUs 0,2",
    ] {
        assert!(hints.iter().any(|hint| hint == expected), "{expected}: {hints:#?}");
    }
    assert!(
        !svg.contains("manual:waits") && !svg.contains("<42>"),
        "who holds nothing is not in the diagram"
    );
    let texts: Vec<_> = document.descendants().filter_map(|element| element.text()).collect();
    assert!(texts.iter().any(|text| text.starts_with("largest request that still fits")), "{texts:?}");
}

#[test]
fn the_same_reply_gives_the_same_drawing_without_external_parts() {
    let svg = svg_drawing("node7", &large(2), Some(&samples::status()));
    assert_eq!(svg, svg_drawing("node7", &large(2), Some(&samples::status())));
    for word in ["<script", "href", "@import", "url(http", "<image", "<foreignObject"] {
        assert!(!svg.contains(word), "{word}");
    }
}

#[test]
fn every_pu_is_drawn_once_on_a_page_of_a_good_shape() {
    for packages in [1, 2, 4, 64] {
        let machine = large(packages);
        let mut status = samples::status();
        status.pool = Pool { free: machine.cpus.clone(), ..Pool::default() };
        status.jobs = (0..70).map(|n| job(&format!("slurm:{n}"), &n.to_string())).collect();
        for status in [None, Some(&status)] {
            let svg = svg_drawing("node7", &machine, status);
            let document = checked(&svg);
            let pus = hints(&document).iter().filter(|hint| hint.starts_with("CPU ")).count();
            assert_eq!(pus, machine.pus as usize);
            let root = document.root_element();
            let (width, height) = (attribute(root, "width"), attribute(root, "height"));
            assert!(width < height * 3 && height < width * 3, "{packages}: {width} x {height}");
        }
    }
}

#[test]
fn the_smallest_machine_and_the_oddest_are_drawn_too() {
    let core = part("core", 0, "0", vec![]);
    let one = Topology { cores: 1, pus: 1, cpus: "0".into(), tree: vec![core], ..Topology::default() };
    checked(&svg_drawing("one", &one, None));
    checked(&svg_drawing("", &Topology::default(), None));
    let wide = part("core", 0, "0-7", vec![]);
    let mut small = part("core", 1, "8", vec![]);
    small.core_kind = Some(0);
    let kinds = vec![CoreKind { name: "efficiency".into(), cpus: "8".into() }];
    let tree = vec![part("package", 4_000_000_000, "0-8", vec![wide, small])];
    let odd =
        Topology { pus: 9, cores: 2, cpus: "0-8".into(), core_kinds: kinds, tree, ..Topology::default() };
    let odd = Topology {
        disallowed: "3".into(),
        offline: (20..200).step_by(2).map(|n| n.to_string()).collect::<Vec<_>>().join(","),
        ..odd
    };
    let svg = svg_drawing(&"a very long title ".repeat(20), &odd, None);
    let document = checked(&svg);
    assert!(hints(&document).iter().any(|hint| hint.starts_with("CPU 8: core 1 (efficiency)")));
    assert!(hints(&document).iter().any(|hint| hint.ends_with("forbidden by the cpuset of pjwd")));
}

#[test]
fn characters_that_xml_does_not_allow_are_left_out() {
    let status = Status {
        node: Node { hostname: "a\u{0}b\u{1b}\u{ffff}\"'<>&".into(), ..Node::default() },
        jobs: vec![job("manual:x\u{7}\u{fffe}", "0")],
        cores: vec![Core::default()],
        ..Status::default()
    };
    checked(&svg_drawing(&status.node.hostname.clone(), &small(), Some(&status)));
}

#[test]
fn the_first_colours_differ_and_carry_text_that_can_be_read() {
    let paints: Vec<FillStyle> = (0..21).map(|n| FillStyle::for_holder(Holder::Job(n))).collect();
    for (n, fill_style) in paints.iter().enumerate() {
        assert!(!paints[n + 1..].contains(fill_style), "{fill_style:?} twice");
    }
}
