//! Connecting without waiting for ever: a daemon that hangs lets nobody in, once its queue is full (connect(2)).

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

/// A connection, if there is one within `patience`; [`Errno::EAGAIN`] if not. A patience of zero doesn't wait.
pub(crate) fn dial(path: &Path, patience: Duration) -> Result<UnixStream, Errno> {
    let waiting = if patience.is_zero() { SockFlag::SOCK_NONBLOCK } else { SockFlag::empty() };
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC | waiting, None)?;
    if !patience.is_zero() {
        let seconds = i64::try_from(patience.as_secs().max(1)).unwrap_or(i64::MAX);
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

/// The process that listens at the other end, or did when it began to; `None` if it is out of this process's sight.
pub(crate) fn listener_pid(stream: &UnixStream) -> Option<i32> {
    getsockopt(stream, PeerCredentials).ok().map(|peer| peer.pid()).filter(|&pid| pid > 0)
}

/// The longest path that a socket can have, in bytes: unix(7) has room for 108 with the zero at the end.
pub(crate) const LONGEST_PATH: usize = 107;

/// The length of a path that no socket can have.
pub(crate) fn excess(path: &Path) -> Option<usize> {
    Some(path.as_os_str().len()).filter(|&length| length > LONGEST_PATH)
}

/// A path for a sentence about its length: the beginning tells which one it is.
pub(crate) fn beginning(path: &Path) -> String {
    let text = path.display().to_string();
    match text.char_indices().nth(LONGEST_PATH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
