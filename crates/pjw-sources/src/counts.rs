//! Core counts in the forms of the batch systems: `72(x2),36` (Slurm), `hostA 4 hostB 8 ` (LSF), and one host name
//! per slot (LSF).
//!
//! The texts come from the environment, so they can have any content. No list is expanded: each function reads the text
//! once, so large numbers cost no more time than small ones.

use thiserror::Error;

use crate::hostlist::host_names_match;
use crate::number::parse_digits;

/// Error: a list of counts from a batch system is invalid. The list says how many CPUs, slots or tasks a job
/// has on each machine. Either the list is empty, or it can't be parsed, or it has counts for more or fewer
/// machines than the job has.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CountsError {
    /// The list is empty.
    #[error("the list of counts is empty: expected something like 4(x2),8")]
    Empty,
    /// A part of the list (the text between two commas) is no count such as `8` or `4(x2)`.
    #[error("part {part} of the list of counts is not a count: expected 8 or 4(x2)")]
    NotACount {
        /// The position of the part in the list, counted from 1.
        part: usize,
    },
    /// The list has counts for more or fewer machines than the job has.
    #[error("the list has counts for {counts} nodes, but the job has {nodes}")]
    LengthMismatch {
        /// The number of machines for which the list has counts.
        counts: u64,
        /// The number of machines that the job has.
        nodes: u32,
    },
    /// The list is not a sequence of pairs of a host name and a count, such as `hostA 4 hostB 8`.
    #[error("word {word} of the list of hosts is not a count: expected pairs like hostA 4 hostB 8")]
    NotAPair {
        /// The position in the list of the word that should be a count. The words are counted from 1.
        word: usize,
    },
}

/// Equal counts of consecutive nodes: `4(x2)` is a count of 4 on each of 2 nodes.
struct Run {
    count: u32,
    nodes: u32,
}

fn parse_runs(text: &str) -> impl Iterator<Item = Result<Run, CountsError>> {
    let parse = |(at, item): (usize, &str)| parse_run(item).ok_or(CountsError::NotACount { part: at + 1 });
    text.split(',').enumerate().map(parse)
}

fn parse_run(item: &str) -> Option<Run> {
    let (count, nodes) = match item.split_once("(x") {
        Some((count, times)) => (count, parse_digits::<u32>(times.strip_suffix(')')?)?),
        None => (item, 1),
    };
    Some(Run { count: parse_digits(count)?, nodes: Some(nodes).filter(|&nodes| nodes > 0)? })
}

/// Returns the count in Slurm's list `count_list` if the count is the same on all machines of the job, such as
/// 72 for `72(x2)`. The list has one count for each machine: `72(x2),36` means 72, 72 and 36. Returns `None` if
/// the counts differ.
///
/// # Errors
/// If `count_list` is not such a list.
pub fn count_if_same_on_all_nodes(count_list: &str) -> Result<Option<u32>, CountsError> {
    if count_list.is_empty() {
        return Err(CountsError::Empty);
    }
    let mut first = None;
    let mut is_same = true;
    for run in parse_runs(count_list) {
        let count = run?.count;
        is_same &= *first.get_or_insert(count) == count;
    }
    Ok(first.filter(|_| is_same))
}

/// Returns the count of one machine in Slurm's list `count_list`. The list has one count for each machine of
/// the job: `72(x2),36` means 72, 72 and 36. `node_index` is the position of the machine in the list, counted
/// from 0. `node_count` is the number of machines of the job.
///
/// # Errors
/// If `count_list` is not such a list, if the list does not have exactly `node_count` counts, or if the list
/// has no count at `node_index`.
pub fn count_of_node(count_list: &str, node_index: u32, node_count: u32) -> Result<u32, CountsError> {
    if count_list.is_empty() {
        return Err(CountsError::Empty);
    }
    let mut total = 0;
    let mut count_at_index = None;
    for run in parse_runs(count_list) {
        let run = run?;
        total += u64::from(run.nodes);
        if u64::from(node_index) < total {
            count_at_index.get_or_insert(run.count);
        }
    }
    count_at_index
        .filter(|_| total == u64::from(node_count))
        .ok_or(CountsError::LengthMismatch { counts: total, nodes: node_count })
}

/// Returns the number of slots on the host `host_name` in LSF's list `host_slot_pairs`, such as
/// `hostA 4 hostB 8`. In this list, each host name is followed by a number of slots. If the host occurs more
/// than once, the numbers are added. Returns `None` if the host does not occur.
///
/// # Errors
/// If `host_slot_pairs` is empty, or is not such a list.
pub fn slot_count_of_host_in_pairs(
    host_slot_pairs: &str,
    host_name: &str,
) -> Result<Option<u32>, CountsError> {
    let mut tokens = host_slot_pairs.split_ascii_whitespace().enumerate();
    let mut sum: Option<u32> = None;
    while let Some((at, name)) = tokens.next() {
        let count = tokens
            .next()
            .and_then(|(_, word)| parse_digits(word))
            .ok_or(CountsError::NotAPair { word: at + 2 })?;
        if host_names_match(name, host_name) {
            sum = Some(sum.unwrap_or(0).saturating_add(count));
        }
    }
    if host_slot_pairs.trim_ascii().is_empty() { Err(CountsError::Empty) } else { Ok(sum) }
}

