//! The program headers that a task finds by `AT_PHDR`: a copy on its stack, in which no header asks for the protection
//! of relocated variables (`PT_GNU_RELRO`).
//!
//! The C library of a static program protects relocated variables at its start by mprotect(2). The call divides the
//! mapping of the variables. While it holds the lock of the address space, it interrupts all CPUs on which other tasks
//! run.

use std::os::fd::RawFd;

use super::image::{ProgramLayout, Segment};
use super::initial_values::read_exactly;
use super::stack::NULL_WORD_BYTES;

/// The size of a program header, elf(5).
const HEADER_BYTES: usize = 56;
/// The most headers that are copied. Usual programs have at most 13.
const MAX_HEADERS: usize = 24;
const PT_NULL: u32 = 0;
const PT_PHDR: u32 = 6;
const PT_GNU_RELRO: u32 = 0x6474_e552;
/// The bytes of a header that contain the address in memory (`p_vaddr`).
const ADDRESS: std::ops::Range<usize> = 16..24;

/// The program headers of tasks. All tasks of a program have the same bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeaderCopy {
    bytes: [u8; HEADER_BYTES * MAX_HEADERS],
    count: usize,
}

impl HeaderCopy {
    /// Reads the headers of `program` from its file `file`. `None` if the task can use those in the memory of the
    /// program: no header asks for the protection of relocated variables. Also `None` if the headers can't be read, or
    /// are too many.
    pub(super) fn read(program: &ProgramLayout, file: RawFd) -> Option<Self> {
        let count =
            usize::try_from(program.program_header_count).ok().filter(|count| *count <= MAX_HEADERS)?;
        let address = program.program_headers;
        let has_headers =
            |segment: &&Segment| segment.address <= address && address - segment.address < segment.file_bytes;
        let segment = program.segments().find(has_headers)?;
        let offset = segment.file_offset + (address - segment.address);
        let mut copy = Self { bytes: [0; HEADER_BYTES * MAX_HEADERS], count };
        // SAFETY: the copy has room for `MAX_HEADERS` headers, and `count` is not larger.
        unsafe { read_exactly(file, copy.bytes.as_mut_ptr(), copy.length(), offset).ok()? };
        copy.disable_relro().then_some(copy)
    }

    /// Disables each header `PT_GNU_RELRO` (its type becomes `PT_NULL`), so that the C library does not protect the
    /// relocated variables of a task. Returns whether there was such a header.
    ///
    /// Also sets the address in the header `PT_PHDR` to the address of this copy, relative to the address at which the
    /// program is mapped. The copy ends 8 bytes below that address.
    fn disable_relro(&mut self) -> bool {
        let copy_address = self.length().saturating_add(NULL_WORD_BYTES).wrapping_neg();
        let mut has_changed = false;
        for header in self.bytes.chunks_exact_mut(HEADER_BYTES).take(self.count) {
            match header.first_chunk().map_or(PT_NULL, |kind: &[u8; 4]| u32::from_le_bytes(*kind)) {
                PT_GNU_RELRO => {
                    header[..size_of::<u32>()].copy_from_slice(&PT_NULL.to_le_bytes());
                    has_changed = true;
                }
                // musl subtracts this address from that of the headers, to find where the program is mapped.
                PT_PHDR => header[ADDRESS].copy_from_slice(&copy_address.to_le_bytes()),
                _ => {}
            }
        }
        has_changed
    }

    /// Returns the length of the headers in bytes.
    fn length(&self) -> u64 {
        (self.count * HEADER_BYTES) as u64
    }

    /// Returns the bytes of the headers. Their place is at the end of the stack, below one null word.
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.count * HEADER_BYTES).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: u32, address: u64) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[ADDRESS].copy_from_slice(&address.to_le_bytes());
        header
    }

    fn copy_of(headers: &[[u8; HEADER_BYTES]]) -> HeaderCopy {
        let mut copy = HeaderCopy { bytes: [0; HEADER_BYTES * MAX_HEADERS], count: headers.len() };
        copy.bytes[..headers.len() * HEADER_BYTES].copy_from_slice(headers.as_flattened());
        copy
    }

    #[test]
    fn the_protection_of_relocated_variables_is_removed_and_the_headers_name_their_own_place() {
        let load = header(1, 0x1000);
        let mut copy = copy_of(&[header(PT_PHDR, 64), load, header(PT_GNU_RELRO, 0x3000)]);
        assert!(copy.disable_relro());
        let copy_address = 0_u64.wrapping_sub(3 * 56 + 8);
        let expected = [header(PT_PHDR, copy_address), load, header(PT_NULL, 0x3000)];
        assert_eq!(copy.bytes(), expected.as_flattened());
        assert!(!copy_of(&[load]).disable_relro());
    }
}
