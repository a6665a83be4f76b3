//! A barrier at which threads spin. Parallel programs that own their cores wait in this way.
//!
//! The barrier is sense-reversing: the last thread to arrive resets the count and flips the sense for which the
//! others wait. So the barrier is ready for the next round at once. No thread yields or sleeps. A thread that spins
//! on a core keeps other threads from running there, perhaps the very thread that it waits for. The demo shows this
//! effect.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A barrier for a fixed number of threads.
#[derive(Debug)]
pub struct SpinBarrier {
    threads: usize,
    remaining: AtomicUsize,
    sense: AtomicBool,
}

/// The state of one thread at the barrier: the sense for which the thread waits next.
#[derive(Debug)]
pub struct BarrierWaiter<'a> {
    barrier: &'a SpinBarrier,
    sense: bool,
}

impl SpinBarrier {
    /// Makes a barrier for `threads` threads, at least one.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        Self { threads, remaining: AtomicUsize::new(threads), sense: AtomicBool::new(false) }
    }

    /// Returns the state for one thread. The thread must take part in every round.
    #[must_use]
    pub fn waiter(&self) -> BarrierWaiter<'_> {
        BarrierWaiter { barrier: self, sense: true }
    }
}

impl BarrierWaiter<'_> {
    /// Waits until every thread has arrived.
    pub fn wait(&mut self) {
        let SpinBarrier { threads, remaining, sense } = self.barrier;
        // Release the writes of this thread, acquire the writes of the others.
        if remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            remaining.store(*threads, Ordering::Relaxed);
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
    fn no_thread_starts_a_round_before_the_others() {
        const THREADS: usize = 3;
        const ROUNDS: usize = 50;
        let barrier = SpinBarrier::new(THREADS);
        let arrived = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let mut waiter = barrier.waiter();
                    for round in 1..=ROUNDS {
                        arrived.fetch_add(1, Ordering::Relaxed);
                        waiter.wait();
                        assert_eq!(arrived.load(Ordering::Relaxed), round * THREADS);
                        waiter.wait();
                    }
                });
            }
        });
    }

    #[test]
    fn a_barrier_of_one_thread_never_waits() {
        let barrier = SpinBarrier::new(1);
        let mut waiter = barrier.waiter();
        (0..10).for_each(|_| waiter.wait());
    }
}
