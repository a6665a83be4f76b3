//! A small Varlink server: one task for each connection, so that nobody's slowness is another's.
//!
//! What it knows of pjw is the trait [`Service`]. Every resource that a client can use is bounded by [`Limits`]:
//! connections (in all, of one user, and what is kept free for root and the daemon's own user), a request's size and the time it may take to arrive, the time a reply
//! may take to be read, what all replies together may hold until they are read. Whoever breaks a limit loses the connection, one connection too many is told so; nobody
//! else notices.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::os::unix::net::UnixListener as StdListener;
use std::rc::Rc;
use std::time::Duration;

use nix::unistd::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::spawn_local;
use tokio::time::sleep;
use tracing::{debug, warn};

use crate::call::{Call, CallError, Reply};
use crate::connection::{self, Terms};
use crate::unsent::Unsent;

/// How long after a failure to accept it is tried again: without a descriptor left every attempt fails at once.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// What a client may use.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections in all.
    pub connections: usize,
    /// How many of those only root and the user the server runs as may have: whatever others do, the
    /// administrator gets in.
    pub connections_reserved: usize,
    /// Connections of one user other than those two.
    pub connections_per_user: usize,
    /// Bytes of one request.
    pub request_bytes: usize,
    /// How long a request may take to arrive, from its first byte to its last.
    pub request_time: Duration,
    /// How long a reply may wait to be read.
    pub write_time: Duration,
    /// Bytes of replies that wait to be read, over all connections.
    pub unsent_bytes: usize,
    /// How long a client may be connected and ask nothing.
    pub idle_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            connections_reserved: 16,
            connections_per_user: 64,
            request_bytes: 64 * 1024,
            request_time: Duration::from_secs(30),
            write_time: Duration::from_secs(5),
            unsent_bytes: 64 * 1024 * 1024,
            idle_time: Duration::from_secs(600),
        }
    }
}

/// Who is at the other end, as the kernel vouches for it (`SO_PEERCRED`, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The user.
    pub uid: u32,
    /// The primary group.
    pub gid: u32,
    /// The process, where the kernel tells.
    pub pid: Option<i32>,
}

/// The answer to a call.
#[derive(Debug)]
pub enum Answer {
    /// One reply.
    Once(Box<Reply>),
    /// Replies as they come, until the sender is dropped.
    Many(mpsc::Receiver<Reply>),
}

/// Who answers the calls.
pub trait Service: 'static {
    /// Answers one call. `more` says whether the caller takes several replies.
    fn call(&self, peer: Peer, call: Call, more: bool) -> impl Future<Output = Result<Answer, CallError>>;
}

/// The connections there are.
#[derive(Debug)]
struct Connections {
    all: RefCell<BTreeMap<u32, usize>>,
    one_less: Notify,
    /// Whom the server runs as.
    own_uid: u32,
}

impl Connections {
    fn new(own_uid: u32) -> Rc<Self> {
        Rc::new(Self { all: RefCell::default(), one_less: Notify::new(), own_uid })
    }

    fn count(&self) -> usize {
        self.all.borrow().values().sum()
    }

    fn admit(self: &Rc<Self>, uid: u32, limits: &Limits) -> Option<Admitted> {
        let mine = self.all.borrow().get(&uid).copied().unwrap_or(0);
        let is_administrator = uid == 0 || uid == self.own_uid;
        let reserved = if is_administrator { 0 } else { limits.connections_reserved };
        let is_full = self.count() >= limits.connections.saturating_sub(reserved);
        if is_full || (!is_administrator && mine >= limits.connections_per_user) {
            return None;
        }
        self.all.borrow_mut().insert(uid, mine + 1);
        Some(Admitted { connections: Rc::clone(self), uid })
    }

    /// Comes back when there is none.
    async fn none_left(&self) {
        while self.count() > 0 {
            self.one_less.notified().await;
        }
    }
}

/// A connection's place, free again when this is dropped.
#[derive(Debug)]
struct Admitted {
    connections: Rc<Connections>,
    uid: u32,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut all = self.connections.all.borrow_mut();
        match all.get(&self.uid).copied() {
            Some(mine) if mine > 1 => all.insert(self.uid, mine - 1),
            _ => all.remove(&self.uid),
        };
        self.connections.one_less.notify_one();
    }
}

