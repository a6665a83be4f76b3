//! The slots of a space: one range of addresses for each task, with its stack and its program.
//!
//! A slot has, from its lowest address: a guard that is never mapped, the stack, the program, another guard, and room
//! for a heap. The room is not reserved: the kernel places the first mappings of tasks there, because it searches from
//! the highest address down. Mostly this is the heap of a task that was started later. The hot end of the stack, a
//! program of up to 0.8 MiB and the beginning of this heap are in the same 2 MiB, so that they share one page of the
//! page table. With a larger program, this is so in most slots.
//!
//! The distance of the program to the end differs from slot to slot, by some pages. The TLB of a core chooses the set
//! for a page by the lowest bits of the page's number. If all copies of a page had the same bits, the tasks of a core
//! would displace each other's entries at each switch. The distances of adjacent slots differ by 17 pages, so that
//! ranges of 64 KiB that the tasks use, such as buffers in their heaps, are in different sets too.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::image::ProgramLayout;
use super::page::{ADDRESS_LIMIT, PAGE};

/// The size in bytes of the addresses that one page of the page table covers on x86-64.
const COVERED: u64 = 2 << 20;
/// The size of a guard: a range where nothing is mapped, so that a stack or a program that exceeds its range fails.
const GUARD: u64 = 64 << 10;
/// The size in bytes of the stack of a task if the limit of the stack (`RLIMIT_STACK`) is infinite.
const USUAL_STACK: u64 = 8 << 20;
/// The size in bytes of the stack of a task if the limit of the stack is lower.
const MIN_STACK: u64 = 256 << 10;
/// The size in bytes of the room for a heap. glibc first maps the variables of the first thread. Then malloc(3) maps
/// 1 MiB at once if brk(2) fails (`MMAP_AS_MORECORE_SIZE`, malloc.c). What is mapped first lies at the end of the room.
const HEAP_ROOM: u64 = (1 << 20) + SMALL_MAPPINGS;
/// The part of [`HEAP_ROOM`] for the variables of the first thread, and for other small mappings.
const SMALL_MAPPINGS: u64 = 64 << 10;
/// The part of the heap that shares a page of the page table with the program.
const HOT_HEAP: u64 = 64 << 10;
/// The number of different distances between a program and the end of its slot: the sets of the second TLB of usual
/// processors (AMD: 128 in Zen 4, 256 in Zen 5).
const DISTANCES: u64 = 256;
/// The pages by which the distances of adjacent slots differ, modulo [`DISTANCES`]. An odd number, so that 256 adjacent
/// slots have 256 distances.
const PAGES_BETWEEN_DISTANCES: u64 = 17;

/// The layout of the slots. A slot is an address range with the stack and the program of one task. All values are in
/// bytes, and are multiples of the page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotShape {
    /// The size of a slot.
    pub(super) bytes: u64,
    /// The address of each slot is a multiple of this.
    pub(super) alignment: u64,
    /// The size of the stack.
    pub(super) stack_bytes: u64,
    /// The offset of the program in slot 0.
    program: u64,
    /// The size of the program.
    span: u64,
    /// The unit of the distances between programs and the ends of their slots: a page, or 0 if all programs have the
    /// same distance.
    distance_unit: u64,
}

/// The addresses of one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TaskSlot {
    /// The lowest address of the slot.
    pub(super) begin: u64,
    /// The lowest address of the stack.
    pub(super) stack: u64,
    /// The address at which the program is mapped. The stack ends here.
    pub(super) program: u64,
    /// The lowest address of the room for a heap. The guard behind the program ends here.
    pub(super) heap_room: u64,
}

impl TaskSlot {
    /// Returns the size of the stack, the program and their guards together, in bytes.
    pub(super) fn reserved_bytes(&self) -> u64 {
        self.heap_room - self.begin
    }
}

impl SlotShape {
    /// Returns the layout of a slot (the address range of one task) for the program `program`. The stack has
    /// `stack_bytes` bytes, or 256 KiB if `stack_bytes` is smaller. `None` if the size of the slot does not fit into 64
    /// bits.
    pub(super) fn new(program: &ProgramLayout, stack_bytes: u64) -> Option<Self> {
        let alignment = COVERED.max(program.alignment);
        // The room for a heap ends before the next 2 MiB do.
        let tail = program.span.checked_add(GUARD + SMALL_MAPPINGS + HOT_HEAP)?.checked_add(COVERED)?;
        let tail = tail.checked_next_multiple_of(program.alignment)?;
        let stack_bytes = stack_bytes.max(MIN_STACK).checked_next_multiple_of(PAGE)?;
        // A program with a larger alignment than a page can't begin at each page.
        let distance_unit = if program.alignment <= PAGE { PAGE } else { 0 };
        let max_distance = (DISTANCES - 1) * distance_unit;
        let needed = GUARD.checked_add(stack_bytes)?.checked_add(tail)?.checked_add(max_distance)?;
        let bytes = needed.checked_next_multiple_of(alignment)?;
        Some(Self { bytes, alignment, stack_bytes, program: bytes - tail, span: program.span, distance_unit })
    }

