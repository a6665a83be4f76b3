//! The memory of a job as text.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use pjw_ipc::wire::{Memory, MemoryDenied, ProcessMemory};

use super::super::text::{count_with_noun, escape_control_characters, percent_text, remedy_lines, wrap_text};
use super::super::{Terminal, style};

/// The most rows of processes, and of earlier readings.
const MAX_ROWS: usize = 40;
/// The width of the column with the process ids.
const PID_WIDTH: usize = 10;
/// The width of a column with the memory on one NUMA node, with the space before it.
const NODE_WIDTH: usize = 12;

/// Returns a text about the memory of a job. The text has the sums over its processes, then warnings, a table of the
/// processes, a table of their memory on each NUMA node if this was requested, and a table of earlier measurements. The
/// tables of processes are left out if the memory was only estimated from the counters of the job's cgroup.
pub(super) fn memory_text(memory: &Memory, term: Terminal) -> String {
    let is_estimate = memory.source == "cgroup";
    let title = if is_estimate { "memory, estimated from its cgroup" } else { "memory" };
    let mut text = style::apply_style(title, style::HEADING, term) + "\n";
    for line in memory_sum_lines(memory, is_estimate) {
        text += &wrap_text(&line, term.width, "  ", "    ");
    }
    if let Some(warning) = &memory.warning {
        text += &warning_text(&warning.text, &warning.remedy, term);
    }
    for far in memory.far.iter().take(MAX_ROWS) {
        text += &warning_text(&format!("process {}: {}", far.pid, far.text), &far.remedy, term);
    }
    text += &more_rows(memory.far.len());
    for waits in memory.map_lock_waits.iter().take(MAX_ROWS) {
        text += &warning_text(&waits.text, &waits.remedy, term);
    }
    text += &more_rows(memory.map_lock_waits.len());
    for denied in memory.denied.iter().take(MAX_ROWS) {
        text += &wrap_text(&denied_text(denied), term.width, "  ! ", "    ");
    }
    text += &more_rows(memory.denied.len());
    if !is_estimate {
        text += &processes_table(memory, term);
        text += &nodes_table(memory, term);
    }
    if memory.history.len() > 1 {
        text += &history_table(memory, term);
    }
    text
}

/// Returns the lines about the memory use of the whole job. `is_estimate` says whether the memory was only estimated
/// from the counters of the job's cgroup. Then no pages were looked at, so the lines have no PSS (with a share of
/// each shared page) and no USS (pages that one process alone maps).
fn memory_sum_lines(memory: &Memory, is_estimate: bool) -> Vec<String> {
    let shared = percent_text(memory.shared_permille);
    let processes = count_with_noun(process_count(memory), "process", "processes");
    let rss = bytes(memory.rss);
    let used = match memory.uss {
        Some(uss) if !is_estimate => format!(
            "uses {} (PSS), {} of it in pages that one process alone maps (USS); {processes} with {rss} in all (RSS), of \
             which {shared} is shared",
            bytes(memory.pss),
            bytes(uss)
        ),
        _ => format!(
            "uses {} (anonymous memory and mapped files); {processes} with {rss} in all (RSS); about {shared} of the \
             anonymous memory is shared",
            bytes(memory.pss)
        ),
    };
    let peak = memory.peak.map(|peak| format!(", at most {} so far", bytes(peak))).unwrap_or_default();
    let details = format!(
        "page tables {}, swapped out {}{peak}; {} is left for it",
        bytes(memory.page_tables),
        bytes(memory.swap),
        bytes(memory.available)
    );
    let nodes = sorted_nodes(memory.by_node.keys()).into_iter();
    let nodes: Vec<String> =
        nodes.map(|node| format!("node {node} {}", bytes(memory.by_node[node]))).collect();
    let nodes = match nodes.as_slice() {
        [] => (!is_estimate).then(|| "the memory on each NUMA node: add --nodes".to_owned()),
        nodes => Some(format!("by NUMA node (RSS): {}", nodes.join(", "))),
    };
    let gone = (memory.gone > 0)
        .then(|| format!("{} ended meanwhile", count_with_noun(memory.gone, "process", "processes")));
    let cost = format!("read in {} ms of CPU time", memory.cost_us.div_ceil(1000));
    let unknown = unknown_spaces(memory).filter(|_| !is_estimate);
    let shared = shared_spaces(memory);
    [Some(used), Some(details), nodes, shared, unknown, gone, Some(cost)].into_iter().flatten().collect()
}

