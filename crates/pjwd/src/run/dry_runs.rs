//! Dry runs for `plan` and `plan --defrag`.
//!
//! A dry run is expensive: it scans every thread of the node, or tries many moves. So one dry run answers all pending
//! calls, and users who are not administrators may get a recent result.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::control::query::QueryAnswer;

/// The oldest result that a user who is not an administrator may get.
const RECENT: Duration = Duration::from_secs(1);

/// The clients that wait for the result of a dry run, and the last result. A dry run computes changes without making
/// them, and its result has the type `T`. One dry run answers all waiting clients.
#[derive(Debug)]
pub struct DryRunQueue<T> {
    waiters: Vec<Waiter>,
    last: Option<(Instant, Arc<T>)>,
    /// Makes an answer from a result.
    to_answer: fn(Arc<T>) -> QueryAnswer,
}

#[derive(Debug)]
struct Waiter {
    answer: oneshot::Sender<QueryAnswer>,
    /// Whether the call requires a new dry run.
    is_new_required: bool,
}

impl<T> DryRunQueue<T> {
    /// Makes a queue without clients. `to_answer` converts the result of a dry run (a computation of changes without
    /// making them) to the answer for a client.
    #[must_use]
    pub fn new(to_answer: fn(Arc<T>) -> QueryAnswer) -> Self {
        Self { waiters: Vec::new(), last: None, to_answer }
    }

    /// Adds a client that waits for the result of a dry run: a computation of changes without making them.
    /// [`DryRunQueue::answer_all`] sends the result to the client through `answer_sender`. If `is_new_required` is
    /// true, the client gets the result of a new dry run. Otherwise, a result that is up to one second old suffices.
    pub fn enqueue(&mut self, answer_sender: oneshot::Sender<QueryAnswer>, is_new_required: bool) {
        self.waiters.push(Waiter { answer: answer_sender, is_new_required });
    }

    /// Sends one result of a dry run (a computation of changes without making them) to all waiting clients, and empties
    /// the queue. Does nothing if no client waits. Reuses the last result if it is less than one second old and no
    /// client requires a new result. Otherwise calls `dry_run` for a new result. `now` returns the current time.
    pub fn answer_all(&mut self, now: impl Fn() -> Instant, dry_run: impl FnOnce() -> T) {
        // Drop calls of clients that have disconnected.
        self.waiters.retain(|waiter| !waiter.answer.is_closed());
        if self.waiters.is_empty() {
            return;
        }
        let is_new_required = self.waiters.iter().any(|waiter| waiter.is_new_required);
        let is_recent = |at: Instant| now().duration_since(at) < RECENT;
        let recent = self.last.take().filter(|(at, _)| !is_new_required && is_recent(*at));
        // The age of a result counts from the end of the dry run. Otherwise a slow dry run would be repeated at once.
        let (at, result) = recent.unwrap_or_else(|| {
            let result = Arc::new(dry_run());
            (now(), result)
        });
        for waiter in self.waiters.drain(..) {
            let _ = waiter.answer.send((self.to_answer)(Arc::clone(&result)));
        }
        self.last = Some((at, result));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use pjw_ipc::call::PlanReply;

    use super::*;

    struct TestQueue {
        queue: DryRunQueue<PlanReply>,
        dry_run_count: Cell<usize>,
        now: Instant,
    }

    impl TestQueue {
        fn new() -> Self {
            let queue = DryRunQueue::new(QueryAnswer::Plan);
            Self { queue, dry_run_count: Cell::new(0), now: Instant::now() }
        }

        /// Answers one call for each element of `calls`, which says whether the call requires a new dry run. Returns
        /// the number of dry runs so far.
        fn answer(&mut self, calls: &[bool]) -> usize {
            let receivers: Vec<_> = calls
                .iter()
                .map(|&is_new_required| {
                    let (sender, receiver) = oneshot::channel();
                    self.queue.enqueue(sender, is_new_required);
                    receiver
                })
                .collect();
            self.queue.answer_all(
                || self.now,
                || {
                    self.dry_run_count.set(self.dry_run_count.get() + 1);
                    PlanReply { actions: Vec::new(), warnings: Vec::new() }
                },
            );
            for mut receiver in receivers {
                assert!(matches!(receiver.try_recv(), Ok(QueryAnswer::Plan(_))));
            }
            self.dry_run_count.get()
        }
    }

    #[test]
    fn one_dry_run_answers_all_pending_calls() {
        let mut queue = TestQueue::new();
        assert_eq!(queue.answer(&[]), 0);
        assert_eq!(queue.answer(&[false; 256]), 1);
        queue.now += RECENT;
        assert_eq!(queue.answer(&[true, false, true]), 2);
    }

    #[test]
    fn users_get_a_recent_result_and_administrators_a_new_one() {
        let mut queue = TestQueue::new();
        assert_eq!(queue.answer(&[false]), 1);
        for _ in 0..10 {
            queue.now += RECENT / 20;
            assert_eq!(queue.answer(&[false]), 1, "one a second at most");
        }
        assert_eq!(queue.answer(&[true]), 2);
        queue.now += RECENT / 2;
        assert_eq!(queue.answer(&[false]), 2);
        queue.now += RECENT;
        assert_eq!(queue.answer(&[false]), 3);
    }

    #[test]
    fn no_dry_run_is_made_for_disconnected_clients() {
        let mut queue = TestQueue::new();
        let (sender, receiver) = oneshot::channel();
        queue.queue.enqueue(sender, true);
        drop(receiver);
        assert_eq!(queue.answer(&[]), 0);
    }
}
