//! The initial values of the variables of a program. The host reads them from the file once, and each task copies them.
//!
//! So one anonymous mapping holds the stack and the variables of a task. Without the copy, the variables would need two
//! further mappings: one of the file, and one of zeros. Each mapping of the address space costs time at the start and
//! the end of a task.

use std::os::fd::RawFd;

use nix::errno::Errno;

use super::image::{ProgramLayout, Segment};
use super::own_memory::map_anonymous;
use super::page::PAGE;

/// The most bytes of initial values in the file for which each task copies the values.
const MOST_COPIED: u64 = 64 << 10;
/// The most bytes of variables in memory for which each task copies the values.
const MOST_MAPPED_WITH_STACK: u64 = 1 << 20;

/// The initial values of the variables of a program, from its file. All tasks copy them from the memory of the host.
#[derive(Debug, Clone, Copy)]
pub(super) struct InitialValues {
    /// The bytes of the writable segments, one after the other. Each segment begins at the beginning of its first page.
    bytes: *const u8,
}

impl InitialValues {
    /// Reads the initial values of the variables of `program` from its file `file`. `None` if the variables need
    /// mappings of their own: they are too large to be copied by each task, or have other protections than the stack.
    /// The memory is never freed.
    ///
    /// # Errors
    /// If the file can't be read, or there is no memory.
    pub(super) fn read(program: &ProgramLayout, file: RawFd) -> Result<Option<Self>, Errno> {
        let sum = |bytes: fn(&Segment) -> u64| {
            program.segments().filter(|segment| segment.is_writable()).map(bytes).sum::<u64>()
        };
        let file_bytes = sum(|segment| PagedRange::of(segment).file_bytes);
        if !program.can_map_variables_with_stack()
            || file_bytes > MOST_COPIED
            || sum(|segment| segment.memory_bytes) > MOST_MAPPED_WITH_STACK
        {
            return Ok(None);
        }
        let bytes = map_anonymous(usize::try_from(file_bytes.max(1)).map_err(|_| Errno::ENOMEM)?)?;
        let mut at = bytes;
        for segment in program.segments().filter(|segment| segment.is_writable()) {
            let range = PagedRange::of(segment);
            // SAFETY: the memory has room for the bytes of all writable segments.
            unsafe { read_exactly(file, at, range.file_bytes, range.file_offset)? };
            at = at.wrapping_add(usize::try_from(range.file_bytes).unwrap_or(0));
        }
        Ok(Some(Self { bytes }))
    }

    /// Copies the values to the variables of a task. The task is the copy of `program` that is mapped at the address
    /// `base`.
    ///
    /// # Safety
    /// The values must be those of `program`. `map_task_slot` must have mapped the copy, with `variables_are_copied`.
    /// The variables are then in anonymous memory, which contains zeros. The task must not have begun to run the
    /// program.
    pub(super) unsafe fn copy_to(&self, base: u64, program: &ProgramLayout) {
        let mut from = self.bytes;
        for segment in program.segments().filter(|segment| segment.is_writable()) {
            let range = PagedRange::of(segment);
            if let (Ok(to), Ok(count)) =
                (usize::try_from(base + range.address), usize::try_from(range.file_bytes))
            {
                // SAFETY: the variables are mapped, and the values have so many bytes.
                unsafe {
                    std::ptr::with_exposed_provenance_mut::<u8>(to).copy_from_nonoverlapping(from, count);
                }
                from = from.wrapping_add(count);
            }
        }
    }
}

/// A segment, extended to the beginning of its first page.
struct PagedRange {
    /// The address of the first page, relative to the address at which the program is mapped.
    address: u64,
    file_offset: u64,
    file_bytes: u64,
}

impl PagedRange {
    fn of(segment: &Segment) -> Self {
        let offset_in_page = segment.address % PAGE;
        Self {
            address: segment.address - offset_in_page,
            file_offset: segment.file_offset - offset_in_page,
            file_bytes: if segment.file_bytes == 0 { 0 } else { segment.file_bytes + offset_in_page },
        }
    }
}

/// Reads `count` bytes of the file `file`, from `offset` on, to the address `to`. Fails with `ENOEXEC` if the file ends
/// before.
///
/// # Safety
/// `to` must have room for the bytes.
pub(super) unsafe fn read_exactly(file: RawFd, to: *mut u8, count: u64, offset: u64) -> Result<(), Errno> {
    let mut done = 0;
    while done < count {
        // SAFETY: the caller guarantees the room.
        let read =
            unsafe { libc::syscall(libc::SYS_pread64, file, to as u64 + done, count - done, offset + done) };
        match Errno::result(read) {
            Ok(0) => return Err(Errno::ENOEXEC),
            Ok(read) => done += u64::try_from(read).unwrap_or(0),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