/// Returns the number of processes of the job, also of those that are not in `memory.processes`.
fn process_count(memory: &Memory) -> u64 {
    u64::try_from(memory.processes.len()).unwrap_or(u64::MAX) + u64::from(memory.more_processes)
}

/// Returns a sentence with the number of processes that share the address space of another process of the job. `None`
/// if there are no such processes.
fn shared_spaces(memory: &Memory) -> Option<String> {
    let more = process_count(memory).saturating_sub(u64::from(memory.address_spaces));
    (more > 0).then(|| {
        let verb = if more == 1 { "shares" } else { "share" };
        format!(
            "{more} of them {verb} the address space of another one, which counts once in these sums; the kernel reports \
             all of it for each process"
        )
    })
}

/// Returns a sentence with the number of processes of which it is unknown whether they share an address space. `None`
/// if there are no such processes, or if the job has only one process.
fn unknown_spaces(memory: &Memory) -> Option<String> {
    let unknown = memory.processes.iter().filter(|process| process.address_space.is_none()).count();
    (unknown > 0 && memory.processes.len() > 1).then(|| {
        let unknown = count_with_noun(u64::try_from(unknown).unwrap_or(u64::MAX), "process", "processes");
        format!(
            "it is unknown whether {unknown} of them share an address space, as after clone(2) with CLONE_VM: each counts \
             alone, because pjwd may not compare them (kcmp(2), which a container may forbid)"
        )
    })
}

/// Returns the lines of a warning, and below them the lines of its remedy.
fn warning_text(text: &str, remedy: &str, term: Terminal) -> String {
    wrap_text(text, term.width, "  ! ", "    ") + &remedy_lines(remedy, term.width)
}

fn denied_text(denied: &MemoryDenied) -> String {
    format!("process {} could not be read: {}", denied.pid, escape_control_characters(&denied.why))
}

/// The line about the processes of a list that are left out. Empty if there are none.
fn more_rows(count: usize) -> String {
    let more = count.saturating_sub(MAX_ROWS);
    if more > 0 { format!("    and {more} more\n") } else { String::new() }
}

/// Returns a table with the memory of the processes of a job. Processes with more resident memory (RSS) come first, and
/// at most [`MAX_ROWS`] are shown. Empty if `memory` has no processes.
fn processes_table(memory: &Memory, term: Terminal) -> String {
    if memory.processes.is_empty() {
        return String::new();
    }
    let heading = "       pid         RSS         PSS         USS  shared        swap  page tables";
    let mut lines = style::apply_style(heading, style::SECONDARY, term) + "\n";
    for process in largest_processes(memory) {
        let uss = process.uss.unwrap_or(0);
        let shared = process.rss.saturating_sub(uss).saturating_mul(1000) / process.rss.max(1);
        let shares_space = |other: &&ProcessMemory| {
            other.pid != process.pid
                && other.address_space.is_some()
                && other.address_space == process.address_space
        };
        let sharer = memory.processes.iter().find(shares_space);
        let note = sharer.map(|other| format!("  same address space as {}", other.pid)).unwrap_or_default();
        let _ = writeln!(
            lines,
            "{:>PID_WIDTH$} {:>11} {:>11} {:>11} {:>7} {:>11} {:>12}{note}",
            process.pid,
            bytes(process.rss),
            bytes(process.pss.unwrap_or(0)),
            bytes(uss),
            percent_text(u32::try_from(shared).unwrap_or(1000)),
            bytes(process.swap),
            bytes(process.page_tables)
        );
    }
    let more = memory.processes.len().saturating_sub(MAX_ROWS)
        + usize::try_from(memory.more_processes).unwrap_or(usize::MAX);
    if more > 0 {
        let _ = writeln!(lines, "           and {more} smaller ones");
    }
    lines
}

