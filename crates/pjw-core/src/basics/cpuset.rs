//! Sets of PUs of any size, and the only parser and printer of CPU lists in this project.
//!
//! The text form is the kernel's list form, `0-3,8`. The empty set is the empty string. A set is a vector of
//! 64-bit words without trailing zero words, so sets with the same PUs are always equal. Two words (128 PUs)
//! are stored inline; larger sets are on the heap.

use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use thiserror::Error;

use crate::basics::prelude::*;

/// A logical CPU (in hwloc's terms a processing unit, PU), identified by its CPU number in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Pu(pub u32);

impl Pu {
    /// The highest PU (logical CPU) number that a CPU list may contain. A list with a higher number is an error
    /// ([`CpuListError::TooLarge`]). The limit bounds the memory that a malicious CPU list can make pjw allocate. The
    /// value is far above 8,191, the highest CPU number that the kernel supports.
    pub const MAX: Pu = Pu(65_535);
}

impl fmt::Display for Pu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A set of PUs (logical CPUs), stored as a bit set.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuSet {
    /// Bit `b` of word `w` is PU `64 * w + b`. Invariant: the last word is not zero.
    words: SmallVec<[u64; 2]>,
}

impl CpuSet {
    /// Makes the empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the set of all PUs (logical CPUs) from `first` to `last`, both included. The set is empty if `first` is
    /// greater than `last`.
    ///
    /// # Panics
    /// If the set would contain a PU greater than [`Pu::MAX`].
    #[must_use]
    pub fn from_range(first: Pu, last: Pu) -> Self {
        (first.0..=last.0).map(Pu).collect()
    }

    /// Makes a set from 64-bit words, as the kernel stores affinity masks: bit `b` of word `w` is the PU (logical CPU)
    /// `64 * w + b`. The number of words is not limited: the set may contain PUs greater than [`Pu::MAX`].
    #[must_use]
    pub fn from_words(words: &[u64]) -> Self {
        // A kernel built for many PUs fills more words than the machine needs. Trailing zero words are
        // dropped.
        let length = words.iter().rposition(|&word| word != 0).map_or(0, |last| last + 1);
        Self { words: SmallVec::from_slice(&words[..length]) }
    }

    /// Returns the bits of the set as 64-bit words: bit `b` of word `w` is the PU (logical CPU) `64 * w + b`. The last
    /// word is never zero. The slice is empty for the empty set.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Adds `pu` to the set. Returns true if the set did not contain `pu` before.
    ///
    /// # Panics
    /// If `pu` is greater than [`Pu::MAX`]. The parsers of this project never return such a PU.
    pub fn insert(&mut self, pu: Pu) -> bool {
        let is_new = !self.contains(pu);
        self.extend([pu]);
        is_new
    }

    /// Adds PUs of the word with the index `word`: those whose bits are set in `bits`. A word has 64 PUs.
    fn add_bits(&mut self, word: usize, bits: u64) {
        if bits != 0 {
            if word >= self.words.len() {
                self.words.resize(word + 1, 0);
            }
            self.words[word] |= bits;
        }
    }

    /// Removes `pu` from the set. Returns true if the set contained `pu` before.
    pub fn remove(&mut self, pu: Pu) -> bool {
        let (word, bit) = word_and_bit(pu);
        let Some(bits) = self.words.get_mut(word) else { return false };
        let was_in_set = *bits & bit != 0;
        *bits &= !bit;
        self.trim();
        was_in_set
    }

    /// Whether the set contains `pu`.
    #[must_use]
    pub fn contains(&self, pu: Pu) -> bool {
        let (word, bit) = word_and_bit(pu);
        self.words.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// Returns the number of PUs (logical CPUs) in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the set contains no PU (logical CPU).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns the lowest PU (logical CPU), or `None` if the set is empty.
    #[must_use]
    pub fn first(&self) -> Option<Pu> {
        self.iter().next()
    }

    /// Returns the highest PU (logical CPU), or `None` if the set is empty.
    #[must_use]
    pub fn last(&self) -> Option<Pu> {
        let last = self.words.last()?;
        pu_at(self.words.len() - 1, 63 - last.leading_zeros())
    }

    /// Returns the only PU (logical CPU) of the set. `None` if the set is empty or contains more than one PU.
    #[must_use]
    pub fn only_pu(&self) -> Option<Pu> {
        let first = self.first()?;
        (self.last() == Some(first)).then_some(first)
    }

    /// Iterates over the PUs (logical CPUs) in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Pu> + '_ {
        self.words.iter().enumerate().flat_map(|(index, &word)| {
            let mut left = word;
            core::iter::from_fn(move || {
                if left == 0 {
                    return None;
                }
                let bit = left.trailing_zeros();
                left &= left - 1;
                pu_at(index, bit)
            })
        })
    }

