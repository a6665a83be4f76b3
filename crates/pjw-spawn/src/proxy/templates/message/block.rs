//! The memory that a template has beside that of its program: a page of code and a block of data.

use std::mem::{offset_of, size_of};
use std::ops::Range;

use super::stub::TemplateReply;

/// The size in bytes of the page with the machine code that a template runs while it waits for messages.
pub(in crate::proxy::templates) const CODE_SIZE: u64 = 4096;
/// The size in bytes of a [`TemplateBlock`], the memory in a template for messages, strings and replies. If the strings
/// do not fit into the block, the template maps more memory for them.
pub(in crate::proxy::templates) const BLOCK_SIZE: u64 = 7 * PAGE as u64;
/// The size in bytes of the memory in which a template writes its reply to a message: one page.
pub(in crate::proxy::templates) const REPLY_SIZE: usize = PAGE;
/// The size of a page in bytes.
const PAGE: usize = 4096;

/// The offsets of the parts of the block. The block begins with a `msghdr`. Its `iovec`, its control buffer and the
/// received message follow. The strings and the reply have pages of their own, because they are written for each
/// instance.
const IOVEC: u64 = 64;
const CONTROL: u64 = 128;
const CONTROL_SIZE: u64 = 64;
const MESSAGE: usize = 192;
const STRINGS: usize = 3 * PAGE;
const REPLY: usize = 6 * PAGE;
/// The maximum size in bytes of a message to a template (the process from which further processes are forked).
pub(in crate::proxy::templates) const MAX_MESSAGE: usize = STRINGS - MESSAGE;

/// The address of a block of memory in a template (the process from which further processes are forked). The block
/// contains the buffers for messages, strings and replies.
#[derive(Debug, Clone, Copy)]
pub(in crate::proxy::templates) struct TemplateBlock(pub(in crate::proxy::templates) u64);

impl TemplateBlock {
    /// Returns the address in the template of the `msghdr`, the parameter of recvmsg(2) by which the template receives
    /// messages.
    pub(in crate::proxy::templates) fn header_address(self) -> u64 {
        self.0
    }

    /// Returns the address at which the template writes its reply to a message. Forked processes do not inherit the
    /// page with the reply (`MADV_DONTFORK`). Otherwise the kernel would copy the page after each fork, when the
    /// template writes its next reply.
    pub(in crate::proxy::templates) fn reply_address(self) -> u64 {
        self.0 + REPLY as u64
    }

    /// Returns the address at which the template writes the process id of a process that it has forked. `index` is the
    /// position of this process among the processes that the message requests, counted from 0.
    pub(in crate::proxy::templates) fn pid_address(self, index: usize) -> u64 {
        self.reply_address() + (offset_of!(TemplateReply, pids) + 4 * index) as u64
    }

    /// Returns the address, in the memory of the template, of the number of a file descriptor that the template has
    /// received with a message. The kernel writes the numbers to the payload of the first control message (cmsg(3)).
    /// `index` is the position among the received descriptors, counted from 0.
    pub(in crate::proxy::templates) fn descriptor_address(self, index: u64) -> u64 {
        self.0 + CONTROL + 16 + 4 * index
    }

    /// Returns the address at which the template receives a message. The message begins with a list of system calls.
    pub(in crate::proxy::templates) fn message_address(self) -> u64 {
        self.0 + MESSAGE as u64
    }

    /// Returns the address of the memory in the template for the arguments and environment variables of forked
    /// processes.
    pub(in crate::proxy::templates) fn strings_address(self) -> u64 {
        self.0 + STRINGS as u64
    }

    /// Returns the size in bytes of the memory in the block for arguments and environment variables.
    pub(in crate::proxy::templates) fn strings_size() -> u64 {
        (REPLY - STRINGS) as u64
    }

    /// Returns the bytes with which the block must begin: the `msghdr` and the `iovec` that the template passes to
    /// recvmsg(2).
    pub(in crate::proxy::templates) fn initial_bytes(self) -> Vec<u8> {
        let mut words = [0u64; (CONTROL / 8) as usize];
        // msg_iov, msg_iovlen, msg_control and msg_controllen of the msghdr.
        words[2] = self.0 + IOVEC;
        words[3] = 1;
        words[4] = self.0 + CONTROL;
        words[5] = CONTROL_SIZE;
        // iov_base and iov_len of the iovec.
        words[8] = self.message_address();
        words[9] = MAX_MESSAGE as u64;
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }
}

/// `struct prctl_mm_map` of prctl(2): the addresses of the code, data, stack, arguments and environment that `/proc`
/// shows for a process.
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
    /// The value of the field `exe_fd` that leaves the link `/proc/PID/exe` unchanged.
    pub(in crate::proxy::templates) const SAME_PROGRAM: u32 = u32::MAX;

    /// Returns a copy of this map with other address ranges: `arguments` for the arguments, and `variables` for the
    /// environment variables.
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

    /// Parses the map from `stat`, the text of `/proc/PID/stat`. `brk` is the end of the heap, which the text does not
    /// contain. `None` if the text is malformed, or if the kernel hides the addresses from the caller by the value 0.
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
const _: () =
    assert!(size_of::<TemplateReply>() <= REPLY_SIZE && REPLY as u64 + REPLY_SIZE as u64 == BLOCK_SIZE);
