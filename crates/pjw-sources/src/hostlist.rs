//! Slurm's lists of nodes: `n[1-3,7],login2`.
//!
//! The problem: find the index of a node in the list, and the number of nodes in the list. A list can name billions
//! of nodes in a few bytes (`n[1-99999999999]`), and comes from the environment. So the list is not expanded: the
//! positions are computed.
//!
//! Terms: an *entry* is the text between two commas outside of brackets. An entry is a sequence of *pieces*: a text,
//! or a bracket with *ranges*. Numbers keep their width: `[08-10]` is 08, 09, 10. With several brackets in an entry
//! the last bracket changes fastest, as `scontrol show hostnames` prints them.

use thiserror::Error;

use crate::number::parse_digits;

/// The maximum length of a list, in bytes. A list of 10,000 scattered nodes is shorter.
const MAX_LENGTH: usize = 65_536;
/// The maximum number of nodes in a list. Slurm allows fewer.
const MAX_NODES: u64 = 1 << 24;
/// The maximum number of brackets in an entry: more than the names of clusters have. It bounds the ways to divide the
/// digits of a name among the brackets.
const MAX_BRACKETS: usize = 5;
/// The maximum number of digits of a number.
const MAX_DIGITS: usize = 10;

/// Error: a list of machines in Slurm's form, such as `n[1-3,7],login2`, can't be parsed, is too long, or
/// names too many machines.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HostlistError {
    /// An entry of the list is empty. An entry is the text between two commas outside of brackets.
    #[error("entry {entry} of the list of nodes is empty: expected something like n[1-3,7],login2")]
    EmptyEntry {
        /// The position of the empty entry in the list, counted from 1.
        entry: usize,
    },
    /// The list is longer than 65,536 bytes.
    #[error("the list of nodes is {length} bytes long: at most {MAX_LENGTH} are read")]
    TooLong {
        /// The length of the list in bytes.
        length: usize,
    },
    /// A bracket in an entry of the list is not closed, not opened, or inside another bracket.
    #[error("a bracket in entry {entry} of the list of nodes has no partner")]
    UnpairedBracket {
        /// The position of the entry in the list, counted from 1. An entry is the text between two commas
        /// outside of brackets.
        entry: usize,
    },
    /// A bracket in an entry of the list contains something other than ranges of numbers such as `1-3,7`.
    #[error("a bracket in entry {entry} of the list of nodes holds no range: expected something like 1-3,7")]
    InvalidRange {
        /// The position of the entry in the list, counted from 1. An entry is the text between two commas
        /// outside of brackets.
        entry: usize,
    },
    /// The list names more than 2^24 machines, or one of its entries has more than five brackets.
    #[error("entry {entry} of the list of nodes names more nodes than any cluster has")]
    TooManyNodes {
        /// The position of the entry at which the limit is exceeded, counted from 1. An entry is the text
        /// between two commas outside of brackets.
        entry: usize,
    },
}

/// The result of [`find_node`], which searches for a machine in a list of machines: the position of the machine in the
/// list, and the number of machines in the list. The list has Slurm's form, such as `n[1-3,7],login2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodePosition {
    /// The position of the machine in the list, counted from 0. `None` if the list does not contain the
    /// machine.
    pub index: Option<u32>,
    /// The number of machines in the list.
    pub node_count: u32,
}

/// Searches for the machine named `node_name` in `host_list`, a list of machines in Slurm's form, such as
/// `n[1-3,7],login2`. Returns the position of the machine, counted from 0, and the number of machines in the
/// list. The position is `None` if the list does not contain the machine. A name without a domain matches the
/// same name with a domain.
///
/// # Errors
/// If `host_list` is not such a list, is longer than 65,536 bytes, or names more than 2^24 machines.
pub fn find_node(host_list: &str, node_name: &str) -> Result<NodePosition, HostlistError> {
    if host_list.len() > MAX_LENGTH {
        return Err(HostlistError::TooLong { length: host_list.len() });
    }
    let mut node_count = 0;
    let mut index = None;
    for (entry, number) in split_entries(host_list).zip(1..) {
        let pieces = parse_entry(entry, number)?;
        let nodes = pieces.iter().try_fold(1, |nodes: u64, piece| nodes.checked_mul(piece.text_count()));
        let sum = nodes.and_then(|nodes| nodes.checked_add(node_count)).filter(|&sum| sum <= MAX_NODES);
        let sum = sum.ok_or(HostlistError::TooManyNodes { entry: number })?;
        // The search comes after this check, because the limit also bounds the cost of the search.
        if index.is_none() {
            let short = ShortNames { entry: !entry.contains('.'), searched: !node_name.contains('.') };
            index = index_of_name(&pieces, node_name, short).map(|offset| node_count + offset);
        }
        node_count = sum;
    }
    // Both numbers are at most the limit, so they fit into 32 bits.
    let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    Ok(NodePosition { index: index.map(narrow), node_count: narrow(node_count) })
}