    /// Returns the PUs (logical CPUs) that are in at least one of the two sets.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let (long, short) = if self.words.len() >= other.words.len() { (self, other) } else { (other, self) };
        let mut set = long.clone();
        for (word, add) in set.words.iter_mut().zip(&short.words) {
            *word |= add;
        }
        set
    }

    /// Returns the PUs (logical CPUs) that are in both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.combine(other, |a, b| a & b)
    }

    /// Returns the PUs (logical CPUs) that are in this set and not in `other`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        self.combine(other, |a, b| a & !b)
    }

    /// Whether every PU (logical CPU) of this set is in `other`.
    #[must_use]
    pub fn is_subset(&self, other: &Self) -> bool {
        self.words
            .iter()
            .enumerate()
            .all(|(index, word)| word & !other.words.get(index).copied().unwrap_or(0) == 0)
    }

    /// Whether the two sets have a PU (logical CPU) in common.
    #[must_use]
    pub fn intersects(&self, other: &Self) -> bool {
        self.words.iter().zip(&other.words).any(|(a, b)| a & b != 0)
    }

    /// Returns the lowest PU (logical CPU) that is in both sets, or `None` if no PU is in both.
    #[must_use]
    pub fn first_common(&self, other: &Self) -> Option<Pu> {
        let words = self.words.iter().zip(&other.words).map(|(a, b)| a & b);
        let (index, word) = words.enumerate().find(|(_, word)| *word != 0)?;
        pu_at(index, word.trailing_zeros())
    }

    /// Returns the set whose words are `op` of the words of both sets. Only words of this set are visited.
    fn combine(&self, other: &Self, op: impl Fn(u64, u64) -> u64) -> Self {
        let mut set = self.clone();
        for (index, word) in set.words.iter_mut().enumerate() {
            *word = op(*word, other.words.get(index).copied().unwrap_or(0));
        }
        set.trim();
        set
    }

    /// Removes the zero words at the end, so that equal sets have equal words.
    fn trim(&mut self) {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
    }
}

/// Returns the index of the word with the bit of `pu`, and this bit.
fn word_and_bit(pu: Pu) -> (usize, u64) {
    (pu.0 as usize / 64, 1 << (pu.0 % 64))
}

/// Returns the PU of the bit `bit` in the word with the index `word`.
fn pu_at(word: usize, bit: u32) -> Option<Pu> {
    u32::try_from(word).ok().map(|word| Pu(word * 64 + bit))
}

impl FromIterator<Pu> for CpuSet {
    fn from_iter<I: IntoIterator<Item = Pu>>(pus: I) -> Self {
        let mut set = Self::new();
        set.extend(pus);
        set
    }
}

impl Extend<Pu> for CpuSet {
    fn extend<I: IntoIterator<Item = Pu>>(&mut self, pus: I) {
        // Consecutive PUs are often in the same word. The word is written once for all of them.
        let (mut current_word, mut bits) = (0, 0);
        for pu in pus {
            assert!(pu <= Pu::MAX, "PU {pu} is beyond the largest this program handles ({})", Pu::MAX);
            let (word, bit) = word_and_bit(pu);
            if word != current_word {
                self.add_bits(current_word, bits);
                (current_word, bits) = (word, 0);
            }
            bits |= bit;
        }
        self.add_bits(current_word, bits);
    }
}

impl From<Pu> for CpuSet {
    fn from(pu: Pu) -> Self {
        core::iter::once(pu).collect()
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pus = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = pus.next() {
            let mut last = first;
            while let Some(next) = pus.next_if(|next| next.0 == last.0 + 1) {
                last = next;
            }
            f.write_str(separator)?;
            separator = ",";
            match last.0 - first.0 {
                0 => write!(f, "{first}")?,
                _ => write!(f, "{first}-{last}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

/// The reason why a text is not a valid CPU list. (An example of a valid CPU list is `0-3,8`.) The error
/// message quotes the invalid part of the text, and shows the correct form.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CpuListError {
    /// The text has nothing between two commas, or a comma at its start or end.
    #[error(
        "an empty place in the CPU list {list:?}: write numbers and ranges between single commas, as in 0-3,8"
    )]
    EmptyPart {
        /// The whole text, cut to 40 characters.
        list: String,
    },
    /// A part of the text (parts are separated by commas) is neither a number nor a range.
    #[error("{text:?} in the CPU list is neither a number nor a range: write it as in 0-3,8")]
    NotANumber {
        /// The invalid part of the text, cut to 40 characters.
        text: String,
    },
    /// The first number of a range is greater than the second number.
    #[error("the range {first}-{last} in the CPU list runs backwards: write {last}-{first}")]
    ReversedRange {
        /// The first number of the range.
        first: u32,
        /// The second number of the range.
        last: u32,
    },
    /// The list contains the same PU more than once.
    #[error("PU {pu} stands twice in the CPU list: name each PU once")]
    DuplicatePu {
        /// The PU that the list contains more than once.
        pu: Pu,
    },
    /// A number is greater than [`Pu::MAX`].
    #[error("{text} in the CPU list is beyond the largest PU number, {max}", max = Pu::MAX)]
    TooLarge {
        /// The number as written in the text, cut to 40 characters.
        text: String,
    },
}

impl FromStr for CpuSet {
    type Err = CpuListError;

    /// Parses the kernel's list form. White space around the whole list (such as the newline of a sysfs file)
    /// is allowed. A list that contains a PU twice is an error.
    fn from_str(text: &str) -> Result<Self, CpuListError> {
        let list = text.trim();
        let mut set = Self::new();
        if list.is_empty() {
            return Ok(set);
        }
        for piece in list.split(',') {
            if piece.is_empty() {
                return Err(CpuListError::EmptyPart { list: shorten(list) });
            }
            let (first, last) = match piece.split_once('-') {
                Some((first, last)) => (pu_number(first, piece)?, pu_number(last, piece)?),
                None => {
                    let pu = pu_number(piece, piece)?;
                    (pu, pu)
                }
            };
            if first > last {
                return Err(CpuListError::ReversedRange { first, last });
            }
            for pu in (first..=last).map(Pu) {
                if !set.insert(pu) {
                    return Err(CpuListError::DuplicatePu { pu });
                }
            }
        }
        Ok(set)
    }
}

/// Parses the number of a PU. `piece` is the part of the list with this number, for the error.
fn pu_number(digits: &str, piece: &str) -> Result<u32, CpuListError> {
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(CpuListError::NotANumber { text: shorten(piece) });
    }
    digits
        .parse::<u32>()
        .ok()
        .filter(|&pu| pu <= Pu::MAX.0)
        .ok_or_else(|| CpuListError::TooLarge { text: shorten(digits) })
}

/// Returns the first 40 characters of a text, so that an error message stays short.
fn shorten(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text.to_owned(),
    }
}

