//! A small Varlink server. Each connection has a task of its own, so a slow client delays no other client.
//!
//! The server knows pjw only by the trait [`Service`]. [`ServerLimits`] bounds every resource that a client can use:
//! - connections: of all users, of one user, and a reserve for root and the daemon's own user;
//! - the size of a request, and the time in which it must arrive;
//! - the time in which a reply must be read, and the bytes of all replies that wait to be read.
//!
//! A client that exceeds a limit loses its connection. A client with one connection too many receives an error first.
//! Other clients are not affected, with one exception: if all connections for users are taken, an idle connection of
//! another user is closed for a user without any ([`ServerLimits::max_connections`]). Its client receives an error too.

use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::rc::Rc;
use std::time::Duration;

use nix::unistd::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_local;
use tokio::time::sleep;
use tracing::{debug, warn};

use crate::connection::{self, ConnectionContext};
use crate::request::RequestParser;
use crate::slots::Connections;
use crate::unsent::ReplyBudget;

pub use crate::service::{Peer, Replies, ServerLimits, Service};

/// The delay after a failed accept(2). Without a free file descriptor every attempt fails at once.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// The error for a client whose idle connection is closed for another user.
pub(crate) const DISPLACED_MESSAGE: &str = "pjwd closed this idle connection, because another user needed one and all \
                                            were taken: try again";
