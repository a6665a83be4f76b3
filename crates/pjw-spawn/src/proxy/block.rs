//! The memory that a template gets beside its program's own: a page of code and a block of data.

use std::mem::{offset_of, size_of};
use std::ops::Range;

use super::stub::Reply;

/// The bytes of the page of code.
pub(super) const CODE_SIZE: u64 = 4096;
/// The bytes of the block. Strings that are too large for it get memory of their own.
pub(super) const SIZE: u64 = 6 * PAGE as u64;
const PAGE: usize = 4096;

/// The parts of the block, as offsets: a `msghdr`, its `iovec`, its control buffer, the received message. Then, in pages
/// of their own, what is written for each instance: the reply and the strings.
const IOVEC: u64 = 64;
const CONTROL: u64 = 128;
const CONTROL_SIZE: u64 = 64;
const MESSAGE: usize = 192;
const REPLY: usize = 3 * PAGE;
const STRINGS: u64 = (REPLY + size_of::<Reply>()) as u64;
/// The most bytes of a message.
pub(super) const MAX_MESSAGE: usize = REPLY - MESSAGE;

/// The address of the block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block(pub(super) u64);

impl Block {
    pub(super) fn header(self) -> u64 {
        self.0
    }

    pub(super) fn reply(self) -> u64 {
        self.0 + REPLY as u64
    }

    /// The address of the result of the instance with this index.
    pub(super) fn pid(self, index: usize) -> u64 {
        self.reply() + (offset_of!(Reply, pids) + 4 * index) as u64
    }

    /// The address of the received descriptor with this index: the payload of the first control message, cmsg(3).
    pub(super) fn descriptor(self, index: u64) -> u64 {
        self.0 + CONTROL + 16 + 4 * index
    }

    /// The address of the received message, which begins with its calls.
    pub(super) fn message(self) -> u64 {
        self.0 + MESSAGE as u64
    }

    /// Where strings begin.
    pub(super) fn strings(self) -> u64 {
        self.0 + STRINGS
    }

    /// The bytes for strings.
    pub(super) fn strings_size() -> u64 {
        SIZE - STRINGS
    }

    /// The contents of the beginning of the block: the `msghdr` and the `iovec`.
    pub(super) fn contents(self) -> Vec<u8> {
        let mut words = [0u64; (CONTROL / 8) as usize];
        words[2] = self.0 + IOVEC;
        words[3] = 1;
        words[4] = self.0 + CONTROL;
        words[5] = CONTROL_SIZE;
        words[8] = self.message();
        words[9] = MAX_MESSAGE as u64;
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }
}

/// `struct prctl_mm_map` of Linux: where the parts of the memory lie, for /proc.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MemoryMap {
    pub(super) start_code: u64,
    pub(super) end_code: u64,
    pub(super) start_data: u64,
    pub(super) end_data: u64,
    pub(super) start_brk: u64,
    pub(super) brk: u64,
    pub(super) start_stack: u64,
    pub(super) arg_start: u64,
    pub(super) arg_end: u64,
    pub(super) env_start: u64,
    pub(super) env_end: u64,
    pub(super) auxv: u64,
    pub(super) auxv_size: u32,
    pub(super) exe_fd: u32,
}

impl MemoryMap {
    /// Stands for "the same program as before".
    pub(super) const SAME_PROGRAM: u32 = u32::MAX;

    /// Returns the map of a process with these strings.
    pub(super) fn with_strings(self, arguments: Range<u64>, variables: Range<u64>) -> Self {
        Self {
            arg_start: arguments.start,
            arg_end: arguments.end,
            env_start: variables.start,
            env_end: variables.end,
            ..self
        }
    }

    /// Reads the map of a process from the text of `/proc/PID/stat`. `None` if the text is not of that form, or if the
    /// caller may not read the addresses, which are then 0.
    pub(super) fn from_stat(stat: &str, brk: u64) -> Option<Self> {
        // The second field, the name, may have blanks. proc(5) numbers the fields from 1.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let map = Self {
            start_code: field(26)?,
            end_code: field(27)?,
            start_stack: field(28)?,
            start_data: field(45)?,
            end_data: field(46)?,
            start_brk: field(47)?,
            brk,
            arg_start: field(48)?,
            arg_end: field(49)?,
            env_start: field(50)?,
            env_end: field(51)?,
            exe_fd: Self::SAME_PROGRAM,
            ..Self::default()
        };
        (map.arg_start != 0).then_some(map)
    }
}

const _: () = assert!(size_of::<MemoryMap>() == 104 && IOVEC + 16 <= CONTROL && MESSAGE.is_multiple_of(8));
