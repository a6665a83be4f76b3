//! How schedulers write core counts.

use thiserror::Error;

use crate::Host;

/// No machine has more; a larger number is a mistake, or an attempt.
const MOST: u32 = 65_536;
/// A host list that expands to more names than this is not expanded.
const MOST_HOSTS: u64 = 65_536;

/// Why a text is no count.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CountError {
    /// Something that is no number, or zero, or absurd.
    #[error("{0:?} is not a number of cores")]
    NotACount(String),
    /// A list without this host.
    #[error("{0:?} does not name this host")]
    NotThisHost(String),
    /// A host list that is malformed or too long.
    #[error("{0:?} is not a list of hosts")]
    NotAHostList(String),
}

/// A number of cores: positive and sane.
///
/// # Errors
/// If it is not.
pub fn number(text: &str) -> Result<u32, CountError> {
    let count = text.trim().parse().ok().filter(|count| (1..=MOST).contains(count));
    count.ok_or_else(|| CountError::NotACount(short(text)))
}

/// Slurm's form for one count per node, `72(x2),36`: the count at a position.
///
/// # Errors
/// If the text is malformed or shorter than that.
pub fn repeated(text: &str, position: u64) -> Result<u32, CountError> {
    let wrong = || CountError::NotACount(short(text));
    let mut passed = 0u64;
    for piece in text.trim().split(',') {
        let (count, times) = match piece.split_once("(x") {
            Some((count, times)) => {
                let times = times.strip_suffix(')').and_then(|times| times.parse::<u32>().ok());
                (count, u64::from(times.filter(|&times| times > 0).ok_or_else(wrong)?))
            }
            None => (piece, 1),
        };
        let count = number(count)?;
        passed += times;
        if position < passed {
            return Ok(count);
        }
    }
    Err(wrong())
}

/// LSF's form, `hostA 4 hostB 8 `: the count of this host.
///
/// # Errors
/// If the text is malformed or does not name this host.
pub fn per_host(text: &str, host: &Host) -> Result<u32, CountError> {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    if words.is_empty() || !words.len().is_multiple_of(2) {
        return Err(CountError::NotACount(short(text)));
    }
    let mine = words.chunks_exact(2).find(|pair| same_host(pair[0], &host.name));
    mine.map_or_else(|| Err(CountError::NotThisHost(short(text))), |pair| number(pair[1]))
}

/// The position of a host in Slurm's list form, `n[1-3,07],login2`.
///
/// # Errors
/// If the list is malformed, absurdly long, or does not name the host.
pub fn position(list: &str, host: &str) -> Result<u64, CountError> {
    let wrong = || CountError::NotAHostList(short(list));
    let mut before = 0u64;
    for piece in split_outside_brackets(list.trim()) {
        let Some((prefix, rest)) = piece.split_once('[') else {
            if same_host(piece, host) {
                return Ok(before);
            }
            before += 1;
            continue;
        };
        let (ranges, suffix) = rest.split_once(']').ok_or_else(wrong)?;
        for range in ranges.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let width = first.len();
            let (low, high): (u64, u64) =
                (first.parse().map_err(|_| wrong())?, last.parse().map_err(|_| wrong())?);
            if high < low || high - low > MOST_HOSTS || before > MOST_HOSTS {
                return Err(wrong());
            }
            for number in low..=high {
                if same_host(&format!("{prefix}{number:0width$}{suffix}"), host) {
                    return Ok(before);
                }
                before += 1;
            }
        }
    }
    Err(CountError::NotThisHost(short(list)))
}

fn split_outside_brackets(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut pieces) = (0u32, 0, Vec::new());
    for (at, character) in list.char_indices() {
        match character {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                pieces.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    pieces.push(&list[start..]);
    pieces
}

/// Whether two names are one host's: alike up to the first dot.
#[must_use]
pub fn same_host(one: &str, other: &str) -> bool {
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    !one.is_empty() && short(one) == short(other)
}

fn short(text: &str) -> String {
    text.chars().take(60).collect()
}
