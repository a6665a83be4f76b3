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
    pub max_connections: usize,
    /// The number of connections that are reserved for administrators: root and the user of the server's
    /// process. These connections are part of [`ServerLimits::max_connections`]. Other users can't use them.
    pub reserved_connections: usize,
    /// The maximum number of open connections of one user. This limit does not apply to root and to the user
    /// of the server's process.
    pub max_connections_per_user: usize,
    /// The maximum size of one request, in bytes.
    pub max_request_bytes: usize,
    /// The time within which a request must arrive completely, counted from its first byte.
    pub request_timeout: Duration,
    /// The time within which a client must read a whole reply, counted from the moment when the server begins
    /// to send it.
    pub write_timeout: Duration,
    /// The maximum size, in bytes, of all replies that the server has not yet written completely to the
    /// sockets, summed over all connections. The server can't finish writing a reply if its client does not
    /// read. Before a further reply exceeds the maximum, the server looks for the user with the most such
    /// bytes, including the further reply:
    ///
    /// - If the further reply is for this user, the server sends the error [`CallError::Busy`] instead.
    /// - Otherwise the server drops the oldest replies of this user, and closes their connections.
    pub max_unread_reply_bytes: usize,
    /// The maximum time between two requests on a connection. The server closes a connection that sends no
    /// request for this time.
    pub idle_timeout: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            max_connections: 256,
            reserved_connections: 16,
            max_connections_per_user: 64,
            max_request_bytes: 64 * 1024,
            request_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(5),
            max_unread_reply_bytes: 64 * 1024 * 1024,
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

/// The result of a successful call: either one reply, or a series of replies. The server sends each reply of
/// a series as soon as the service provides it.
#[derive(Debug)]
pub enum Replies {
    /// The only reply to the call.
    Single(Box<Reply>),
    /// The channel from which the server receives a series of replies. The series ends when the sender of the
    /// channel is dropped.
    Stream(mpsc::Receiver<Reply>),
}

/// Computes the replies to the calls of clients. The server handles the connections and the protocol, and
/// passes each call to an implementation of this trait.
pub trait Service: 'static {
    /// Computes the result of the method call `call` from the client `peer`. `more` is true if the client
    /// accepts several replies to this call. An error is sent to the client as the reply.
    fn call(&self, peer: Peer, call: Call, more: bool) -> impl Future<Output = Result<Replies, CallError>>;
}
