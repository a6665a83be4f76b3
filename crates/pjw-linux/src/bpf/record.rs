//! Parser of the records that `tasks.bpf.c` writes.

use std::num::NonZeroU64;

use pjw_core::cpuset::Pu;
use pjw_core::ids::{Comm, Pid, StartTime, Tid, Uid};

use super::task::TaskRecord;
use crate::proc::procfs::Stat;

/// The maximum size of the affinity mask in a record of the BPF programs, in bytes: one bit for each of 8192 PUs
/// (logical CPUs). In `tasks.bpf.c`, this is the size of the field `mask` of `struct record`.
pub(super) const MASK_BYTES: usize = 1024;
/// `offsetof(struct record, mask)`.
const HEADER_BYTES: usize = 120;

/// Bit of the field `flags` of `struct record` in `tasks.bpf.c`: the task is a kernel thread.
const IS_KERNEL_THREAD: u32 = 1;
/// Bit of the same field: the record has the time for which the task waited for a PU.
const HAS_WAIT: u32 = 2;
/// Bit of the same field: the task belongs to a child of vfork(2).
const IN_VFORK: u32 = 4;

/// The letters of the thread states in `/proc` (`task_state_array` in `fs/proc/array.c`). The index is the number of
/// the highest bit that is set in the state, counted from 1. Index 0: no bit is set.
const LETTERS: [char; 9] = ['R', 'S', 'D', 'T', 't', 'X', 'Z', 'P', 'I'];
/// `TASK_REPORT` of `include/linux/sched.h`.
const REPORTED: u32 = 0x7f;
/// `TASK_IDLE`: an uninterruptible sleep that does not count as load.
const IDLE: u32 = 0x402;
/// `TASK_RTLOCK_WAIT` (5.16) and `TASK_FROZEN` (6.1), shown as uninterruptible. Unused before.
const SHOWN_AS_UNINTERRUPTIBLE: u32 = 0x1000 | 0x8000;

/// A parsed record of the task scan (the BPF program that reports the state of threads). Contains the state of one
/// thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BpfRecord<'a> {
    /// The state of the thread. The affinity mask ([`TaskRecord::mask_words`]) is empty here.
    pub(super) task: TaskRecord<'static>,
    /// The affinity mask of the thread in the format of the kernel: an array of words in the byte order of this
    /// machine.
    pub(super) mask: &'a [u8],
}

/// Error: a record that a BPF program wrote has an invalid length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MalformedRecord;

/// Parses the first record in `bytes`. Returns the record and the bytes behind the record. `None` if `bytes` ends
/// before the end of the record.
///
/// # Errors
/// If the record has an invalid length.
pub(super) fn parse_first_record(bytes: &[u8]) -> Result<Option<(BpfRecord<'_>, &[u8])>, MalformedRecord> {
    let Some(length) = bytes.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes) as usize) else {
        return Ok(None);
    };
    if !(HEADER_BYTES..=HEADER_BYTES + MASK_BYTES).contains(&length) || !length.is_multiple_of(8) {
        return Err(MalformedRecord);
    }
    let Some((record, following)) = bytes.split_at_checked(length) else { return Ok(None) };
    let parts = record.split_first_chunk::<HEADER_BYTES>();
    Ok(parts.map(|(header, mask)| (BpfRecord { task: parse_task(header), mask }, following)))
}

/// Parses the fixed part of a record of the task scan, which describes a thread. The affinity mask follows this part in
/// the record: `mask_words` is empty in the result.
fn parse_task(header: &[u8; HEADER_BYTES]) -> TaskRecord<'static> {
    let (flags, run_ns) = (u32_at(header, 32), u64_at(header, 56));
    TaskRecord {
        tid: Tid(u32_at(header, 4)),
        pid: Pid(u32_at(header, 8)),
        stat: Stat {
            comm: parse_comm(&header[104..]),
            state: state_letter(u32_at(header, 24), u32_at(header, 28)),
            parent: Pid(u32_at(header, 12)),
            process_group: Pid(u32_at(header, 20)),
            session: Pid(u32_at(header, 16)),
            is_kernel_thread: flags & IS_KERNEL_THREAD != 0,
            run_ticks: run_ns / StartTime::TICK.0,
            start: StartTime(u64_at(header, 48) / StartTime::TICK.0),
            stack_start: u64_at(header, 72),
            last_cpu: Pu(u32_at(header, 36)),
        },
        run_ns,
        wait_ns: (flags & HAS_WAIT != 0).then(|| u64_at(header, 64)),
        uid: Uid(u32_at(header, 40)),
        effective_uid: Uid(u32_at(header, 44)),
        cgroup_inode: u64_at(header, 80),
        cgroup_fingerprint: u64_at(header, 88),
        address_space: NonZeroU64::new(u64_at(header, 96)),
        is_in_vfork: flags & IN_VFORK != 0,
        mask_words: &[],
    }
}

