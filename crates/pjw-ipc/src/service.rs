//! The types that the server and its connections share: the limits of clients, the peer of a connection, and the
//! service that answers calls.

use std::future::Future;
use std::time::Duration;

use nix::unistd::geteuid;
use tokio::sync::mpsc;

use crate::call::{Call, CallError, Reply};

/// The limits on connections, memory and time that protect the server from its clients. When a limit
/// is exceeded, the server closes a connection. If the exceeded limit is the one on the memory for unread replies, the
/// server possibly sends the error `Busy` instead of a reply, and the connection stays open
/// ([`ServerLimits::max_unread_reply_bytes`]).
#[derive(Debug, Clone, Copy)]
pub struct ServerLimits {
    /// The maximum number of open connections, of all users together. If no connection is left for a user without
    /// any, the server closes an idle connection of the user with most, except root and the user of the server's
    /// process. A connection is idle while the server waits for a request, or for the next reply of a series. A
    /// connection on which the server has waited for a request for less than 1 s is closed only if there is no other,
    /// unless its user has more than eight. For the only connection of a user, [`ServerLimits::min_connection_time`]
    /// says more. The client gets the error [`CallError::Busy`] before its connection is closed.
    pub max_connections: usize,
    /// The number of connections that are reserved for administrators: root and the user of the server's
    /// process. All other users together can have at most [`ServerLimits::max_connections`] minus this number
    /// of connections.
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
    /// The maximum size, in bytes, of all unfinished replies of all connections together. A reply is
    /// unfinished until the server has written the whole reply to the socket. The server can't finish a reply
    /// while the client does not read.
    ///
    /// If a new reply would exceed the maximum, the server adds up the unfinished replies of each user, and
    /// counts the new reply too. The user with the largest sum then loses replies:
    ///
    /// - If the new reply is for this user, the server sends the error [`CallError::Busy`] instead of the new
    ///   reply. If the new reply is part of a series of replies, the server also closes the connection.
    /// - Otherwise the server drops the oldest unfinished reply of this user, and closes the connection of
    ///   the dropped reply. If the new reply still does not fit, the server compares the sums again.
    pub max_unread_reply_bytes: usize,
    /// The maximum time between two requests on a connection. The server closes a connection that sends no
    /// request for this time.
    pub idle_timeout: Duration,
    /// The least time for which the only connection of a user stays open. After this time, the server can close the
    /// connection for a user without any ([`ServerLimits::max_connections`]), also if its client follows events.
    /// Connections on which the server has waited for a request for this time are closed first. After these, the
    /// oldest connection is closed.
    pub min_connection_time: Duration,
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
            min_connection_time: Duration::from_secs(10),
        }
    }
}

/// The client process at the other end of a connection: its user, group and process id, as the kernel reports these
/// facts (`SO_PEERCRED`, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The user id of the client process.
    pub uid: u32,
    /// The primary group id of the client process.
    pub gid: u32,
    /// The process id of the client process. `None` if the kernel does not report it.
    pub pid: Option<i32>,
}

impl Peer {
    /// Returns whether the client runs as root or as the user of this process (the server). If true, the client is an
    /// administrator, and the limits for users do not apply to this client.
    #[must_use]
    pub fn is_of_root_or_own_user(self) -> bool {
        self.uid == 0 || self.uid == geteuid().as_raw()
    }
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

/// The part of a server that computes the replies to the calls of clients. The server handles the connections and the
/// protocol, and passes each call to an implementation of this trait.
pub trait Service: 'static {
    /// Computes the result of the method call `call` from the client `peer`. `more` is true if the client accepts
    /// several replies to this call.
    ///
    /// # Errors
    /// If the call is refused or fails. The server sends the error to the client as the reply.
    fn call(&self, peer: Peer, call: Call, more: bool) -> impl Future<Output = Result<Replies, CallError>>;
}
