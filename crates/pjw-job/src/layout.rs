//! The layout of the core map, which is the file `coremap` in the directory of a job, by default
//! `/run/pjwd/jobs/ID/coremap`, and has 4096 bytes. pjwd writes the file, and the programs of the job map it
//! into their memory. The file holds the core map of the job: the CPUs of the job, as pjwd publishes them.
//! Numbers have the byte order of the machine.
//!
//! | offset | size | content |
//! | --- | --- | --- |
//! | 0 | 8 | the text `PJWCORES` |
//! | 8 | 4 | the version of the layout, 1 |
//! | 12 | 4 | the size of the core map, 4096 |
//! | 16 | 4 | the sequence counter: odd while the daemon writes. It is also the word for futex(2) |
//! | 20 | 4 | reserved |
//! | 24 | 8 | the epoch: 1 more with each change of the content |
//! | 32 | 8 | the time at which the leaving CPUs are taken, in ns of `CLOCK_MONOTONIC`; 0 if none is leaving |
//! | 40 | 4 | flags: 1 the core map is live, 2 a CPU of the job has a number of 8064 or more |
//! | 44 | 4 | the number of 8-byte words in use of each set |
//! | 48 | 4 | the number of CPUs of the job |
//! | 52 | 4 | the number of physical cores of these CPUs |
//! | 56 | 8 | reserved |
//! | 64 | 1008 | the set of own CPUs |
//! | 1072 | 1008 | the set of borrowed CPUs |
//! | 2080 | 1008 | the set of leaving CPUs |
//! | 3088 | 1008 | the set of own CPUs that another job has borrowed |
//!
//! CPU n is bit n % 64 of word n / 64 of a set.

use pjw_core::cpuset::{CpuSet, Pu};

/// The size of the core map in bytes. The core map is the file `coremap` of a job: pjwd writes the file, and the
/// programs of the job map it into their memory.
pub const COREMAP_BYTES: usize = 4096;
/// The first 8 bytes of the core map (the file `coremap` of a job). A file with other bytes is no core map.
pub const MAGIC: [u8; 8] = *b"PJWCORES";
/// The version of the layout of the core map (the file `coremap` of a job) that this crate reads and writes.
pub const LAYOUT_VERSION: u32 = 1;
/// The offset of the version of the layout, in bytes from the start of the core map (the file `coremap` of a job).
pub const VERSION_OFFSET: usize = 8;
/// The offset of the 4-byte field that contains [`COREMAP_BYTES`], in bytes from the start of the core map (the file
/// `coremap` of a job).
pub const SIZE_OFFSET: usize = 12;
/// The offset of the 4-byte sequence counter, in bytes from the start of the core map (the file `coremap` of a job).
/// Before each write, pjwd makes the counter odd. After the write, pjwd adds 1. So the counter is odd while pjwd
/// writes, and even after the write. Each write leaves a new value.
pub const SEQUENCE_OFFSET: usize = 16;
/// The offset of a reserved 4-byte word, in bytes from the start of the core map (the file `coremap` of a job). The
/// word is always 0, and no program waits for it with futex(2).
///
/// pjwd changes the sequence counter by the operation `FUTEX_WAKE_OP` of futex(2). This operation also wakes the
/// programs that wait for a second word, which pjwd chooses. At the beginning of a write, no program should wake up.
/// Therefore pjwd then chooses the reserved word.
pub const RESERVED_OFFSET: usize = 20;
/// The offset of the epoch, in bytes from the start of the core map (the file `coremap` of a job). The epoch is an
/// 8-byte number that has a new value after each change of the core map.
///
/// A write of pjwd replaces all bytes from this offset to the end of the file. The bytes before this offset stay
/// unchanged, except the sequence counter. When pjwd no longer keeps the file up to date, pjwd clears [`LIVE_FLAG`] in
/// a last write. The last write does not replace the sets of CPUs.
pub const EPOCH_OFFSET: usize = 24;
/// The number of 8-byte words that each set of CPUs occupies in the core map (the file `coremap` of a job). Each bit
/// stands for one CPU. The core map has four sets: `own`, `borrowed`, `leaving` and `lent` ([`CoreMapContent`]).
pub const WORDS_PER_CPU_SET: usize = 126;
/// The largest number of CPUs in each set of CPUs of the core map (the file `coremap` of a job). Each set has one bit
/// for each of the CPU numbers from 0 to `MAX_CPUS - 1`. A CPU with a larger number can't be in the core map.
pub const MAX_CPUS: u32 = 64 * 126;
/// A bit in the flags of the core map (the file `coremap` of a job). The bit is set as long as pjwd keeps this file
/// up to date. If the bit is not set, pjwd no longer writes this file ([`CoreMapContent::is_live`]). The number of
/// words in use is then 0 for all sets of CPUs, so all sets are empty. A reader must ignore the words that are not in
/// use: they may contain old CPUs.
pub const LIVE_FLAG: u32 = 1;
/// A bit in the flags of the core map (the file `coremap` of a job). The bit is set if the job has CPUs that are
/// missing in the core map, because their numbers are [`MAX_CPUS`] or more. The file `coremap.json` in the same
/// directory lists all CPUs.
pub const TRUNCATED_FLAG: u32 = 2;