/// Returns the processes in the tables: those with the most resident memory (RSS), the largest first.
fn largest_processes(memory: &Memory) -> impl Iterator<Item = &ProcessMemory> {
    let mut processes: Vec<&ProcessMemory> = memory.processes.iter().collect();
    processes.sort_by_key(|process| std::cmp::Reverse(process.rss));
    processes.into_iter().take(MAX_ROWS)
}

/// Returns a table with the resident memory (RSS) of the processes of a job on each NUMA node. It has the same rows as
/// the table of the processes. Nodes that have no room in the width of the terminal are in further tables below. Empty
/// if the memory on the nodes was not requested.
fn nodes_table(memory: &Memory, term: Terminal) -> String {
    let nodes = sorted_nodes(memory.processes.iter().flat_map(|process| process.by_node.keys()));
    let columns = (term.width.saturating_sub(PID_WIDTH) / NODE_WIDTH).max(1);
    let mut lines = String::new();
    for nodes in nodes.chunks(columns) {
        let mut heading = format!("{:>PID_WIDTH$}", "pid");
        for node in nodes {
            let name = format!("node {}", escape_control_characters(node));
            let _ = write!(heading, "{name:>NODE_WIDTH$}");
        }
        lines += &(style::apply_style(&heading, style::SECONDARY, term) + "\n");
        for process in largest_processes(memory) {
            let _ = write!(lines, "{:>PID_WIDTH$}", process.pid);
            for &node in nodes {
                let size = process.by_node.get(node).copied().unwrap_or(0);
                let _ = write!(lines, "{:>NODE_WIDTH$}", bytes(size));
            }
            lines.push('\n');
        }
    }
    lines
}

/// Returns the names of NUMA nodes, each once, in the order of their numbers: 2 comes before 10.
fn sorted_nodes<'n>(names: impl IntoIterator<Item = &'n String>) -> Vec<&'n String> {
    let names: BTreeSet<&String> = names.into_iter().collect();
    let mut names = Vec::from_iter(names);
    names.sort_by_key(|name| name.parse::<u32>().unwrap_or(u32::MAX));
    names
}

/// Returns a table with the last [`MAX_ROWS`] measurements of the memory of a job, the oldest first.
fn history_table(memory: &Memory, term: Terminal) -> String {
    let heading = "  read at                          RSS         PSS  shared  processes";
    let mut lines = style::apply_style(heading, style::SECONDARY, term) + "\n";
    let skipped = memory.history.len().saturating_sub(MAX_ROWS);
    for sample in memory.history.iter().skip(skipped) {
        let estimated = if sample.source == "cgroup" { "  estimated" } else { "" };
        let _ = writeln!(
            lines,
            "  {:24} {:>11} {:>11} {:>7} {:>10}{estimated}",
            escape_control_characters(&sample.time),
            bytes(sample.rss),
            bytes(sample.pss),
            percent_text(sample.shared_permille),
            sample.processes
        );
    }
    lines
}

