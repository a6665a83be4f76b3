//! A budget for replies that wait to be read, over all connections. A client that requests much and reads nothing
//! must not exhaust the server's memory.
//!
//! When the budget is used up, the user with the most waiting bytes gives way. A further reply to the same user is
//! refused. For a further reply to another user, the oldest reply of the first user is dropped with its connection.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use tokio::sync::Notify;

/// A limit on the number of bytes of all replies that the server has not sent yet, over all connections. Also contains
/// a list of these replies.
#[derive(Debug)]
pub(crate) struct ReplyBudget {
    max_bytes: usize,
    waiting: RefCell<UnsentReplies>,
}

/// The replies that the server has not sent yet, of all connections.
#[derive(Debug, Default)]
struct UnsentReplies {
    /// The replies by their numbers, in the order of their arrival.
    replies: BTreeMap<u64, UnsentReply>,
    /// The number of the reply that arrived last.
    last_number: u64,
}

#[derive(Debug)]
struct UnsentReply {
    uid: u32,
    bytes: usize,
    /// Notified when the budget drops this reply.
    dropped: Rc<Notify>,
}

/// The bytes that one unsent reply occupies in the [`ReplyBudget`]. Dropping this value frees the bytes.
#[derive(Debug)]
pub(crate) struct ReservedBytes {
    budget: Rc<ReplyBudget>,
    number: u64,
    dropped: Rc<Notify>,
}

impl ReplyBudget {
    /// Makes a budget in which all unsent replies together can have at most `max_bytes` bytes.
    pub(crate) fn new(max_bytes: usize) -> Rc<Self> {
        Rc::new(Self { max_bytes, waiting: RefCell::default() })
    }

    /// Reserves space for a new reply of `bytes` bytes to the user `uid`. If the unsent replies and the new reply
    /// together exceed the limit, drops unsent replies until the limit is kept: each time the oldest reply to the
    /// user whose replies have the most bytes. If this user is `uid` itself, returns `None` instead, and the new reply
    /// must not be sent.
    pub(crate) fn reserve(self: &Rc<Self>, uid: u32, bytes: usize) -> Option<ReservedBytes> {
        let mut waiting = self.waiting.borrow_mut();
        while let Some(heaviest) = waiting.user_to_give_way(uid, bytes, self.max_bytes) {
            if heaviest == uid {
                return None;
            }
            waiting.drop_oldest_of(heaviest);
        }
        waiting.last_number += 1;
        let (number, dropped) = (waiting.last_number, Rc::new(Notify::new()));
        waiting.replies.insert(number, UnsentReply { uid, bytes, dropped: Rc::clone(&dropped) });
        Some(ReservedBytes { budget: Rc::clone(self), number, dropped })
    }
}

impl UnsentReplies {
    /// Returns the user with the most unsent bytes, if a new reply of `bytes` bytes to the user `uid` would exceed the
    /// limit of `max_bytes`. The new reply counts for its user.
    fn user_to_give_way(&self, uid: u32, bytes: usize, max_bytes: usize) -> Option<u32> {
        let mut bytes_of_users = BTreeMap::from([(uid, bytes)]);
        for reply in self.replies.values() {
            *bytes_of_users.entry(reply.uid).or_default() += reply.bytes;
        }
        let is_too_much = bytes_of_users.values().sum::<usize>() > max_bytes;
        let heaviest = bytes_of_users.into_iter().max_by_key(|&(_, bytes)| bytes);
        heaviest.filter(|_| is_too_much).map(|(uid, _)| uid)
    }

    /// Drops the oldest unsent reply to the user `uid`.
    fn drop_oldest_of(&mut self, uid: u32) {
        let oldest = self.replies.iter().find(|(_, reply)| reply.uid == uid).map(|(&number, _)| number);
        if let Some(reply) = oldest.and_then(|number| self.replies.remove(&number)) {
            reply.dropped.notify_one();
        }
    }
}

impl ReservedBytes {
    /// Waits until the budget drops this reply, to make space for a reply to another user.
    pub(crate) async fn wait_until_dropped(&self) {
        self.dropped.notified().await;
    }
}

impl Drop for ReservedBytes {
    fn drop(&mut self) {
        self.budget.waiting.borrow_mut().replies.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn is_dropped(reserved: &ReservedBytes) -> bool {
        pin!(reserved.wait_until_dropped()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn a_sent_reply_frees_its_share() {
        let unsent = ReplyBudget::new(100);
        let first = unsent.reserve(7, 60).unwrap();
        assert!(unsent.reserve(7, 41).is_none(), "a user who reads nothing is refused more");
        let second = unsent.reserve(7, 40);
        assert!(second.is_some() && !is_dropped(&first));
        drop(first);
        assert!(unsent.reserve(7, 60).is_some());
        assert!(unsent.reserve(7, 101).is_none(), "more than there is for all");
    }

    #[test]
    fn the_user_with_the_most_waiting_bytes_gives_way_oldest_reply_first() {
        let unsent = ReplyBudget::new(100);
        let heavy: Vec<ReservedBytes> = [40, 30, 20].map(|bytes| unsent.reserve(7, bytes).unwrap()).into();
        let reply_to_root = unsent.reserve(0, 30).unwrap();
        assert_eq!(heavy.iter().map(is_dropped).collect::<Vec<_>>(), [true, false, false]);
        assert!(unsent.reserve(7, 30).is_none());
        assert!(!is_dropped(&reply_to_root), "who has little waiting is left alone");
        drop(heavy);
        assert!(unsent.reserve(7, 70).is_some(), "a dropped reply is not counted twice");
    }
}