/// Serves until `stop` becomes true; calls that are under way then are still answered, if that takes no longer
/// than [`Limits::write_time`]. Must run inside a [`tokio::task::LocalSet`].
///
/// # Errors
/// If the listener can't be given to the runtime.
pub async fn serve<S: Service>(
    listener: StdListener,
    service: Rc<S>,
    limits: Limits,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    let connections = Connections::new(geteuid().as_raw());
    let unsent = Unsent::new(limits.unsent_bytes);
    let mut failing = false;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        match accepted {
            Ok((stream, _)) => {
                failing = false;
                let terms = Terms { limits, unsent: Rc::clone(&unsent), stop: stop.clone() };
                welcome(stream, &service, &connections, terms);
            }
            Err(error) => {
                if !failing {
                    warn!(%error, "can't accept connections; trying again until it works");
                }
                failing = true;
                sleep(ACCEPT_AGAIN).await;
            }
        }
    }
    tokio::select! {
        () = connections.none_left() => {}
        () = sleep(limits.write_time) => {}
        () = turn_away_all(&listener) => {}
    }
    Ok(())
}

/// Nobody is left to wait in the queue of a server that will not accept them.
async fn turn_away_all(listener: &UnixListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => connection::turn_away(&stream, "pjwd is stopping: try again when it runs"),
            Err(_) => sleep(ACCEPT_AGAIN).await,
        }
    }
}

fn welcome<S: Service>(stream: UnixStream, service: &Rc<S>, connections: &Rc<Connections>, terms: Terms) {
    let Ok(credentials) = stream.peer_cred() else { return };
    let peer = Peer { uid: credentials.uid(), gid: credentials.gid(), pid: credentials.pid() };
    let Some(admitted) = connections.admit(peer.uid, &terms.limits) else {
        debug!(uid = peer.uid, "too many connections");
        connection::turn_away(&stream, "too many connections: try again later");
        return;
    };
    let service = Rc::clone(service);
    spawn_local(async move {
        let _admitted = admitted;
        if let Err(end) = connection::attend(stream, peer, service, terms).await {
            debug!(uid = peer.uid, %end, "connection closed");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: u32 = 6;
    const LIMITS: Limits = Limits {
        connections: 6,
        connections_reserved: 2,
        connections_per_user: 2,
        request_bytes: 0,
        request_time: Duration::ZERO,
        write_time: Duration::ZERO,
        unsent_bytes: 0,
        idle_time: Duration::ZERO,
    };

    #[test]
    fn one_user_cannot_take_the_places_of_others() {
        let connections = Connections::new(OWN);
        let admit = |uid| connections.admit(uid, &LIMITS);
        let mine = [admit(7), admit(7)];
        assert!(mine.iter().all(Option::is_some));
        assert!(admit(7).is_none(), "a user's share is used up");
        let other = admit(8);
        assert!(other.is_some(), "another user has a share of its own");
        drop(mine);
        assert_eq!(connections.count(), 1);
        assert!(admit(7).is_some(), "a place is free again when its connection ends");
    }

    #[test]
    fn all_users_together_leave_places_for_the_administrator() {
        let connections = Connections::new(OWN);
        let admit = |uid| connections.admit(uid, &LIMITS);
        let users = [7, 7, 8, 8].map(admit);
        assert!(users.iter().all(Option::is_some));
        assert!(admit(9).is_none(), "what is left is not for users");
        let kept = [admit(0), admit(OWN)];
        assert!(kept.iter().all(Option::is_some), "root and the daemon's own user get in");
        assert!(admit(0).is_none(), "and nobody gets more than there is");
        drop(kept);
        assert!(admit(9).is_none(), "a reserved place that comes free stays reserved");
    }

    #[test]
    fn an_administrator_is_bound_only_by_the_room_there_is() {
        for uid in [0, OWN] {
            let connections = Connections::new(OWN);
            let admit = |uid| connections.admit(uid, &LIMITS);
            let admitted: Vec<_> = (0..LIMITS.connections).map(|_| admit(uid)).collect();
            assert!(admitted.iter().all(Option::is_some));
            assert!(admit(uid).is_none() && admit(7).is_none());
        }
    }
}
