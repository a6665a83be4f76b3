//! The order in which callers use the thread that reads memory: one at a time, and the users take turns.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use tokio::sync::oneshot;

/// The party that waits for a [`Turn`] (the right to measure the memory of a job): a user who called pjwd, or pjwd
/// itself. [`MemoryReaderQueue`] treats all parties equally.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnRequester {
    /// The calls of the user with this id.
    User(u32),
    /// pjwd itself, which measures the memory of jobs at an interval (configuration key `memory.sample`).
    Daemon,
}

/// The error of [`MemoryReaderQueue::wait_for_turn`]: the user already has the maximum number of calls that wait for a
/// memory measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{waiting} of your calls wait for readings of memory already, which are made one after the other: try again when one of \
     them is answered"
)]
pub struct TooManyWaiting {
    /// The number of calls that wait.
    pub waiting: usize,
}

/// The queue of the calls that wait for the memory reader thread. This thread measures the memory use of one job at a
/// time. The call that has the [`Turn`] uses the thread, and all other calls wait. Users with waiting calls get the
/// turn in rotation: a user with many calls does not block other users. pjwd itself counts as one more user.
#[derive(Debug, Default)]
pub struct MemoryReaderQueue(Rc<RefCell<Queue>>);

/// The right to use a memory reader thread, which measures the memory use of jobs. Each memory reader thread has a
/// [`MemoryReaderQueue`] of its own, which gives out one turn at a time. When this value is dropped, the next call that
/// waits in [`MemoryReaderQueue::wait_for_turn`] gets a turn.
#[derive(Debug)]
pub struct Turn(Rc<RefCell<Queue>>);

/// The calls that wait for their turn.
#[derive(Debug, Default)]
struct Queue {
    is_taken: bool,
    /// The requesters with waiting calls: the first one gets the next turn.
    waiting: VecDeque<(TurnRequester, VecDeque<oneshot::Sender<Turn>>)>,
}

impl MemoryReaderQueue {
    /// Waits until the caller can use the memory reader thread, and returns the right to use the thread. `requester` is
    /// the user for whom the call is made, or pjwd itself. If the future is dropped, the call leaves the queue.
    ///
    /// # Errors
    /// If `max_waiting_calls` calls of `requester` already wait. The error is returned at once, without waiting. The
    /// first waiting call of a requester is accepted even if `max_waiting_calls` is 0.
    pub async fn wait_for_turn(
        &self,
        requester: TurnRequester,
        max_waiting_calls: usize,
    ) -> Result<Turn, TooManyWaiting> {
        let receiver = {
            let mut queue = self.0.borrow_mut();
            if !queue.is_taken {
                queue.is_taken = true;
                return Ok(Turn(Rc::clone(&self.0)));
            }
            queue.add(requester, max_waiting_calls)?
        };
        // The queue keeps the sender until it sends the turn.
        receiver.await.map_err(|_| TooManyWaiting { waiting: 0 })
    }
}

impl Queue {
    /// Adds a waiting call of `requester` (a user or pjwd itself), and returns the receiver through which the call
    /// gets its turn. Fails if `max_waiting_calls` calls of `requester` already wait. The first waiting call of a
    /// requester is accepted in any case, even with the limit 0.
    fn add(
        &mut self,
        requester: TurnRequester,
        max_waiting_calls: usize,
    ) -> Result<oneshot::Receiver<Turn>, TooManyWaiting> {
        let (sender, receiver) = oneshot::channel();
        let Some((_, calls)) = self.waiting.iter_mut().find(|(other, _)| *other == requester) else {
            self.waiting.push_back((requester, VecDeque::from([sender])));
            return Ok(receiver);
        };
        calls.retain(|call| !call.is_closed());
        if calls.len() >= max_waiting_calls {
            return Err(TooManyWaiting { waiting: calls.len() });
        }
        calls.push_back(sender);
        Ok(receiver)
    }

