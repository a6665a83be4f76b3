//! A socket that was passed to this process as a bare descriptor number (sd_listen_fds(3)).

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::net::UnixListener;

/// A listener of our own on the socket that is open as `fd`.
///
/// # Errors
/// If the number is negative, or no descriptor is left.
pub fn listener(fd: RawFd) -> io::Result<UnixListener> {
    if fd < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the descriptor is only borrowed for the copy below, which fails if nothing is open under the number.
    let passed = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(UnixListener::from(passed.try_clone_to_owned()?))
}