/// Returns the number of slots on the host `host_name` in LSF's list `host_list`, such as `hostA hostA hostB`.
/// This list contains the name of a host once for each slot. The variable `LSB_HOSTS` has such a list. Returns
/// `None` if the host does not occur.
///
/// # Errors
/// If `host_list` is empty.
pub fn slot_count_of_host_in_list(host_list: &str, host_name: &str) -> Result<Option<u32>, CountsError> {
    if host_list.trim_ascii().is_empty() {
        return Err(CountsError::Empty);
    }
    let slots = host_list.split_ascii_whitespace().filter(|name| host_names_match(name, host_name)).count();
    Ok(u32::try_from(slots).ok().filter(|&slots| slots > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_by_position() {
        let cases = [
            ("72(x2),36", 0, 3, Ok(72)),
            ("72(x2),36", 1, 3, Ok(72)),
            ("72(x2),36", 2, 3, Ok(36)),
            ("4(x2),8", 2, 3, Ok(8)),
            ("4", 0, 1, Ok(4)),
            ("72(x2),36", 0, 2, Err(CountsError::LengthMismatch { counts: 3, nodes: 2 })),
            ("72(x2),36", 3, 3, Err(CountsError::LengthMismatch { counts: 3, nodes: 3 })),
            ("4294967295(x4294967295)", 4_294_967_294, 4_294_967_295, Ok(4_294_967_295)),
            ("", 0, 1, Err(CountsError::Empty)),
            ("4,", 0, 2, Err(CountsError::NotACount { part: 2 })),
            ("4(x0)", 0, 1, Err(CountsError::NotACount { part: 1 })),
            ("4(x2", 0, 2, Err(CountsError::NotACount { part: 1 })),
            ("4(2)", 0, 2, Err(CountsError::NotACount { part: 1 })),
            ("+4", 0, 1, Err(CountsError::NotACount { part: 1 })),
            ("-4", 0, 1, Err(CountsError::NotACount { part: 1 })),
            ("99999999999", 0, 1, Err(CountsError::NotACount { part: 1 })),
        ];
        for (text, index, nodes, expected) in cases {
            assert_eq!(count_of_node(text, index, nodes), expected, "{text:?} {index} of {nodes}");
        }
    }

    #[test]
    fn equal_counts_need_no_position() {
        let cases = [
            ("4", Ok(Some(4))),
            ("72(x2)", Ok(Some(72))),
            ("4(x2),4", Ok(Some(4))),
            ("72(x2),36", Ok(None)),
            ("", Err(CountsError::Empty)),
            ("4,x", Err(CountsError::NotACount { part: 2 })),
        ];
        for (text, expected) in cases {
            assert_eq!(count_if_same_on_all_nodes(text), expected, "{text:?}");
        }
    }

    #[test]
    fn pairs_are_read_by_the_hosts_name() {
        let cases = [
            ("hostA 4 hostB 8 ", "hostA", Ok(Some(4))),
            ("hostA 4 hostB 8 ", "hostB.example.org", Ok(Some(8))),
            ("hostA.example.org 4", "hosta", Ok(Some(4))),
            ("hostA 4 hostB 8 ", "hostC", Ok(None)),
            ("hostA 4 hostB 8 hostA 1", "hostA", Ok(Some(5))),
            ("hostA 4294967295 hostA 2", "hostA", Ok(Some(u32::MAX))),
            ("hostA 4 hostB", "hostA", Err(CountsError::NotAPair { word: 4 })),
            ("hostA hostB 4", "hostA", Err(CountsError::NotAPair { word: 2 })),
            ("hostA -4", "hostA", Err(CountsError::NotAPair { word: 2 })),
            (" ", "hostA", Err(CountsError::Empty)),
        ];
        for (text, host, expected) in cases {
            assert_eq!(slot_count_of_host_in_pairs(text, host), expected, "{text:?} on {host}");
        }
    }

    #[test]
    fn names_are_counted() {
        assert_eq!(slot_count_of_host_in_list("vm vm other", "vm.example.org"), Ok(Some(2)));
        assert_eq!(slot_count_of_host_in_list("other", "vm"), Ok(None));
        assert_eq!(slot_count_of_host_in_list("", "vm"), Err(CountsError::Empty));
    }
}
