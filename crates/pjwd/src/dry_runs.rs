//! Answering `plan` and `plan --defrag`: a dry run looks at every thread of the node, or tries many moves, so one answers
//! all who wait, and plain users get a recent one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::question::Answer;

/// So old an answer is still good enough for a plain user.
const RECENT: Duration = Duration::from_secs(1);

/// Who waits for a dry run, and the last one.
#[derive(Debug)]
pub struct DryRuns<T> {
    waiting: Vec<Waiting>,
    last: Option<(Instant, Arc<T>)>,
    /// Which answer it makes.
    tell: fn(Arc<T>) -> Answer,
}

#[derive(Debug)]
struct Waiting {
    answer: oneshot::Sender<Answer>,
    /// Whether only a dry run of now will do.
    fresh: bool,
}

impl<T> DryRuns<T> {
    /// Nobody waits yet.
    #[must_use]
    pub fn new(tell: fn(Arc<T>) -> Answer) -> Self {
        Self { waiting: Vec::new(), last: None, tell }
    }

    /// Notes that somebody asks; `fresh` is for administrators.
    pub fn ask(&mut self, answer: oneshot::Sender<Answer>, fresh: bool) {
        self.waiting.push(Waiting { answer, fresh });
    }

    /// Answers everybody who waits, by one dry run at most.
    pub fn answer(&mut self, now: impl Fn() -> Instant, dry_run: impl FnOnce() -> T) {
        // Whoever asked may have hung up.
        self.waiting.retain(|waiting| !waiting.answer.is_closed());
        if self.waiting.is_empty() {
            return;
        }
        let fresh = self.waiting.iter().any(|waiting| waiting.fresh);
        let recent = self.last.take().filter(|(at, _)| !fresh && now().duration_since(*at) < RECENT);
        // Its age counts from its end: a slow one must not be followed by the next at once.
        let (at, told) = recent.unwrap_or_else(|| {
            let told = Arc::new(dry_run());
            (now(), told)
        });
        for waiting in self.waiting.drain(..) {
            let _ = waiting.answer.send((self.tell)(Arc::clone(&told)));
        }
        self.last = Some((at, told));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use pjw_ipc::call::PlanReply;

    use super::*;

    struct Bench {
        runs: DryRuns<PlanReply>,
        made: Cell<usize>,
        now: Instant,
    }

    impl Bench {
        fn new() -> Self {
            Self { runs: DryRuns::new(Answer::Plan), made: Cell::new(0), now: Instant::now() }
        }

        /// One turn in which these ask; says how many dry runs there have been when all are answered.
        fn turn(&mut self, asking: &[bool]) -> usize {
            let told: Vec<_> = asking
                .iter()
                .map(|&fresh| {
                    let (answer, told) = oneshot::channel();
                    self.runs.ask(answer, fresh);
                    told
                })
                .collect();
            self.runs.answer(
                || self.now,
                || {
                    self.made.set(self.made.get() + 1);
                    PlanReply { actions: Vec::new(), abstained: Vec::new() }
                },
            );
            for mut told in told {
                assert!(matches!(told.try_recv(), Ok(Answer::Plan(_))));
            }
            self.made.get()
        }
    }

    #[test]
    fn one_dry_run_answers_all_who_wait() {
        let mut bench = Bench::new();
        assert_eq!(bench.turn(&[]), 0);
        assert_eq!(bench.turn(&[false; 256]), 1);
        bench.now += RECENT;
        assert_eq!(bench.turn(&[true, false, true]), 2);
    }

    #[test]
    fn plain_users_get_a_recent_one_and_administrators_a_new_one() {
        let mut bench = Bench::new();
        assert_eq!(bench.turn(&[false]), 1);
        for _ in 0..10 {
            bench.now += RECENT / 20;
            assert_eq!(bench.turn(&[false]), 1, "one a second at most");
        }
        assert_eq!(bench.turn(&[true]), 2);
        bench.now += RECENT / 2;
        assert_eq!(bench.turn(&[false]), 2);
        bench.now += RECENT;
        assert_eq!(bench.turn(&[false]), 3);
    }

    #[test]
    fn nobody_is_looked_for_who_has_hung_up() {
        let mut bench = Bench::new();
        drop({
            let (answer, told) = oneshot::channel();
            bench.runs.ask(answer, true);
            told
        });
        assert_eq!(bench.turn(&[]), 0);
    }
}