/// Returns an amount of memory in bytes as text, with one decimal from 1 KiB on, such as `1.2 GiB`.
fn bytes(amount: u64) -> String {
    let units = [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(size, _)| amount >= *size) {
        Some((size, unit)) => {
            let tenths = u128::from(amount) * 10 / u128::from(size);
            format!("{}.{} {unit}", tenths / 10, tenths % 10)
        }
        None => format!("{amount} B"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use pjw_ipc::wire::{FarMemory, MapLockWaits, MemorySample, Warning};

    use super::super::super::samples::PLAIN_TERMINAL;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn process(pid: u32, space: u32, rss: u64, uss: u64) -> ProcessMemory {
        ProcessMemory {
            pid,
            rss: rss * MIB,
            pss: Some((uss + 100) * MIB),
            uss: Some(uss * MIB),
            page_tables: MIB,
            address_space: Some(space),
            ..ProcessMemory::default()
        }
    }

    fn farm() -> Memory {
        let sample = |time: &str, pss| MemorySample {
            time: time.into(),
            source: "smaps".into(),
            rss: 900 * MIB,
            pss,
            shared_permille: 889,
            processes: 3,
        };
        Memory {
            source: "smaps".into(),
            cost_us: 19_400,
            rss: 1_360 * MIB,
            pss: 520 * MIB,
            uss: Some(120 * MIB),
            shared_permille: 911,
            page_tables: 3 * MIB,
            peak: Some(1_536 * MIB),
            available: 5 << 30,
            address_spaces: 3,
            processes: vec![process(100, 0, 400, 0), process(101, 1, 460, 60), process(102, 2, 460, 60)],
            gone: 1,
            history: vec![
                sample("2026-05-04T12:00:00.000Z", 400 * MIB),
                sample("2026-05-04T12:00:30.000Z", 520 * MIB),
            ],
            ..Memory::default()
        }
    }

    #[test]
    fn address_spaces_that_could_not_be_compared_are_said_to_be_unknown() {
        let mut memory = farm();
        assert!(!memory_text(&memory, PLAIN_TERMINAL).contains("unknown"));
        memory.processes.iter_mut().for_each(|process| process.address_space = None);
        let text = memory_text(&memory, PLAIN_TERMINAL);
        assert!(text.contains("it is unknown whether 3 processes of them share an address"), "{text}");
        let estimate = Memory { source: "cgroup".into(), uss: None, ..memory };
        assert!(!memory_text(&estimate, PLAIN_TERMINAL).contains("unknown"));
    }

    #[test]
    fn processes_that_share_an_address_space_are_counted_in_a_line() {
        assert!(!memory_text(&farm(), PLAIN_TERMINAL).contains("of another one"));
        let processes = vec![process(100, 0, 400, 0), process(101, 1, 460, 60), process(102, 1, 460, 60)];
        let text = memory_text(&Memory { processes, address_spaces: 2, ..farm() }, PLAIN_TERMINAL);
        assert!(text.contains("  1 of them shares the address space of another one"), "{text}");
        assert!(text.contains("same address space as 102"), "{text}");
    }

    #[test]
    fn the_memory_is_shown_with_its_processes_and_its_history() {
        insta::assert_snapshot!(memory_text(&farm(), PLAIN_TERMINAL), @r"
        memory
          uses 520.0 MiB (PSS), 120.0 MiB of it in pages that one process alone maps
            (USS); 3 processes with 1.3 GiB in all (RSS), of which 91.1% is shared
          page tables 3.0 MiB, swapped out 0 B, at most 1.5 GiB so far; 5.0 GiB is left
            for it
          the memory on each NUMA node: add --nodes
          1 process ended meanwhile
          read in 20 ms of CPU time
               pid         RSS         PSS         USS  shared        swap  page tables
               101   460.0 MiB   160.0 MiB    60.0 MiB   86.9%         0 B      1.0 MiB
               102   460.0 MiB   160.0 MiB    60.0 MiB   86.9%         0 B      1.0 MiB
               100   400.0 MiB   100.0 MiB         0 B  100.0%         0 B      1.0 MiB
          read at                          RSS         PSS  shared  processes
          2026-05-04T12:00:00.000Z   900.0 MiB   400.0 MiB   88.9%          3
          2026-05-04T12:00:30.000Z   900.0 MiB   520.0 MiB   88.9%          3
        ");
    }

    #[test]
    fn the_memory_on_each_node_is_shown_for_the_job_and_for_each_process() {
        let on_nodes = |sizes: &[(u32, u64)]| {
            sizes.iter().map(|(node, size)| (node.to_string(), size * MIB)).collect::<BTreeMap<_, _>>()
        };
        let mut memory = farm();
        assert_eq!(nodes_table(&memory, PLAIN_TERMINAL), "", "it was not requested");
        memory.by_node = on_nodes(&[(0, 800), (2, 100), (10, 460)]);
        memory.processes[0].by_node = on_nodes(&[(0, 400)]);
        memory.processes[1].by_node = on_nodes(&[(0, 360), (2, 100)]);
        memory.processes[2].by_node = on_nodes(&[(0, 40), (10, 420)]);
        let text = memory_text(&memory, PLAIN_TERMINAL);
        let sums = "  by NUMA node (RSS): node 0 800.0 MiB, node 2 100.0 MiB, node 10 460.0 MiB\n";
        assert!(text.contains(sums), "{text}");
        let wide = [
            "       pid      node 0      node 2     node 10",
            "       101   360.0 MiB   100.0 MiB         0 B",
            "       102    40.0 MiB         0 B   420.0 MiB",
            "       100   400.0 MiB         0 B         0 B",
        ];
        assert!(text.contains(&(wide.join("\n") + "\n")), "{text}");
        let narrow = [
            "       pid      node 0      node 2",
            "       101   360.0 MiB   100.0 MiB",
            "       102    40.0 MiB         0 B",
            "       100   400.0 MiB         0 B",
            "       pid     node 10",
            "       101         0 B",
            "       102   420.0 MiB",
            "       100         0 B",
        ];
        let text = memory_text(&memory, Terminal { width: 40, ..PLAIN_TERMINAL });
        assert!(text.contains(&(narrow.join("\n") + "\n")), "{text}");
    }

    #[test]
    fn an_estimate_says_that_it_is_one() {
        let memory = Memory { source: "cgroup".into(), uss: None, gone: 0, history: Vec::new(), ..farm() };
        let text = memory_text(&memory, PLAIN_TERMINAL);
        assert!(text.starts_with("memory, estimated from its cgroup\n"), "{text}");
        assert!(text.contains("about 91.1% of the"), "{text}");
        assert!(!text.contains("PSS"), "{text}");
    }

    #[test]
    fn warnings_and_processes_that_may_not_be_read_are_shown_with_the_reason() {
        let denied = vec![MemoryDenied { pid: 7, uid: 0, why: "it is a process\u{1b}[2J of user 0".into() }];
        let warning = Warning {
            code: "memory".into(),
            text: "8 workers x 1.2 GiB of their own will not fit".into(),
            remedy: "start fewer workers".into(),
            ..Warning::default()
        };
        let text = memory_text(&Memory { denied, warning: Some(warning), ..farm() }, PLAIN_TERMINAL);
        assert!(
            text.contains("! process 7 could not be read: it is a process\\u{1b}[2J of user 0"),
            "{text}"
        );
        assert!(text.contains("! 8 workers x 1.2 GiB of their own will not fit\n"), "{text}");
        assert!(text.contains("start fewer workers"), "{text}");
    }

    #[test]
    fn memory_far_from_the_threads_is_shown_with_a_remedy() {
        let far = FarMemory {
            pid: 7,
            text: "1 hot thread runs on NUMA node 0, and 900.0 MiB of it is elsewhere".into(),
            remedy: "move the memory: migratepages 7 1 0".into(),
            ..FarMemory::default()
        };
        let text = memory_text(&Memory { far: vec![far], ..farm() }, PLAIN_TERMINAL);
        assert!(text.contains("  ! process 7: 1 hot thread runs on NUMA node 0"), "{text}");
        assert!(text.contains("migratepages 7 1 0"), "{text}");
    }

    #[test]
    fn threads_that_wait_to_map_memory_are_shown_with_a_remedy() {
        let waits = MapLockWaits {
            text: "4 active threads of process 7 wait for one another".into(),
            remedy: "allocate buffers once".into(),
            ..MapLockWaits::default()
        };
        let text = memory_text(&Memory { map_lock_waits: vec![waits], ..farm() }, PLAIN_TERMINAL);
        assert!(text.contains("  ! 4 active threads of process 7 wait for one another\n"), "{text}");
        assert!(text.contains("allocate buffers once"), "{text}");
    }

    #[test]
    fn of_many_processes_the_number_of_those_that_are_left_out_is_shown() {
        let far = vec![FarMemory { text: "far".into(), ..FarMemory::default() }; MAX_ROWS];
        let denied = vec![MemoryDenied { why: "denied".into(), ..MemoryDenied::default() }; MAX_ROWS + 2];
        let mut memory = Memory { far, denied, ..farm() };
        assert_eq!(memory_text(&memory, PLAIN_TERMINAL).matches("    and ").count(), 1);
        memory.far.push(FarMemory::default());
        let text = memory_text(&memory, PLAIN_TERMINAL);
        assert!(text.contains("    and 1 more\n") && text.contains("    and 2 more\n"), "{text}");
    }

    #[test]
    fn amounts_have_one_decimal() {
        let amounts = [0, 1023, 1024, 1536 * 1024, 5 << 30, u64::MAX].map(bytes);
        assert_eq!(amounts, ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB", "16777215.9 TiB"]);
    }
}
