//! A job for the bench of pinning: workers of one of four kinds, who go lap after lap until they are killed. Prints
//! `ready` when they start, and after each lap the seconds that it took. A lap is so many steps for each worker; a worker
//! that is early does not wait for the others, and does more laps.
//!
//! `memory`: each worker goes through arrays of its own that no cache holds, as STREAM's triad does; where a thread
//! runs, near its memory or not, decides. `barrier`: workers compute a little and wait for all others, asleep, so one
//! that shares a core holds up all. `bursts`: twice as many workers as asked for compute for a moment and sleep for a
//! moment, each at a pace of its own; where they are pinned badly, one waits while a core is idle. `waves`: as many as asked
//! for do so, and sleep for less: a worker that wakes where another runs waits, if it is pinned there.
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

/// 16 MiB: three of them are more than a core's share of any cache.
const ARRAY_LENGTH: usize = 2 << 20;
/// Some 2 ms of a chain of operations each of which needs the one before.
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
    /// How they work
    #[arg(long, value_enum)]
    kind: WorkKind,
    /// How many
    #[arg(long)]
    workers: usize,
    /// How many steps of each, on average, are a lap
    #[arg(long)]
    steps: u64,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // The end of the bench, even by SIGKILL, ends its jobs.
    set_pdeathsig(Signal::SIGKILL).context("can't ask to end with the bench")?;
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

/// How far all workers are.
#[derive(Debug)]
struct Laps {
    steps: u64,
    done: AtomicU64,
    /// When the last lap ended.
    lap_began: Mutex<Instant>,
}

impl Laps {
    fn new(steps: u64) -> Self {
        Self { steps: steps.max(1), done: AtomicU64::new(0), lap_began: Mutex::new(Instant::now()) }
    }

    /// A step is done; tells of the lap if it was its last.
    fn count_step(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        if done.is_multiple_of(self.steps) {
            // Nobody panics while he has it.
            let mut lap_began = self.lap_began.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let lap = now.saturating_duration_since(std::mem::replace(&mut *lap_began, now));
            print_line(&format!("{:.6}", lap.as_secs_f64()));
        }
    }
}

/// A worker's steps.
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

/// `a = b + 3 c`, McCalpin's STREAM.
fn triad(a: &mut [f64], b: &[f64], c: &[f64]) {
    for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
        *a = b + 3.0 * c;
    }
}

/// A moment asleep. Its lengths are primes: no two of four workers stay in step.
fn sleep_briefly(index: usize) {
    thread::sleep(Duration::from_micros([1_009, 2_003, 1_511, 2_503][index % 4]));
}

/// A linear congruential generator: every link needs the last one.
fn compute_chain(mut value: u64, length: u64) -> u64 {
    for _ in 0..length {
        // Without this the compiler finds out what many links make at once.
        value =
            black_box(value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
    }
    value
}

/// A line for the bench, which may be gone: then nobody needs it.
fn print_line(line: &str) {
    let mut out = stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
