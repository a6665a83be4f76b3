//! How a process of the farm waits, and how another one wakes it: by a futex(2) in the shared memory, and by an
//! eventfd(2) for the master.
//!
//! No order of steps loses a wake-up, also if the process that wakes others is killed between two steps. A process that
//! waits looks again after [`LONGEST_WAIT`] in any case, because the other one may be stopped (`SIGSTOP`) between two
//! steps.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// The longest time for which a process of a farm sleeps. After this time, the process checks its condition again even
/// if no other process has woken it.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// A condition variable in the shared memory of a farm, implemented by futex(2).
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct FutexCondition {
    /// The number of changes. It may wrap.
    version: AtomicU32,
    /// 1 if a process may be waiting.
    is_awaited: AtomicU32,
}

impl FutexCondition {
    /// Waits until `check` returns a value, and returns this value. Calls `check` at once, and again after each sleep.
    /// A sleep ends when another process calls [`FutexCondition::notify`], when a signal is handled, and after
    /// [`LONGEST_WAIT`].
    pub(crate) fn wait_until<T>(&self, mut check: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(value) = check() {
                return value;
            }
            let version = self.version.load(Ordering::SeqCst);
            self.is_awaited.store(1, Ordering::SeqCst);
            // A change before `is_awaited` was set may have woken nobody: this check finds it. A later change increases
            // `version`, and the wait then ends at once.
            if let Some(value) = check() {
                return value;
            }
            wait(&self.version, version);
        }
    }

    /// Wakes all processes that wait for this condition variable. Before the call, the caller must change the shared
    /// data that these processes wait for.
    pub(crate) fn notify(&self) {
        let is_awaited = self.take_is_awaited();
        self.announce_change(is_awaited);
    }

    /// The first step of [`FutexCondition::notify`]: returns whether a process may be waiting, and resets this. Must
    /// come before the increase of `version`. Otherwise, a process could take the new version and set `is_awaited`
    /// between the two steps. The reset would then lose that the process waits, and no later call would wake it.
    fn take_is_awaited(&self) -> bool {
        self.is_awaited.swap(0, Ordering::SeqCst) != 0
    }

    /// The second step of [`FutexCondition::notify`]: increases `version`, and wakes all processes that wait if
    /// `is_awaited` is true.
    fn announce_change(&self, is_awaited: bool) {
        self.version.fetch_add(1, Ordering::SeqCst);
        if is_awaited {
            wake(&self.version);
        }
    }

    /// Wakes all processes that wait for this condition variable. Unlike [`FutexCondition::notify`], calls futex(2)
    /// even if no process seems to wait. Must be used if another process may have been killed in a call of `notify`,
    /// before that call woke the waiting processes.
    pub(crate) fn notify_always(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
        wake(&self.version);
    }
}

/// Waits until [`wake`] is called for `word` (FUTEX_WAIT between processes). Returns at once if `word` is not `value`.
/// Also returns after [`LONGEST_WAIT`], and when a signal was handled.
fn wait(word: &AtomicU32, value: u32) {
    let seconds = libc::time_t::try_from(LONGEST_WAIT.as_secs()).unwrap_or(1);
    let timeout = libc::timespec { tv_sec: seconds, tv_nsec: 0 };
    // SAFETY: the word and the time live until the call returns. FUTEX_WAIT only reads the word.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const timeout) };
}

/// Wakes all processes that wait for `word` (FUTEX_WAKE).
fn wake(word: &AtomicU32) {
    // SAFETY: the word lives until the call returns. FUTEX_WAKE does not use the memory.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX) };
}

/// An eventfd(2) with which the other processes of a farm wake the master process. The master waits by epoll(7) for
/// this eventfd and for the ends of the other processes.
#[derive(Debug)]
pub(crate) struct MasterWaker {
    event: OwnedFd,
}

impl MasterWaker {
    /// Creates the eventfd(2).
    ///
    /// # Errors
    /// The error of eventfd(2).
    pub(crate) fn new() -> Result<Self, Errno> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { event: event.into() })
    }

    /// Returns the descriptor of the eventfd.
    pub(crate) fn descriptor(&self) -> &OwnedFd {
        &self.event
    }

    /// Wakes the master process of the farm if `is_sleeping` is not 0. Before the call, the caller must store the data
    /// that the master waits for, with [`Ordering::SeqCst`].
    pub(crate) fn wake_if_sleeping(&self, is_sleeping: &AtomicU32) {
        if is_sleeping.load(Ordering::SeqCst) != 0 {
            // A full counter wakes the master too.
            let _ = nix::unistd::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Resets the counter of the eventfd, so that the descriptor is no longer readable.
    pub(crate) fn reset_eventfd(&self) {
        let _ = nix::unistd::read(&self.event, &mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_begins_to_wait_between_the_steps_of_a_wake_up_is_known_to_the_next_one() {
        let condition = FutexCondition::default();
        let mut checks = 0;
        let mut is_awaited = false;
        // The first check stands before the load of `version`, and the second one after `is_awaited` was set. Another
        // process makes a step of `notify` at each of them. A third process uses up its change, so both find nothing.
        condition.wait_until(|| {
            checks += 1;
            match checks {
                1 => is_awaited = condition.take_is_awaited(),
                2 => condition.announce_change(is_awaited),
                _ => return Some(()),
            }
            None
        });
        assert!(condition.take_is_awaited());
    }
}
