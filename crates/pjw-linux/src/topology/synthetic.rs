//! Validates a synthetic description before hwloc parses it.
//!
//! hwloc builds a machine of any size. So a typing error could exhaust the memory.

use pjw_core::cpuset::Pu;
use thiserror::Error;

use super::limits::MAX_PUS;

/// Maximum length of a description. hwloc's own limit on levels is far below.
const MAX_BYTES: usize = 4096;

/// Error: the synthetic description of a machine is invalid. Such a description is a text in hwloc's format
/// (hwloc(7)), such as `pack:2 core:8 pu:2` for 2 packages, each with 8 cores, each with 2 PUs.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SyntheticTopologyError {
    /// The description has no text except white space.
    #[error("it is empty")]
    Empty,
    /// The description is longer than 4096 bytes.
    #[error("it is longer than {MAX_BYTES} bytes")]
    TooLong,
    /// A level of the description, such as `core:4`, has no number, or its number is not at least 1.
    #[error("{word:?} has no number of at least 1")]
    NoNumber {
        /// The text of the level, such as `core:x`, cut to 40 characters.
        word: String,
    },
    /// The described machine has more than [`MAX_PUS`] PUs.
    #[error("it has more than {MAX_PUS} PUs, the maximum")]
    TooManyPus,
    /// The description gives a PU a number (`indexes=`) above [`Pu::MAX`].
    #[error("PU {number} is beyond {max}, the maximum", max = Pu::MAX)]
    PuNumberTooLarge {
        /// The number that is too large.
        number: u64,
    },
    /// The description has no level of PUs (logical CPUs) at its end. hwloc would accept the description with `pu:1`
    /// added at the end.
    #[error("its last level is not that of the PUs: add pu:1, or pu:2 for SMT")]
    NoPuLevel,
    /// hwloc rejects the description, for example because of an unknown level or a wrong sequence of levels.
    #[error("hwloc does not know these levels, or not in this order")]
    RejectedByHwloc,
}

/// Checks `text`, a synthetic description of a machine such as `pack:2 core:8 pu:2`, before hwloc reads it. hwloc
/// itself accepts descriptions that need too much memory.
pub(super) fn check_description(text: &str) -> Result<(), SyntheticTopologyError> {
    if text.trim().is_empty() {
        return Err(SyntheticTopologyError::Empty);
    }
    if text.len() > MAX_BYTES {
        return Err(SyntheticTopologyError::TooLong);
    }
    if let Some(number) = numbers_in_brackets(text).find(|&number| number > u64::from(Pu::MAX.0)) {
        return Err(SyntheticTopologyError::PuNumberTooLarge { number });
    }
    let mut pus: u64 = 1;
    for word in outside_brackets(text).split_whitespace() {
        let number = word.rsplit(':').next().unwrap_or(word);
        let Some(count) = number.parse::<u64>().ok().filter(|&count| count > 0) else {
            return Err(SyntheticTopologyError::NoNumber { word: word.chars().take(40).collect() });
        };
        pus = pus.saturating_mul(count);
        if pus > u64::from(MAX_PUS) {
            return Err(SyntheticTopologyError::TooManyPus);
        }
    }
    Ok(())
}

/// Returns `text`, a synthetic description of a machine, without the parts in brackets: `(attributes)` and
/// `[attached memory]`.
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

/// The numbers in `indexes=3,1,0*2` and similar attributes. Memory sizes have no limit.
fn numbers_in_brackets(text: &str) -> impl Iterator<Item = u64> {
    let lists = text.split("indexes=").skip(1).map(|text| text.split([')', ' ']).next().unwrap_or(text));
    let digits = lists.flat_map(|list| list.split(|c: char| !c.is_ascii_digit()));
    digits.filter(|digits| !digits.is_empty()).map(|digits| digits.parse().unwrap_or(u64::MAX))
}
