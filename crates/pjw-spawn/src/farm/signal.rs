//! Waking a process of the farm that waits: a futex(2) in the shared memory, and an eventfd(2) for the master.
//!
//! No order of steps loses a wake-up, also if the process that wakes others is killed between two steps. A process that
//! waits looks again after [`LONGEST_WAIT`] in any case, because the other one may be stopped (`SIGSTOP`) between two steps.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// After this time a waiting process looks again by itself.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// A condition in shared memory that processes wait for.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Condition {
    /// The number of changes. It may wrap.
    version: AtomicU32,
    /// 1 if a process may be waiting.
    is_awaited: AtomicU32,
}

impl Condition {
    /// Waits until `look` returns a value.
    pub(crate) fn wait_until<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(value) = look() {
                return value;
            }
            let version = self.version.load(Ordering::SeqCst);
            self.is_awaited.store(1, Ordering::SeqCst);
            if let Some(value) = look() {
                return value;
            }
            wait(&self.version, version);
        }
    }

    /// Wakes all that wait. The change that they wait for must be made before.
    pub(crate) fn notify(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
        if self.is_awaited.swap(0, Ordering::SeqCst) != 0 {
            wake(&self.version);
        }
    }

    /// Wakes all that wait, also if a process that was to wake them was killed before it did.
    pub(crate) fn notify_always(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
        wake(&self.version);
    }
}

/// FUTEX_WAIT between processes. Returns also when a signal was handled.
fn wait(word: &AtomicU32, value: u32) {
    let seconds = libc::time_t::try_from(LONGEST_WAIT.as_secs()).unwrap_or(1);
    let timeout = libc::timespec { tv_sec: seconds, tv_nsec: 0 };
    // SAFETY: the word and the time live until the call returns. FUTEX_WAIT only reads the word.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const timeout) };
}

/// FUTEX_WAKE for all.
fn wake(word: &AtomicU32) {
    // SAFETY: the word lives until the call returns. FUTEX_WAKE does not use the memory.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX) };
}

/// How the other processes wake the master, which waits for their ends as well, by epoll(7).
#[derive(Debug)]
pub(crate) struct MasterWaker {
    event: OwnedFd,
}

impl MasterWaker {
    pub(crate) fn new() -> Result<Self, Errno> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { event: event.into() })
    }

    pub(crate) fn descriptor(&self) -> &OwnedFd {
        &self.event
    }

    /// Wakes the master if `is_sleeping` says that it sleeps. The news must be published before, with the order SeqCst.
    pub(crate) fn wake(&self, is_sleeping: &AtomicU32) {
        if is_sleeping.load(Ordering::SeqCst) != 0 {
            // A full counter wakes the master too.
            let _ = nix::unistd::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Forgets the wake-ups so far.
    pub(crate) fn clear(&self) {
        let _ = nix::unistd::read(&self.event, &mut [0; 8]);
        debug_assert!(self.event.as_raw_fd() >= 0);
    }
}