/// Returns whether two host names match: whether they possibly name the same machine. Two names with domains
/// must be equal. If a name has no domain, such as `n1`, the domain of the other name is ignored, so that `n1`
/// and `n1.example.org` match. Upper and lower case are not distinguished. Empty names do not match.
#[must_use]
pub fn host_names_match(first: &str, second: &str) -> bool {
    if first.is_empty() {
        return false;
    }
    if first.contains('.') && second.contains('.') {
        return first.eq_ignore_ascii_case(second);
    }
    let without_domain = |name: &str| name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    without_domain(first) == without_domain(second)
}

/// Splits `list` at the commas outside of brackets into its entries.
fn split_entries(list: &str) -> impl Iterator<Item = &str> {
    let mut inside = false;
    list.split(move |character| {
        match character {
            '[' => inside = true,
            ']' => inside = false,
            _ => {}
        }
        character == ',' && !inside
    })
}

/// A piece of an entry.
enum Piece<'a> {
    Text(&'a str),
    Ranges(Vec<Range>),
}

/// The numbers `low-high`, each at least `width` digits wide.
struct Range {
    low: u64,
    high: u64,
    width: usize,
}

impl Piece<'_> {
    /// Returns the number of texts for which the piece stands.
    fn text_count(&self) -> u64 {
        match self {
            Piece::Text(_) => 1,
            Piece::Ranges(ranges) => ranges.iter().map(Range::size).sum(),
        }
    }
}

impl Range {
    fn size(&self) -> u64 {
        self.high - self.low + 1
    }
}

/// Parses `text`, an entry of a list of machines such as `r[1-2]n[1-4]`, into its pieces: texts, and the ranges in the
/// brackets between them. `entry` is the number of the entry in the list, counted from 1, for the error.
///
/// # Errors
/// If the entry is empty, if a bracket or a range is malformed, or if there are too many brackets.
fn parse_entry(text: &str, entry: usize) -> Result<Vec<Piece<'_>>, HostlistError> {
    if text.is_empty() {
        return Err(HostlistError::EmptyEntry { entry });
    }
    let mut pieces = Vec::new();
    let mut remaining = text;
    while let Some((text, bracket)) = remaining.split_once('[') {
        let (ranges, after) = bracket.split_once(']').ok_or(HostlistError::UnpairedBracket { entry })?;
        if text.contains(']') || ranges.contains('[') {
            return Err(HostlistError::UnpairedBracket { entry });
        }
        if pieces.len() >= 2 * MAX_BRACKETS {
            return Err(HostlistError::TooManyNodes { entry });
        }
        pieces.push(Piece::Text(text));
        let ranges: Option<_> = ranges.split(',').map(parse_range).collect();
        pieces.push(Piece::Ranges(ranges.ok_or(HostlistError::InvalidRange { entry })?));
        remaining = after;
    }
    if remaining.contains(']') {
        return Err(HostlistError::UnpairedBracket { entry });
    }
    pieces.push(Piece::Text(remaining));
    Ok(pieces)
}

/// Parses `text`, a number such as `7` or a range of numbers such as `1-3`. `None` if the text has another form.
fn parse_range(text: &str) -> Option<Range> {
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| parse_digits::<u64>(text).filter(|_| text.len() <= MAX_DIGITS);
    let range = Range { low: number(low)?, high: number(high)?, width: low.len() };
    (range.low <= range.high).then_some(range)
}

/// Which of two compared host names have no domain. If one has none, the domain of the other is ignored.
#[derive(Clone, Copy)]
struct ShortNames {
    /// Whether the names for which the entry of the list stands have no domain.
    entry: bool,
    /// Whether the searched name has no domain.
    searched: bool,
}

