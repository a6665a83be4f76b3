//! A spin lock whose waiters stop spinning when the holder's core has left: `lock.rs`. In this program, threads take a
//! lock in turns. Each 100 ms it prints the time in seconds, and how often the lock was taken since the start.
//!
//! ```text
//! pjwctl run --job locks --cores 4 -- target/release/examples/spin_lock 4
//! pjwctl assign locks --cores 2
//! ```
//!
//! The first argument is the number of threads. The second one, `test-and-set`, `mcs` or `pthread`, names another lock
//! to compare with.
#![allow(clippy::print_stdout, unreachable_pub)]

mod lock;
mod peers;

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pjw_job::Job;

use lock::SpinLock;
use peers::{Lock, McsLock, PthreadMutex, TestAndSetLock};

const REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// The length of a chain of operations, each of which needs the result of the one before: about 0.2 microseconds.
const CHAIN_LENGTH: u64 = 100;

/// How often a thread took the lock. It has cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Count(AtomicU64);

fn main() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let threads =
        arguments.next().map_or(Ok(2), |threads| threads.parse()).map_err(|error| format!("{error}"))?;
    let lock: Box<dyn Lock> = match arguments.next().as_deref() {
        None | Some("example") => Box::new(SpinLock::new(Arc::new(Job::of_this_process()), ())),
        Some("test-and-set") => Box::new(TestAndSetLock::default()),
        Some("mcs") => Box::new(McsLock::new(threads)),
        Some("pthread") => Box::new(PthreadMutex::new()),
        Some(other) => return Err(format!("there is no lock {other:?}")),
    };
    let counts: Vec<Count> = (0..threads).map(|_| Count::default()).collect();
    let begun = Instant::now();
    thread::scope(|scope| {
        for (thread, count) in counts.iter().enumerate() {
            let lock = &lock;
            scope.spawn(move || {
                loop {
                    lock.run_locked(thread, &compute);
                    compute();
                    count.0.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        loop {
            thread::sleep(REPORT_INTERVAL);
            let all: u64 = counts.iter().map(|count| count.0.load(Ordering::Relaxed)).sum();
            println!("{:.4} {all}", begun.elapsed().as_secs_f64());
        }
    })
}

fn compute() {
    let step = |value: u64| black_box(value).wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    black_box((0..CHAIN_LENGTH).fold(1, |value, _| step(value)));
}
