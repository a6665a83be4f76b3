//! The kernel's process events fork, exec and exit, received over netlink (connector, `CN_IDX_PROC`;
//! `include/uapi/linux/cn_proc.h`).
//!
//! Events are hints and not complete. The socket buffer overruns under many forks, and the kernel may lack
//! memory for a message. Both are reported, and the caller then scans all processes.
//!
//! A successful subscription does not prove that events arrive. In a pid or user namespace of its own a
//! process receives no events, or, if another process subscribes, events with pids of another namespace. So
//! [`ProcEventSocket::open`] verifies delivery: it starts a thread and waits for the event with that thread's id.

mod datagram;
mod event;
mod socket;

pub use event::{EventLoss, ProcEventsError};
pub use socket::ProcEventSocket;
