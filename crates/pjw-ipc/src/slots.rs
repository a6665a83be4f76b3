//! The open connections of the server, and the number of connections that each user may have.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::service::ServerLimits;

/// The grace time of a connection, from the moment at which the server begins to wait for a request on it. The client
/// may be between two requests, or the server has not read its request yet.
const GRACE_TIME: Duration = Duration::from_secs(1);
/// The most connections of a user whose connections have a grace time. Without this limit, a user could keep many
/// connections by a request on each of them every second, and the users with few would lose theirs.
const MAX_CONNECTIONS_WITH_GRACE_TIME: usize = 8;

/// The open connections, in the order in which they were accepted.
#[derive(Debug)]
pub(crate) struct Connections {
    open: RefCell<BTreeMap<u64, Rc<OpenConnection>>>,
    /// The number of connections that were accepted so far.
    accepted: Cell<u64>,
    /// Notified when a connection is closed.
    closed: Notify,
    /// The user id of the server's process.
    own_uid: u32,
}

#[derive(Debug)]
struct OpenConnection {
    uid: u32,
    accepted_at: Instant,
    /// What the server waits for, and since when. `None` while the server works on a request or sends a reply. Closing
    /// an idle connection interrupts no work of the server: it ends a series between two replies, or before a request
    /// was read completely.
    idle: Cell<Option<(Awaited, Instant)>>,
    /// Notified when the connection must be closed, because another user gets its slot.
    displaced: Notify,
}

/// What the server waits for on an idle connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Awaited {
    /// The next request of the client.
    Request,
    /// The next reply of a series, such as the next event.
    Reply,
}

impl Connections {
    /// Returns an empty list of connections of a server whose process has the user id `own_uid`.
    pub(crate) fn new(own_uid: u32) -> Rc<Self> {
        Rc::new(Self { open: RefCell::default(), accepted: Cell::new(0), closed: Notify::new(), own_uid })
    }

    /// Returns the number of open connections.
    pub(crate) fn count(&self) -> usize {
        self.open.borrow().len()
    }

    fn is_administrator(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own_uid
    }

    /// Returns a slot for a new connection of the user `uid`. The connection counts until the slot is dropped or gets
    /// displaced. `None` if there are too many connections of this user, or too many in total.
    ///
    /// - Users other than root and the user of the server can't get the last slots, which are reserved
    ///   (`reserved_connections`). One such user can have at most `max_connections_per_user` connections, and at most
    ///   as many as there are free slots.
    /// - If no slot is free for a user without any connection, an idle connection of another user is closed, and its
    ///   slot goes to the new connection. The new connection is refused only if no other user can lose one: the only
    ///   connection of a user is kept for at least the time `min_connection_time`.
    /// - Root and the user of the server can get all slots. Their connections are never closed for another user.
    pub(crate) fn take_slot(self: &Rc<Self>, uid: u32, limits: &ServerLimits) -> Option<Slot> {
        let user_connections = self.open.borrow().values().filter(|connection| connection.uid == uid).count();
        let is_administrator = self.is_administrator(uid);
        let reserved = if is_administrator { 0 } else { limits.reserved_connections };
        let free = limits.max_connections.saturating_sub(reserved).saturating_sub(self.count());
        // A user may have as many connections as are free. So a few users can't take all slots. Many users can.
        let has_share = is_administrator || user_connections < limits.max_connections_per_user.min(free);
        let is_admitted = if free == 0 {
            // The new connection takes the place of the displaced one, so the reserved slots are not affected.
            !is_administrator && user_connections == 0 && self.displace_one(limits.min_connection_time)
        } else {
            has_share
        };
        is_admitted.then(|| self.add(uid, Instant::now()))
    }

