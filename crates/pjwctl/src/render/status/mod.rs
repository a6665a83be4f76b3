//! `status`: header, core map, jobs, and warnings with their remedies. Fits 80 columns.

use jiff::Timestamp;
use pjw_core::cpuset::CpuSet;
use pjw_ipc::wire::{Status, Warning};

use super::core_map::{Holder, Holders, core_map};
use super::text::{count, printable, wrap};
use super::{Page, UserNames, jobs, style, text};

/// The codes of warnings that mean a broken promise. Other warnings are for information.
const ALARMS: [&str; 5] = ["overlap", "unserved", "audit", "violation", "unconfined"];

/// Whether a warning means a broken promise.
pub(crate) fn is_alarming(warning: &Warning) -> bool {
    ALARMS.iter().any(|alarm| warning.code.contains(alarm))
}

/// The reply to `status` as text.
#[must_use]
pub fn status(status: &Status, names: &UserNames, now: Timestamp, page: Page) -> String {
    let holders = Holders::new(&status.pool, &status.jobs);
    let mut parts = vec![header(status, page)];
    parts.push(core_map(&status.cores, &holders, page) + &legend(status, &holders, page));
    parts.push(jobs::jobs(&status.jobs, names, now, page));
    if !status.warnings.is_empty() {
        parts.push(status.warnings.iter().map(|warning| self::warning(warning, page)).collect());
    }
    parts.join("\n")
}

fn header(status: &Status, page: Page) -> String {
    let title = format!("{}:", printable(&status.node.hostname));
    let observes = if status.mode == "observe" { " (changes nothing)" } else { "" };
    let warden = wrap(
        &format!(
            "{title} pjwd {}, mode {}{observes}, discovery by {}, pid {}",
            status.version, status.mode, status.discovery, status.pid
        ),
        page.width,
        "",
        "  ",
    );
    let warden = warden
        .strip_prefix(&title)
        .map(|rest| style::paint(&title, style::HEADING, page) + rest)
        .unwrap_or(warden);
    let node = &status.node;
    let machine = format!(
        "{}, {}, {}, {}, {}",
        count(node.packages, "package", "packages"),
        count(node.numa_nodes, "NUMA node", "NUMA nodes"),
        count(node.l3, "L3", "L3s"),
        count(node.cores, "core", "cores"),
        text::cpus(&node.cpus, 24),
    );
    let free = if status.fits.machine == 0 {
        format!("free: no core of {}", node.cores)
    } else {
        let list = text::cpus(&status.pool.free, 24);
        let fits = &status.fits;
        format!(
            "free: {} of {} ({list}); fits in one L3: {}, NUMA node: {}, package: {}",
            fits.machine,
            count(node.cores, "core", "cores"),
            fits.l3,
            fits.numa_node,
            fits.package
        )
    };
    warden + &wrap(&machine, page.width, "", "  ") + &wrap(&free, page.width, "", "  ")
}

/// The meaning of the signs that occur in the core map and are no letters. The letters are in the rows of the table.
fn legend(status: &Status, holders: &Holders, page: Page) -> String {
    let signs = [
        (Holder::Free, "free"),
        (Holder::Housekeeping, "housekeeping"),
        (Holder::Offline, "offline"),
        (Holder::Several, "held by several jobs"),
    ];
    let shown: Vec<Holder> = status
        .cores
        .iter()
        .map(|core| holders.of_core(&core.cpus.parse::<CpuSet>().unwrap_or_default()))
        .collect();
    let present = signs.into_iter().filter(|(holder, _)| shown.contains(holder));
    let entries: Vec<String> = present
        .map(|(holder, meaning)| {
            let (cell, style) = holder.cell();
            format!("{} {meaning}", style::paint(cell.encode_utf8(&mut [0; 4]), style, page))
        })
        .collect();
    if entries.is_empty() { String::new() } else { entries.join("   ") + "\n" }
}

fn warning(warning: &Warning, page: Page) -> String {
    let style = if is_alarming(warning) { style::ALARM } else { style::NOTICE };
    // A text that names its job does not need the id once more.
    let job = if warning.job.is_empty() || warning.text.contains(&warning.job) {
        String::new()
    } else {
        format!("{}: ", warning.job)
    };
    let what = format!("{job}{}", warning.text);
    let text = wrap(&what, page.width, "! ", "  ");
    let text = text.lines().map(|line| style::paint(line, style, page) + "\n").collect::<String>();
    let remedy = if warning.remedy.is_empty() {
        String::new()
    } else {
        wrap(&warning.remedy, page.width, "  → ", "    ")
    };
    text + &remedy
}

#[cfg(test)]
mod tests;
