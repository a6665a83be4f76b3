//! `topology`: the machine as a tree, and who holds what.
//!
//! Cores are not drawn one by one but counted where they hang, as `4 cores of 2 PUs`; JSON has each of them.

use std::collections::BTreeMap;

use pjw_core::cpuset::CpuSet;
use pjw_ipc::wire::{Domain, Status, Topology};

use super::core_map::{Holder, Holders};
use super::text::{count, cpus, printable};
use super::{Page, style};

/// The answer to `topology`. With a status, the smallest parts say who holds their PUs.
#[must_use]
pub fn topology(topology: &Topology, status: Option<&Status>, page: Page) -> String {
    let counts = [
        count(topology.packages, "package", "packages"),
        count(topology.numa_nodes, "NUMA node", "NUMA nodes"),
        count(topology.l3, "L3", "L3s"),
        count(topology.cores, "core", "cores"),
        count(topology.pus, "PU", "PUs"),
    ];
    let kinds =
        if topology.kinds > 1 { format!(", {} kinds of core", topology.kinds) } else { String::new() };
    let title = style::paint("machine", style::HEADING, page);
    let mut tree = Tree {
        lines: format!("{title}: {}{kinds}, {}\n", counts.join(", "), cpus(&topology.cpus, 24)),
        ledger: status.map(|status| (Holders::new(&status.pool, &status.jobs), status)),
        page,
    };
    tree.children(&topology.tree, "");
    tree.lines
}

struct Tree<'a> {
    lines: String,
    ledger: Option<(Holders, &'a Status)>,
    page: Page,
}

impl Tree<'_> {
    /// Draws the parts of one part; those of a kind that is only counted come as one line.
    fn children(&mut self, parts: &[Domain], indent: &str) {
        let (cores, domains): (Vec<&Domain>, Vec<&Domain>) =
            parts.iter().partition(|part| part.kind == "core");
        let holders = if cores.is_empty() { Vec::new() } else { self.held(&cores) };
        let lines = domains.len() + usize::from(!cores.is_empty()) + holders.len();
        let mut drawn = 0;
        let mut branch = || {
            drawn += 1;
            if drawn == lines { ("└─ ", "   ") } else { ("├─ ", "│  ") }
        };
        if !cores.is_empty() {
            let line = counted(&cores);
            self.line(indent, branch().0, &line);
        }
        for holder in holders {
            self.line(indent, branch().0, &holder);
        }
        for domain in domains {
            let (here, below) = branch();
            let line = described(domain);
            self.line(indent, here, &line);
            self.children(&domain.children, &format!("{indent}{below}"));
        }
    }

    fn line(&mut self, indent: &str, branch: &str, text: &str) {
        self.lines.push_str(indent);
        self.lines.push_str(branch);
        self.lines.push_str(text);
        self.lines.push('\n');
    }

    /// Who holds the PUs of these cores, a line each.
    fn held(&self, cores: &[&Domain]) -> Vec<String> {
        let Some((holders, status)) = &self.ledger else { return Vec::new() };
        let pus = all_pus(cores);
        let line = |(holder, pus): (Holder, CpuSet)| {
            let who = match holder {
                Holder::Job(n) => status.jobs.get(n).map(|job| printable(&job.id)).unwrap_or_default(),
                Holder::Several => "several jobs".to_owned(),
                Holder::Housekeeping => "housekeeping".to_owned(),
                Holder::Free => "free".to_owned(),
                Holder::Offline => "offline".to_owned(),
            };
            let who = style::paint(&who, holder.cell().1, self.page);
            format!("{who}: {}", cpus(&pus.to_string(), 40))
        };
        holders.among(&pus).into_iter().map(line).collect()
    }
}

fn described(domain: &Domain) -> String {
    let name = match domain.kind.as_str() {
        "package" => format!("package {}", domain.number),
        "numa_node" => format!("NUMA node {}", domain.number),
        "l3" => format!("L3#{}", domain.number),
        other => format!("{} {}", printable(other), domain.number),
    };
    let memory =
        if domain.memory_bytes > 0 { format!(", {}", memory(domain.memory_bytes)) } else { String::new() };
    format!("{name}: {}{memory}", cpus(&domain.cpus, 40))
}

/// `4 cores of 2 PUs, 8 of 1`: hybrid machines have several sorts.
fn counted(cores: &[&Domain]) -> String {
    let mut sizes: BTreeMap<usize, u64> = BTreeMap::new();
    for core in cores {
        *sizes.entry(all_pus(&[core]).len()).or_default() += 1;
    }
    let sorts = sizes.into_iter().rev().map(|(pus, cores)| {
        format!("{} of {}", count(cores, "core", "cores"), count(pus as u64, "PU", "PUs"))
    });
    sorts.collect::<Vec<_>>().join(", ")
}

fn all_pus(parts: &[&Domain]) -> CpuSet {
    let sets = parts.iter().map(|part| part.cpus.parse::<CpuSet>().unwrap_or_default());
    sets.fold(CpuSet::new(), |all, set| all.union(&set))
}

fn memory(bytes: u64) -> String {
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

#[cfg(test)]
#[path = "topology/tests.rs"]
mod tests;
