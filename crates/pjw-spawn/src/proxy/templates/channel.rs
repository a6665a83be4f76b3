//! The channel between the launcher and a template: a pair of sockets of the type `SOCK_SEQPACKET`, which keep messages
//! apart.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recv, sendmsg, socketpair,
};

use super::load::tracee::{PlainData, value_of};
use crate::child::Child;

/// The time between two checks whether a wait was cancelled, in milliseconds.
const CANCEL_INTERVAL: u16 = 50;
/// The longest wait of [`Channel::wait_closed`], in milliseconds.
const CLOSE_TIMEOUT: u16 = 1000;

/// A socket by which the launcher sends messages to a template. A template is a process that has loaded a program, and
/// from which further processes of the program are forked. The launcher is the process that started the template. The
/// template ends when this socket is closed.
#[derive(Debug)]
pub(super) struct Channel(OwnedFd);

impl Channel {
    /// Creates a pair of connected sockets. Returns the socket of the launcher, and the descriptor of the socket for
    /// the template (the process from which further processes are forked).
    pub(super) fn pair() -> Result<(Self, OwnedFd), Errno> {
        let (own, other) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        Ok((Self(own), other))
    }

    /// Sends the message `bytes` to the template, together with the file descriptors in `descriptors`.
    pub(super) fn send(&self, bytes: &[u8], descriptors: &[RawFd]) -> Result<(), Errno> {
        let control = [ControlMessage::ScmRights(descriptors)];
        let control = if descriptors.is_empty() { &control[..0] } else { &control };
        let flags = MsgFlags::MSG_NOSIGNAL;
        retry(|| sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None)).map(drop)
    }

    /// Waits for a message from the template, which is the process `template`. Returns the message as a value of type
    /// `T`. `None` if the template has closed its socket or has ended, or if the message has fewer bytes than `T`.
    /// Fails with `ECANCELED` when `is_cancelled` becomes true.
    pub(super) fn receive<T: PlainData>(
        &self,
        template: &Child,
        is_cancelled: Option<&AtomicBool>,
    ) -> Result<Option<T>, Errno> {
        wait_readable(&[self.as_fd(), template.as_fd()], is_cancelled)?;
        let mut bytes = vec![0; size_of::<T>()];
        match retry(|| recv(self.0.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT)) {
            // EAGAIN: the template has ended, and a process that the template has forked still has its socket open.
            Ok(0) | Err(Errno::ECONNRESET | Errno::EAGAIN) => Ok(None),
            Ok(length) => Ok(value_of(&bytes[..length])),
            Err(errno) => Err(errno),
        }
    }

    /// Waits until no process has the template's socket open any more. Ignores the messages that still arrive. Returns
    /// after 1 s without an event, even if the socket is still open: a stopped process does not close it.
    pub(super) fn wait_closed(&self) {
        let descriptor = self.0.as_fd();
        let mut ignored = [0; 64];
        loop {
            let mut ready = [PollFd::new(descriptor, PollFlags::POLLIN)];
            if !retry(|| poll(&mut ready, CLOSE_TIMEOUT)).is_ok_and(|count| count > 0) {
                return;
            }
            if !retry(|| recv(self.0.as_raw_fd(), &mut ignored, MsgFlags::empty()))
                .is_ok_and(|length| length > 0)
            {
                return;
            }
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until one of the descriptors is readable. Fails with `ECANCELED` when `is_cancelled` becomes true.
pub(super) fn wait_readable(
    descriptors: &[BorrowedFd<'_>],
    is_cancelled: Option<&AtomicBool>,
) -> Result<(), Errno> {
    let timeout = is_cancelled.map_or(PollTimeout::NONE, |_| CANCEL_INTERVAL.into());
    let mut ready: Vec<_> = descriptors.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    loop {
        if is_cancelled.is_some_and(|is_cancelled| is_cancelled.load(Ordering::Relaxed)) {
            return Err(Errno::ECANCELED);
        }
        match poll(&mut ready, timeout) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno),
        }
    }
}

/// Calls `call` again for as long as a signal interrupts it (`EINTR`), and returns its result.
fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            other => return other,
        }
    }
}
