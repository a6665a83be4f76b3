//! `topology`: the machine as a tree, and the holders of its PUs.
//!
//! Cores are not listed one by one but counted, as `4 cores of 2 PUs`. Parts that are alike and have the same holders
//! share one line, as `16 x L3#0-15`. JSON has each part.

use std::collections::BTreeMap;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_ipc::wire::{CoreKind, Device, Domain, Fits, Status, Topology};

use super::core_map::{Holder, PuHolders};
use super::text::{
    char_count, count_with_noun, cpus_phrase, escape_control_characters, shorten_cpu_list, wrap_text,
};
use super::{Terminal, style};

/// Returns the text of `pjwctl topology`: a tree of the packages, NUMA nodes, caches and cores of the machine. If
/// `status` is `Some`, the tree also shows which jobs hold the cores.
#[must_use]
pub fn topology_text(topology: &Topology, status: Option<&Status>, term: Terminal) -> String {
    let title = style::apply_style("machine", style::HEADING, term);
    let head = format!("machine: {}, {}", part_counts_text(topology), cpus_phrase(&topology.cpus, 24));
    let mut lines = wrap_text(&head, term.width, "", "  ").replacen("machine", &title, 1);
    for (what, list) in
        [("offline or hidden", &topology.offline), ("forbidden to pjwd", &topology.disallowed)]
    {
        if !list.is_empty() {
            lines.push_str(&format!("{what}: {}\n", cpus_phrase(list, 40)));
        }
    }
    if let Some(free) = status.map(|status| &status.fits).or(topology.fits.as_ref()) {
        lines.push_str(&wrap_text(&largest_requests_sentence(topology, free), term.width, "", "  "));
    }
    let mut tree = Tree {
        lines,
        kinds: &topology.core_kinds,
        holders: status.map(|status| (PuHolders::new(&status.pool, &status.jobs), status)),
        devices: topology.devices.iter().collect(),
        term,
    };
    let groups: Vec<Vec<&Domain>> = tree.group_equal_parts(topology.tree.iter());
    let mut extra_lines = tree.take_devices(|device| !belongs_to_any(device, &topology.tree));
    extra_lines.extend(tree.loose_cores(topology.tree.iter()));
    tree.draw_groups(&groups, "", &extra_lines);
    tree.lines
}

/// Returns a text with the numbers of packages, dies, NUMA nodes, L3 caches, cores and PUs (logical CPUs) of the
/// machine.
pub(super) fn part_counts_text(topology: &Topology) -> String {
    let parts = [
        (topology.packages, "package", "packages"),
        (topology.dies, "die", "dies"),
        (topology.numa_nodes, "NUMA node", "NUMA nodes"),
        (topology.l3, "L3", "L3s"),
        (topology.cores, "core", "cores"),
        (topology.pus, "PU", "PUs"),
    ];
    let present = parts.into_iter().filter(|(number, _, _)| *number > 0);
    let mut parts: Vec<String> =
        present.map(|(number, one, many)| count_with_noun(number, one, many)).collect();
    if topology.kinds > 1 {
        parts.push(format!("{} kinds of core", topology.kinds));
    }
    parts.join(", ")
}

/// Returns a sentence with the largest numbers of cores that a new job can get now: in one L3 cache, in one NUMA
/// node, in one package and on the whole machine. A level that the machine does not have, such as L3 caches, is left
/// out.
pub(super) fn largest_requests_sentence(topology: &Topology, fits: &Fits) -> String {
    let levels = [
        (topology.l3, fits.l3, "one L3"),
        (topology.numa_nodes, fits.numa_node, "one NUMA node"),
        (topology.packages, fits.package, "one package"),
        (1, fits.machine, "the machine"),
    ];
    let present = levels.into_iter().filter(|(parts, _, _)| *parts > 0);
    let parts: Vec<String> = present.map(|(_, cores, place)| format!("{cores} in {place}")).collect();
    format!("largest request that still fits, in cores: {}", parts.join(", "))
}

/// Returns the name of a part of the machine, such as `package 0`, `NUMA node 0` or `L3#0`.
pub(super) fn domain_name(domain: &Domain) -> String {
    numbered_name(domain, &domain.number.to_string())
}

