//! `plan --defrag` and `defrag`: the jobs that move, the reasons, and the largest requests before and after.

use comfy_table::{ContentArrangement, Table, TableStyle};
use pjw_ipc::call::DefragReply;

use super::text::{escape_control_characters, shorten_cpu_list, wrap_text};
use super::{Terminal, style};

/// The maximum width of a CPU list, in columns.
const MAX_LIST_WIDTH: usize = 20;

/// The stage of a defragmentation that [`defrag_text`] describes: the moves of jobs are only planned, or are done. A
/// defragmentation moves jobs to other cores, so that the cores of each job are closer together, or so that larger
/// requests for cores can be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefragStage {
    /// The moves are planned.
    Planned,
    /// The moves are done.
    Done,
}

/// Returns the text of `pjwctl plan --defrag` and `pjwctl defrag`: a table of the jobs that move to other cores, with
/// the reasons, and the largest request for cores that fits before and after the moves. If no job moves, the text is
/// a sentence. `stage` says whether the moves are planned or done.
#[must_use]
pub fn defrag_text(reply: &DefragReply, stage: DefragStage, term: Terminal) -> String {
    if reply.moves.is_empty() {
        let why = "nothing to move: no job would lie closer together, and no larger request would fit";
        return wrap_text(why, term.width, "", "");
    }
    moves_text(reply, term) + "\n" + &wrap_text(&largest_requests_text(reply, stage), term.width, "", "  ")
}

/// Returns a table with one row for each job that moves: its CPUs before and after the move, and the reason.
fn moves_text(reply: &DefragReply, term: Terminal) -> String {
    let mut table = Table::new();
    table.load_style(TableStyle::new()).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_width(u16::try_from(term.width).unwrap_or(u16::MAX));
    table.set_header(["job", "from", "to", "why"]);
    for moved in &reply.moves {
        let [from, to] = [&moved.from, &moved.to].map(|list| shorten_cpu_list(list, MAX_LIST_WIDTH));
        table.add_row([
            escape_control_characters(&moved.job),
            from,
            to,
            escape_control_characters(&moved.why),
        ]);
    }
    for (n, column) in table.column_iter_mut().enumerate() {
        column.set_padding((u16::from(n > 0), 0));
    }
    let line = |(n, line): (usize, String)| {
        let line = line.trim_end();
        if n == 0 { style::apply_style(line, style::HEADING, term) + "\n" } else { line.to_owned() + "\n" }
    };
    table.lines().enumerate().map(line).collect()
}

/// Returns a text with the largest number of cores that a new job can get in one L3 cache, before and after the
/// moves. If the moves change this number for one NUMA node or for one package, the text has these numbers too.
/// `stage` says whether the moves are planned or done.
fn largest_requests_text(reply: &DefragReply, stage: DefragStage) -> String {
    let (before, after) = (&reply.largest_requests_before, &reply.largest_requests_after);
    let levels = [
        ("L3", before.l3, after.l3),
        ("NUMA node", before.numa_node, after.numa_node),
        ("package", before.package, after.package),
    ];
    let (first, second) = if stage == DefragStage::Planned { ("now", "after") } else { ("before", "now") };
    let kept = levels.into_iter().filter(|&(level, before, after)| level == "L3" || before != after);
    let texts = kept.map(|(level, before, after)| format!("one {level}: {before} {first}, {after} {second}"));
    format!("largest request that fits {}", texts.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use pjw_ipc::wire::{Fits, Move};

    use super::super::samples;
    use super::*;

    fn reply() -> DefragReply {
        let moved = |job: &str, from: &str, to: &str, why: &str| Move {
            job: job.into(),
            from: from.into(),
            to: to.into(),
            why: why.into(),
        };
        DefragReply {
            moves: vec![
                moved("slurm:4711", "3-4", "6-7", "it lies on 1 L3 instead of 2"),
                moved(
                    "manual:evil\x1b[2J",
                    "0,2,4,6,8,10,12,14,16,18,20",
                    "32-42",
                    "one NUMA node can then serve 12 cores instead of 10",
                ),
            ],
            largest_requests_before: Fits { l3: 3, numa_node: 10, package: 12, machine: 14 },
            largest_requests_after: Fits { l3: 6, numa_node: 12, package: 12, machine: 14 },
        }
    }

    #[test]
    fn an_empty_plan_of_moves_has_a_message() {
        let empty = DefragReply { moves: vec![], ..reply() };
        assert_snapshot!(defrag_text(&empty, DefragStage::Planned, samples::PLAIN_TERMINAL), @r"
        nothing to move: no job would lie closer together, and no larger request would
        fit
        ");
    }

    #[test]
    fn moves_are_shown_with_their_reasons_and_benefits() {
        assert_snapshot!(defrag_text(&reply(), DefragStage::Planned, samples::PLAIN_TERMINAL), @r"
        job                  from               to    why
        slurm:4711           3-4                6-7   it lies on 1 L3 instead of 2
        manual:evil\u{1b}[2J 0,2,4,6,8,10,…(11) 32-42 one NUMA node can then serve 12
                                                      cores instead of 10

        largest request that fits one L3: 3 now, 6 after; one NUMA node: 10 now, 12
          after
        ");
    }

    #[test]
    fn completed_moves_are_shown_as_completed() {
        let text =
            defrag_text(&reply(), DefragStage::Done, Terminal { width: 120, ..samples::PLAIN_TERMINAL });
        let last = "largest request that fits one L3: 3 before, 6 now; one NUMA node: 10 before, 12 now\n";
        assert!(text.ends_with(last), "{text}");
    }
}
