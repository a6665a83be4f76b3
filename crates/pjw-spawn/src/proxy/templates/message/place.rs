//! What a program that makes itself a template tells its launcher.

/// The environment variable with the number of the descriptor by which a program communicates with its launcher.
pub(in crate::proxy::templates) const CHANNEL_VARIABLE: &str = "PJW_SPAWN_CHANNEL";
/// `PR_GET_TID_ADDRESS` of prctl(2), which libc lacks.
pub(in crate::proxy::templates) const PR_GET_TID_ADDRESS: u64 = 40;
/// The maximum number of pointers to the arguments and variables of an instance, with their null pointers.
pub(in crate::proxy::templates) const MAX_POINTERS: usize = POINTERS_SIZE / 8;
/// The size of the memory for these pointers in bytes.
pub(in crate::proxy::templates) const POINTERS_SIZE: usize = 32 * 1024;

/// The first message of a program that calls `fork_here`: the addresses in its memory that the launcher needs.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::proxy::templates) struct TemplateAddresses {
    pub(in crate::proxy::templates) block: u64,
    pub(in crate::proxy::templates) pointers: u64,
    pub(in crate::proxy::templates) brk: u64,
    pub(in crate::proxy::templates) thread_id: u64,
    pub(in crate::proxy::templates) robust_list: u64,
    pub(in crate::proxy::templates) robust_list_length: u64,
}