/// The error for a client that gets no connection.
pub(crate) const TOO_MANY_CONNECTIONS: &str = "too many connections: try again later";

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
) -> io::Result<()> {
    let (_, no_new_listeners) = mpsc::unbounded_channel();
    serve_with_new_listeners(listener, no_new_listeners, service, limits, stop).await
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
) -> io::Result<()> {
    let mut listener = register_listener(listener)?;
    let connections = Connections::new(geteuid().as_raw());
    let unsent = ReplyBudget::new(limits.max_unread_reply_bytes);
    let parser = Rc::new(RequestParser::new());
    let mut is_failing = false;
    loop {
        let accepted = tokio::select! {
            // A successor comes last, so that every connection to the former listener is accepted.
            biased;
            _ = stop.wait_for(|stop| *stop) => break,
            accepted = listener.accept() => accepted,
            Some(successor) = new_listeners.recv() => {
                listener = register_listener(successor)?;
                continue;
            }
        };
        match accepted {
            Ok((stream, _)) => {
                is_failing = false;
                let (parser, unsent) = (Rc::clone(&parser), Rc::clone(&unsent));
                let context = ConnectionContext { limits, parser, unsent, stop: stop.clone() };
                serve_in_task(stream, &service, &connections, context);
            }
            Err(error) => {
                if !is_failing {
                    warn!(%error, "can't accept connections; trying again");
                }
                is_failing = true;
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

/// Registers `listener` with the tokio runtime.
fn register_listener(listener: StdListener) -> io::Result<UnixListener> {
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

/// Starts a task that answers the calls on `stream`, as [`serve_peer_in_task`] does. Closes the connection if the user
/// of the client is unknown.
fn serve_in_task<S: Service>(
    stream: UnixStream,
    service: &Rc<S>,
    connections: &Rc<Connections>,
    context: ConnectionContext,
) {
    let Ok(credentials) = stream.peer_cred() else { return };
    let peer = Peer { uid: credentials.uid(), gid: credentials.gid(), pid: credentials.pid() };
    serve_peer_in_task(stream, peer, service, connections, context);
}

/// Starts a task that answers the calls of `peer` on `stream`. If too many connections are open, sends an error and
/// closes the connection instead. The task does the same when another user gets the slot of the connection.
fn serve_peer_in_task<S: Service>(
    mut stream: UnixStream,
    peer: Peer,
    service: &Rc<S>,
    connections: &Rc<Connections>,
    context: ConnectionContext,
) {
    let Some(slot) = connections.take_slot(peer.uid, &context.limits) else {
        debug!(uid = peer.uid, "too many connections");
        connection::send_busy_error(&stream, TOO_MANY_CONNECTIONS);
        return;
    };
    let service = Rc::clone(service);
    spawn_local(async move {
        let served = tokio::select! {
            // This branch comes first: when another user has the slot, no further request may be read, because its
            // answer would be interrupted.
            biased;
            () = slot.wait_until_displaced() => None,
            served = connection::serve_connection(&mut stream, peer, service, context, &slot) => Some(served),
        };
        match served {
            Some(Ok(())) => {}
            Some(Err(end)) => debug!(uid = peer.uid, %end, "connection closed"),
            None => {
                debug!(uid = peer.uid, "connection closed: another user gets its slot");
                connection::send_busy_error(&stream, DISPLACED_MESSAGE);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::runtime::Builder;
    use tokio::task::{LocalSet, yield_now};

    use super::*;
    use crate::call::{Call, CallError, Reply};

    /// Answers each call with a series of replies that has no reply and does not end.
    #[derive(Default)]
    struct SilentService(RefCell<Vec<mpsc::Sender<Reply>>>);

    impl Service for SilentService {
        async fn call(&self, _peer: Peer, _call: Call, _more: bool) -> Result<Replies, CallError> {
            let (sender, replies) = mpsc::channel(1);
            self.0.borrow_mut().push(sender);
            Ok(Replies::Stream(replies))
        }
    }

    /// Sends a call and reads the reply. Then the connection is idle.
    async fn exchange(client: &mut UnixStream) {
        client.write_all(b"{\"method\":\"org.varlink.service.GetInfo\"}\0").await.unwrap();
        let mut reply = Vec::new();
        while reply.last() != Some(&0) {
            assert_ne!(client.read_buf(&mut reply).await.unwrap(), 0, "the connection is open");
        }
        assert!(reply.starts_with(b"{\"parameters\""), "{}", String::from_utf8_lossy(&reply));
    }

    /// The least time for which the only connection of a user stays open. In it, the grace time of a connection ends.
    const MIN_CONNECTION_TIME: Duration = Duration::from_secs(1);

    /// Fills the three slots with connections of the users `uids`. The first `followers` of them follow events. After
    /// the time for which their connections are kept, a user without connections comes. Asserts that the connection
    /// with the index `displaced` is closed with the reason, and that the others stay.
    async fn check_displaced(uids: [u32; 3], followers: usize, displaced: usize) {
        let limits = ServerLimits {
            max_connections: 3,
            reserved_connections: 0,
            min_connection_time: MIN_CONNECTION_TIME,
            ..ServerLimits::default()
        };
        let (_running, stop) = watch::channel(false);
        let (parser, unsent) = (Rc::new(RequestParser::new()), ReplyBudget::new(1 << 20));
        let (service, connections) = (Rc::new(SilentService::default()), Connections::new(6));
        let connect = |uid| {
            let (client, stream) = UnixStream::pair().unwrap();
            let (parser, unsent) = (Rc::clone(&parser), Rc::clone(&unsent));
            let context = ConnectionContext { limits, parser, unsent, stop: stop.clone() };
            let peer = Peer { uid, gid: uid, pid: None };
            serve_peer_in_task(stream, peer, &service, &connections, context);
            client
        };
        let mut clients = uids.map(connect);
        for (index, client) in clients.iter_mut().enumerate() {
            exchange(client).await;
            if index < followers {
                let call = r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#;
                client.write_all(format!("{call}\0").as_bytes()).await.unwrap();
                while service.0.borrow().len() <= index {
                    yield_now().await;
                }
            }
        }
        sleep(2 * MIN_CONNECTION_TIME).await;
        let mut newcomer = connect(99);
        exchange(&mut newcomer).await;
        for (index, client) in clients.iter_mut().enumerate() {
            if index == displaced {
                let mut received = String::new();
                client.read_to_string(&mut received).await.unwrap();
                let is_reason = received.contains("org.pjw.Warden.Busy")
                    && received.contains("closed this idle connection");
                assert!(is_reason, "{received}");
            } else if index >= followers {
                exchange(client).await;
            }
        }
        assert_eq!(connections.count(), 3);
    }

    #[test]
    fn a_user_without_connections_is_served_when_others_have_all() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        // The only connection of a user that follows events is closed only if none is unused.
        let cases =
            [([7, 7, 8], 0, 0), ([7, 7, 8], 1, 0), ([7, 8, 9], 0, 0), ([7, 8, 9], 1, 1), ([7, 8, 9], 3, 0)];
        LocalSet::new().block_on(&runtime, async {
            // All cases run at the same time, because each of them waits.
            let checks = cases
                .map(|(uids, followers, displaced)| spawn_local(check_displaced(uids, followers, displaced)));
            for check in checks {
                check.await.unwrap();
            }
        });
    }
}
