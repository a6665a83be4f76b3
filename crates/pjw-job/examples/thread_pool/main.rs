//! A thread pool whose number of workers follows the core map: `pool.rs`. This program runs rounds of short tasks
//! without end, and prints after each round how many workers there are and how many tasks they run in a second.
//!
//! ```text
//! pjwctl run --job pool --cores 4 -- target/release/examples/thread_pool
//! pjwctl assign pool --cores 2
//! ```
#![allow(clippy::print_stdout, unreachable_pub)]

mod pool;

use std::hint::black_box;
use std::sync::mpsc;
use std::time::Instant;

use pjw_job::Job;

use pool::ThreadPool;

const TASKS_PER_ROUND: u32 = 10_000;

fn main() -> std::io::Result<()> {
    let pool = ThreadPool::new(Job::of_this_process())?;
    loop {
        let begun = Instant::now();
        let (sender, receiver) = mpsc::channel::<()>();
        for _ in 0..TASKS_PER_ROUND {
            let sender = sender.clone();
            pool.execute(move || {
                black_box((0..200_000_u64).map(black_box).sum::<u64>());
                drop(sender);
            });
        }
        drop(sender);
        // The channel is closed when the last task has dropped its sender.
        let _ = receiver.recv();
        let rate = f64::from(TASKS_PER_ROUND) / begun.elapsed().as_secs_f64();
        println!("{} workers, {rate:.0} tasks/s", pool.worker_count());
    }
}
