//! Maps a program into a slot, as binfmt_elf.c of the kernel does it at execve(2).
//!
//! The segments are private mappings of the file: all copies share the pages that no one writes to, through the page cache.

use std::os::fd::RawFd;

use nix::errno::Errno;

use super::image::{Segment, Shape};
use super::page::PAGE;
use super::slot::SlotShape;

/// A call of mmap(2) at a fixed address. The mappings that were there are replaced.
///
/// # Safety
/// Nothing may use the memory that is replaced.
unsafe fn map_at(
    address: u64,
    bytes: u64,
    protection: i32,
    flags: i32,
    file: RawFd,
    offset: u64,
) -> Result<(), Errno> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_FIXED;
    // SAFETY: the caller guarantees that the memory is unused.
    let mapped =
        unsafe { libc::syscall(libc::SYS_mmap, address, bytes, protection, flags, i64::from(file), offset) };
    Errno::result(mapped).map(drop)
}

/// Frees the memory of an address range, and makes the range inaccessible, so that nothing else is mapped there.
///
/// # Safety
/// Nothing may use the range.
pub(super) unsafe fn reserve_again(address: u64, bytes: u64) -> Result<(), Errno> {
    // SAFETY: as above.
    unsafe { map_at(address, bytes, libc::PROT_NONE, libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1, 0) }
}

/// Maps the stack and the program of a task into the slot at `address`.
///
/// # Safety
/// The slot must be unused, and `file` must be the file of the program.
pub(super) unsafe fn fill_slot(
    address: u64,
    slot: &SlotShape,
    program: &Shape,
    file: RawFd,
) -> Result<(), Errno> {
    let executable = if program.has_executable_stack { libc::PROT_EXEC } else { 0 };
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK);
    let (stack, bytes) = (address + slot.stack, slot.program - slot.stack);
    // SAFETY: the caller guarantees the slot.
    unsafe { map_at(stack, bytes, protection | executable, flags, -1, 0)? };
    // A huge page at the end of the stack would take 2 MiB for each task. Kernels before 6.7 give such to MAP_STACK.
    // SAFETY: the advice changes no contents.
    unsafe { libc::syscall(libc::SYS_madvise, stack, bytes, libc::MADV_NOHUGEPAGE) };
    for segment in program.segments() {
        // SAFETY: all segments lie inside of the span, for which the slot has room.
        unsafe { map_segment(address + slot.program, segment, file)? };
    }
    Ok(())
}

/// # Safety
/// As above.
unsafe fn map_segment(base: u64, segment: &Segment, file: RawFd) -> Result<(), Errno> {
    let begin = base + segment.address;
    let (file_end, end) = (begin + segment.file_bytes, begin + segment.memory_bytes);
    let begin_page = begin - begin % PAGE;
    let mut anonymous_from = begin_page;
    if segment.file_bytes > 0 {
        let offset = segment.file_offset - segment.file_offset % PAGE;
        // SAFETY: as above.
        unsafe { map_at(begin_page, file_end - begin_page, segment.protection, 0, file, offset)? };
        anonymous_from = file_end.next_multiple_of(PAGE);
        if segment.memory_bytes > segment.file_bytes && segment.protection & libc::PROT_WRITE != 0 {
            let zeros = anonymous_from.min(end) - file_end;
            let at = std::ptr::with_exposed_provenance_mut::<u8>(
                usize::try_from(file_end).map_err(|_| Errno::EINVAL)?,
            );
            // SAFETY: this is the rest of the last page of the file, which was mapped writable just now.
            unsafe { at.write_bytes(0, usize::try_from(zeros).map_err(|_| Errno::EINVAL)?) };
        }
    }
    let end = end.next_multiple_of(PAGE);
    if anonymous_from >= end {
        return Ok(());
    }
    // SAFETY: as above.
    unsafe { map_at(anonymous_from, end - anonymous_from, segment.protection, libc::MAP_ANONYMOUS, -1, 0) }
}
