//! A small Varlink server. Each connection has a task of its own, so a slow client delays no other client.
//!
//! The server knows pjw only by the trait [`Service`]. [`ServerLimits`] bounds every resource that a client can use:
//! - connections: of all users, of one user, and a reserve for root and the daemon's own user;
//! - the size of a request, and the time in which it must arrive;
//! - the time in which a reply must be read, and the bytes of all replies that wait to be read.
//!
//! A client that exceeds a limit loses its connection. A client with one connection too many receives an error first.
//! Other clients are not affected.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::unix::net::UnixListener as StdListener;
use std::rc::Rc;
use std::time::Duration;

use nix::unistd::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::spawn_local;
use tokio::time::sleep;
use tracing::{debug, warn};

use crate::connection::{self, ConnectionContext};
use crate::request::RequestParser;
use crate::unsent::ReplyBudget;

pub use crate::service::{Peer, Replies, ServerLimits, Service};

/// The delay after a failed accept(2). Without a free file descriptor every attempt fails at once.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// The open connections, by user id.
#[derive(Debug)]
struct Connections {
    all: RefCell<BTreeMap<u32, usize>>,
    closed: Notify,
    /// The user id of the server's process.
    own_uid: u32,
}

impl Connections {
    fn new(own_uid: u32) -> Rc<Self> {
        Rc::new(Self { all: RefCell::default(), closed: Notify::new(), own_uid })
    }

    fn count(&self) -> usize {
        self.all.borrow().values().sum()
    }

    /// Returns a slot for a new connection of the user `uid`. The connection counts until the slot is dropped. `None`
    /// if there are too many connections of this user, or too many in total.
    ///
    /// - Users other than root and the user of the server can't get the last slots, which are reserved
    ///   (`reserved_connections`). One such user can have at most `max_connections_per_user` connections, and at most
    ///   as many as there are free slots.
    /// - Root and the user of the server can get all slots.
    fn take_slot(self: &Rc<Self>, uid: u32, limits: &ServerLimits) -> Option<Slot> {
        let mine = self.all.borrow().get(&uid).copied().unwrap_or(0);
        let is_administrator = uid == 0 || uid == self.own_uid;
        let reserved = if is_administrator { 0 } else { limits.reserved_connections };
        let free = limits.max_connections.saturating_sub(reserved).saturating_sub(self.count());
        // A user may have as many connections as are free. So some users together can't take all of them.
        let has_share = is_administrator || mine < limits.max_connections_per_user.min(free);
        if free == 0 || !has_share {
            return None;
        }
        self.all.borrow_mut().insert(uid, mine + 1);
        Some(Slot { connections: Rc::clone(self), uid })
    }

    /// Returns when there are no connections.
    async fn wait_until_empty(&self) {
        while self.count() > 0 {
            self.closed.notified().await;
        }
    }
}

/// The slot of one connection. Dropping it frees the slot.
#[derive(Debug)]
struct Slot {
    connections: Rc<Connections>,
    uid: u32,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut all = self.connections.all.borrow_mut();
        match all.get(&self.uid).copied() {
            Some(mine) if mine > 1 => all.insert(self.uid, mine - 1),
            _ => all.remove(&self.uid),
        };
        self.connections.closed.notify_one();
    }
}

/// Serves the clients that connect to `listener`, until the value in `stop` becomes true. `service` computes the
/// replies. `limits` bounds the connections, the memory and the time that clients can use. Must run inside a
/// [`tokio::task::LocalSet`].
///
/// When `stop` is true, the server accepts no more calls, and ends each series of replies. The server still sends the
/// replies to the calls that it has already read, for at most [`ServerLimits::write_timeout`]. Then the function
/// returns.
///
/// # Errors
/// If `listener` cannot be registered with the tokio runtime.
pub async fn serve<S: Service>(
    listener: StdListener,
    service: Rc<S>,
    limits: ServerLimits,
    stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let (_, none) = mpsc::unbounded_channel();
    serve_with_new_listeners(listener, none, service, limits, stop).await
}

