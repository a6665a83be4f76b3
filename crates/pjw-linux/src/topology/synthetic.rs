//! A look at a synthetic string before hwloc sees it: how many PUs it would make.
//!
//! hwloc makes any machine it is told to, and a typing mistake can ask for more memory than there is.

use pjw_core::cpuset::Pu;
use thiserror::Error;

use super::MOST_PUS;

/// The longest string: hwloc's own limit on levels is far below.
const MOST_CHARACTERS: usize = 4096;

/// What is wrong with a synthetic string.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Nonsense {
    /// Nothing is in it.
    #[error("it is empty")]
    Empty,
    /// Too much is in it.
    #[error("it is longer than {MOST_CHARACTERS} characters")]
    Long,
    /// A number is missing or wrong.
    #[error("{word:?} has no number of its own, from 1 up")]
    NoNumber {
        /// Where it is missing.
        word: String,
    },
    /// A machine too large.
    #[error("it makes more than {MOST_PUS} PUs, the most that is handled")]
    Large,
    /// A PU's number too large.
    #[error("PU {number} is beyond {max}, the largest number that is handled", max = Pu::MAX)]
    Number {
        /// The number.
        number: u64,
    },
    /// hwloc can't make sense of it.
    #[error("hwloc knows no such parts, or not in this order")]
    Refused,
}

/// Whether hwloc may have it.
pub(super) fn check(text: &str) -> Result<(), Nonsense> {
    if text.trim().is_empty() {
        return Err(Nonsense::Empty);
    }
    if text.len() > MOST_CHARACTERS {
        return Err(Nonsense::Long);
    }
    if let Some(number) = numbers_in_brackets(text).find(|&number| number > u64::from(Pu::MAX.0)) {
        return Err(Nonsense::Number { number });
    }
    let mut pus: u64 = 1;
    for word in outside_brackets(text).split_whitespace() {
        let number = word.rsplit(':').next().unwrap_or(word);
        let parts = number.parse::<u64>().ok().filter(|&parts| parts > 0);
        let parts = parts.ok_or_else(|| Nonsense::NoNumber { word: word.chars().take(40).collect() })?;
        pus = pus.saturating_mul(parts);
        if pus > u64::from(MOST_PUS) {
            return Err(Nonsense::Large);
        }
    }
    Ok(())
}

/// The levels alone, without `(attributes)` and `[attached memory]`.
fn outside_brackets(text: &str) -> String {
    let mut depth = 0_u32;
    let levels = text.chars().filter_map(|c| match c {
        '(' | '[' => {
            depth += 1;
            None
        }
        ')' | ']' => {
            depth = depth.saturating_sub(1);
            Some(' ')
        }
        _ => (depth == 0).then_some(c),
    });
    levels.collect()
}

/// The numbers of `indexes=3,1,0*2` and the like. Sizes of memory aren't PUs and have no such bound.
fn numbers_in_brackets(text: &str) -> impl Iterator<Item = u64> {
    let lists = text.split("indexes=").skip(1).map(|rest| rest.split([')', ' ']).next().unwrap_or(rest));
    let digits = lists.flat_map(|list| list.split(|c: char| !c.is_ascii_digit()));
    digits.filter(|digits| !digits.is_empty()).map(|digits| digits.parse().unwrap_or(u64::MAX))
}
