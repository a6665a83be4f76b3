//! The two programs of the bench `lending`.
//!
//! `server` answers requests that arrive at random times, whether the earlier ones are answered or not (an open loop).
//! The demand changes in steps. A request takes a fixed amount of computing. Its latency counts from its arrival, so a
//! request that waits for a worker, or a worker that waits for a CPU, is late.
//!
//! `batch` has one thread for each core. All threads compute a little and then wait for each other at a barrier, as
//! fluidanimate does. So one thread that waits for a CPU delays all.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::io::{Write, stdout};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use pjw_benches::measure::results::quantile;
use serde_json::json;

/// The computing time of one phase of a thread of `batch`, as a number of requests that take as long.
const PHASE_REQUESTS: u64 = 10;
/// The time between two lines of `batch`.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// A server with a changing demand, and a batch program with barriers
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    program: Program,
}

#[derive(Debug, Subcommand)]
enum Program {
    /// Prints how many iterations one request of this length has
    Calibrate {
        /// The length of a request in microseconds
        #[arg(long)]
        request_us: u64,
    },
    /// Answers requests, then prints its throughput and latencies as JSON
    Server(ServerArgs),
    /// Computes until it is killed, and prints the number of phases each 100 ms
    Batch {
        /// The number of threads
        #[arg(long)]
        threads: usize,
        /// The iterations of one request
        #[arg(long)]
        iterations: u64,
    },
}

#[derive(Debug, Args)]
struct ServerArgs {
    /// The number of workers
    #[arg(long)]
    workers: usize,
    /// The iterations of one request
    #[arg(long)]
    iterations: u64,
    /// The length of a request in microseconds, on a core of its own
    #[arg(long)]
    request_us: u64,
    /// The demand of each step, in percent of what the workers can answer
    #[arg(long, value_delimiter = ',')]
    demand: Vec<u64>,
    /// The length of a step in milliseconds
    #[arg(long)]
    step_ms: u64,
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    // If the bench ends, even by SIGKILL, its programs end too.
    set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
    match cli.program {
        Program::Calibrate { request_us } => print_line(&iterations_of(request_us).to_string()),
        Program::Server(args) => answer_requests(&args),
        Program::Batch { threads, iterations } => compute_phases(threads, iterations),
    }
}

fn print_line(line: &str) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("can't write to standard output")
}

/// Computes a chain of operations, each of which needs the result of the one before.
fn work(iterations: u64) -> u64 {
    (0..iterations)
        .fold(1, |value, _| black_box(value).wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1))
}

/// Returns how many iterations of [`work`] take `request_us` µs of CPU time. Measures this by the fastest of many
/// runs, because the fastest run was not interrupted.
fn iterations_of(request_us: u64) -> u64 {
    const TRIAL_ITERATIONS: u64 = 200_000;
    let time = |_| {
        let begin = Instant::now();
        black_box(work(TRIAL_ITERATIONS));
        begin.elapsed().as_nanos().max(1)
    };
    let fastest = (0..200).map(time).min().unwrap_or(1);
    u64::try_from(u128::from(TRIAL_ITERATIONS) * u128::from(request_us) * 1000 / fastest).unwrap_or(u64::MAX)
}

/// Returns the times at which the requests arrive, counted from the start of the server. The times between two requests
/// have an exponential distribution whose mean depends on the demand of the step. The times are the same in every run.
fn arrival_times(args: &ServerArgs) -> Vec<Duration> {
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut times = Vec::new();
    let step = Duration::from_millis(args.step_ms);
    let mut begin = Duration::ZERO;
    for percent in &args.demand {
        let end = begin + step;
        let mean_s = args.request_us as f64 / 1e6 / args.workers as f64 * 100.0 / (*percent).max(1) as f64;
        let mut at = begin;
        loop {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let uniform = ((random >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
            at += Duration::from_secs_f64(-uniform.ln() * mean_s);
            if at >= end {
                break;
            }
            times.push(at);
        }
        begin = end;
    }
    times
}

/// Computes the requests in `args.workers` threads. Prints `ready` at first. At the end, prints as JSON the number of
/// requests, the run time, quantiles of the latency, and the number of answers in each second. The latency of a request
/// is the time from its arrival to the end of its computation.
fn answer_requests(args: &ServerArgs) -> anyhow::Result<()> {
    let arrivals = arrival_times(args);
    let next = AtomicUsize::new(0);
    print_line("ready")?;
    let begin = Instant::now();
    let answer = || {
        let mut answered: Vec<(Duration, Duration)> = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&arrival) = arrivals.get(index) else { return answered };
            let early = arrival.saturating_sub(begin.elapsed());
            if !early.is_zero() {
                thread::sleep(early);
            }
            black_box(work(args.iterations));
            let done = begin.elapsed();
            answered.push((done, done.saturating_sub(arrival)));
        }
    };
    // For each request, the time of its answer since the start, and its latency.
    let answered: Vec<(Duration, Duration)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..args.workers).map(|_| scope.spawn(answer)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    let end = answered.iter().map(|(done, _)| *done).max().unwrap_or_default();
    let mut per_second: Vec<u64> = (0..=end.as_secs()).map(|_| 0).collect();
    for (done, _) in &answered {
        if let Some(count) =
            usize::try_from(done.as_secs()).ok().and_then(|second| per_second.get_mut(second))
        {
            *count += 1;
        }
    }
    let latencies: Vec<f64> = answered.iter().map(|(_, latency)| latency.as_secs_f64() * 1e6).collect();
    let at = |share| quantile(&latencies, share).unwrap_or_default();
    let result = json!({
        "completed": answered.len(),
        "seconds": end.as_secs_f64(),
        "p50_us": at(0.5),
        "p99_us": at(0.99),
        "p999_us": at(0.999),
        "per_second": per_second,
    });
    print_line(&result.to_string())
}

/// Computes in `threads` threads, which wait for each other after each phase. A phase has the work of
/// [`PHASE_REQUESTS`] requests of `iterations` iterations. Prints `ready`, and then every [`REPORT_INTERVAL`] the
/// number of finished phases. Returns only after an error.
fn compute_phases(threads: usize, iterations: u64) -> anyhow::Result<()> {
    let (barrier, phases) = (Barrier::new(threads), AtomicU64::new(0));
    print_line("ready")?;
    thread::scope(|scope| {
        for index in 0..threads {
            let (barrier, phases) = (&barrier, &phases);
            scope.spawn(move || {
                loop {
                    black_box(work(iterations * PHASE_REQUESTS));
                    barrier.wait();
                    if index == 0 {
                        phases.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        loop {
            thread::sleep(REPORT_INTERVAL);
            print_line(&phases.load(Ordering::Relaxed).to_string())?;
        }
    })
}