/// Serves clients as [`serve`] does, and also lets the caller replace the listener. The caller sends a new listener
/// on the channel `new_listeners`, for example after the socket file was removed and created again. From then on, the
/// server accepts new connections only from the new listener. Open connections stay open.
///
/// # Errors
/// If a listener cannot be registered with the tokio runtime.
pub async fn serve_with_new_listeners<S: Service>(
    listener: StdListener,
    mut new_listeners: mpsc::UnboundedReceiver<StdListener>,
    service: Rc<S>,
    limits: ServerLimits,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let mut listener = registered(listener)?;
    let connections = Connections::new(geteuid().as_raw());
    let unsent = ReplyBudget::new(limits.max_unread_reply_bytes);
    let parser = Rc::new(RequestParser::new());
    let mut failing = false;
    loop {
        let accepted = tokio::select! {
            // A successor comes last, so that every connection to the former listener is accepted.
            biased;
            _ = stop.wait_for(|stop| *stop) => break,
            accepted = listener.accept() => accepted,
            Some(successor) = new_listeners.recv() => {
                listener = registered(successor)?;
                continue;
            }
        };
        match accepted {
            Ok((stream, _)) => {
                failing = false;
                let (parser, unsent) = (Rc::clone(&parser), Rc::clone(&unsent));
                let shared = ConnectionContext { limits, parser, unsent, stop: stop.clone() };
                serve_in_task(stream, &service, &connections, shared);
            }
            Err(error) => {
                if !failing {
                    warn!(%error, "can't accept connections; trying again");
                }
                failing = true;
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
    tokio::select! {
        () = connections.wait_until_empty() => {}
        () = sleep(limits.write_timeout) => {}
        () = reject_all(&listener) => {}
    }
    Ok(())
}

fn registered(listener: StdListener) -> std::io::Result<UnixListener> {
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Accepts the connections that wait at `listener`, and rejects each with an error, because the server stops. Never
/// returns.
async fn reject_all(listener: &UnixListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                connection::send_busy_error(&stream, "pjwd is stopping: try again when it runs again");
            }
            Err(_) => sleep(ACCEPT_RETRY_DELAY).await,
        }
    }
}

/// Starts a task that answers the calls on `stream`. If too many connections are open, sends an error and closes the
/// connection instead. Closes the connection if the user of the client is unknown.
fn serve_in_task<S: Service>(
    stream: UnixStream,
    service: &Rc<S>,
    connections: &Rc<Connections>,
    shared: ConnectionContext,
) {
    let Ok(credentials) = stream.peer_cred() else { return };
    let peer = Peer { uid: credentials.uid(), gid: credentials.gid(), pid: credentials.pid() };
    let Some(slot) = connections.take_slot(peer.uid, &shared.limits) else {
        debug!(uid = peer.uid, "too many connections");
        connection::send_busy_error(&stream, "too many connections: try again later");
        return;
    };
    let service = Rc::clone(service);
    spawn_local(async move {
        let _admitted = slot;
        if let Err(end) = connection::serve_connection(stream, peer, service, shared).await {
            debug!(uid = peer.uid, %end, "connection closed");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: u32 = 6;
    const LIMITS: ServerLimits = ServerLimits {
        max_connections: 6,
        reserved_connections: 2,
        max_connections_per_user: 2,
        max_request_bytes: 0,
        request_timeout: Duration::ZERO,
        write_timeout: Duration::ZERO,
        max_unread_reply_bytes: 0,
        idle_timeout: Duration::ZERO,
    };

    #[test]
    fn one_user_cannot_use_up_all_connections() {
        let connections = Connections::new(OWN);
        let take_slot = |uid| connections.take_slot(uid, &LIMITS);
        let mine = [take_slot(7), take_slot(7)];
        assert!(mine.iter().all(Option::is_some));
        assert!(take_slot(7).is_none(), "a user's share is used up");
        let other = take_slot(8);
        assert!(other.is_some(), "another user has a share of its own");
        drop(mine);
        assert_eq!(connections.count(), 1);
        assert!(take_slot(7).is_some(), "a place is free again when its connection ends");
    }

    #[test]
    fn some_users_together_leave_connections_for_others() {
        let connections = Connections::new(OWN);
        let limits = ServerLimits::default();
        let mut slots = Vec::new();
        for uid in 100..106 {
            slots.extend(std::iter::from_fn(|| connections.take_slot(uid, &limits)));
        }
        assert!(connections.count() > 230, "six users take all that they can get");
        assert!(connections.take_slot(7, &limits).is_some(), "another one gets a connection");
    }

    #[test]
    fn all_users_together_leave_connections_for_the_administrator() {
        let connections = Connections::new(OWN);
        let take_slot = |uid| connections.take_slot(uid, &LIMITS);
        let users = [7, 7, 8, 9].map(take_slot);
        assert!(users.iter().all(Option::is_some));
        assert!(take_slot(10).is_none(), "what is left is not for users");
        let kept = [take_slot(0), take_slot(OWN)];
        assert!(kept.iter().all(Option::is_some), "root and the daemon's own user get in");
        assert!(take_slot(0).is_none(), "and nobody gets more than there is");
        drop(kept);
        assert!(take_slot(10).is_none(), "a reserved place that comes free stays reserved");
    }

    #[test]
    fn an_administrator_is_limited_only_by_the_total_of_connections() {
        for uid in [0, OWN] {
            let connections = Connections::new(OWN);
            let take_slot = |uid| connections.take_slot(uid, &LIMITS);
            let slot: Vec<_> = (0..LIMITS.max_connections).map(|_| take_slot(uid)).collect();
            assert!(slot.iter().all(Option::is_some));
            assert!(take_slot(uid).is_none() && take_slot(7).is_none());
        }
    }
}
