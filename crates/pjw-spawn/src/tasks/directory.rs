//! The directory of a space: which ranks run, the addresses that they have published, and a barrier. `pjw_tasks.h` has
//! the same layout, and all operations of tasks. The host only makes the directory and removes what an ended task has
//! published.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

/// `PJW_TASKS_MAGIC_` of pjw_tasks.h.
const MAGIC: u64 = 0x3153_4b53_4154_4a50;
/// `PJW_TASKS_NAMES_` of pjw_tasks.h.
const MAX_NAMES: usize = 4096;
/// The number of low bits of [`PublishedAddress::state`] that contain the phase of the entry: 1 while it is being
/// written, 2 when it is written, 3 when it is published.
const PHASE_BITS: u32 = 2;
/// The name of the environment variable that contains the address of the directory of an address space. By this
/// variable, a task (a process in the address space) finds the table of all tasks.
pub(crate) const TASKS_VARIABLE: &str = "PJW_TASKS";

/// The directory of an address space: a table in the shared memory, in which tasks (processes with the same memory)
/// find each other and publish addresses. The type is `struct pjw_tasks_space_` of `pjw_tasks.h`. In memory, the
/// process ids of all ranks follow this value.
#[repr(C)]
pub(super) struct TaskDirectory {
    magic: AtomicU64,
    nonce: AtomicU64,
    /// The number of ranks.
    size: AtomicU32,
    /// The number of processes that have attached to the directory, if the processes do not share an address space.
    attached: AtomicU32,
    /// The number of the present barrier in the high 32 bits, and the number of waiting ranks in the low 32 bits.
    barrier: AtomicU64,
    /// The number of changes of `names`, for futex(2).
    names_changed: AtomicU32,
    /// How many entries were ever in use.
    names_used: AtomicU32,
    names: [PublishedAddress; MAX_NAMES],
}

/// An address that a task has published by a name: `struct pjw_tasks_name_` of pjw_tasks.h.
#[repr(C)]
struct PublishedAddress {
    /// The process id of the publisher, shifted left by [`PHASE_BITS`], plus the phase. 0 for a free entry.
    state: AtomicU64,
    address: AtomicU64,
    /// The number of bytes at `address`.
    bytes: AtomicU64,
    /// The file descriptor of the memory file, plus 1. 0 if only an address is published.
    descriptor: AtomicU32,
    unused: AtomicU32,
    text: [AtomicU8; 96],
}

impl TaskDirectory {
    /// Returns the size in bytes of the directory of an address space for `rank_count` ranks. The process ids of the
    /// ranks are included.
    pub(super) fn size_in_bytes(rank_count: u32) -> usize {
        size_of::<Self>() + rank_count as usize * size_of::<AtomicU32>()
    }

    /// Fills in a new directory for `size` ranks at the address `at`, where all bytes must be zero. `nonce` is a random
    /// number. By this number, a task checks that the address in its environment is the address of its directory.
    ///
    /// # Safety
    /// `at` must point to as many bytes as [`TaskDirectory::size_in_bytes`] returns for `size`.
    pub(super) unsafe fn create<'a>(at: *mut u8, size: u32, nonce: u64) -> &'a Self {
        // SAFETY: the caller guarantees the memory. Zero is a value of each field.
        let directory = unsafe { &*at.cast::<Self>() };
        directory.size.store(size, Relaxed);
        directory.nonce.store(nonce, Relaxed);
        directory.magic.store(MAGIC, Relaxed);
        directory
    }

    /// Returns the field with the process id of the task that has the rank `rank`. `rank` must be less than the number
    /// of ranks.
    pub(super) fn pid_of(&self, rank: u32) -> &AtomicU32 {
        let first = (&raw const *self).wrapping_add(1).cast::<AtomicU32>();
        // SAFETY: the directory is followed by one word for each rank.
        unsafe { &*first.wrapping_add(rank as usize) }
    }

    /// Removes the addresses that the ended task with the process id `pid` had published. Wakes the tasks that wait for
    /// a change of the directory.
    pub(super) fn remove_task(&self, pid: u32) {
        let mut has_changed = false;
        let used = self.names_used.load(Acquire) as usize;
        for name in self.names.iter().take(used) {
            let state = name.state.load(Acquire);
            if state >> PHASE_BITS == u64::from(pid) {
                has_changed |= name.state.compare_exchange(state, 0, AcqRel, Relaxed).is_ok();
            }
        }
        if has_changed {
            self.names_changed.fetch_add(1, AcqRel);
            // SAFETY: the futex is a word of the directory.
            unsafe {
                libc::syscall(libc::SYS_futex, self.names_changed.as_ptr(), libc::FUTEX_WAKE, i32::MAX)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_the_header() {
        let header = include_str!("../../../pjw-spawn-c/include/pjw_tasks.h");
        for line in [
            format!("#define PJW_TASKS_MAGIC_ 0x{MAGIC:x}u"),
            format!("#define PJW_TASKS_NAMES_ {MAX_NAMES}"),
            format!("#define PJW_TASKS_SPACE_BYTES_ {}", size_of::<TaskDirectory>()),
        ] {
            assert!(header.lines().any(|other| other == line), "pjw_tasks.h has no line {line}");
        }
        assert_eq!(size_of::<PublishedAddress>(), 128);
    }
}
