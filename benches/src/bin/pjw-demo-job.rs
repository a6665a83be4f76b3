//! The job of the demo: workers that compute in steps and wait at a spinning barrier after each step, as the ranks of
//! a parallel program do. The program prints `ready` when all workers run, and at its end its run time in seconds.
//!
//! A step is a chain of integer operations, each of which needs the result of the one before. So its time depends on
//! the CPU time of the thread, not on caches, memory or the other hardware thread of the core.
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
    /// The number of workers
    #[arg(long)]
    workers: usize,
    /// The number of steps of each worker; 0 to run until the process is ended
    #[arg(long)]
    steps: u64,
    /// The length of the chain that each worker computes in a step
    #[arg(long, default_value_t = 4_000_000)]
    work: u64,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // If the demo ends, even by SIGKILL, its jobs end too.
    set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
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

/// Computes the steps of one worker, and calls `wait_at_barrier` after each step. Does not return if the number of
/// steps is 0. `seed` makes the results of the workers different.
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

/// Computes `length` values of a linear congruential generator. Each value needs the one before.
fn compute_chain(mut value: u64, length: u64) -> u64 {
    for _ in 0..length {
        value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    }
    value
}

/// Prints a line. An error is ignored: the demo may have ended.
fn print_line(line: &str) {
    let mut out = stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
