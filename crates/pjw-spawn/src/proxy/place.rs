//! What a program that makes itself a template tells its launcher.

/// The variable with the number of the channel.
pub(super) const CHANNEL_VARIABLE: &str = "PJW_SPAWN_CHANNEL";
/// `PR_GET_TID_ADDRESS` of prctl(2), which libc lacks.
pub(super) const PR_GET_TID_ADDRESS: u64 = 40;
/// The most pointers to arguments and variables, and their bytes.
pub(super) const MAX_POINTERS: usize = POINTERS_SIZE / 8;
pub(super) const POINTERS_SIZE: usize = 32 * 1024;

/// Where the launcher finds what it needs in the memory of the program. It is the first message on the channel.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Place {
    pub(super) block: u64,
    pub(super) pointers: u64,
    pub(super) brk: u64,
    pub(super) thread_id: u64,
    pub(super) robust_list: u64,
    pub(super) robust_list_length: u64,
}
