//! A budget for replies that wait to be read, over all connections: a client that asks for much and reads nothing must
//! not have the server out of memory.
//!
//! When it is used up, whoever has most waiting gives way: a newcomer of the same user is refused, and for a newcomer
//! of another the oldest of those replies is given up, with its connection.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use tokio::sync::Notify;

/// The replies that wait, of all connections.
#[derive(Debug)]
pub(crate) struct Unsent {
    most: usize,
    waiting: RefCell<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// In the order of their coming.
    replies: BTreeMap<u64, Reply>,
    came: u64,
}

#[derive(Debug)]
struct Reply {
    uid: u32,
    bytes: usize,
    give_up: Rc<Notify>,
}

/// A reply's share of the budget, until it is sent and this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    unsent: Rc<Unsent>,
    number: u64,
    give_up: Rc<Notify>,
}

impl Unsent {
    pub(crate) fn new(most: usize) -> Rc<Self> {
        Rc::new(Self { most, waiting: RefCell::default() })
    }

    /// A share for a reply to `uid`; `None` if there is no room and nobody has more waiting than this user.
    pub(crate) fn hold(self: &Rc<Self>, uid: u32, bytes: usize) -> Option<Held> {
        let mut waiting = self.waiting.borrow_mut();
        while let Some(heaviest) = waiting.heaviest_of_too_many(uid, bytes, self.most) {
            if heaviest == uid {
                return None;
            }
            waiting.give_up_oldest_of(heaviest);
        }
        waiting.came += 1;
        let (number, give_up) = (waiting.came, Rc::new(Notify::new()));
        waiting.replies.insert(number, Reply { uid, bytes, give_up: Rc::clone(&give_up) });
        Some(Held { unsent: Rc::clone(self), number, give_up })
    }
}

impl Waiting {
    /// Who has most waiting, if with these bytes more it would be too much.
    fn heaviest_of_too_many(&self, uid: u32, bytes: usize, most: usize) -> Option<u32> {
        let mut of_users = BTreeMap::from([(uid, bytes)]);
        for reply in self.replies.values() {
            *of_users.entry(reply.uid).or_default() += reply.bytes;
        }
        let is_too_much = of_users.values().sum::<usize>() > most;
        let heaviest = of_users.into_iter().max_by_key(|&(_, bytes)| bytes);
        heaviest.filter(|_| is_too_much).map(|(uid, _)| uid)
    }

    fn give_up_oldest_of(&mut self, uid: u32) {
        let oldest = self.replies.iter().find(|(_, reply)| reply.uid == uid).map(|(&number, _)| number);
        if let Some(reply) = oldest.and_then(|number| self.replies.remove(&number)) {
            reply.give_up.notify_one();
        }
    }
}

impl Held {
    /// Comes back when the reply has to make room for others.
    pub(crate) async fn given_up(&self) {
        self.give_up.notified().await;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.unsent.waiting.borrow_mut().replies.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn is_given_up(held: &Held) -> bool {
        pin!(held.given_up()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn what_is_sent_makes_room() {
        let unsent = Unsent::new(100);
        let first = unsent.hold(7, 60).unwrap();
        assert!(unsent.hold(7, 41).is_none(), "a user who reads nothing is refused more");
        let second = unsent.hold(7, 40);
        assert!(second.is_some() && !is_given_up(&first));
        drop(first);
        assert!(unsent.hold(7, 60).is_some());
        assert!(unsent.hold(7, 101).is_none(), "more than there is for all");
    }

    #[test]
    fn who_has_most_waiting_gives_way_to_others_the_oldest_first() {
        let unsent = Unsent::new(100);
        let heavy: Vec<Held> = [40, 30, 20].map(|bytes| unsent.hold(7, bytes).unwrap()).into();
        let roots = unsent.hold(0, 30).unwrap();
        assert_eq!(heavy.iter().map(is_given_up).collect::<Vec<_>>(), [true, false, false]);
        assert!(unsent.hold(7, 30).is_none());
        assert!(!is_given_up(&roots), "who has little waiting is left alone");
        drop(heavy);
        assert!(unsent.hold(7, 70).is_some(), "what was given up is not counted twice");
    }
}
