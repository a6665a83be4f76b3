//! A barrier at which threads spin. Parallel programs that own their cores wait in this way.
//!
//! The barrier is sense-reversing: the last thread to arrive resets the count and flips the sense for which the
//! others wait. So the barrier is ready for the next round at once. No thread yields or sleeps. A thread that spins
//! on a core keeps other threads from running there, perhaps the very thread that it waits for. The demo shows this
//! effect.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A barrier for a fixed number of threads: each thread waits at the barrier until all have arrived. A waiting thread
/// spins, and does not sleep. After that, the barrier can be used again at once.
#[derive(Debug)]
pub struct SpinBarrier {
    threads: usize,
    /// The number of threads that have not arrived yet.
    remaining: AtomicUsize,
    /// Flips when the last thread arrives.
    sense: AtomicBool,
}

/// One thread's access to a [`SpinBarrier`], with the state that this thread has there.
#[derive(Debug)]
pub struct BarrierWaiter<'a> {
    barrier: &'a SpinBarrier,
    /// The sense for which this thread waits next.
    sense: bool,
}

impl SpinBarrier {
    /// Makes a barrier for `threads` threads. 0 counts as 1.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        Self { threads, remaining: AtomicUsize::new(threads), sense: AtomicBool::new(false) }
    }

    /// Returns the access to this barrier for one thread. Each thread needs a value of its own, and must wait in every
    /// use of the barrier.
    #[must_use]
    pub fn waiter(&self) -> BarrierWaiter<'_> {
        BarrierWaiter { barrier: self, sense: true }
    }
}

impl BarrierWaiter<'_> {
    /// Waits until all threads of the barrier have called this function. The thread spins meanwhile.
    pub fn wait(&mut self) {
        let SpinBarrier { threads, remaining, sense } = self.barrier;
        // AcqRel releases the writes of this thread and acquires the writes of the others.
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
