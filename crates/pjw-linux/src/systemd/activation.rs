//! Socket activation: a listening socket passed as a descriptor number (sd_listen_fds(3)).

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::net::UnixListener;

/// Makes a listener of the Unix socket that systemd passed to this process (socket activation). `fd` is the
/// number of the socket's file descriptor. The listener has a duplicate of this descriptor. So `fd` stays open
/// when the listener is dropped.
///
/// # Errors
/// `InvalidInput` if `fd` is negative. The error of fcntl(2) if `fd` is not open, or if no file descriptor is
/// left.
pub fn dup_listener(fd: RawFd) -> io::Result<UnixListener> {
    if fd < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the descriptor is borrowed only for the duplication below, which fails if `fd` is not open.
    let passed = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(UnixListener::from(passed.try_clone_to_owned()?))
}