    /// Adds a connection of the user `uid` that was accepted at the time `accepted_at`, and returns its slot.
    fn add(self: &Rc<Self>, uid: u32, accepted_at: Instant) -> Slot {
        let number = self.accepted.get();
        self.accepted.set(number + 1);
        let (idle, displaced) = (Cell::default(), Notify::new());
        let connection = Rc::new(OpenConnection { uid, accepted_at, idle, displaced });
        self.open.borrow_mut().insert(number, Rc::clone(&connection));
        Slot { connections: Rc::clone(self), number, connection }
    }

    /// Displaces an idle connection. Among the users who can lose one, the user who has the most connections loses it.
    /// Of several such connections, the one is chosen that has been idle for the longest time. Returns whether a
    /// connection was displaced.
    ///
    /// - A user with several connections can lose each idle one.
    /// - The only connection of a user is kept for `min_connection_time`. Then it can be chosen if it is idle, also if
    ///   it follows events. Connections that have waited for a request for `min_connection_time` are chosen first. After
    ///   these, the oldest connection is chosen. So users who need one of these slots in turn have it equally long: a
    ///   user who comes back has the newest connection.
    /// - A connection that has waited for a request for less than [`GRACE_TIME`] is chosen only if there is no other.
    ///   Except: the connections of a user with more than [`MAX_CONNECTIONS_WITH_GRACE_TIME`] have no grace time.
    /// - Administrators lose none.
    fn displace_one(&self, min_connection_time: Duration) -> bool {
        let mut open = self.open.borrow_mut();
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        for connection in open.values() {
            *counts.entry(connection.uid).or_default() += 1;
        }
        let candidates = open.iter().filter_map(|(&number, connection)| {
            let (awaited, since) = connection.idle.get()?;
            let count = counts.get(&connection.uid).copied()?;
            let (awaits_request, idle_time) = (awaited == Awaited::Request, since.elapsed());
            let is_unused = awaits_request && idle_time >= min_connection_time;
            let is_spare = count > 1 || is_unused;
            let can_be_closed = !self.is_administrator(connection.uid)
                && (is_spare || connection.accepted_at.elapsed() >= min_connection_time);
            let has_grace =
                awaits_request && idle_time < GRACE_TIME && count <= MAX_CONNECTIONS_WITH_GRACE_TIME;
            // All connections that follow events wait since the same event. Their ages differ.
            let since = if is_spare { since } else { connection.accepted_at };
            can_be_closed.then_some((Reverse(has_grace), count, is_spare, Reverse((since, number))))
        });
        let number = candidates.max().map(|(_, _, _, Reverse((_, number)))| number);
        let chosen = number.and_then(|number| open.remove(&number));
        if let Some(connection) = &chosen {
            connection.displaced.notify_one();
        }
        chosen.is_some()
    }

    /// Returns when there are no connections.
    pub(crate) async fn wait_until_empty(&self) {
        while self.count() > 0 {
            self.closed.notified().await;
        }
    }
}

/// The slot of one connection. Dropping this value frees the slot.
#[derive(Debug)]
pub(crate) struct Slot {
    connections: Rc<Connections>,
    number: u64,
    connection: Rc<OpenConnection>,
}

impl Slot {
    /// Marks the connection as idle until the returned value is dropped. The task of the connection calls this function
    /// before it waits for `awaited`.
    pub(crate) fn mark_idle(&self, awaited: Awaited) -> Idle<'_> {
        self.connection.idle.set(Some((awaited, Instant::now())));
        Idle(&self.connection.idle)
    }

    /// Waits until another user gets this slot. The connection was idle at that time, and the caller must close the
    /// connection before it does anything else with it.
    pub(crate) async fn wait_until_displaced(&self) {
        self.connection.displaced.notified().await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.connections.open.borrow_mut().remove(&self.number);
        self.connections.closed.notify_one();
    }
}

