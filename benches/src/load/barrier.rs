//! A barrier at which threads spin: the way parallel programs wait that own their cores.
//!
//! Sense-reversing: the last thread to arrive resets the count and flips the sense that the others watch, so the
//! barrier is ready for the next round at once. Nobody yields or sleeps. That is the point of the demo: a thread
//! that spins on a core keeps the one it waits for from running there.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The barrier.
#[derive(Debug)]
pub struct SpinBarrier {
    threads: usize,
    missing: AtomicUsize,
    sense: AtomicBool,
}

/// A thread's place at the barrier: the sense it waits for next.
#[derive(Debug)]
pub struct Place<'a> {
    barrier: &'a SpinBarrier,
    sense: bool,
}

impl SpinBarrier {
    /// A barrier for so many threads, at least one.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        Self { threads, missing: AtomicUsize::new(threads), sense: AtomicBool::new(false) }
    }

    /// A place for one thread, which must take part in every round.
    #[must_use]
    pub fn place(&self) -> Place<'_> {
        Place { barrier: self, sense: true }
    }
}

impl Place<'_> {
    /// Waits until every thread is here.
    pub fn wait(&mut self) {
        let SpinBarrier { threads, missing, sense } = self.barrier;
        // Release what this thread did before, acquire what the others did.
        if missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            missing.store(*threads, Ordering::Relaxed);
            sense.store(self.sense, Ordering::Release);
        } else {
            while sense.load(Ordering::Acquire) != self.sense {
                spin_loop();
            }
        }
        self.sense = !self.sense;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_a_round_ahead() {
        const THREADS: usize = 3;
        const ROUNDS: usize = 50;
        let barrier = SpinBarrier::new(THREADS);
        let arrived = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let mut place = barrier.place();
                    for round in 1..=ROUNDS {
                        arrived.fetch_add(1, Ordering::Relaxed);
                        place.wait();
                        assert_eq!(arrived.load(Ordering::Relaxed), round * THREADS);
                        place.wait();
                    }
                });
            }
        });
    }

    #[test]
    fn one_thread_waits_for_nobody() {
        let barrier = SpinBarrier::new(1);
        let mut place = barrier.place();
        (0..10).for_each(|_| place.wait());
    }
}
