//! The interface between a running memory reading and its caller: what is read now, and whether to go on.

use pjw_core::ids::Pid;

/// The functions that a reading of a job's memory ([`measure_job_memory`](super::measure_job_memory)) calls while it
/// runs. Through them, the caller learns which process is being read, and can stop the reading. Each function or
/// closure without parameters that returns bool implements this trait: it returns whether the result of the reading is
/// still wanted.
pub trait ReadingProgress {
    /// Returns whether the result of the reading is still wanted. If not, the reading stops with
    /// `ReadingError::Abandoned`.
    fn is_wanted(&self) -> bool;

    /// Returns whether an earlier reading still waits for the memory lock (`mmap_lock`) of the process `pid`. If true,
    /// this reading leaves out the process, and lists it in `JobMemoryReading::denied`.
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
