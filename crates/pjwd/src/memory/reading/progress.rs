//! What the caller of a reading learns and says while it is made.

use pjw_core::ids::Pid;

/// Follows a reading, and can stop it. A function that returns bool is a `ReadingProgress` too: it says whether the
/// reading is still wanted.
pub trait ReadingProgress {
    /// Returns whether the result is still wanted. If not, the reading stops with `ReadingError::Abandoned`.
    fn is_wanted(&self) -> bool;

    /// Returns whether an earlier reading still waits for the lock of the memory of the process `pid`. Such a process
    /// is left out and listed in `JobMemoryReading::denied`.
    fn is_mmap_lock_awaited(&self, pid: Pid) -> bool;

    /// Called before the pages of the process `pid` are read.
    fn begin_process(&self, pid: Pid);
}

impl<F: Fn() -> bool> ReadingProgress for F {
    fn is_wanted(&self) -> bool {
        self()
    }

    fn is_mmap_lock_awaited(&self, _: Pid) -> bool {
        false
    }

    fn begin_process(&self, _: Pid) {}
}