impl Serialize for CpuSet {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CpuSet {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = alloc::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::cpu_set;
    use proptest::prelude::*;
    use std::string::ToString;

    #[test]
    fn prints_the_kernels_list_form() {
        for list in ["", "0", "0-3,8", "0,2,4", "5,63-65,127-128,4095"] {
            assert_eq!(cpu_set(list).to_string(), list);
        }
        assert_eq!(cpu_set("0-1\n").to_string(), "0-1", "sysfs files end in a newline");
    }

    #[test]
    fn a_wrong_list_gives_an_error_with_the_reason() {
        let cases = [
            ("0,,3", "an empty place"),
            (",", "an empty place"),
            ("0-", "neither a number nor a range"),
            ("-1", "neither a number nor a range"),
            ("a-b", "neither a number nor a range"),
            ("0-3:2", "neither a number nor a range"),
            ("+1", "neither a number nor a range"),
            ("1 ,2", "neither a number nor a range"),
            ("3-1", "write 1-3"),
            ("0-3,2", "PU 2 stands twice"),
            ("99999999999", "beyond the largest"),
            ("65536", "beyond the largest"),
        ];
        for (list, expected) in cases {
            let error = list.parse::<CpuSet>().unwrap_err().to_string();
            assert!(error.contains(expected), "{list}: {error}");
        }
    }

    #[test]
    fn an_error_quotes_a_long_list_in_part() {
        let error = "x".repeat(10_000).parse::<CpuSet>().unwrap_err().to_string();
        assert!(error.len() < 200, "{error}");
    }

    #[test]
    fn sets_with_equal_pus_are_equal_values() {
        let mut large = cpu_set("1,4000");
        large.remove(Pu(4000));
        assert_eq!(large, cpu_set("1"));
        assert_eq!(cpu_set("0-127").difference(&cpu_set("1-127")), cpu_set("0"));
        assert_eq!(cpu_set("0-3").intersection(&cpu_set("4-7")), CpuSet::new());
    }

    #[test]
    fn only_pu_returns_the_pu_of_a_set_with_one_pu() {
        assert_eq!(cpu_set("4000").only_pu(), Some(Pu(4000)));
        assert_eq!(cpu_set("1-2").only_pu(), None);
        assert_eq!(CpuSet::new().only_pu(), None);
    }

    fn any_set() -> impl Strategy<Value = CpuSet> {
        proptest::collection::vec(0u32..2000, 0..60).prop_map(|pus| pus.into_iter().map(Pu).collect())
    }

    proptest! {
        #[test]
        fn text_round_trips(set in any_set()) {
            prop_assert_eq!(set.to_string().parse::<CpuSet>().unwrap(), set);
        }

        #[test]
        fn parsing_any_text_never_panics(text in "\\PC*") {
            let _ = text.parse::<CpuSet>();
        }

        #[test]
        fn algebra_agrees_with_a_plain_set(a in any_set(), b in any_set()) {
            use std::collections::BTreeSet;
            let (x, y): (BTreeSet<_>, BTreeSet<_>) = (a.iter().collect(), b.iter().collect());
            prop_assert!(a.union(&b).iter().eq(x.union(&y).copied()));
            prop_assert!(a.intersection(&b).iter().eq(x.intersection(&y).copied()));
            prop_assert!(a.difference(&b).iter().eq(x.difference(&y).copied()));
            prop_assert_eq!(a.is_subset(&b), x.is_subset(&y));
            prop_assert_eq!(a.intersects(&b), !x.is_disjoint(&y));
            prop_assert_eq!((a.len(), a.first(), a.last()), (x.len(), x.first().copied(), x.last().copied()));
        }
    }
}