// The offsets of further fields, in bytes from the start of the core map. The table above lists the fields.
pub(crate) const LEAVING_AT_OFFSET: usize = 32;
pub(crate) const FLAGS_OFFSET: usize = 40;
const WORDS_OFFSET: usize = 44;
const CPU_COUNT_OFFSET: usize = 48;
const CORE_COUNT_OFFSET: usize = 52;
pub(crate) const SETS_OFFSET: usize = 64;
/// The offset of the 4 bytes of the epoch that change if 1 is added to it.
pub(crate) const LOW_EPOCH_OFFSET: usize = EPOCH_OFFSET + if cfg!(target_endian = "big") { 4 } else { 0 };

/// The size of the core map (the file `coremap` of a job) in 8-byte words.
pub const COREMAP_WORDS: usize = COREMAP_BYTES / 8;

/// The content of the core map: the CPUs of a job at one time. The core map is the file `coremap` of 4096 bytes in
/// the directory of the job. pjwd writes the file, and the programs of the job map it into their memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CoreMapContent {
    /// The number of this state of the core map. pjwd adds 1 when another field of this type changes, and when it makes
    /// a new file for the core map.
    pub epoch: u64,
    /// Whether pjwd keeps this file up to date. False in two cases. First, pjwd has removed the files of the job,
    /// because it no longer keeps the job on cores, for example after the end of the job. Second, another program has
    /// removed the file, and pjwd makes a new file at the same path. If false, all sets of CPUs are empty. When pjwd
    /// stops or is killed, the value stays true.
    pub is_live: bool,
    /// Whether the core map lacks CPUs of the job, because their numbers are [`MAX_CPUS`] or more.
    /// [`CoreMapContent::encode`] also sets the flag in the file if a set in this value contains such a CPU.
    pub is_truncated: bool,
    /// The online CPUs that the job owns. The CPUs in `lent` are among them, and the CPUs in `leaving` that the job
    /// owns.
    pub own: CpuSet,
    /// The CPUs that this job does not own, and that it may use until they are taken back. Each is free, or belongs to
    /// another job that leaves it idle, or is a housekeeping CPU (a CPU that is reserved for the system). The CPUs in
    /// `leaving` that this job does not own are among them.
    pub borrowed: CpuSet,
    /// Those CPUs in `own` and `borrowed` that are to be taken from the job at the time `leaving_at_ns`, or later. The
    /// job may use them until then.
    pub leaving: CpuSet,
    /// Those CPUs in `own` that another job has borrowed. This job may use them at any time nevertheless.
    pub lent: CpuSet,
    /// The time at which the CPUs in `leaving` are taken from the job, in ns of `CLOCK_MONOTONIC`. If they are taken at
    /// different times, the earliest of these times. `None` if `leaving` is empty.
    pub leaving_at_ns: Option<u64>,
    /// The number of physical cores that have at least one CPU in `own` or `borrowed`. Cores of lent and of
    /// leaving CPUs count too.
    pub core_count: u32,
}

impl CoreMapContent {
    /// Returns the CPUs on which the job may run: the CPUs that the job owns (`own`), and the CPUs that it borrows
    /// from other jobs (`borrowed`). CPUs in `lent` are included: the job may use its own CPUs even while another job
    /// borrows them. CPUs in `leaving` are included too: the job may use them until they are taken from it.
    #[must_use]
    pub fn cpus(&self) -> CpuSet {
        self.own.union(&self.borrowed)
    }

