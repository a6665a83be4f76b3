//! A small Varlink server: one task for each connection, so that nobody's slowness is another's.
//!
//! What it knows of pjw is the trait [`Service`]. Every resource that a client can use is bounded by [`Limits`]:
//! connections (in all and of one user), a request's size and the time it may take to arrive, the time a reply
//! may take to be read. Whoever breaks a limit is told if possible and loses the connection; nobody else notices.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::os::unix::net::UnixListener as StdListener;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_local;
use tracing::{debug, warn};

use crate::call::{Call, CallError, Reply};
use crate::connection;

/// What a client may use.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections in all.
    pub connections: usize,
    /// Connections of one user other than root.
    pub connections_per_user: usize,
    /// Bytes of one request.
    pub request_bytes: usize,
    /// How long half a request may wait for its other half.
    pub request_time: Duration,
    /// How long a reply may wait to be read.
    pub write_time: Duration,
    /// How long a client may be connected and ask nothing.
    pub idle_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            connections_per_user: 64,
            request_bytes: 64 * 1024,
            request_time: Duration::from_secs(30),
            write_time: Duration::from_secs(5),
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

/// Counts connections, and gives them back when they end.
#[derive(Debug, Default)]
struct Counter {
    all: usize,
    by_user: BTreeMap<u32, usize>,
}

struct Admitted {
    counter: Rc<RefCell<Counter>>,
    uid: u32,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut counter = self.counter.borrow_mut();
        counter.all -= 1;
        if let Some(mine) = counter.by_user.get_mut(&self.uid) {
            *mine -= 1;
            if *mine == 0 {
                counter.by_user.remove(&self.uid);
            }
        }
    }
}

fn admit(counter: &Rc<RefCell<Counter>>, uid: u32, limits: &Limits) -> Option<Admitted> {
    let mut now = counter.borrow_mut();
    let mine = now.by_user.get(&uid).copied().unwrap_or(0);
    // Root can always look in, as long as there is any room.
    if now.all >= limits.connections || (uid != 0 && mine >= limits.connections_per_user) {
        return None;
    }
    now.all += 1;
    *now.by_user.entry(uid).or_default() += 1;
    Some(Admitted { counter: Rc::clone(counter), uid })
}

/// Serves until `stop` becomes true. Must run inside a [`tokio::task::LocalSet`].
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
    let counter = Rc::new(RefCell::new(Counter::default()));
    let mut short_of_descriptors = false;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        };
        match accepted {
            Ok((stream, _)) => {
                short_of_descriptors = false;
                welcome(stream, &service, &counter, limits, stop.clone());
            }
            Err(error) => {
                if !short_of_descriptors {
                    warn!(%error, "can't accept connections; trying again until it works");
                }
                short_of_descriptors = true;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn welcome<S: Service>(
    stream: UnixStream,
    service: &Rc<S>,
    counter: &Rc<RefCell<Counter>>,
    limits: Limits,
    stop: watch::Receiver<bool>,
) {
    let Ok(credentials) = stream.peer_cred() else { return };
    let peer = Peer { uid: credentials.uid(), gid: credentials.gid(), pid: credentials.pid() };
    let Some(admitted) = admit(counter, peer.uid, &limits) else {
        debug!(uid = peer.uid, "too many connections");
        connection::turn_away(&stream);
        return;
    };
    let service = Rc::clone(service);
    spawn_local(async move {
        let _admitted = admitted;
        if let Err(end) = connection::attend(stream, peer, service, limits, stop).await {
            debug!(uid = peer.uid, %end, "connection closed");
        }
    });
}
