//! Threads that wait for one another because they map and unmap memory in one address space.
//!
//! mmap(2), munmap(2), mprotect(2), brk(2) and some page faults of all threads of an address space wait for one lock of
//! the kernel (`mmap_lock`). A thread that waits either sleeps, or spins in the kernel as long as the holder of the
//! lock runs (kernel/locking/rwsem.c). So many threads on many cores show some sleeping threads, and much system time.

use crate::basics::{Pid, prelude::*};
use crate::diagnosis::words::{counted_noun, join_names};

/// The smallest number of active threads that can wait for one another.
const MIN_THREADS: u32 = 2;
/// The share of the samples in which the threads must be blocked on the lock, in permille.
const MIN_BLOCKED_PERMILLE: u32 = 100;
/// The share as in [`MIN_BLOCKED_PERMILLE`], if most of the CPU time of the threads is system time.
const MIN_BLOCKED_PERMILLE_IN_KERNEL: u32 = 10;
/// The share of system time in the CPU time that counts as most of it, in permille.
const MIN_SYSTEM_PERMILLE: u32 = 500;
/// The smallest number of samples in which a thread must be blocked on the lock.
const MIN_BLOCKED_SAMPLES: u32 = 3;

/// Samples of the active threads of one address space: how often these threads were blocked on `mmap_lock`, the
/// kernel's lock of the address space. mmap(2), munmap(2) and some page faults take this lock.
///
/// One sample is one reading of one thread. The caller reads each thread many times. Each time, the caller reads the
/// state of the thread (`/proc/PID/task/TID/stat`) and the kernel function in which the thread sleeps (`wchan` in the
/// same directory). A thread that sleeps in a function that takes `mmap_lock` is blocked on the lock. A thread is
/// active if at least one sample found it running, waiting for a PU (logical CPU) or in uninterruptible sleep.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MmapLockSamples {
    /// The processes of the address space with active threads, ascending.
    pub pids: BTreeSet<Pid>,
    /// The number of active threads. A thread is active if it was in state R (running or waiting for a PU) or D
    /// (uninterruptible sleep) in at least one sample.
    pub threads: u32,
    /// The number of samples of all these threads together.
    pub samples: u32,
    /// The number of samples in which the thread was blocked on the lock.
    pub blocked_samples: u32,
    /// The CPU time of these threads between their first and their last sample, in clock ticks of 10 ms.
    pub cpu_ticks: u64,
    /// The part of `cpu_ticks` in which the threads ran in the kernel (system time), in clock ticks of 10 ms.
    pub system_ticks: u64,
}

/// A problem of an address space: its active threads are often blocked on `mmap_lock`, the kernel's lock of the address
/// space. mmap(2), munmap(2) and some page faults take this lock. The state of each thread was read many times: one
/// reading of one thread is a sample. A thread is active if it was running, waiting for a PU (logical CPU) or in
/// uninterruptible sleep in at least one sample. [`MmapLockWaits::remedy`] says what a user can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MmapLockWaits {
    /// The processes of the address space with active threads, ascending.
    pub pids: BTreeSet<Pid>,
    /// The number of active threads.
    pub threads: u32,
    /// The share of the samples in which these threads were blocked on the lock, in permille.
    pub blocked_permille: u32,
    /// The share of system time in the CPU time of these threads, in permille.
    pub system_permille: u32,
}

