//! A ring buffer in the shared memory, which transfers results from one process to another.
//!
//! A result is written as one or more pieces, so it may be longer than the ring buffer. The receiving process sees a
//! piece when `head` has moved past it, and not before. So a process that is killed while it writes a piece has sent
//! nothing, and a result counts when its last piece is seen.

use std::sync::atomic::Ordering;

use super::memory::{RingControl, RingMemory};
use super::result::Outcome;
use crate::child::ExitStatus;

/// The size in bytes of the header before each piece of a result: a [`ResultHeader`], and the length of the piece.
const HEADER_BYTES: usize = 32;
/// Values of [`ResultHeader::kind`].
const DONE: u32 = 0;
const FAILED: u32 = 1;
const KILLED_BY_SIGNAL: u32 = 2;
const KILLED_BY_EXIT: u32 = 3;

/// The header of a result in a ring buffer: the number of the item, and whether the item was computed, failed, or
/// killed its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResultHeader {
    pub(crate) number: u64,
    kind: u32,
    code: i32,
    attempts: u32,
}

impl ResultHeader {
    /// Returns the header for a result: `number` is the number of the item, and `outcome` is its outcome.
    pub(crate) fn from_outcome(number: u64, outcome: &Outcome) -> Self {
        let (kind, code, attempts) = match outcome {
            Outcome::Done(_) => (DONE, 0, 0),
            Outcome::Failed { code, .. } => (FAILED, *code, 0),
            Outcome::Killed { attempts, end: ExitStatus::Signal(signal) } => {
                (KILLED_BY_SIGNAL, *signal, *attempts)
            }
            Outcome::Killed { attempts, end: ExitStatus::Code(code) } => (KILLED_BY_EXIT, *code, *attempts),
        };
        Self { number, kind, code, attempts }
    }

    /// Returns the header for the result of an item that was computed. `number` is the number of the item.
    pub(crate) fn done(number: u64) -> Self {
        Self { number, kind: DONE, code: 0, attempts: 0 }
    }

    /// Returns the header for the result of an item that failed: the function of the program returned the error `code`.
    /// `number` is the number of the item.
    pub(crate) fn failed(number: u64, code: i32) -> Self {
        Self { number, kind: FAILED, code, attempts: 0 }
    }

    /// Returns the outcome of the item, with the bytes `bytes` of the result. `None` if the header is invalid.
    fn outcome(self, bytes: Vec<u8>) -> Option<Outcome> {
        let (code, attempts) = (self.code, self.attempts);
        Some(match self.kind {
            DONE => Outcome::Done(bytes),
            FAILED => Outcome::Failed { code, bytes },
            KILLED_BY_SIGNAL => Outcome::Killed { attempts, end: ExitStatus::Signal(code) },
            KILLED_BY_EXIT => Outcome::Killed { attempts, end: ExitStatus::Code(code) },
            _ => return None,
        })
    }

    /// Returns the header of a piece with `length` bytes, as it is in the ring buffer. `is_last` says whether this is
    /// the last piece of the result.
    fn to_bytes(self, length: usize, is_last: bool) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.number.to_ne_bytes());
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        let words = [self.kind, self.code.cast_unsigned(), self.attempts, length, u32::from(is_last)];
        for (field, word) in bytes[8..].chunks_exact_mut(4).zip(words) {
            field.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// The pieces of an incomplete result that the receiving process has already read.
#[derive(Debug, Default)]
pub(crate) struct PartialResult(Vec<u8>);

impl PartialResult {
    /// Discards the pieces. Must be called if the sending process was killed before it sent the last piece.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// What a call of [`ResultRing::read_piece`] has read from the ring buffer: nothing, a piece of a result, a complete
/// result, or invalid data.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RingReadOutcome {
    Nothing,
    /// A piece of a result, which is not the last piece.
    Piece,
    /// The last piece of a result, so the result is complete. The variant contains the number of the item and its
    /// outcome.
    Result(u64, Outcome),
    /// The ring buffer contains data that the library does not write.
    Invalid,
}

/// A ring buffer in the shared memory of a farm that transfers results from one process to another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResultRing<'a> {
    pub(crate) control: &'a RingControl,
    pub(crate) bytes: RingMemory,
}

