//! The two uses of futex(2) for the core map: a reader waits for another value of the sequence counter, and the writer
//! lets the kernel change a number, such as the counter, and wakes the readers.

use std::io;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// A change of a number by `FUTEX_WAKE_OP` (futex(2)). The value has the number of the operation from bit 28 on, and
/// the argument of the operation from bit 12 on.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(crate) enum Change {
    /// The number becomes 0 (`FUTEX_OP_SET`).
    SetToZero = 0,
    /// The number becomes 1 more (`FUTEX_OP_ADD`).
    AddOne = (1 << 28) | (1 << 12),
    /// An even number becomes 1 more, and an odd one stays (`FUTEX_OP_OR`).
    MakeOdd = (2 << 28) | (1 << 12),
}

/// Waits by futex(2) as long as the number at `word` is `value`, until a writer wakes the readers or the time `timeout`
/// has passed. If `timeout` is `None`, waits without a limit. May also return without a reason, so the caller must
/// check the number again.
pub(crate) fn wait_while_equal(word: &AtomicU32, value: u32, timeout: Option<Duration>) {
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word and the time live until the call returns. FUTEX_WAIT only reads the word.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, timeout) };
}

/// Changes the number at `word` by `change`, and wakes all processes that wait for the number at `waiters` by futex(2).
/// The call is a full memory barrier.
///
/// The kernel changes the number (`FUTEX_WAKE_OP`). If the mapped file was truncated or its file system is full, the
/// call therefore returns an error. A direct write to the memory would kill this process by `SIGBUS`.
///
/// # Errors
/// `EFAULT` if the mapped file was truncated, or if the page can't be written.
///
/// # Safety
/// Both pointers must lie in memory that this process has mapped and that stays mapped during the call.
pub(crate) unsafe fn change_and_wake(change: Change, word: *mut u32, waiters: *mut u32) -> io::Result<()> {
    let (all, change) = (libc::c_int::MAX, change as libc::c_int);
    // SAFETY: the caller guarantees the two words.
    let result =
        unsafe { libc::syscall(libc::SYS_futex, waiters, libc::FUTEX_WAKE_OP, all, 0_usize, word, change) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
