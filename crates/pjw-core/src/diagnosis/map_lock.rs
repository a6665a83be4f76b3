//! Threads that wait for one another because they map and unmap memory in one address space.
//!
//! mmap(2), munmap(2), mprotect(2), brk(2) and some page faults of all threads of an address space wait for one lock of the kernel
//! (`mmap_lock`). A thread that waits either sleeps, or spins in the kernel as long as the holder of the lock runs
//! (kernel/locking/rwsem.c). So many threads on many cores show some sleeping threads, and much system time.

use crate::basics::{Pid, prelude::*};
use crate::diagnosis::words::{count, join_names};

/// The number of busy threads from which they can wait for one another.
const MIN_THREADS: u32 = 2;
/// Threads that sleep for this share of the time in the lock are reported, in permille.
const MIN_WAITING_PERMILLE: u32 = 100;
/// Or this share, if they spend most of their CPU time in the kernel.
const MIN_WAITING_PERMILLE_IN_KERNEL: u32 = 10;
/// The share of system time in the CPU time that counts as most of it, in permille.
const MIN_SYSTEM_PERMILLE: u32 = 500;
/// The smallest number of looks at which a thread waited.
const MIN_WAITS: u32 = 3;

/// A count of how often busy threads of one address space slept to get `mmap_lock`, the kernel's lock of the
/// address space. mmap(2), munmap(2) and some page faults take this lock. The caller looks at the threads many
/// times. At each look, the caller reads the state of each thread, and the kernel function in which the thread
/// sleeps (`/proc/PID/task/TID/stat` and `wchan`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MmapLockSamples {
    /// The processes of the address space with busy threads, ascending.
    pub pids: BTreeSet<Pid>,
    /// The number of threads that ran, or waited in an uninterruptible sleep, at some look.
    pub threads: u32,
    /// The number of looks at these threads.
    pub looks: u32,
    /// The number of looks at which the thread slept because it waited for the lock of its address space.
    pub waits: u32,
    /// The CPU time of these threads between the first and the last look, in clock ticks of 10 ms.
    pub cpu_ticks: u64,
    /// The part of `cpu_ticks` in system mode.
    pub system_ticks: u64,
}

/// The finding that busy threads of one address space often sleep until they get `mmap_lock`, the kernel's lock of
/// the address space. mmap(2), munmap(2) and some page faults take this lock. [`MmapLockWaits::remedy`] says what a
/// user can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MmapLockWaits {
    /// The processes of the address space with busy threads, ascending.
    pub pids: BTreeSet<Pid>,
    /// The number of busy threads.
    pub threads: u32,
    /// The share of the time for which these threads slept because they waited for the lock, in permille.
    pub waiting_permille: u32,
    /// The share of system time in their CPU time, in permille.
    pub system_permille: u32,
}

impl MmapLockSamples {
    /// Returns the finding if the threads often sleep to get `mmap_lock`. Returns `None` unless all these
    /// conditions hold:
    ///
    /// - There are at least two busy threads.
    /// - At three or more looks, a thread slept to get the lock.
    /// - These looks are at least 10 % of all looks. 1 % suffices if at least half of the CPU time of the threads
    ///   was system time, because a thread also spins in the kernel to get the lock.
    #[must_use]
    pub fn finding(&self) -> Option<MmapLockWaits> {
        let permille = |part: u64, whole: u64| {
            u32::try_from(part.saturating_mul(1000) / whole.max(1)).unwrap_or(u32::MAX).min(1000)
        };
        let waiting_permille = permille(u64::from(self.waits), u64::from(self.looks));
        let system_permille = permille(self.system_ticks, self.cpu_ticks);
        let needed = match system_permille >= MIN_SYSTEM_PERMILLE {
            true => MIN_WAITING_PERMILLE_IN_KERNEL,
            false => MIN_WAITING_PERMILLE,
        };
        let is_found = self.threads >= MIN_THREADS && self.waits >= MIN_WAITS && waiting_permille >= needed;
        is_found.then(|| MmapLockWaits {
            pids: self.pids.clone(),
            threads: self.threads,
            waiting_permille,
            system_permille,
        })
    }
}

impl MmapLockWaits {
    /// Returns the finding as one sentence for users, who may not know the name `mmap_lock`. Example: `4 busy
    /// threads of process 7 wait for one another to map and unmap memory: they sleep for 30.2 % of the time in the
    /// lock of their address space, and 95 % of their CPU time is system time`.
    #[must_use]
    pub fn sentence(&self) -> String {
        let noun = if self.pids.len() == 1 { "process" } else { "processes" };
        format!(
            "{} of {noun} {} wait for one another to map and unmap memory: they sleep for {}.{} % of the time in the lock \
             of their address space, and {} % of their CPU time is system time",
            count(self.threads as usize, "busy thread"),
            join_names(&self.pids),
            self.waiting_permille / 10,
            self.waiting_permille % 10,
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

    fn looks(threads: u32, waits: u32, system_ticks: u64) -> MmapLockSamples {
        MmapLockSamples { pids: [Pid(7)].into(), threads, looks: 400, waits, cpu_ticks: 80, system_ticks }
    }

    #[test]
    fn threads_that_sleep_in_the_lock_are_found() {
        let found = looks(4, 121, 76).finding().unwrap();
        assert_eq!((found.waiting_permille, found.system_permille), (302, 950));
        assert_eq!(
            found.sentence(),
            "4 busy threads of process 7 wait for one another to map and unmap memory: they sleep for 30.2 % of the time in \
             the lock of their address space, and 95 % of their CPU time is system time"
        );
        assert!(looks(4, 40, 10).finding().is_some(), "a tenth of the time");
        assert!(looks(2, 4, 40).finding().is_some(), "the others spin in the kernel");
    }

    #[test]
    fn threads_that_seldom_wait_are_not_found() {
        assert_eq!(looks(4, 0, 80).finding(), None, "system time for another reason");
        assert_eq!(looks(4, 39, 39).finding(), None);
        assert_eq!(looks(4, 3, 80).finding(), None);
        assert_eq!(looks(1, 400, 80).finding(), None, "one thread waits for nobody");
        let few = MmapLockSamples { looks: 4, waits: 2, ..looks(2, 2, 80) };
        assert_eq!(few.finding(), None);
        assert_eq!(MmapLockSamples::default().finding(), None);
    }

    #[test]
    fn tasks_are_named_by_their_processes() {
        let found = MmapLockSamples { pids: [Pid(7), Pid(9)].into(), ..looks(6, 200, 0) }.finding().unwrap();
        let text = found.sentence();
        assert!(text.starts_with("6 busy threads of processes 7 and 9 wait for one another"), "{text}");
    }
}