impl ResultRing<'_> {
    /// Writes one piece of a result into the ring buffer: the header `header`, and as many of `bytes` as fit now.
    /// Returns how many of `bytes` were written, and whether this was the last piece.
    ///
    /// Returns `None`, and writes nothing, if there is too little free space: neither for all of `bytes` nor for a
    /// quarter of the ring buffer.
    pub(crate) fn write_piece(&self, header: ResultHeader, bytes: &[u8]) -> Option<(usize, bool)> {
        let capacity = self.bytes.len();
        let head = self.control.head.load(Ordering::SeqCst);
        let used = head.wrapping_sub(self.control.tail.0.load(Ordering::SeqCst));
        let free = capacity.saturating_sub(usize::try_from(used).unwrap_or(capacity));
        let min_length = bytes.len().min(capacity / 4);
        let max_length = free.checked_sub(HEADER_BYTES).filter(|max_length| *max_length >= min_length)?;
        // Rounded down to a multiple of 8: a piece takes up such a number of bytes.
        let length = bytes.len().min(max_length & !7);
        let is_last = length == bytes.len();
        // SAFETY: until `head` moves, only the sending process, which is this one, uses the free space.
        unsafe {
            self.bytes.write(head, &header.to_bytes(length, is_last));
            self.bytes.write(head + HEADER_BYTES as u64, &bytes[..length]);
        }
        let size = (HEADER_BYTES + length.next_multiple_of(8)) as u64;
        self.control.head.store(head + size, Ordering::SeqCst);
        Some((length, is_last))
    }

    /// Reads one piece of a result, and frees the space of the piece in the ring buffer. `partial` contains the earlier
    /// pieces of the same result. The call appends the new piece to `partial`.
    pub(crate) fn read_piece(&self, partial: &mut PartialResult) -> RingReadOutcome {
        let tail = self.control.tail.0.load(Ordering::SeqCst);
        let used = self.control.head.load(Ordering::SeqCst).wrapping_sub(tail);
        if used == 0 {
            return RingReadOutcome::Nothing;
        }
        let used = usize::try_from(used).unwrap_or(usize::MAX);
        if used < HEADER_BYTES || used > self.bytes.len() {
            return RingReadOutcome::Invalid;
        }
        let mut header_bytes = Vec::with_capacity(HEADER_BYTES);
        // SAFETY: the sending process does not write to these bytes until `tail` moves.
        unsafe { self.bytes.read(tail, HEADER_BYTES, &mut header_bytes) };
        let number = header_bytes[..8].try_into().map_or(0, u64::from_ne_bytes);
        let word = |at: usize| header_bytes[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
        let (kind, code, attempts) = (word(8), word(12).cast_signed(), word(16));
        let header = ResultHeader { number, kind, code, attempts };
        let (length, is_last) = (word(20) as usize, word(24));
        let size = HEADER_BYTES + length.next_multiple_of(8);
        if size > used || is_last > 1 {
            return RingReadOutcome::Invalid;
        }
        // SAFETY: as above.
        unsafe { self.bytes.read(tail + HEADER_BYTES as u64, length, &mut partial.0) };
        self.control.tail.0.store(tail + size as u64, Ordering::SeqCst);
        if is_last == 0 {
            return RingReadOutcome::Piece;
        }
        let outcome = header.outcome(std::mem::take(&mut partial.0));
        outcome.map_or(RingReadOutcome::Invalid, |outcome| RingReadOutcome::Result(number, outcome))
    }

    /// Empties the ring buffer. Must be called while no other process uses the buffer.
    pub(crate) fn reset(&self) {
        self.control.head.store(0, Ordering::SeqCst);
        self.control.tail.0.store(0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::farm::memory::{MemorySizes, SharedMemory};

    const CAPACITY: usize = 4096;

    fn shared() -> SharedMemory {
        let sizes = MemorySizes { workers: 1, window: 8, ring: CAPACITY, input: 0, has_writer: false };
        SharedMemory::map(sizes).unwrap()
    }

    fn ring(shared: &SharedMemory) -> ResultRing<'_> {
        ResultRing { control: &shared.worker_controls()[0].results, bytes: shared.result_ring(0) }
    }

    #[test]
    fn results_of_all_sizes_pass_the_end_of_the_ring_unchanged() {
        let shared = shared();
        let ring = ring(&shared);
        let mut partial = PartialResult::default();
        for size in (0..3000).step_by(7) {
            let bytes: Vec<u8> = (0..size).map(|at| u8::try_from((at + size) % 251).unwrap()).collect();
            let written = ring.write_piece(ResultHeader::failed(size as u64, -3), &bytes);
            assert_eq!(written, Some((size, true)));
            let expected = Outcome::Failed { code: -3, bytes };
            assert_eq!(ring.read_piece(&mut partial), RingReadOutcome::Result(size as u64, expected));
            assert_eq!(ring.read_piece(&mut partial), RingReadOutcome::Nothing);
        }
    }

    #[test]
    fn a_result_that_is_longer_than_the_ring_passes_in_pieces() {
        let shared = shared();
        let ring = ring(&shared);
        let bytes: Vec<u8> = (0..20_000_u32).map(|at| u8::try_from(at % 253).unwrap()).collect();
        let (mut partial, mut sent, mut pieces) = (PartialResult::default(), 0, 0);
        loop {
            while let Some((length, is_last)) = ring.write_piece(ResultHeader::done(5), &bytes[sent..]) {
                sent += length;
                if is_last {
                    break;
                }
            }
            match ring.read_piece(&mut partial) {
                RingReadOutcome::Piece => pieces += 1,
                RingReadOutcome::Result(number, outcome) => {
                    assert_eq!((number, outcome), (5, Outcome::Done(bytes)));
                    break;
                }
                other => unreachable!("{other:?}"),
            }
        }
        assert!(pieces >= 4);
    }

    #[test]
    fn a_full_ring_takes_nothing_and_an_invalid_head_is_noticed() {
        let shared = shared();
        let ring = ring(&shared);
        while ring.write_piece(ResultHeader::done(1), &[1; 100]).is_some() {}
        assert_eq!(ring.write_piece(ResultHeader::done(1), &[1; 100]), None);
        ring.control.head.store(u64::MAX, Ordering::SeqCst);
        assert_eq!(ring.read_piece(&mut PartialResult::default()), RingReadOutcome::Invalid);
        ring.reset();
        assert_eq!(ring.read_piece(&mut PartialResult::default()), RingReadOutcome::Nothing);
    }
}
