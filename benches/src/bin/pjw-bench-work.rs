//! A job for the bench of pinning: workers of one of three kinds. Prints `ready` once all workers run, and the seconds
//! it took at its end.
//!
//! `memory`: each worker goes through arrays of its own that no cache holds, as STREAM's triad does; where a thread
//! runs, near its memory or not, decides. `barrier`: workers compute a little and wait for all others, asleep, so one
//! that shares a core holds up all. `bursts`: twice as many workers as asked for compute for a moment and sleep for a
//! moment, each at a pace of its own; where they are pinned badly, one waits while a core is idle.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::io::{Write, stdout};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Parser, ValueEnum};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;

/// 16 MiB: three of them are more than a core's share of any cache.
const WORDS: usize = 2 << 20;
/// Some 2 ms of a chain of operations each of which needs the one before.
const LINK: u64 = 1_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Memory,
    Barrier,
    Bursts,
}

/// Workers that compute in one of three ways
#[derive(Debug, Parser)]
struct Args {
    /// How they work
    #[arg(long, value_enum)]
    kind: Kind,
    /// How many
    #[arg(long)]
    workers: usize,
    /// How many steps each does
    #[arg(long)]
    steps: u64,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // Whoever ends the bench, even with SIGKILL, ends its jobs.
    set_pdeathsig(Signal::SIGKILL).context("can't ask to end with the bench")?;
    let workers = if args.kind == Kind::Bursts { 2 * args.workers } else { args.workers };
    let together = Barrier::new(workers);
    say("ready");
    let begin = Instant::now();
    thread::scope(|scope| {
        for number in 0..workers {
            let together = &together;
            scope.spawn(move || {
                together.wait();
                work(args.kind, args.steps, number, together);
            });
        }
    });
    say(&format!("{:.6}", begin.elapsed().as_secs_f64()));
    Ok(())
}

fn work(kind: Kind, steps: u64, number: usize, together: &Barrier) {
    let mut link = number as u64;
    match kind {
        Kind::Memory => {
            let (mut a, b, c) = (vec![0.0; WORDS], vec![1.0; WORDS], vec![2.0; WORDS]);
            for _ in 0..steps {
                triad(&mut a, black_box(&b), black_box(&c));
                black_box(&mut a);
            }
        }
        Kind::Barrier => {
            for _ in 0..steps {
                link = chain(link, LINK);
                together.wait();
            }
        }
        Kind::Bursts => {
            for _ in 0..steps {
                link = chain(link, LINK);
                // Primes: no two of them stay in step.
                thread::sleep(Duration::from_micros([1_009, 2_003, 1_511, 2_503][number % 4]));
            }
        }
    }
    black_box(link);
}

/// `a = b + 3 c`, McCalpin's STREAM.
fn triad(a: &mut [f64], b: &[f64], c: &[f64]) {
    for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
        *a = b + 3.0 * c;
    }
}

/// A linear congruential generator: every link needs the last one.
fn chain(mut link: u64, length: u64) -> u64 {
    for _ in 0..length {
        link = link.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    }
    link
}

/// A line for the bench, which may be gone: then nobody needs it.
fn say(line: &str) {
    let mut out = stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