    /// Returns the addresses of the slot with the number `index`. `slots_at` is the address of slot 0, the lowest one.
    pub(super) fn slot(&self, slots_at: u64, index: usize) -> TaskSlot {
        let begin = slots_at + index as u64 * self.bytes;
        let distance = index as u64 * PAGES_BETWEEN_DISTANCES % DISTANCES * self.distance_unit;
        let program = begin + self.program - distance;
        let heap_room = program + self.span + GUARD;
        TaskSlot { begin, stack: program - self.stack_bytes, program, heap_room }
    }

    /// Returns the room for a heap in the slot with the number `index`: its lowest address, and its size in bytes.
    pub(super) fn heap_room(&self, slots_at: u64, index: usize) -> (u64, u64) {
        (self.slot(slots_at, index).heap_room, HEAP_ROOM)
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
    use std::collections::BTreeSet;

    use super::*;

    /// A program of 880 KiB whose segments have this alignment.
    fn program_of_usual_size(alignment: u64) -> ProgramLayout {
        let mut program = ProgramLayout::EMPTY;
        (program.span, program.alignment) = (880 << 10, alignment);
        program
    }

    #[test]
    fn the_copies_of_a_page_in_256_adjacent_slots_have_different_lowest_bits() {
        let shape = SlotShape::new(&program_of_usual_size(PAGE), 8 << 20).unwrap();
        let sets: BTreeSet<u64> =
            (0..256).map(|index| shape.slot(0, index).program / PAGE % DISTANCES).collect();
        assert_eq!(sets.len(), 256);
        let slots: Vec<TaskSlot> = (0..257).map(|index| shape.slot(shape.alignment, index)).collect();
        let mut with_one_page = 0;
        for (slot, next) in slots.iter().zip(&slots[1..]) {
            assert!(slot.begin + GUARD <= slot.stack && slot.heap_room + HEAP_ROOM <= next.begin);
            assert_eq!(
                (slot.program - slot.stack, slot.heap_room - slot.program),
                (8 << 20, (880 << 10) + GUARD)
            );
            let page_of_table = |address: u64| address / COVERED;
            let end = slot.heap_room + SMALL_MAPPINGS;
            with_one_page += u32::from(page_of_table(slot.program - PAGE) == page_of_table(end));
        }
        assert!(with_one_page >= 240, "{with_one_page} of 256 slots need one page of the page table");
    }

    #[test]
    fn ranges_of_64_kib_of_50_tasks_are_spread_evenly_over_the_sets() {
        let shape = SlotShape::new(&program_of_usual_size(PAGE), 8 << 20).unwrap();
        let mut uses = [0; 256];
        for index in 0..50 {
            let first = shape.slot(0, index).heap_room / PAGE;
            (first..first + 16).for_each(|page| uses[usize::try_from(page % DISTANCES).unwrap()] += 1);
        }
        assert!(uses.iter().all(|uses| (2..=4).contains(uses)), "{uses:?}");
    }

    #[test]
    fn a_program_with_a_larger_alignment_begins_at_a_multiple_of_it_in_each_slot() {
        let shape = SlotShape::new(&program_of_usual_size(COVERED), 8 << 20).unwrap();
        assert!((0..10).all(|index| shape.slot(shape.alignment, index).program.is_multiple_of(COVERED)));
    }

    #[test]
    fn slots_find_room_only_in_the_addresses_of_a_process() {
        // 4,000 stacks of 4 TiB are more than 47 bits, and less than 64 bits.
        let stack = 4 << 40;
        let program = stack - PAGE;
        let stack_bytes = program - GUARD;
        let slot = SlotShape {
            bytes: stack,
            alignment: COVERED,
            stack_bytes,
            program,
            span: PAGE,
            distance_unit: PAGE,
        };
        assert_eq!(slot.bytes_of(10), Some(10 * stack + COVERED));
        assert_eq!(slot.bytes_of(4_000), None);
        assert_eq!(slot.bytes_of(u64::MAX), None);
    }
}
