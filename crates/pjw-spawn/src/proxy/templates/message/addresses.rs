//! The agreement between a launcher and a program that makes itself a template (`fork_here`): the environment variable
//! with the channel, and the message with the addresses that the launcher needs.

/// The name of an environment variable for a program that becomes a template in `fork_here`. A template is a process
/// from which further processes are forked. The variable contains the number of the file descriptor by which the
/// program communicates with its launcher, the process that started it.
pub(in crate::proxy::templates) const CHANNEL_VARIABLE: &str = "PJW_SPAWN_CHANNEL";
/// `PR_GET_TID_ADDRESS` of prctl(2), which libc lacks.
pub(in crate::proxy::templates) const PR_GET_TID_ADDRESS: u64 = 40;
/// The maximum number of pointers to the arguments and environment variables of a process that is forked in
/// `fork_here`. The null pointers at the ends of both lists are included.
pub(in crate::proxy::templates) const MAX_POINTERS: usize = POINTERS_SIZE / 8;
/// The size in bytes of the memory for the pointers to the arguments and environment variables of a process that is
/// forked in `fork_here`.
pub(in crate::proxy::templates) const POINTERS_SIZE: usize = 32 * 1024;

/// The first message that a program sends to its launcher (the process that started it) when it calls `fork_here`.
/// Contains the addresses in the memory of the program that the launcher needs.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::proxy::templates) struct TemplateAddresses {
    /// The address of the [`TemplateBlock`](super::block::TemplateBlock).
    pub(in crate::proxy::templates) block: u64,
    /// The address of the memory for the pointers to arguments and environment variables.
    pub(in crate::proxy::templates) pointers: u64,
    /// The end of the heap: brk(2).
    pub(in crate::proxy::templates) brk: u64,
    /// The address at which the C library keeps the thread id. 0 if there is none.
    pub(in crate::proxy::templates) thread_id_address: u64,
    /// The address and the length of the head of the robust futex list, get_robust_list(2).
    pub(in crate::proxy::templates) robust_list: u64,
    pub(in crate::proxy::templates) robust_list_length: u64,
}
