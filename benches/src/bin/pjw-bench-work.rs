//! The job of the bench `pinning`: workers of one of four kinds that run until the process is killed. The program
//! prints `ready` when the workers start, and after each lap its time in seconds. A lap is a number of steps of all
//! workers together. Except in `barrier`, the workers do not wait for each other, so a fast worker does more of the
//! steps.
//!
//! - `memory`: each worker goes through arrays of its own that are larger than the caches, as the triad of STREAM
//!   does. The time depends on how near the thread is to its memory.
//! - `barrier`: the workers compute a little and then sleep until all have arrived. So one worker that shares a core
//!   delays all workers.
//! - `bursts`: twice as many workers as `--workers` compute and sleep in turns, each at a pace of its own. With a bad
//!   pin, a worker waits while another core is idle.
//! - `waves`: `--workers` workers compute and sleep in turns, with longer computations. A worker that wakes on a busy
//!   core waits if it is pinned there.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::io::{Write, stdout};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Parser, ValueEnum};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;

/// The length of an array: 16 MiB. Three arrays are larger than the share of a core in any cache.
const ARRAY_LENGTH: usize = 2 << 20;
/// The length of a chain of operations, each of which needs the result of the one before: about 2 ms.
const CHAIN_LENGTH: u64 = 1_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WorkKind {
    Memory,
    Barrier,
    Bursts,
    Waves,
}

/// Workers that compute in one of four ways
#[derive(Debug, Parser)]
struct Args {
    /// The kind of work
    #[arg(long, value_enum)]
    kind: WorkKind,
    /// The number of workers; bursts starts twice as many
    #[arg(long)]
    workers: usize,
    /// The mean number of steps of a worker in a lap
    #[arg(long)]
    steps: u64,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // If the bench ends, even by SIGKILL, its jobs end too.
    set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
    let workers = if args.kind == WorkKind::Bursts { 2 * args.workers } else { args.workers };
    let barrier = Barrier::new(workers);
    let laps = Laps::new(args.steps * workers as u64);
    print_line("ready");
    thread::scope(|scope| {
        for index in 0..workers {
            let (barrier, laps) = (&barrier, &laps);
            scope.spawn(move || run_worker(args.kind, index, barrier, laps));
        }
    });
    Ok(())
}

/// Counts the steps of all workers, and prints the time of each lap. A lap is a fixed number of steps.
#[derive(Debug)]
struct Laps {
    /// The number of steps of all workers in a lap.
    steps: u64,
    /// The number of steps since the start.
    done: AtomicU64,
    /// The time at which the last lap ended, or the start.
    lap_began: Mutex<Instant>,
}

impl Laps {
    fn new(steps: u64) -> Self {
        Self { steps: steps.max(1), done: AtomicU64::new(0), lap_began: Mutex::new(Instant::now()) }
    }

    /// Counts a step. Prints the time of the lap if this step was the last one of the lap.
    fn count_step(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        if done.is_multiple_of(self.steps) {
            // No thread panics while it holds the lock.
            let mut lap_began = self.lap_began.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let lap = now.saturating_duration_since(std::mem::replace(&mut *lap_began, now));
            print_line(&format!("{:.6}", lap.as_secs_f64()));
        }
    }
}

/// Computes steps of the kind `kind` until the process ends. `index` is the number of the worker. All workers wait
/// for each other at `barrier` before the first step, and with [`WorkKind::Barrier`] in each step. Counts each step
/// in `laps`.
fn run_worker(kind: WorkKind, index: usize, barrier: &Barrier, laps: &Laps) -> ! {
    let mut value = index as u64;
    let array_length = if kind == WorkKind::Memory { ARRAY_LENGTH } else { 0 };
    let (mut a, b, c) = (vec![0.0; array_length], vec![1.0; array_length], vec![2.0; array_length]);
    barrier.wait();
    loop {
        match kind {
            WorkKind::Memory => {
                triad(&mut a, black_box(&b), black_box(&c));
                black_box(&mut a);
            }
            WorkKind::Barrier => {
                value = black_box(compute_chain(value, CHAIN_LENGTH));
                barrier.wait();
            }
            WorkKind::Bursts => {
                value = black_box(compute_chain(value, CHAIN_LENGTH));
                sleep_briefly(index);
            }
            WorkKind::Waves => {
                value = black_box(compute_chain(value, 4 * CHAIN_LENGTH));
                sleep_briefly(index);
            }
        }
        laps.count_step();
    }
}

/// Computes `a = b + 3 c`, the triad of McCalpin's STREAM.
fn triad(a: &mut [f64], b: &[f64], c: &[f64]) {
    for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
        *a = b + 3.0 * c;
    }
}

/// Sleeps for 1 to 3 ms. The times are primes, so that the workers do not stay in step.
fn sleep_briefly(index: usize) {
    thread::sleep(Duration::from_micros([1_009, 2_003, 1_511, 2_503][index % 4]));
}

/// Computes `length` values of a linear congruential generator. Each value needs the one before.
fn compute_chain(mut value: u64, length: u64) -> u64 {
    for _ in 0..length {
        // Without black_box, the compiler computes many values at once.
        value =
            black_box(value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
    }
    value
}

/// Prints a line. An error is ignored: the bench may have ended.
fn print_line(line: &str) {
    let mut out = stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