/// Decodes `mask`, the affinity mask in a record, and writes it to `words` as 64-bit words. PUs (logical CPUs) that
/// are offline are left out, as sched_getaffinity(2) does. `online` contains the online PUs as 64-bit words. Zero
/// words at the end of the mask are left out.
pub(super) fn decode_mask(mask: &[u8], online: &[u64], words: &mut Vec<u64>) {
    words.clear();
    words.extend(mask.chunks_exact(8).zip(online).map(|(word, online)| u64_at(word, 0) & online));
    while words.last() == Some(&0) {
        words.pop();
    }
}

/// Returns the letter that `/proc` shows for a thread state, as `task_state_index` in `include/linux/sched.h`
/// computes it. `state` and `exit_state` are the fields of the kernel's `task_struct`. Returns `?` for an unknown
/// state.
fn state_letter(state: u32, exit_state: u32) -> char {
    let shown = if state & SHOWN_AS_UNINTERRUPTIBLE != 0 {
        0x2
    } else if state & IDLE == IDLE {
        REPORTED + 1
    } else {
        (state | exit_state) & REPORTED
    };
    let highest = u32::BITS - shown.leading_zeros();
    LETTERS.get(highest as usize).copied().unwrap_or('?')
}

/// Returns the name of a thread (comm) from `bytes`, a text that ends at its first zero byte. The bytes behind the
/// zero byte are ignored: they can be left from an earlier name.
pub(super) fn parse_comm(bytes: &[u8]) -> Comm {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    Comm::new(&bytes[..end])
}

/// Returns the 32-bit number at the offset `at` in `bytes`, in the byte order of this machine. Returns 0 if `bytes`
/// ends before the end of the number.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// Returns the 64-bit number at the offset `at` in `bytes`, in the byte order of this machine. Returns 0 if `bytes`
/// ends before the end of the number.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(length: u32, words: usize) -> Vec<u8> {
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend((4..HEADER_BYTES + 8 * words).map(|at| u8::try_from(at % 251).unwrap()));
        bytes
    }

    #[test]
    fn an_incomplete_record_is_not_parsed() {
        let both = [bytes(128, 1), bytes(120, 0)].concat();
        for end in 0..128 {
            assert_eq!(parse_first_record(&both[..end]), Ok(None), "{end}");
        }
        let (BpfRecord { task, mask }, rest) = parse_first_record(&both).unwrap().unwrap();
        assert_eq!(task.tid, Tid(u32::from_ne_bytes([4, 5, 6, 7])));
        assert_eq!(mask, [120, 121, 122, 123, 124, 125, 126, 127]);
        for end in 0..120 {
            assert_eq!(parse_first_record(&rest[..end]), Ok(None), "{end}");
        }
        let (last, rest) = parse_first_record(rest).unwrap().unwrap();
        assert_eq!((last.mask, rest), (&[][..], &[][..]));
    }

    #[test]
    fn an_invalid_length_is_rejected_before_the_record_is_complete() {
        for length in [0, 1, 7, 8, 16, 112, 119, 121, 127, 1152, u32::MAX] {
            assert_eq!(parse_first_record(&length.to_ne_bytes()), Err(MalformedRecord), "{length}");
        }
        assert_eq!(parse_first_record(&1144_u32.to_ne_bytes()), Ok(None));
    }

    #[test]
    fn masks_are_cut_to_the_online_pus_and_have_no_trailing_zeros() {
        let mut words = vec![9; 3];
        let mask = [u64::MAX.to_ne_bytes(), 6_u64.to_ne_bytes()].concat();
        decode_mask(&mask, &[0b101, 0b10], &mut words);
        assert_eq!(words, [0b101, 0b10]);
        decode_mask(&mask, &[0b101, 0b1000], &mut words);
        assert_eq!(words, [0b101]);
        decode_mask(&mask, &[1], &mut words);
        assert_eq!(words, [1]);
        decode_mask(&[], &[1], &mut words);
        assert!(words.is_empty());
    }

    #[test]
    fn states_have_the_same_letters_as_in_proc() {
        let states = [
            (0x0, 0x0, 'R'),
            (0x1, 0x0, 'S'),
            (0x2, 0x0, 'D'),
            (0x102, 0x0, 'D'), // killable
            (0x4, 0x0, 'T'),
            (0x8, 0x0, 't'),
            (0x80, 0x10, 'X'),
            (0x80, 0x20, 'Z'),
            (0x40, 0x0, 'P'),
            (0x402, 0x0, 'I'),
            (0x2001, 0x0, 'S'), // freezable
            (0x8000, 0x0, 'D'), // frozen
            (0x1000, 0x0, 'D'), // waits for a lock, PREEMPT_RT
        ];
        for (state, exit_state, expected) in states {
            assert_eq!(state_letter(state, exit_state), expected, "{state:#x} {exit_state:#x}");
        }
    }

    #[test]
    fn a_name_ends_with_its_first_zero_byte() {
        assert_eq!(parse_comm(b"sh\0h\0\0\0\0\0\0\0\0\0\0\0\0"), Comm::from("sh"));
        assert_eq!(parse_comm(b"fifteen-letters\0"), Comm::from("fifteen-letters"));
    }
}
