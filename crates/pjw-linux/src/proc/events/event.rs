//! Process events as values, and the reasons why there are none.

use nix::errno::Errno;
use thiserror::Error;

/// Whether process events were lost, as [`ProcEvents::drain_events`](super::ProcEvents::drain_events) returns it. After
/// a loss the caller must scan all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventLoss {
    /// Whether events were lost since the previous call: the socket's buffer overflowed, or message numbers
    /// are missing.
    pub overrun: bool,
    /// Whether the kernel still drops events: the socket's buffer overflowed and has not been read empty
    /// since.
    pub congested: bool,
}

/// Why the kernel's process events (fork, exec and exit) are not available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ProcEventsFault {
    /// This user lacks permission.
    #[error("process events need CAP_NET_ADMIN before Linux 6.6")]
    Denied,
    /// This kernel lacks process events.
    #[error("this kernel has no process events")]
    Unsupported,
    /// The kernel delivers no events to this namespace.
    #[error("the kernel sends no process events to a pid, user or network namespace of its own")]
    NoEvents,
    /// Any other error.
    #[error("process events can't be opened: {0}")]
    Other(Errno),
}
