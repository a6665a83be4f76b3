//! The slots of a space: one range of addresses for each task, with its stack and its program.
//!
//! A slot has, from its lowest address: a guard that is never mapped, the stack, the program. The program lies at the
//! end, and the end is a multiple of 2 MiB: the hot end of the stack and the program share one page of the page table.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::image::ProgramLayout;
use super::page::{ADDRESS_LIMIT, PAGE};

/// What a page of the page table covers on x86-64.
const COVERED: u64 = 2 << 20;
const GUARD: u64 = 64 << 10;
/// The stack of a task if the limit of the stack (`RLIMIT_STACK`) is infinite. The usual limit.
const USUAL_STACK: u64 = 8 << 20;
const MIN_STACK: u64 = 256 << 10;

/// The layout of a slot. A slot is an address range with the stack and the program of one task. All values are in
/// bytes, and are multiples of the page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotShape {
    pub(super) bytes: u64,
    pub(super) alignment: u64,
    /// Where the stack begins and ends, relative to the slot. The program is mapped at the end of the stack.
    pub(super) stack: u64,
    pub(super) program: u64,
}

impl SlotShape {
    /// Returns the layout of a slot (the address range of one task) for the program `program`. The stack has
    /// `stack_bytes` bytes, or 256 KiB if `stack_bytes` is smaller. `None` if the size of the slot does not fit into 64
    /// bits.
    pub(super) fn new(program: &ProgramLayout, stack_bytes: u64) -> Option<Self> {
        let tail = program.span.checked_next_multiple_of(program.alignment)?;
        let alignment = COVERED.max(program.alignment);
        let stack_bytes = stack_bytes.max(MIN_STACK).checked_next_multiple_of(PAGE)?;
        let bytes = GUARD.checked_add(stack_bytes)?.checked_add(tail)?.checked_next_multiple_of(alignment)?;
        let program = bytes - tail;
        Some(Self { bytes, alignment, stack: program - stack_bytes, program })
    }

    /// Returns the size in bytes of an address range with room for `count` slots. The size includes bytes that may be
    /// needed to align the first slot. `None` if the address space of a process is too small.
    pub(super) fn bytes_of(&self, count: u64) -> Option<u64> {
        let bytes = self.bytes.checked_mul(count)?.checked_add(self.alignment)?;
        (bytes < ADDRESS_LIMIT).then_some(bytes)
    }
}

/// Returns the size in bytes that the stack of a task has: the soft limit `RLIMIT_STACK`, or 8 MiB if there is no
/// limit.
pub(super) fn stack_bytes() -> u64 {
    match getrlimit(Resource::RLIMIT_STACK) {
        Ok((RLIM_INFINITY, _)) | Err(_) => USUAL_STACK,
        Ok((soft, _)) => soft,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_find_room_only_in_the_addresses_of_a_process() {
        // 4,000 stacks of 4 TiB are more than 47 bits, and less than 64 bits.
        let stack = 4 << 40;
        let slot = SlotShape { bytes: stack, alignment: COVERED, stack: GUARD, program: stack - PAGE };
        assert_eq!(slot.bytes_of(10), Some(10 * stack + COVERED));
        assert_eq!(slot.bytes_of(4_000), None);
        assert_eq!(slot.bytes_of(u64::MAX), None);
    }
}