/// Returns the index of `name` among the names that `pieces`, the pieces of an entry of the list, stand for. The
/// index is counted from 0, in the order of the list. `None` if `name` is not one of them. `short` says which of the
/// names have no domain: such a name also matches the same name with any domain.
fn index_of_name(pieces: &[Piece<'_>], name: &str, short: ShortNames) -> Option<u64> {
    let Some((piece, following)) = pieces.split_first() else {
        return (name.is_empty() || short.entry && name.starts_with('.')).then_some(0);
    };
    match piece {
        Piece::Text(text) => match strip_prefix_ignoring_case(name, text) {
            Some(name) => index_of_name(following, name, short),
            None => {
                let domain = strip_prefix_ignoring_case(text, name)?;
                (short.searched && following.is_empty() && domain.starts_with('.')).then_some(0)
            }
        },
        Piece::Ranges(ranges) => {
            let names_per_number =
                following.iter().try_fold(1, |n: u64, piece| n.checked_mul(piece.text_count()))?;
            let digit_count = name.bytes().take(MAX_DIGITS).take_while(u8::is_ascii_digit).count();
            (1..=digit_count).rev().find_map(|length| {
                let (number, name) = name.split_at(length);
                let first_index = index_in_ranges(ranges, number)?.checked_mul(names_per_number)?;
                first_index.checked_add(index_of_name(following, name, short)?)
            })
        }
    }
}

/// Returns the index of the number `number` among the numbers in `ranges`, counted from 0. `None` if the number is
/// not in the ranges. Also `None` if it does not have the leading zeros of the range: `[01-10]` contains `05`, but
/// neither `5` nor `005`.
fn index_in_ranges(ranges: &[Range], number: &str) -> Option<u64> {
    let value = parse_digits::<u64>(number)?;
    let mut before = 0;
    for range in ranges {
        let has_right_width =
            number.len() == range.width || number.len() > range.width && !number.starts_with('0');
        if has_right_width && (range.low..=range.high).contains(&value) {
            return Some(before + value - range.low);
        }
        before += range.size();
    }
    None
}

fn strip_prefix_ignoring_case<'a>(name: &'a str, prefix: &str) -> Option<&'a str> {
    let (head, tail) = name.split_at_checked(prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then_some(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(list: &str, node: &str, index: Option<u32>, node_count: u32) {
        assert_eq!(find_node(list, node), Ok(NodePosition { index, node_count }), "{node} in {list}");
    }

    #[test]
    fn a_node_is_found_at_its_place() {
        check("n1", "n1", Some(0), 1);
        check("n[1-3,7],login2", "n1", Some(0), 5);
        check("n[1-3,7],login2", "n3", Some(2), 5);
        check("n[1-3,7],login2", "n7", Some(3), 5);
        check("n[1-3,7],login2", "login2", Some(4), 5);
        check("n[1-3,7],login2", "n4", None, 5);
        check("a,b,a", "a", Some(0), 3);
    }

    #[test]
    fn numbers_keep_their_width() {
        check("n[08-11]", "n10", Some(2), 4);
        check("n[08-11]", "n08", Some(0), 4);
        check("n[08-11]", "n8", None, 4);
        check("n[8-11]", "n08", None, 4);
        check("n[098-102]", "n100", Some(2), 5);
    }

    #[test]
    fn the_last_bracket_changes_fastest() {
        check("r[1-2]n[1-4]", "r1n4", Some(3), 8);
        check("r[1-2]n[1-4]", "r2n1", Some(4), 8);
        check("r[1-2]n[1-4]-ib", "r2n4-ib", Some(7), 8);
        check("n[1-2][0-9]", "n13", Some(3), 20);
    }

    #[test]
    fn short_and_full_names_match_each_other() {
        check("n[1-3]", "n2.example.org", Some(1), 3);
        check("n[1-3].example.org", "n2", Some(1), 3);
        check("n[1-3].example.org", "N2.Example.org", Some(1), 3);
        check("n[1-3].example.org", "n2.other.org", None, 3);
        check("n[1-3]", "n22", None, 3);
        check("login.example.org", "login", Some(0), 1);
        check("login.example.org", "login.example", None, 1);
        check("login.example.org", "log", None, 1);
        assert!(host_names_match("n1", "N1.example.org"));
        assert!(
            !host_names_match("n1.a", "n1.b") && !host_names_match("", "") && !host_names_match("n1", "n10")
        );
    }

    #[test]
    fn a_list_of_billions_of_nodes_is_refused_without_cost() {
        for bomb in ["n[1-9999999999]", "n[0-9999][0-9999][0-9999]", "a[1-16777216],b"] {
            assert!(matches!(find_node(bomb, "n5"), Err(HostlistError::TooManyNodes { .. })), "{bomb}");
        }
        assert_eq!(find_node("n[1-99999999999]", "n5"), Err(HostlistError::InvalidRange { entry: 1 }));
        assert_eq!(find_node(&"[0-9]".repeat(6), "000000"), Err(HostlistError::TooManyNodes { entry: 1 }));
        assert_eq!(find_node(&"n,".repeat(40_000), "n"), Err(HostlistError::TooLong { length: 80_000 }));
        let scattered: Vec<String> = (0..10_000).map(|n| (2 * n).to_string()).collect();
        check(&format!("n[{}]", scattered.join(",")), "n19998", Some(9_999), 10_000);
    }

    #[test]
    fn a_text_that_is_no_list_is_refused_with_the_reason() {
        let cases = [
            ("", HostlistError::EmptyEntry { entry: 1 }),
            ("a,,b", HostlistError::EmptyEntry { entry: 2 }),
            ("n[1-3", HostlistError::UnpairedBracket { entry: 1 }),
            ("n1-3]", HostlistError::UnpairedBracket { entry: 1 }),
            ("n[[1]]", HostlistError::UnpairedBracket { entry: 1 }),
            ("n[]", HostlistError::InvalidRange { entry: 1 }),
            ("n[3-1]", HostlistError::InvalidRange { entry: 1 }),
            ("n[1-]", HostlistError::InvalidRange { entry: 1 }),
            ("n[+1]", HostlistError::InvalidRange { entry: 1 }),
            ("a,n[x]", HostlistError::InvalidRange { entry: 2 }),
        ];
        for (list, error) in cases {
            assert_eq!(find_node(list, "n1"), Err(error), "{list:?}");
        }
    }
}
