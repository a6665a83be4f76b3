//! The locks that the bench `locks` compares with the example: a plain spin lock, an MCS lock, and a mutex of the C
//! library.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::lock::SpinLock;

/// A lock, as the threads of this program use it.
pub trait Lock: Sync {
    /// Runs the function while no other thread runs one with this lock. `thread` is the number of the calling thread.
    fn run_locked(&self, thread: usize, function: &dyn Fn());
}

impl Lock for SpinLock<()> {
    fn run_locked(&self, _thread: usize, function: &dyn Fn()) {
        let _guard = self.lock();
        function();
    }
}

/// A plain spin lock: a waiter spins until the word is free, and tries to set it.
#[derive(Default)]
pub struct TestAndSetLock(AtomicBool);

impl Lock for TestAndSetLock {
    fn run_locked(&self, _thread: usize, function: &dyn Fn()) {
        while self.0.swap(true, Ordering::Acquire) {
            while self.0.load(Ordering::Relaxed) {
                spin_loop();
            }
        }
        function();
        self.0.store(false, Ordering::Release);
    }
}

/// The queue lock of Mellor-Crummey and Scott: the holder passes the lock to the thread that has waited longest. Each
/// thread spins on a word of its own, so a release changes a word that one other thread reads.
pub struct McsLock {
    /// The last thread in the queue, or 0. The number of a thread is its index plus 1.
    tail: AtomicUsize,
    nodes: Vec<McsNode>,
}

/// The place of one thread in the queue. It has cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct McsNode {
    /// The next thread in the queue, or 0.
    next: AtomicUsize,
    is_waiting: AtomicBool,
}

impl McsLock {
    pub fn new(threads: usize) -> Self {
        Self { tail: AtomicUsize::new(0), nodes: (0..threads).map(|_| McsNode::default()).collect() }
    }

    fn lock(&self, thread: usize) {
        let node = &self.nodes[thread];
        node.next.store(0, Ordering::Relaxed);
        node.is_waiting.store(true, Ordering::Relaxed);
        let before = self.tail.swap(thread + 1, Ordering::AcqRel);
        if before != 0 {
            self.nodes[before - 1].next.store(thread + 1, Ordering::Release);
            while node.is_waiting.load(Ordering::Acquire) {
                spin_loop();
            }
        }
    }

    fn unlock(&self, thread: usize) {
        let node = &self.nodes[thread];
        let is_last =
            || self.tail.compare_exchange(thread + 1, 0, Ordering::Release, Ordering::Relaxed).is_ok();
        if node.next.load(Ordering::Relaxed) == 0 && is_last() {
            return;
        }
        // The next thread is in the queue, but this thread may not see it yet.
        while node.next.load(Ordering::Relaxed) == 0 {
            spin_loop();
        }
        let next = node.next.load(Ordering::Acquire);
        self.nodes[next - 1].is_waiting.store(false, Ordering::Release);
    }
}

impl Lock for McsLock {
    fn run_locked(&self, thread: usize, function: &dyn Fn()) {
        self.lock(thread);
        function();
        self.unlock(thread);
    }
}

/// The mutex of the C library. A waiter sleeps at once.
pub struct PthreadMutex(Box<UnsafeCell<libc::pthread_mutex_t>>);

// SAFETY: the functions of the C library may be called by all threads.
unsafe impl Sync for PthreadMutex {}

impl PthreadMutex {
    pub fn new() -> Self {
        Self(Box::new(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER)))
    }
}

impl Lock for PthreadMutex {
    fn run_locked(&self, _thread: usize, function: &dyn Fn()) {
        // SAFETY: the mutex is initialised, and its box never moves it.
        unsafe { libc::pthread_mutex_lock(self.0.get()) };
        function();
        // SAFETY: this thread holds the mutex.
        unsafe { libc::pthread_mutex_unlock(self.0.get()) };
    }
}
