//! A job for the demo: workers that compute in steps and meet at a spinning barrier after each, as the ranks of a
//! parallel program do. Prints `ready` once all workers run, and the seconds it took at its end.
//!
//! The work is a chain of integer operations each of which needs the one before: how fast it goes depends on how
//! often its thread has a core, not on caches, memory or what the core's other hardware thread does.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::io::{Write, stdout};
use std::time::Instant;

use anyhow::Context;
use clap::Parser;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use pjw_benches::load::barrier::SpinBarrier;

/// Workers that compute in steps and spin at a barrier after each
#[derive(Debug, Parser)]
struct Args {
    /// How many
    #[arg(long)]
    workers: usize,
    /// How many steps; 0 goes on until it is ended
    #[arg(long)]
    steps: u64,
    /// How much each worker computes in a step, in links of the chain
    #[arg(long, default_value_t = 4_000_000)]
    work: u64,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // The end of the demo, even by SIGKILL, ends its jobs.
    set_pdeathsig(Signal::SIGKILL).context("can't ask to end with the demo")?;
    let barrier = SpinBarrier::new(args.workers);
    let seconds = std::thread::scope(|scope| {
        for seed in 2..=args.workers as u64 {
            let mut waiter = barrier.waiter();
            let args = &args;
            scope.spawn(move || {
                waiter.wait();
                run_steps(args, seed, || waiter.wait());
            });
        }
        let mut waiter = barrier.waiter();
        waiter.wait();
        print_line("ready");
        let start = Instant::now();
        run_steps(&args, 1, || waiter.wait());
        start.elapsed().as_secs_f64()
    });
    print_line(&format!("{seconds:.6}"));
    Ok(())
}

fn run_steps(args: &Args, seed: u64, mut wait_at_barrier: impl FnMut()) {
    let mut value = seed;
    let mut left = args.steps;
    loop {
        value = compute_chain(value, args.work);
        wait_at_barrier();
        left = left.saturating_sub(1);
        if left == 0 && args.steps > 0 {
            break;
        }
    }
    black_box(value);
}

/// A linear congruential generator: every link needs the last one.
fn compute_chain(mut value: u64, length: u64) -> u64 {
    for _ in 0..length {
        value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    }
    value
}

/// A line for the demo, which may be gone: then nobody needs it.
fn print_line(line: &str) {
    let mut out = stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
