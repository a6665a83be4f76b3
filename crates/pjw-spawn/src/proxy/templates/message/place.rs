//! What a program that makes itself a template tells its launcher.

/// The variable with the number of the channel.
pub(in crate::proxy::templates) const CHANNEL_VARIABLE: &str = "PJW_SPAWN_CHANNEL";
/// `PR_GET_TID_ADDRESS` of prctl(2), which libc lacks.
pub(in crate::proxy::templates) const PR_GET_TID_ADDRESS: u64 = 40;
/// The most pointers to arguments and variables, and their bytes.
pub(in crate::proxy::templates) const MAX_POINTERS: usize = POINTERS_SIZE / 8;
pub(in crate::proxy::templates) const POINTERS_SIZE: usize = 32 * 1024;

/// Where the launcher finds what it needs in the memory of the program. It is the first message on the channel.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::proxy::templates) struct Place {
    pub(in crate::proxy::templates) block: u64,
    pub(in crate::proxy::templates) pointers: u64,
    pub(in crate::proxy::templates) brk: u64,
    pub(in crate::proxy::templates) thread_id: u64,
    pub(in crate::proxy::templates) robust_list: u64,
    pub(in crate::proxy::templates) robust_list_length: u64,
}
