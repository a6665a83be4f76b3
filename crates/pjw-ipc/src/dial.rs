//! Connecting to the daemon's socket with a timeout. A daemon that hangs accepts no connections. When its queue of
//! connections is full, connect(2) waits.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::sockopt::{PeerCredentials, SendTimeout};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, setsockopt, socket,
};
use nix::sys::time::TimeVal;

/// Connects to the Unix socket at `path`. A `timeout` above zero is rounded down to whole seconds, but is at least 1 s.
/// If `timeout` is zero, the function does not wait.
///
/// # Errors
/// [`Errno::EAGAIN`] if the daemon does not accept the connection in time. Other errors are those of connect(2).
pub(crate) fn dial(path: &Path, timeout: Duration) -> Result<UnixStream, Errno> {
    let nonblock = if timeout.is_zero() { SockFlag::SOCK_NONBLOCK } else { SockFlag::empty() };
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC | nonblock, None)?;
    if !timeout.is_zero() {
        let seconds = i64::try_from(timeout.as_secs().max(1)).unwrap_or(i64::MAX);
        setsockopt(&fd, SendTimeout, &TimeVal::new(seconds, 0))?;
    }
    let address = UnixAddr::new(path)?;
    loop {
        match connect(fd.as_raw_fd(), &address) {
            Err(Errno::EINTR) => {}
            connected => return connected.map(|()| UnixStream::from(fd)),
        }
    }
}

/// Returns the process id of the daemon to which `stream` is connected: the process that called listen(2). `None` if
/// this process is in another pid namespace.
pub(crate) fn listener_pid(stream: &UnixStream) -> Option<i32> {
    getsockopt(stream, PeerCredentials).ok().map(|peer| peer.pid()).filter(|&pid| pid > 0)
}

/// The maximum length of the path of a Unix socket, in bytes. The kernel has space for 108 bytes, and the last byte is
/// zero (unix(7)).
pub(crate) const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Returns the length of `path` in bytes if `path` is too long for a Unix socket (longer than
/// [`MAX_SOCKET_PATH_BYTES`]). Otherwise returns `None`.
pub(crate) fn length_if_too_long(path: &Path) -> Option<usize> {
    Some(path.as_os_str().len()).filter(|&length| length > MAX_SOCKET_PATH_BYTES)
}

/// Returns `path` as text for an error message. If the text has more than [`MAX_SOCKET_PATH_BYTES`] characters, the
/// rest is replaced by `…`.
pub(crate) fn truncate_path(path: &Path) -> String {
    let text = path.display().to_string();
    match text.char_indices().nth(MAX_SOCKET_PATH_BYTES) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
