//! Process events as values, and the reasons why there are none.

use nix::errno::Errno;
use thiserror::Error;

/// Whether process events (fork, exec and exit) were lost, as returned by
/// [`ProcEventSocket::drain_events`](super::ProcEventSocket::drain_events). After a loss, the caller must scan
/// all processes, because the caller can't know which processes started or ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventLoss {
    /// Whether events were lost since the previous call. Possible causes: the receive buffer of the socket overflowed,
    /// sequence numbers are missing, or the socket can't be read.
    pub events_lost: bool,
    /// Whether the kernel may still be dropping events. After the receive buffer of the socket has
    /// overflowed, the kernel drops all new events until the buffer is empty. This field is true from the
    /// overflow until a read has found the buffer empty.
    pub still_dropping: bool,
}

/// Why the kernel's process events (fork, exec and exit) are not available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ProcEventsError {
    /// This user has no permission to receive process events. Before Linux 6.6, `CAP_NET_ADMIN` is required.
    #[error("process events need CAP_NET_ADMIN before Linux 6.6")]
    PermissionDenied,
    /// The kernel was built without process events (`CONFIG_PROC_EVENTS`).
    #[error("this kernel has no process events")]
    Unsupported,
    /// No events arrive. The kernel delivers none to a process in a pid, user or network namespace other than
    /// the initial one, such as in a container.
    #[error("the kernel sends no process events to a pid, user or network namespace of its own")]
    NoEvents,
    /// Another system call error.
    #[error("process events can't be opened: {0}")]
    Other(Errno),
}
