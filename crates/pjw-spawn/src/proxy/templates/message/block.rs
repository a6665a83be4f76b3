//! The memory that a template gets beside its program's own: a page of code and a block of data.

use std::mem::{offset_of, size_of};
use std::ops::Range;

use super::stub::Reply;

/// The bytes of the page of code.
pub(in crate::proxy::templates) const CODE_SIZE: u64 = 4096;
/// The bytes of the block. Strings that are too large for it get memory of their own.
pub(in crate::proxy::templates) const SIZE: u64 = 7 * PAGE as u64;
/// The bytes of the reply, with the rest of its page.
pub(in crate::proxy::templates) const REPLY_SIZE: usize = PAGE;
const PAGE: usize = 4096;

/// The parts of the block, as offsets: a `msghdr`, its `iovec`, its control buffer, the received message. Then, in pages
/// of their own, what is written for each instance: the strings and the reply.
const IOVEC: u64 = 64;
const CONTROL: u64 = 128;
const CONTROL_SIZE: u64 = 64;
const MESSAGE: usize = 192;
const STRINGS: usize = 3 * PAGE;
const REPLY: usize = 6 * PAGE;
/// The most bytes of a message.
pub(in crate::proxy::templates) const MAX_MESSAGE: usize = STRINGS - MESSAGE;

/// The address of the block.
#[derive(Debug, Clone, Copy)]
pub(in crate::proxy::templates) struct Block(pub(in crate::proxy::templates) u64);

impl Block {
    pub(in crate::proxy::templates) fn header(self) -> u64 {
        self.0
    }

    /// The address of the reply. The template has its page alone (`MADV_DONTFORK`): it writes there after each fork, and a page
    /// that an instance had too would be copied each time.
    pub(in crate::proxy::templates) fn reply(self) -> u64 {
        self.0 + REPLY as u64
    }

    /// The address of the result of the instance with this index.
    pub(in crate::proxy::templates) fn pid(self, index: usize) -> u64 {
        self.reply() + (offset_of!(Reply, pids) + 4 * index) as u64
    }

    /// The address of the received descriptor with this index: the payload of the first control message, cmsg(3).
    pub(in crate::proxy::templates) fn descriptor(self, index: u64) -> u64 {
        self.0 + CONTROL + 16 + 4 * index
    }

    /// The address of the received message, which begins with its calls.
    pub(in crate::proxy::templates) fn message(self) -> u64 {
        self.0 + MESSAGE as u64
    }

    /// Where strings begin.
    pub(in crate::proxy::templates) fn strings(self) -> u64 {
        self.0 + STRINGS as u64
    }

    /// The bytes for strings.
    pub(in crate::proxy::templates) fn strings_size() -> u64 {
        (REPLY - STRINGS) as u64
    }

    /// The contents of the beginning of the block: the `msghdr` and the `iovec`.
    pub(in crate::proxy::templates) fn contents(self) -> Vec<u8> {
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
pub(in crate::proxy::templates) struct MemoryMap {
    pub(in crate::proxy::templates) start_code: u64,
    pub(in crate::proxy::templates) end_code: u64,
    pub(in crate::proxy::templates) start_data: u64,
    pub(in crate::proxy::templates) end_data: u64,
    pub(in crate::proxy::templates) start_brk: u64,
    pub(in crate::proxy::templates) brk: u64,
    pub(in crate::proxy::templates) start_stack: u64,
    pub(in crate::proxy::templates) arg_start: u64,
    pub(in crate::proxy::templates) arg_end: u64,
    pub(in crate::proxy::templates) env_start: u64,
    pub(in crate::proxy::templates) env_end: u64,
    pub(in crate::proxy::templates) auxv: u64,
    pub(in crate::proxy::templates) auxv_size: u32,
    pub(in crate::proxy::templates) exe_fd: u32,
}

impl MemoryMap {
    /// Stands for "the same program as before".
    pub(in crate::proxy::templates) const SAME_PROGRAM: u32 = u32::MAX;

    /// Returns the map of a process with these strings.
    pub(in crate::proxy::templates) fn with_strings(
        self,
        arguments: Range<u64>,
        variables: Range<u64>,
    ) -> Self {
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
    pub(in crate::proxy::templates) fn from_stat(stat: &str, brk: u64) -> Option<Self> {
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
const _: () = assert!(size_of::<Reply>() <= REPLY_SIZE && REPLY as u64 + REPLY_SIZE as u64 == SIZE);
