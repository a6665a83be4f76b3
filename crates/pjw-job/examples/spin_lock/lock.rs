//! A spin lock for programs whose cores come and go. Copy this file, and change it as you need.
//!
//! A plain spin lock is fast while each thread has a core of its own. Without it, a waiter can spin for milliseconds
//! while the thread that holds the lock waits for a core. In this lock, the holder stores its CPU. A waiter spins only
//! while the holder can run: while the job has that CPU, and the waiter itself does not run there.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pjw_job::{Job, Pu};

/// The word of a lock that no thread holds.
const FREE: u32 = 0;
/// The bit of the word that says that threads sleep until the lock is released.
const HAS_SLEEPERS: u32 = 1 << 31;
/// How often a waiter looks at the word until it looks at the core map.
const SPINS: u32 = 50;

/// A value that one thread at a time can use.
pub struct SpinLock<T> {
    /// `FREE`, or the number of the holder's CPU plus 1. The latter may have the bit `HAS_SLEEPERS` besides.
    word: AtomicU32,
    job: Arc<Job>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is used through a guard only, and there is one guard at a time. So the threads pass the value on.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    /// Makes a lock for the threads of a job.
    pub fn new(job: Arc<Job>, value: T) -> Self {
        Self { word: AtomicU32::new(FREE), job, value: UnsafeCell::new(value) }
    }

    /// Waits until no other thread holds the lock, and takes it. The thread holds it until the guard is dropped.
    pub fn lock(&self) -> SpinGuard<'_, T> {
        // A thread that slept can't know whether others still sleep, so it says that they do.
        let mut sleepers = 0;
        loop {
            let word = self.spin();
            if word == FREE {
                let held = (current_cpu() + 1) | sleepers;
                if self.word.compare_exchange(FREE, held, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return SpinGuard { lock: self, value: PhantomData };
                }
                continue;
            }
            let holder_cpu = (word & !HAS_SLEEPERS) - 1;
            if !self.job.has_cpu(Pu(holder_cpu)) {
                self.sleep(word);
                sleepers = HAS_SLEEPERS;
            } else if holder_cpu == current_cpu() {
                std::thread::yield_now();
            }
        }
    }

    /// Spins until the lock is free, but not for long. Returns the word.
    fn spin(&self) -> u32 {
        for _ in 0..SPINS {
            if self.word.load(Ordering::Relaxed) == FREE {
                return FREE;
            }
            spin_loop();
        }
        self.word.load(Ordering::Relaxed)
    }

    /// Sleeps until the lock is released, unless the word has changed already.
    fn sleep(&self, word: u32) {
        let marked = word | HAS_SLEEPERS;
        if self.word.compare_exchange(word, marked, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            futex(&self.word, libc::FUTEX_WAIT, marked);
        }
    }

    fn unlock(&self) {
        if self.word.swap(FREE, Ordering::Release) & HAS_SLEEPERS != 0 {
            futex(&self.word, libc::FUTEX_WAKE, 1);
        }
    }
}

/// The right to use the value of a lock. The lock is released when the guard is dropped.
pub struct SpinGuard<'a, T> {
    lock: &'a SpinLock<T>,
    /// The guard can be shared with other threads, or sent to them, only if a `&mut T` can.
    value: PhantomData<&'a mut T>,
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: no other thread has a guard of this lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: no other thread has a guard of this lock, and this guard is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    fn drop(&mut self) {
        self.lock.unlock();
    }
}

/// Returns the CPU on which this thread runs. The C library reads it from the memory that it shares with the kernel
/// (rseq(2)).
fn current_cpu() -> u32 {
    // SAFETY: the call has no arguments.
    let cpu = unsafe { libc::sched_getcpu() };
    u32::try_from(cpu).unwrap_or(0)
}

/// Waits until the word is not `value` any more or a thread is woken (`FUTEX_WAIT`), or wakes `value` threads
/// (`FUTEX_WAKE`).
fn futex(word: &AtomicU32, operation: libc::c_int, value: u32) {
    let operation = operation | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word lives until the call returns, and the kernel only reads it. Without a timeout the pointer is
    // null.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, std::ptr::null::<libc::timespec>())
    };
}
