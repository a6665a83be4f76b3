//! Socket activation: a listening socket passed as a descriptor number (sd_listen_fds(3)).

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;

/// The request `SIOCUNIXFILE` of ioctl(2), from `linux/un.h`: opens the file of a Unix socket with `O_PATH`.
const OPEN_SOCKET_FILE: u16 = 0x89e0;

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

/// Returns the metadata of the file that the Unix socket `listener` is bound to, also if the file was removed. `None`
/// if the socket has no file, before Linux 4.13, and without `CAP_NET_ADMIN`.
#[must_use]
pub fn metadata_of_socket_file(listener: &UnixListener) -> Option<Metadata> {
    // SAFETY: the request has no argument. It accesses no memory of this process, and returns a new descriptor.
    let fd = unsafe { libc::ioctl(listener.as_raw_fd(), OPEN_SOCKET_FILE.into()) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the kernel has just made this descriptor, so nothing else owns it.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.metadata().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn the_file_of_a_socket_is_known_after_its_removal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let before = std::fs::metadata(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let Some(file) = metadata_of_socket_file(&listener) else {
            eprintln!("skipped: this process has no CAP_NET_ADMIN, or the kernel is older than Linux 4.13");
            return;
        };
        assert_eq!((file.dev(), file.ino(), file.mode()), (before.dev(), before.ino(), before.mode()));
    }
}
