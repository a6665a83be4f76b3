//! The size of a page, and of an address space.

/// The size of a page on x86-64 in bytes.
pub(super) const PAGE: u64 = 4096;
/// The upper limit of the addresses in a process on x86-64 with four levels of page tables (`TASK_SIZE` of the kernel).
pub(super) const ADDRESS_LIMIT: u64 = 0x7fff_ffff_f000;
