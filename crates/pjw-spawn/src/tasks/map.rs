//! Maps a program into a slot, as binfmt_elf.c of the kernel does it at execve(2).
//!
//! Code and constants are private mappings of the file: all copies share their pages through the page cache. If the
//! variables are small, as in most programs, one anonymous mapping holds the stack and the variables, and each task
//! copies the initial values into this mapping. Each mapping of the address space costs time at the start and the end
//! of a task.

use std::os::fd::RawFd;

use nix::errno::Errno;

use super::image::{ProgramLayout, Segment};
use super::page::PAGE;
use super::slot::TaskSlot;

/// Maps `bytes` bytes at the address `address` by mmap(2), and replaces the mappings that were there. The mapping is
/// private. With `MAP_ANONYMOUS` in `flags`, `file` is -1.
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

/// Unmaps `bytes` bytes of memory from `address` on. The address range then stays reserved (`PROT_NONE`), so that the
/// kernel maps nothing else there.
///
/// # Safety
/// Nothing may use the memory.
pub(super) unsafe fn unmap_and_reserve(address: u64, bytes: u64) -> Result<(), Errno> {
    // SAFETY: the caller guarantees that the memory is unused.
    unsafe { map_at(address, bytes, libc::PROT_NONE, libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1, 0) }
}

/// The maximum size in bytes of the part of a program's variables that is populated ahead. The relocations are at the
/// beginning of the variables, so this part is written for certain.
const MOST_WRITTEN: u64 = 64 << 10;

/// The size in bytes of the end of a stack that is populated ahead. It contains the arguments, the environment
/// variables and the first frames below them, so it is written for certain.
const WRITTEN_STACK: u64 = 2 * PAGE;

/// Returns the begin and the end of the pages that a program writes first: the beginning of its variables, to which it
/// applies relocations. Both are relative to the address at which the program is mapped.
pub(super) fn first_written_range(program: &ProgramLayout) -> (u64, u64) {
    program.segments().find(|segment| segment.is_writable()).map_or((0, 0), |segment| {
        let begin = segment.address - segment.address % PAGE;
        let end = segment.address + segment.memory_bytes.min(MOST_WRITTEN);
        (begin, end.next_multiple_of(PAGE))
    })
}

/// Maps the stack and the program of a task into the slot `slot`, and populates the last pages of the stack. `file` is
/// the file of the program. If `advise` is true, tells the kernel to use no huge pages for the stack (madvise(2)). If
/// `variables_are_copied` is true, the task has to copy the [`super::initial_values::InitialValues`] of its variables
/// before it begins the program.
///
/// # Safety
/// The slot must be unused, and `file` must be the file of the program.
pub(super) unsafe fn map_task_slot(
    slot: &TaskSlot,
    program: &ProgramLayout,
    file: RawFd,
    advise: bool,
    variables_are_copied: bool,
) -> Result<(), Errno> {
    let executable = if program.has_executable_stack { libc::PROT_EXEC } else { 0 };
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK);
    let mut bytes = slot.program - slot.stack;
    if variables_are_copied {
        bytes += program.span;
    }
    let stack = slot.stack;
    // SAFETY: the caller guarantees the slot.
    unsafe { map_at(stack, bytes, protection | executable, flags, -1, 0)? };
    if advise {
        // SAFETY: the advice changes no contents.
        unsafe { libc::syscall(libc::SYS_madvise, stack, bytes, libc::MADV_NOHUGEPAGE) };
    }
    for segment in program.segments().filter(|segment| !(variables_are_copied && segment.is_writable())) {
        // SAFETY: all segments lie inside of the span, for which the slot has room.
        unsafe { map_segment(slot.program, segment, file)? };
    }
    let written = WRITTEN_STACK.min(slot.program - slot.stack);
    // If the call fails, as on Linux before 5.14, each of these pages costs a page fault later.
    // SAFETY: changes no contents.
    unsafe { libc::syscall(libc::SYS_madvise, slot.program - written, written, libc::MADV_POPULATE_WRITE) };
    Ok(())
}

/// Maps `segment` of the program that is mapped at `base`: first the pages with bytes of the file `file`, and then
/// anonymous memory for the rest of the segment.
///
/// # Safety
/// Nothing may use the memory of the segment. `file` must be the file of the program.
unsafe fn map_segment(base: u64, segment: &Segment, file: RawFd) -> Result<(), Errno> {
    let begin = base + segment.address;
    let (file_end, end) = (begin + segment.file_bytes, begin + segment.memory_bytes);
    let begin_page = begin - begin % PAGE;
    let mut anonymous_from = begin_page;
    if segment.file_bytes > 0 {
        let offset = segment.file_offset - segment.file_offset % PAGE;
        // SAFETY: the caller guarantees that the memory is unused.
        unsafe { map_at(begin_page, file_end - begin_page, segment.protection, 0, file, offset)? };
        anonymous_from = file_end.next_multiple_of(PAGE);
    }
    let end = end.next_multiple_of(PAGE);
    if anonymous_from >= end {
        return Ok(());
    }
    // SAFETY: the caller guarantees that the memory is unused.
    unsafe { map_at(anonymous_from, end - anonymous_from, segment.protection, libc::MAP_ANONYMOUS, -1, 0) }
}

/// In the last page with file content of each writable segment, sets the bytes after the file content to zero. The
/// variables with the value 0 (`.bss`) begin there. The task itself calls this function, so that the kernel places the
/// page on the NUMA node of the task.
///
/// # Safety
/// The program must have been mapped at `base` without `variables_are_copied`, and not have begun.
pub(super) unsafe fn zero_rest_of_file_pages(base: u64, program: &ProgramLayout) {
    for segment in program.segments().filter(|segment| segment.is_writable() && segment.file_bytes > 0) {
        let begin = base + segment.address + segment.file_bytes;
        let end = begin.next_multiple_of(PAGE).min(base + segment.address + segment.memory_bytes);
        if let (Ok(begin), Ok(bytes)) = (usize::try_from(begin), usize::try_from(end - begin)) {
            // SAFETY: this is a part of a page of the segment, which is mapped writable.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(begin).write_bytes(0, bytes) };
        }
    }
}