    /// Removes the call that gets the next turn from the queue, and returns its sender. The requesters get turns one
    /// after the other, whatever number of calls each has. Calls that are no longer waited for are removed too.
    /// `None` if no call waits.
    fn pop_next_call(&mut self) -> Option<oneshot::Sender<Turn>> {
        while let Some((requester, mut calls)) = self.waiting.pop_front() {
            calls.retain(|call| !call.is_closed());
            if let Some(call) = calls.pop_front() {
                if !calls.is_empty() {
                    self.waiting.push_back((requester, calls));
                }
                return Some(call);
            }
        }
        None
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let next = self.0.borrow_mut().pop_next_call();
        match next {
            // If the future is dropped before it takes the turn, the turn is dropped with it, which ends that turn.
            Some(call) => drop(call.send(Turn(Rc::clone(&self.0)))),
            None => self.0.borrow_mut().is_taken = false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// Polls a future once.
    fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
        pin!(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    fn taken(turns: &MemoryReaderQueue) -> Turn {
        match poll(&mut Box::pin(turns.wait_for_turn(TurnRequester::User(1), 2))) {
            Poll::Ready(Ok(turn)) => turn,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn users_take_turns_and_each_user_keeps_the_order() {
        let turns = MemoryReaderQueue::default();
        let mut present = taken(&turns);
        let requesters =
            [TurnRequester::User(1), TurnRequester::User(1), TurnRequester::User(2), TurnRequester::Daemon];
        let mut calls: Vec<_> =
            requesters.iter().map(|&requester| Box::pin(turns.wait_for_turn(requester, 2))).collect();
        calls.iter_mut().for_each(|call| assert!(poll(call).is_pending()));
        for expected in [0, 2, 3, 1] {
            drop(present);
            let ready = (0..requesters.len()).find_map(|n| match poll(&mut calls[n]) {
                Poll::Ready(turn) => Some((n, turn.unwrap())),
                Poll::Pending => None,
            });
            let (n, turn) = ready.unwrap();
            assert_eq!(n, expected);
            present = turn;
            // A future that is ready must not be polled again.
            calls[n] = Box::pin(turns.wait_for_turn(TurnRequester::User(9), 99));
        }
        drop(calls);
        drop(present);
        drop(taken(&turns));
    }

    #[test]
    fn a_user_with_too_many_waiting_calls_is_refused_and_others_are_not() {
        let turns = MemoryReaderQueue::default();
        let present = taken(&turns);
        let mut calls: Vec<_> =
            (0..3).map(|_| Box::pin(turns.wait_for_turn(TurnRequester::User(1), 2))).collect();
        assert!(poll(&mut calls[0]).is_pending() && poll(&mut calls[1]).is_pending());
        let Poll::Ready(Err(refused)) = poll(&mut calls[2]) else { panic!("it waits") };
        assert!(refused.to_string().starts_with("2 of your calls wait"), "{refused}");
        let mut other = Box::pin(turns.wait_for_turn(TurnRequester::User(2), 2));
        assert!(poll(&mut other).is_pending());
        drop(calls.remove(0));
        let mut again = Box::pin(turns.wait_for_turn(TurnRequester::User(1), 2));
        assert!(poll(&mut again).is_pending(), "a call that was dropped waits no longer");
        drop(present);
        assert!(poll(&mut calls[0]).is_ready());
    }

    #[test]
    fn the_turn_of_a_call_that_hangs_up_passes_on() {
        let turns = MemoryReaderQueue::default();
        let present = taken(&turns);
        let mut first = Box::pin(turns.wait_for_turn(TurnRequester::User(1), 2));
        let mut second = Box::pin(turns.wait_for_turn(TurnRequester::User(2), 2));
        assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
        drop(present);
        // The turn was sent to the first call, which is dropped before it takes the turn.
        drop(first);
        let Poll::Ready(Ok(turn)) = poll(&mut second) else { panic!("the turn is lost") };
        drop(turn);
        drop(taken(&turns));
    }
}