    /// Returns the 4096 bytes of a core map with this content. `sequence` becomes the value of the sequence counter,
    /// and must be even: an odd value means that pjwd is writing the core map. CPUs with numbers of [`MAX_CPUS`] or
    /// more are left out, and the flag [`TRUNCATED_FLAG`] is then set.
    #[must_use]
    pub fn encode(&self, sequence: u32) -> [u8; COREMAP_BYTES] {
        let mut page = [0; COREMAP_BYTES];
        let mut put = |offset: usize, bytes: &[u8]| {
            page[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        let sets = [&self.own, &self.borrowed, &self.leaving, &self.lent];
        let is_beyond = |set: &&CpuSet| set.last().is_some_and(|last| last.0 >= MAX_CPUS);
        let is_truncated = self.is_truncated || sets.iter().any(is_beyond);
        let words = sets.iter().map(|set| set.words().len().min(WORDS_PER_CPU_SET)).max().unwrap_or(0);
        let flags = u32::from(self.is_live) * LIVE_FLAG + u32::from(is_truncated) * TRUNCATED_FLAG;
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).to_ne_bytes();
        put(0, &MAGIC);
        put(VERSION_OFFSET, &LAYOUT_VERSION.to_ne_bytes());
        put(SIZE_OFFSET, &count(COREMAP_BYTES));
        put(SEQUENCE_OFFSET, &sequence.to_ne_bytes());
        put(EPOCH_OFFSET, &self.epoch.to_ne_bytes());
        put(LEAVING_AT_OFFSET, &self.leaving_at_ns.unwrap_or(0).to_ne_bytes());
        put(FLAGS_OFFSET, &flags.to_ne_bytes());
        put(WORDS_OFFSET, &count(words));
        put(CPU_COUNT_OFFSET, &count(self.cpus().len()));
        put(CORE_COUNT_OFFSET, &self.core_count.to_ne_bytes());
        for (number, set) in sets.iter().enumerate() {
            for (word, bits) in set.words().iter().take(WORDS_PER_CPU_SET).enumerate() {
                put(SETS_OFFSET + 8 * (number * WORDS_PER_CPU_SET + word), &bits.to_ne_bytes());
            }
        }
        page
    }

    /// Reads the content of a core map (the file `coremap` of a job) from its bytes. `words` contains all bytes of
    /// the file, as 8-byte words. A field of the file says how many words of each set of CPUs are in use. Returns
    /// `None` if this number is larger than [`WORDS_PER_CPU_SET`]. The first fields of the file ([`MAGIC`], the
    /// version and the size) are not checked.
    #[must_use]
    pub fn decode(words: &[u64; COREMAP_WORDS]) -> Option<Self> {
        let [own, borrowed, leaving, lent] =
            cpu_set_word_ranges(words)?.map(|range| CpuSet::from_words(&words[range]));
        let flags = number_in_words(words, FLAGS_OFFSET);
        let leaving_at_ns = words[LEAVING_AT_OFFSET / 8];
        Some(Self {
            epoch: words[EPOCH_OFFSET / 8],
            is_live: flags & LIVE_FLAG != 0,
            is_truncated: flags & TRUNCATED_FLAG != 0,
            own,
            borrowed,
            leaving,
            lent,
            leaving_at_ns: (leaving_at_ns != 0).then_some(leaving_at_ns),
            core_count: number_in_words(words, CORE_COUNT_OFFSET),
        })
    }
}

/// The size of the header of the core map (the file `coremap` of a job), in 8-byte words. The sets of CPUs follow the
/// header.
pub(crate) const HEADER_WORDS: usize = SETS_OFFSET / 8;

/// Returns which words of each of the four sets of CPUs in a core map (the file `coremap` of a job) are in use. Each
/// result is a range of indices into `words`. Only the header in `words` is read: the words of the sets can still be
/// missing. `None` if the header says that each set has more than [`WORDS_PER_CPU_SET`] words in use.
pub(crate) fn cpu_set_word_ranges(words: &[u64; COREMAP_WORDS]) -> Option<[std::ops::Range<usize>; 4]> {
    let in_use = words_in_use(words)?;
    Some([0, 1, 2, 3].map(|number| {
        let first = HEADER_WORDS + number * WORDS_PER_CPU_SET;
        first..first + in_use
    }))
}

/// Returns the two bits of the core map (the file `coremap` of a job) that belong to the CPU `cpu`: the indices of two
/// 8-byte words, and a mask with one bit. In the first word, the bit says whether the job owns the CPU. In the second
/// word, the bit says whether the job borrows the CPU. `None` if the number of the CPU is [`MAX_CPUS`] or more.
pub(crate) fn cpu_bit_position(cpu: Pu) -> Option<([usize; 2], u64)> {
    (cpu.0 < MAX_CPUS).then(|| {
        let word = HEADER_WORDS + cpu.0 as usize / 64;
        ([word, word + WORDS_PER_CPU_SET], 1 << (cpu.0 % 64))
    })
}

/// Returns how many words of each set of CPUs are in use. `None` if the number is larger than [`WORDS_PER_CPU_SET`].
fn words_in_use(words: &[u64; COREMAP_WORDS]) -> Option<usize> {
    usize::try_from(number_in_words(words, WORDS_OFFSET)).ok().filter(|&in_use| in_use <= WORDS_PER_CPU_SET)
}

/// Returns the 4-byte number at `offset`, a multiple of 4, in bytes from the start of the core map.
fn number_in_words(words: &[u64; COREMAP_WORDS], offset: usize) -> u32 {
    let bytes = words[offset / 8].to_ne_bytes();
    let at = offset % 8;
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Returns the sequence counter of a core map (the file `coremap` of a job). `page` contains the bytes of the file.
pub(crate) fn sequence_of(page: &[u8; COREMAP_BYTES]) -> u32 {
    number_at(page, SEQUENCE_OFFSET)
}

/// Returns whether the file with the content `page` is a core map that this crate can read. Then the file begins with
/// [`MAGIC`], the version [`LAYOUT_VERSION`] and the size [`COREMAP_BYTES`].
pub(crate) fn has_known_header(page: &[u8; COREMAP_BYTES]) -> bool {
    page[..8] == MAGIC
        && number_at(page, VERSION_OFFSET) == LAYOUT_VERSION
        && number_at(page, SIZE_OFFSET) as usize == COREMAP_BYTES
}

/// Converts the 4096 bytes of a core map (the file `coremap` of a job) to 8-byte words in the byte order of the
/// machine.
pub(crate) fn to_words(page: &[u8; COREMAP_BYTES]) -> [u64; COREMAP_WORDS] {
    let mut words = [0; COREMAP_WORDS];
    for (word, bytes) in words.iter_mut().zip(page.chunks_exact(8)) {
        *word = u64::from_ne_bytes([
            bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
        ]);
    }
    words
}

fn number_at(page: &[u8; COREMAP_BYTES], offset: usize) -> u32 {
    u32::from_ne_bytes([page[offset], page[offset + 1], page[offset + 2], page[offset + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    fn content() -> CoreMapContent {
        CoreMapContent {
            epoch: 0x0102_0304_0506_0708,
            is_live: true,
            is_truncated: false,
            own: set("0-1,64"),
            borrowed: set("2-3,200"),
            leaving: set("3"),
            lent: set("1"),
            leaving_at_ns: Some(123_456_789_012),
            core_count: 3,
        }
    }

    #[test]
    fn every_field_has_the_offset_that_the_documentation_names() {
        let page = content().encode(7);
        let number = |at: usize| number_at(&page, at);
        let long = |at: usize| u64::from_ne_bytes(page[at..at + 8].try_into().unwrap());
        assert_eq!(&page[..8], b"PJWCORES");
        assert_eq!((number(8), number(12), number(16), number(20)), (1, 4096, 7, 0));
        assert_eq!((long(24), long(32)), (0x0102_0304_0506_0708, 123_456_789_012));
        assert_eq!((number(40), number(44), number(48), number(52), long(56)), (1, 4, 6, 3, 0));
        assert_eq!((long(64), long(72)), (0b11, 1), "own CPUs");
        assert_eq!((long(1072), long(1072 + 24)), (0b1100, 1 << 8), "borrowed CPUs");
        assert_eq!((long(2080), long(3088)), (0b1000, 0b10), "leaving and lent CPUs");
        let documented = include_str!("../../../docs/coremap.md");
        for row in ["| 16 | 4 |", "| 24 | 8 |", "| 40 | 4 |", "| 1072 | 1008 |", "| 3088 | 1008 |"] {
            assert!(documented.contains(row), "docs/coremap.md lacks {row}");
        }
    }

    #[test]
    fn a_page_is_read_as_it_was_written() {
        let empty = CoreMapContent::default();
        let largest = CoreMapContent { own: CpuSet::from_range(Pu(0), Pu(MAX_CPUS - 1)), ..content() };
        for content in [content(), empty, largest] {
            assert_eq!(CoreMapContent::decode(&to_words(&content.encode(2))), Some(content));
        }
    }

    #[test]
    fn a_cpu_beyond_the_sets_is_left_out_and_flagged() {
        let beyond = CoreMapContent { own: set("5,8064"), ..CoreMapContent::default() };
        let read = CoreMapContent::decode(&to_words(&beyond.encode(0))).unwrap();
        assert_eq!((read.own, read.is_truncated), (set("5"), true));
    }

    #[test]
    fn a_page_with_more_words_than_a_set_has_is_refused() {
        let mut page = content().encode(0);
        page[WORDS_OFFSET..WORDS_OFFSET + 4].copy_from_slice(&127_u32.to_ne_bytes());
        assert_eq!(CoreMapContent::decode(&to_words(&page)), None);
        assert_eq!(cpu_set_word_ranges(&to_words(&page)), None);
    }
}