impl MmapLockSamples {
    /// Returns the finding that the threads are often blocked on `mmap_lock`. A sample is one reading of one thread,
    /// and says whether the thread was blocked on the lock. Returns `None` unless all these conditions hold:
    ///
    /// - At least two threads are active: at least one sample found the thread running, waiting for a PU (logical CPU)
    ///   or in uninterruptible sleep.
    /// - At least three samples found a blocked thread.
    /// - At least 10 % of all samples found a blocked thread. If at least half of the CPU time of the threads is system
    ///   time, 1 % of all samples suffices. The reason is that a thread can also wait for the lock by spinning in the
    ///   kernel. A spinning thread is not blocked, and its CPU time is system time.
    #[must_use]
    pub fn finding(&self) -> Option<MmapLockWaits> {
        let permille = |part: u64, whole: u64| {
            u32::try_from(part.saturating_mul(1000) / whole.max(1)).unwrap_or(u32::MAX).min(1000)
        };
        let blocked_permille = permille(u64::from(self.blocked_samples), u64::from(self.samples));
        let system_permille = permille(self.system_ticks, self.cpu_ticks);
        let min_blocked_permille = if system_permille >= MIN_SYSTEM_PERMILLE {
            MIN_BLOCKED_PERMILLE_IN_KERNEL
        } else {
            MIN_BLOCKED_PERMILLE
        };
        let is_found = self.threads >= MIN_THREADS
            && self.blocked_samples >= MIN_BLOCKED_SAMPLES
            && blocked_permille >= min_blocked_permille;
        is_found.then(|| MmapLockWaits {
            pids: self.pids.clone(),
            threads: self.threads,
            blocked_permille,
            system_permille,
        })
    }
}

impl MmapLockWaits {
    /// Returns the finding as one sentence for users. Example: `4 active threads of process 7 wait for one another to
    /// map and unmap memory: they are blocked on the kernel's lock of their address space (mmap_lock) for 30.2 % of
    /// the time, and 95 % of their CPU time is system time`.
    #[must_use]
    pub fn description(&self) -> String {
        let noun = if self.pids.len() == 1 { "process" } else { "processes" };
        format!(
            "{} of {noun} {} wait for one another to map and unmap memory: they are blocked on the kernel's lock of \
             their address space (mmap_lock) for {}.{} % of the time, and {} % of their CPU time is system time",
            counted_noun(self.threads as usize, "active thread"),
            join_names(&self.pids),
            self.blocked_permille / 10,
            self.blocked_permille % 10,
            self.system_permille / 10
        )
    }

    /// Returns advice for users: how a program can map and unmap memory less often, so that its threads wait less
    /// for `mmap_lock`. For example, the program can allocate buffers once instead of in each loop.
    #[must_use]
    pub fn remedy() -> &'static str {
        "allocate buffers once instead of in each loop; let malloc keep its memory: \
         GLIBC_TUNABLES=glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=4294967296; use huge pages for \
         fewer page faults; or use processes with an address space of their own instead of threads or of --share memory"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(threads: u32, blocked_samples: u32, system_ticks: u64) -> MmapLockSamples {
        let pids = [Pid(7)].into();
        MmapLockSamples { pids, threads, samples: 400, blocked_samples, cpu_ticks: 80, system_ticks }
    }

    #[test]
    fn threads_that_are_blocked_on_the_lock_are_found() {
        let found = samples(4, 121, 76).finding().unwrap();
        assert_eq!((found.blocked_permille, found.system_permille), (302, 950));
        assert_eq!(
            found.description(),
            "4 active threads of process 7 wait for one another to map and unmap memory: they are blocked on the \
             kernel's lock of their address space (mmap_lock) for 30.2 % of the time, and 95 % of their CPU time is \
             system time"
        );
        assert!(samples(4, 40, 10).finding().is_some(), "a tenth of the time");
        assert!(samples(2, 4, 40).finding().is_some(), "the others spin in the kernel");
    }

    #[test]
    fn threads_that_seldom_wait_are_not_found() {
        assert_eq!(samples(4, 0, 80).finding(), None, "system time for another reason");
        assert_eq!(samples(4, 39, 39).finding(), None);
        assert_eq!(samples(4, 3, 80).finding(), None);
        assert_eq!(samples(1, 400, 80).finding(), None, "one thread waits for nobody");
        let few = MmapLockSamples { samples: 4, blocked_samples: 2, ..samples(2, 2, 80) };
        assert_eq!(few.finding(), None);
        assert_eq!(MmapLockSamples::default().finding(), None);
    }

    #[test]
    fn tasks_are_named_by_their_processes() {
        let found =
            MmapLockSamples { pids: [Pid(7), Pid(9)].into(), ..samples(6, 200, 0) }.finding().unwrap();
        let text = found.description();
        assert!(text.starts_with("6 active threads of processes 7 and 9 wait for one another"), "{text}");
    }
}