/// A connection is idle while this value exists.
#[derive(Debug)]
pub(crate) struct Idle<'a>(&'a Cell<Option<(Awaited, Instant)>>);

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

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
        min_connection_time: Duration::MAX,
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

    fn is_displaced(slot: &Slot) -> bool {
        !slot.connections.open.borrow().contains_key(&slot.number)
    }

    /// Marks `slot` as idle, later than the slots that were marked before.
    fn mark_idle(slot: &Slot, awaited: Awaited) -> Idle<'_> {
        std::thread::sleep(Duration::from_millis(1));
        slot.mark_idle(awaited)
    }

    #[test]
    fn a_user_without_connections_gets_the_slot_of_an_idle_one_of_the_user_with_most() {
        let connections = Connections::new(OWN);
        let limits = ServerLimits { max_connections: 9, max_connections_per_user: 3, ..LIMITS };
        let take_slot = |uid| connections.take_slot(uid, &limits);
        let slots = [7, 7, 7, 8, 8, 9, 10].map(|uid| take_slot(uid).unwrap());
        let displaced = || (0..7).filter(|&index| is_displaced(&slots[index])).collect::<Vec<usize>>();
        assert!(take_slot(11).is_none(), "no connection is idle");
        let idle = [5, 4, 2, 1].map(|index: usize| mark_idle(&slots[index], Awaited::Request));
        let first = take_slot(11);
        assert!(first.is_some());
        assert_eq!(displaced(), [2], "of the user with most, the one that has been idle longest");
        assert_eq!(connections.count(), 7, "the reserved slots stay free");
        assert!(take_slot(11).is_none() && take_slot(7).is_none(), "only for the first connection of a user");
        let second = take_slot(12);
        assert_eq!(displaced(), [2, 4], "of two users with as many, the one that has been idle longest");
        let third = take_slot(13);
        assert_eq!(displaced(), [1, 2, 4]);
        assert!(take_slot(14).is_none(), "nobody has two connections with an idle one among them");
        drop(idle);
        drop((slots, first, second, third));
        assert_eq!(connections.count(), 0, "each slot was freed once");
    }

    /// Returns a time so long ago that the grace time is over, and one at which it has not begun. A slow test changes
    /// neither.
    fn before_and_in_grace_time() -> (Instant, Instant) {
        let now = Instant::now();
        (now.checked_sub(2 * GRACE_TIME).unwrap(), now + Duration::from_secs(3600))
    }

    #[test]
    fn a_connection_between_two_requests_is_displaced_only_if_there_is_no_other() {
        let connections = Connections::new(OWN);
        let limits = ServerLimits { max_connections: 20, max_connections_per_user: 3, ..LIMITS };
        let slots = [7, 7, 7, 8, 8, 9, 9].map(|uid| connections.take_slot(uid, &limits).unwrap());
        let displaced = || (0..7).filter(|&index| is_displaced(&slots[index])).collect::<Vec<usize>>();
        let (early, recent) = before_and_in_grace_time();
        slots[0].connection.idle.set(Some((Awaited::Request, recent)));
        slots[3].connection.idle.set(Some((Awaited::Request, early)));
        slots[5].connection.idle.set(Some((Awaited::Reply, recent)));
        let full = ServerLimits { max_connections: 9, ..limits };
        let first = connections.take_slot(10, &full);
        assert!(first.is_some());
        assert_eq!(displaced(), [3], "the user 7 has more, and may be about to send a request");
        let second = connections.take_slot(11, &full);
        assert!(second.is_some());
        assert_eq!(displaced(), [3, 5], "a client that waits for events sends no request");
        let third = connections.take_slot(12, &full);
        assert!(third.is_some());
        assert_eq!(displaced(), [0, 3, 5], "there is no other");
    }

    #[test]
    fn requests_on_many_connections_do_not_keep_them_at_the_cost_of_users_with_few() {
        let connections = Connections::new(OWN);
        let many = MAX_CONNECTIONS_WITH_GRACE_TIME + 1;
        let limits = ServerLimits { max_connections: 100, max_connections_per_user: many, ..LIMITS };
        let slots: Vec<Slot> = (0..many).map(|_| connections.take_slot(7, &limits).unwrap()).collect();
        let others = [8, 8].map(|uid| connections.take_slot(uid, &limits).unwrap());
        let (early, recent) = before_and_in_grace_time();
        slots[0].connection.idle.set(Some((Awaited::Request, recent)));
        others[0].connection.idle.set(Some((Awaited::Request, early)));
        // All slots that are not reserved are taken.
        let full = ServerLimits { max_connections: many + 2 + LIMITS.reserved_connections, ..limits };
        let newcomer = connections.take_slot(9, &full);
        assert!(newcomer.is_some() && is_displaced(&slots[0]) && !is_displaced(&others[0]));
    }

    #[test]
    fn the_only_connection_of_a_user_is_displaced_after_its_least_time_and_unused_ones_come_first() {
        let connections = Connections::new(OWN);
        let limits = ServerLimits { min_connection_time: Duration::from_secs(600), ..LIMITS };
        let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap();
        let slots = [(7, 1200), (8, 1300), (9, 1100), (10, 3), (11, 1400)]
            .map(|(uid, seconds)| connections.add(uid, ago(seconds)));
        let displaced = || (0..5).filter(|&index| is_displaced(&slots[index])).collect::<Vec<usize>>();
        let idle = [
            // The first two follow events.
            (0, Awaited::Reply, 1150),
            (3, Awaited::Reply, 3),
            (1, Awaited::Request, 2),
            (2, Awaited::Request, 700),
        ];
        for (index, awaited, seconds) in idle {
            slots[index].connection.idle.set(Some((awaited, ago(seconds))));
        }
        let mut newcomers = Vec::new();
        for (uid, expected) in [(12, vec![2]), (13, vec![1, 2]), (14, vec![0, 1, 2])] {
            newcomers.push(connections.take_slot(uid, &limits).unwrap());
            assert_eq!(displaced(), expected);
        }
        assert!(connections.take_slot(15, &limits).is_none(), "one is new, the others have work");
        assert_eq!(displaced(), [0, 1, 2]);
    }

    #[test]
    fn as_many_users_who_follow_events_as_there_are_slots_keep_out_no_other_user() {
        let connections = Connections::new(OWN);
        let limits = ServerLimits { min_connection_time: Duration::ZERO, ..ServerLimits::default() };
        let mut slots: VecDeque<(u32, Slot)> = VecDeque::new();
        let users = (100..).take(limits.max_connections);
        // The second time, each user comes back after another user got the slot.
        for uid in users.clone().chain(users) {
            let is_full = slots.len() == limits.max_connections - limits.reserved_connections;
            let slot = connections.take_slot(uid, &limits).expect("each user gets a connection");
            slot.connection.idle.set(Some((Awaited::Reply, Instant::now())));
            slots.push_back((uid, slot));
            if is_full {
                let (oldest, slot) = slots.pop_front().unwrap();
                assert!(is_displaced(&slot), "{uid} gets the slot of {oldest}, which is the oldest");
            }
        }
    }

    #[test]
    fn connections_of_administrators_are_not_displaced() {
        let connections = Connections::new(OWN);
        let limits = ServerLimits { min_connection_time: Duration::ZERO, ..LIMITS };
        let slots = [0, OWN, 0, OWN, 0, OWN].map(|uid| connections.take_slot(uid, &limits).unwrap());
        let _idle = slots.each_ref().map(|slot| slot.mark_idle(Awaited::Request));
        assert!(connections.take_slot(9, &limits).is_none());
        assert!(!slots.iter().any(is_displaced));
    }

    #[test]
    fn a_connection_is_idle_only_while_it_waits() {
        let connections = Connections::new(OWN);
        let slots = [7, 7, 8, 9].map(|uid| connections.take_slot(uid, &LIMITS).unwrap());
        drop(slots[0].mark_idle(Awaited::Request));
        assert!(connections.take_slot(10, &LIMITS).is_none(), "it has a request to answer");
        let _idle = slots[0].mark_idle(Awaited::Request);
        assert!(connections.take_slot(10, &LIMITS).is_some());
        assert!(is_displaced(&slots[0]));
    }
}