/// Returns the name of a part of the same kind as `domain`, with `number` in it. `number` can also be a list of
/// numbers.
fn numbered_name(domain: &Domain, number: &str) -> String {
    match domain.kind.as_str() {
        "numa_node" => format!("NUMA node {number}"),
        "l3" => format!("L3#{number}"),
        other => format!("{} {number}", escape_control_characters(other)),
    }
}

/// Returns the class of a device and its names in the operating system, such as `gpu card0 cuda0`. If the device has no
/// name, the text contains its address instead.
pub(super) fn device_class_and_names(device: &Device) -> String {
    let names = if device.names.is_empty() { device.address.clone() } else { device.names.join(" ") };
    escape_control_characters(&format!("{} {names}", device.class))
}

/// Returns `bytes` as text in the unit KiB, MiB, GiB or TiB, such as `1.5 GiB`. `bytes` is a size of memory in bytes.
pub(super) fn memory_size_text(bytes: u64) -> String {
    let (unit, name) = [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")]
        .into_iter()
        .find(|(unit, _)| bytes >= *unit)
        .unwrap_or((1 << 10, "KiB"));
    let tenths = u128::from(bytes) * 10 / u128::from(unit);
    if tenths >= 100 {
        format!("{} {name}", tenths / 10)
    } else {
        format!("{}.{} {name}", tenths / 10, tenths % 10)
    }
}

/// The drawing of the machine as a tree of lines, under construction.
struct Tree<'a> {
    lines: String,
    kinds: &'a [CoreKind],
    holders: Option<(PuHolders, &'a Status)>,
    /// The devices that are not drawn yet.
    devices: Vec<&'a Device>,
    term: Terminal,
}

impl<'a> Tree<'a> {
    /// Divides `parts` (parts of the machine, such as packages) into groups that are each drawn as one line, because
    /// their parts are drawn alike. The groups have the order of their first parts. Cores are left out.
    fn group_equal_parts<'d>(&self, parts: impl Iterator<Item = &'d Domain>) -> Vec<Vec<&'d Domain>> {
        let mut groups: Vec<(String, Vec<&Domain>)> = Vec::new();
        for part in parts.filter(|part| part.kind != "core") {
            let key = self.drawing_key(part);
            match groups.iter_mut().find(|(known, _)| *known == key) {
                Some((_, group)) => group.push(part),
                None => groups.push((key, vec![part])),
            }
        }
        groups.into_iter().map(|(_, group)| group).collect()
    }

    /// Returns a text that is the same for all parts of the machine that are drawn alike. The text has the kind of
    /// the part, its cores, devices and inner parts, and the number of PUs (logical CPUs) of each holder (such as a
    /// job). It does not have the number of the part, its list of PUs, or its memory size.
    fn drawing_key(&self, part: &Domain) -> String {
        let set = cpus(part);
        let mut key = format!("{} {} {}", part.kind, part.children.is_empty(), set.len());
        key.push_str(&self.core_counts_text(&cores(part)));
        for (holder, pus) in self.holders(&set) {
            key.push_str(&format!("{holder:?} {}", pus.len()));
        }
        for device in self.devices.iter().filter(|device| is_near(device, &set)) {
            key.push_str(&format!("{} {}", device.address, device.names.join(" ")));
        }
        for child in part.children.iter().filter(|child| child.kind != "core") {
            key.push_str(&format!("({})", self.drawing_key(child)));
        }
        key
    }

    /// Appends a line for each group of parts to `self.lines`, and below each line the lines of the inner parts.
    /// `indent` is the beginning of each line. `extra_lines` has lines of the same level that come before the first
    /// group, such as those of devices.
    fn draw_groups(&mut self, groups: &[Vec<&Domain>], indent: &str, extra_lines: &[String]) {
        let lines = groups.len() + extra_lines.len();
        let branch = |n: usize| if n + 1 == lines { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        for (n, line) in extra_lines.iter().enumerate() {
            self.lines.push_str(&format!("{indent}{}{line}\n", branch(n).0));
        }
        for (n, group) in groups.iter().enumerate() {
            let (here, below) = branch(n + extra_lines.len());
            let Some(first) = group.first() else { continue };
            let inner = self.group_inner_parts(group);
            let mut line = format!("{indent}{here}{}", self.group_text(group, inner.is_empty()));
            let mut inner_lines = self.devices_of(first);
            if !inner.is_empty() {
                inner_lines.extend(self.loose_cores(group.iter().flat_map(|part| &part.children)));
            }
            if inner.is_empty() && !first.children.is_empty() {
                let held: Vec<(String, usize)> = self.holder_texts(group);
                let width: usize = char_count(&line) + held.iter().map(|(_, width)| width + 2).sum::<usize>();
                if width < self.term.width {
                    let held: Vec<String> = held.into_iter().map(|(text, _)| text).collect();
                    line.push_str(if held.is_empty() { "" } else { ": " });
                    line.push_str(&held.join(", "));
                } else {
                    inner_lines.extend(held.into_iter().map(|(text, _)| text));
                }
            }
            self.lines.push_str(&line);
            self.lines.push('\n');
            self.draw_groups(&inner, &format!("{indent}{below}"), &inner_lines);
        }
    }

    /// Returns the parts inside the parts of `group`, divided into groups of parts that are drawn alike. Cores are
    /// left out. All parts of `group` must be drawn alike: then they have equal inner parts.
    fn group_inner_parts<'d>(&self, group: &[&'d Domain]) -> Vec<Vec<&'d Domain>> {
        let mut all: Vec<Vec<&Domain>> = Vec::new();
        for part in group {
            for (n, inner) in self.group_equal_parts(part.children.iter()).into_iter().enumerate() {
                match all.get_mut(n) {
                    Some(known) => known.extend(inner),
                    None => all.push(inner),
                }
            }
        }
        all
    }

    /// Returns the text for a group of parts that are drawn alike, such as `2 x package 0-1, 8 cores of 2 PUs`.
    /// `is_leaf` says that no inner parts are drawn below the group.
    fn group_text(&self, group: &[&Domain], is_leaf: bool) -> String {
        let Some(first) = group.first() else { return String::new() };
        let ids: CpuSet = group.iter().map(|part| Pu(part.number.min(Pu::MAX.0))).collect();
        let times = if group.len() > 1 { format!("{} x ", group.len()) } else { String::new() };
        let name = numbered_name(first, &shorten_cpu_list(&ids.to_string(), 16));
        let mut parts = vec![format!("{times}{name}")];
        let sizes = || group.iter().map(|part| part.memory_bytes);
        let (least, most) = (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0));
        if most > 0 {
            let (least, most) = (memory_size_text(least), memory_size_text(most));
            parts.push(if least == most { most } else { format!("{least} to {most}") });
        }
        let set = shorten_cpu_list(&all_cpus(group).to_string(), 24);
        match (first.children.is_empty(), set.is_empty()) {
            (true, true) => parts.push("memory alone".to_owned()),
            (true, false) => parts.push(format!("memory alone, near CPUs {set}")),
            // The line of the single inner part shows the cores.
            (false, _) if first.children.len() == 1 && !is_leaf => {}
            (false, _) => {
                parts.push(self.core_counts_text(&cores(first)));
                if !is_leaf || self.holders.is_none() {
                    parts.push(format!("CPUs {set}"));
                }
            }
        }
        let has_fits = group.len() == 1 && first.children.len() != 1 && !is_leaf;
        if let Some(free) = first.fits.filter(|_| has_fits) {
            parts.push(format!("{free} free"));
        }
        parts.join(", ")
    }

    /// Returns one line about the cores among `parts`, which are in no smaller part. Returns no line if there are no
    /// cores.
    fn loose_cores<'d>(&self, parts: impl Iterator<Item = &'d Domain>) -> Vec<String> {
        let cores: Vec<&Domain> = parts.filter(|part| part.kind == "core").collect();
        if cores.is_empty() {
            return Vec::new();
        }
        let held: Vec<String> = self.holder_texts(&cores).into_iter().map(|(text, _)| text).collect();
        let colon = if held.is_empty() { "" } else { ": " };
        vec![format!("{}{colon}{}", self.core_counts_text(&cores), held.join(", "))]
    }

    /// Returns a text for each holder (such as a job) of PUs (logical CPUs) in the parts of `group`: the name of the
    /// holder and the list of its PUs. Lent PUs have a text for each pair of owner and borrower. Also returns the
    /// width of each text in columns.
    fn holder_texts(&self, group: &[&Domain]) -> Vec<(String, usize)> {
        let jobs = self.holders.as_ref().map(|(_, status)| status.jobs.as_slice()).unwrap_or_default();
        let describe = |holder: Holder, pus: &CpuSet, lent_to: &str| {
            let who = holder.name(jobs);
            let list = shorten_cpu_list(&pus.to_string(), 40);
            let width = char_count(&who) + 1 + char_count(&list) + char_count(lent_to);
            (format!("{} {list}{lent_to}", style::apply_style(&who, holder.symbol().1, self.term)), width)
        };
        let describe_lent = |((owner, borrower), pus): ((usize, usize), CpuSet)| {
            let lent_to = format!(" (lent to {})", Holder::Job(borrower).name(jobs));
            describe(Holder::Job(owner), &pus, &lent_to)
        };
        let describe_all = |(holder, pus): (Holder, CpuSet)| match (holder, &self.holders) {
            (Holder::Lent, Some((holders, _))) => {
                holders.lent_pus_by_jobs(&pus).into_iter().map(describe_lent).collect()
            }
            _ => vec![describe(holder, &pus, "")],
        };
        self.holders(&all_cpus(group)).into_iter().flat_map(describe_all).collect()
    }

    fn holders(&self, pus: &CpuSet) -> BTreeMap<Holder, CpuSet> {
        self.holders.as_ref().map(|(holders, _)| holders.pus_by_holder(pus)).unwrap_or_default()
    }

    /// Returns the numbers of cores of each kind as text, such as `4 cores of 2 PUs, 8 of 1 PU` on a hybrid machine.
    fn core_counts_text(&self, cores: &[&Domain]) -> String {
        let mut counts: BTreeMap<(usize, Option<u32>), u64> = BTreeMap::new();
        for core in cores {
            *counts.entry((cpus(core).len(), core.core_kind)).or_default() += 1;
        }
        let counts = counts.into_iter().rev().map(|((pus, kind), cores)| {
            let kind = kind.and_then(|kind| self.kinds.get(kind as usize));
            let kind = kind.map(|kind| escape_control_characters(&kind.name) + " ").unwrap_or_default();
            let cores = count_with_noun(cores, &format!("{kind}core"), &format!("{kind}cores"));
            format!("{cores} of {}", count_with_noun(pus as u64, "PU", "PUs"))
        });
        counts.collect::<Vec<_>>().join(", ")
    }

    /// Returns one line with the devices of `part` that belong to no smaller part. Marks these devices as drawn.
    /// Returns no line if there are none.
    fn devices_of(&mut self, part: &Domain) -> Vec<String> {
        if !carries_devices(part) {
            return Vec::new();
        }
        let set = cpus(part);
        self.take_devices(|device| is_near(device, &set) && !belongs_to_any(device, &part.children))
    }

    /// Returns one line with those devices that have not been drawn yet and for which `is_here` returns true. Marks
    /// these devices as drawn. Returns no line if there are none.
    fn take_devices(&mut self, is_here: impl Fn(&Device) -> bool) -> Vec<String> {
        let here: Vec<String> = self
            .devices
            .iter()
            .filter(|device| is_here(device))
            .map(|device| device_class_and_names(device))
            .collect();
        self.devices.retain(|device| !is_here(device));
        if here.is_empty() { Vec::new() } else { vec![here.join(", ")] }
    }
}

/// Returns whether devices can belong to `part`. The buses of devices belong to packages and to memory, but not to
/// caches and cores.
fn carries_devices(part: &Domain) -> bool {
    !matches!(part.kind.as_str(), "core" | "l3")
}

/// Returns whether `device` belongs to at least one of `parts`.
fn belongs_to_any(device: &Device, parts: &[Domain]) -> bool {
    parts.iter().any(|part| carries_devices(part) && is_near(device, &cpus(part)))
}

/// Returns whether the device is near PUs (logical CPUs) that are all in `cpus`.
fn is_near(device: &Device, cpus: &CpuSet) -> bool {
    let near = device.cpus.parse::<CpuSet>().unwrap_or_default();
    !near.is_empty() && near.is_subset(cpus)
}

fn cpus(part: &Domain) -> CpuSet {
    part.cpus.parse().unwrap_or_default()
}

fn all_cpus(parts: &[&Domain]) -> CpuSet {
    parts.iter().fold(CpuSet::new(), |all, part| all.union(&cpus(part)))
}

fn cores(part: &Domain) -> Vec<&Domain> {
    if part.kind == "core" { vec![part] } else { part.children.iter().flat_map(cores).collect() }
}

#[cfg(test)]
mod tests;
