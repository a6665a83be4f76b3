//! `status`: header, core map, jobs, and warnings with their remedies. Fits 80 columns.

use jiff::Timestamp;
use pjw_core::cpuset::CpuSet;
use pjw_ipc::wire::{Status, Warning};

use super::core_map::{Holder, PuHolders, core_map_text};
use super::text::{count_with_noun, escape_control_characters, remedy_lines, wrap_text};
use super::{Terminal, UserNames, jobs, style, text};

/// The codes of warnings that mean a broken promise. Other warnings are for information.
const ALARMS: [&str; 5] = ["overlap", "unserved", "audit", "violation", "unconfined"];

/// Returns whether `warning` says that pjw does not keep a job on cores of its own, for example because two jobs share
/// a core. All other warnings are less serious.
pub(crate) fn is_alarming(warning: &Warning) -> bool {
    ALARMS.iter().any(|alarm| warning.code.contains(alarm))
}

/// Returns the text of `pjwctl status`: the machine, the core map, the table of jobs, and warnings. `names` contains
/// the names of the users that own the jobs. The table shows the age of each job at the time `now`.
#[must_use]
pub fn status_text(status: &Status, names: &UserNames, now: Timestamp, term: Terminal) -> String {
    let holders = PuHolders::new(&status.pool, &status.jobs);
    let mut parts = vec![status_header(status, term)];
    parts.push(core_map_text(&status.cores, &holders, term) + &legend(status, &holders, term));
    parts.push(jobs::jobs_text(&status.jobs, names, now, term));
    if !status.warnings.is_empty() {
        parts.push(status.warnings.iter().map(|warning| warning_text(warning, term)).collect());
    }
    parts.join("\n")
}

/// Returns the first lines of the status: the machine, the daemon and the numbers of cores.
fn status_header(status: &Status, term: Terminal) -> String {
    let title = format!("{}:", escape_control_characters(&status.node.hostname));
    let observes = if status.mode == "observe" { " (changes nothing)" } else { "" };
    let daemon = wrap_text(
        &format!(
            "{title} pjwd {}, mode {}{observes}, discovery by {}, pid {}",
            status.version, status.mode, status.discovery, status.pid
        ),
        term.width,
        "",
        "  ",
    );
    let daemon = daemon
        .strip_prefix(&title)
        .map(|rest| style::apply_style(&title, style::HEADING, term) + rest)
        .unwrap_or(daemon);
    let node = &status.node;
    let machine = format!(
        "{}, {}, {}, {}, {}",
        count_with_noun(node.packages, "package", "packages"),
        count_with_noun(node.numa_nodes, "NUMA node", "NUMA nodes"),
        count_with_noun(node.l3, "L3", "L3s"),
        count_with_noun(node.cores, "core", "cores"),
        text::cpus_phrase(&node.cpus, 24),
    );
    let free = if status.fits.machine == 0 {
        format!("free: no core of {}", node.cores)
    } else {
        let list = text::cpus_phrase(&status.pool.free, 24);
        let fits = &status.fits;
        format!(
            "free: {} of {} ({list}); fits in one L3: {}, NUMA node: {}, package: {}",
            fits.machine,
            count_with_noun(node.cores, "core", "cores"),
            fits.l3,
            fits.numa_node,
            fits.package
        )
    };
    let lines = [machine, free].into_iter().chain(slow_lending(status));
    daemon + &lines.map(|line| wrap_text(&line, term.width, "", "  ")).collect::<String>()
}

/// Returns a sentence with the reason why lent cores come back later than they could. `None` if they come back at once,
/// or if nothing is lent.
fn slow_lending(status: &Status) -> Option<String> {
    let lending = status.lending.as_ref().filter(|lending| lending.why_not.is_empty())?;
    (lending.demand == "sampled").then(|| {
        let why = escape_control_characters(&lending.why_sampled);
        format!("lent cores: their owners are sampled each 2 ms, because BPF can't report them: {why}")
    })
}

/// Returns a line with the meanings of the symbols in the core map, such as the one for free cores. The letters of
/// jobs are left out. Only symbols that occur in the map are listed. Empty if none of them occurs.
fn legend(status: &Status, holders: &PuHolders, term: Terminal) -> String {
    let meanings = [
        (Holder::Free, "free"),
        (Holder::Housekeeping, "housekeeping"),
        (Holder::Offline, "offline"),
        (Holder::Lent, "lent to another job"),
        (Holder::SeveralJobs, "held by several jobs"),
    ];
    let shown: Vec<Holder> = status
        .cores
        .iter()
        .map(|core| holders.holder_of_core(&core.cpus.parse::<CpuSet>().unwrap_or_default()))
        .collect();
    let present = meanings.into_iter().filter(|(holder, _)| shown.contains(holder));
    let entries: Vec<String> = present
        .map(|(holder, meaning)| {
            let (cell, style) = holder.symbol();
            format!("{} {meaning}", style::apply_style(cell.encode_utf8(&mut [0; 4]), style, term))
        })
        .collect();
    if entries.is_empty() { String::new() } else { entries.join("   ") + "\n" }
}

/// Returns the text of a warning and its remedies. If the text does not name the job that the warning is about, the
/// id of the job comes first.
fn warning_text(warning: &Warning, term: Terminal) -> String {
    let style = if is_alarming(warning) { style::FAILURE } else { style::WARNING };
    let job = if warning.job.is_empty() || warning.text.contains(&warning.job) {
        String::new()
    } else {
        format!("{}: ", warning.job)
    };
    let text = format!("{job}{}", warning.text);
    let text = wrap_text(&text, term.width, "! ", "  ");
    let text = text.lines().map(|line| style::apply_style(line, style, term) + "\n").collect::<String>();
    text + &remedy_lines(&warning.remedy, term.width)
}

#[cfg(test)]
mod tests;
