//! Socket activation: a listening socket passed as a descriptor number (sd_listen_fds(3)).

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;

use rustix::fs::{Dir, Mode, OFlags, fstat, open, readlinkat};

/// The request `SIOCUNIXFILE` of ioctl(2), from `linux/un.h`: opens the file of a Unix socket with `O_PATH`.
const OPEN_SOCKET_FILE: u16 = 0x89e0;

/// Makes a listener from the Unix socket that systemd passed to this process (socket activation). `fd` is the number of
/// the socket's file descriptor. The listener has a duplicate of this descriptor. So `fd` stays open when the listener
/// is dropped.
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

/// Returns the metadata of the file to which the Unix socket `listener` is bound, even if the file was removed. `None`
/// in each of these cases: the socket has no file, the kernel is older than Linux 4.13, or this process lacks
/// `CAP_NET_ADMIN`.
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

/// A service manager (such as systemd) that passed a listening socket to this process. The service manager keeps the
/// socket open as long as the socket unit (the unit that configures the socket) is active. When the socket unit is
/// stopped, the service manager closes the socket.
#[derive(Debug)]
pub struct SocketManager {
    /// The directory `/proc/PID/fd` of the service manager. This descriptor refers to the same process even if another
    /// process gets the pid.
    descriptors: OwnedFd,
    /// The target of the links in `/proc/PID/fd` that refer to the socket, such as `socket:[123]`.
    link: String,
}

impl SocketManager {
    /// Makes a value for the service manager (such as systemd) with the pid `pid`, which passed the listening socket
    /// `listener` to this process. `None` if the process `pid` does not have this socket open: then it is not the
    /// service manager. Also `None` if the descriptors of the process can't be read.
    #[must_use]
    pub fn new(pid: u32, listener: &UnixListener) -> Option<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptors = open(format!("/proc/{pid}/fd"), flags, Mode::empty()).ok()?;
        let link = format!("socket:[{}]", fstat(listener).ok()?.st_ino);
        let manager = Self { descriptors, link };
        (manager.has_socket() == Some(true)).then_some(manager)
    }

    /// Returns whether the service manager (such as systemd) has closed the listening socket that it passed to this
    /// process. The service manager does so when the socket unit (the unit that configures the socket) is stopped.
    /// Returns false if the service manager has ended, or if its descriptors can't be read.
    #[must_use]
    pub fn has_closed_socket(&self) -> bool {
        self.has_socket() == Some(false)
    }

    /// Returns whether the service manager has the socket open. `None` if the service manager has ended, or if its
    /// descriptors can't be read.
    fn has_socket(&self) -> Option<bool> {
        let mut is_alive = false;
        for entry in Dir::read_from(&self.descriptors).ok()? {
            let entry = entry.ok()?;
            // Not every entry is a link, and a descriptor may have been closed meanwhile.
            if let Ok(target) = readlinkat(&self.descriptors, entry.file_name(), Vec::<u8>::new()) {
                is_alive = true;
                if target.as_bytes() == self.link.as_bytes() {
                    return Some(true);
                }
            }
        }
        is_alive.then_some(false)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::tests::until_true;

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

    #[test]
    fn a_service_manager_that_closes_a_socket_is_told_from_one_that_has_it_open_or_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        // The standard output of the shell is the socket, until the shell reads a line.
        let mut manager = Command::new("sh")
            .args(["-c", "read -r line; exec >/dev/null; read -r line"])
            .stdin(Stdio::piped())
            .stdout(OwnedFd::from(listener.try_clone().unwrap()))
            .spawn()
            .unwrap();
        let known = SocketManager::new(manager.id(), &listener).unwrap();
        assert!(!known.has_closed_socket());
        manager.stdin.as_mut().unwrap().write_all(b"close\n").unwrap();
        until_true("the socket is closed", || known.has_closed_socket());
        assert!(SocketManager::new(manager.id(), &listener).is_none(), "it does not have the socket");
        drop(manager.stdin.take());
        manager.wait().unwrap();
        assert!(!known.has_closed_socket(), "the service manager has ended");
    }
}
