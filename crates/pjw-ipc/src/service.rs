//! The types that the server and its connections share: the limits of clients, the peer of a connection, and the
//! service that answers calls.

use std::future::Future;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::call::{Call, CallError, Reply};

/// The limits on connections, memory and time that protect the server from its clients. A connection that exceeds a
/// limit is closed.
#[derive(Debug, Clone, Copy)]
pub struct ServerLimits {
    /// The maximum number of open connections, of all users together.
    pub connections: usize,
    /// The number of connections, among [`ServerLimits::connections`], that are reserved for root and for the
    /// user of the server's process, so that an administrator can always connect.
    pub connections_reserved: usize,
    /// The maximum number of open connections of one user. Root and the user of the server's process have no such
    /// limit.
    pub connections_per_user: usize,
    /// The maximum size of one request, in bytes.
    pub request_bytes: usize,
    /// The time within which a request must arrive completely, counted from its first byte.
    pub request_timeout: Duration,
    /// The time within which the client must read a reply.
    pub write_timeout: Duration,
    /// The maximum number of bytes in all replies that clients have not read yet, summed over all connections.
    pub unsent_bytes: usize,
    /// The time after which a connection without any call is closed.
    pub idle_timeout: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections: 256,
            connections_reserved: 16,
            connections_per_user: 64,
            request_bytes: 64 * 1024,
            request_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(5),
            unsent_bytes: 64 * 1024 * 1024,
            idle_timeout: Duration::from_secs(600),
        }
    }
}

/// The client process at the other end of a connection: its user, group and process id as the kernel reports them
/// (`SO_PEERCRED`, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The user id of the client process.
    pub uid: u32,
    /// The primary group id of the client process.
    pub gid: u32,
    /// The process id of the client process. `None` if the kernel does not report it.
    pub pid: Option<i32>,
}

/// The result of a successful call: either one reply, or a series of replies that the server sends as they come.
#[derive(Debug)]
pub enum Replies {
    /// One reply.
    Once(Box<Reply>),
    /// Several replies, until the sender is dropped.
    Many(mpsc::Receiver<Reply>),
}

/// Computes the replies to the calls of clients. The server handles connections and the protocol, and calls an
/// implementation of this trait for each reply.
pub trait Service: 'static {
    /// Answers one call of `peer`. `more` is true if the caller accepts several replies.
    fn call(&self, peer: Peer, call: Call, more: bool) -> impl Future<Output = Result<Replies, CallError>>;
}
