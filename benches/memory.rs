//! Measures the time of `GetStatus` while `pjwctl show JOB --memory` reads the memory of a large job again and again,
//! beside the same call without a reading. The two take turns.
//!
//! `--gib N`, or `PJW_BENCH_MEMORY_GIB`, is the resident memory of the job. Without them it is the smaller of 16 GiB
//! and 60 % of the memory that the machine has available. A job that is larger than the available memory has several
//! processes, which share their memory.
#![forbid(unsafe_code)]

use std::env;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use pjw_benches::load::memory_process::{MemoryProcesses, available_bytes, run_as_memory_process};
use pjw_benches::measure::chart::Chart;
use pjw_benches::measure::results::{Figure, median, print_line, publish, quantile, target_directory};
use pjw_benches::peers::echo::RawClient;
use pjw_benches::programs::daemon::{EventSource, PrivateWarden};
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_ipc::client::Client;
use serde_json::{Value, json};

const STATUS_CALL: &[u8] = b"{\"method\":\"org.pjw.Warden.GetStatus\",\"parameters\":{}}\0";
/// The time between two calls.
const PAUSE: Duration = Duration::from_millis(1);
/// The memory of the job, in bytes, if nothing says otherwise and so much fits: 16 GiB.
const DEFAULT_BYTES: u64 = 16 << 30;
const JOB: &str = "large";

fn main() -> anyhow::Result<()> {
    run_as_memory_process()?;
    let Setup { effort, interrupt, programs, scale } = Setup::prepare()?;
    let bytes = job_bytes(effort)?;
    let large = MemoryProcesses::start(bytes, &interrupt)?;
    let processes = large.pids().len();
    print_line(&format!("the job has {} MiB of resident memory, processes: {processes}", bytes >> 20))?;
    let keys = format!("housekeeping = \"{}\"\n", scale.unusable_pus);
    let warden = PrivateWarden::start_with_config(&programs, &keys, EventSource::ProcEvents, &interrupt)?;
    let _: Value = Client::connect(&warden.socket())?
        .call("Assign", &json!({ "job": JOB, "cores": 1, "pids": large.pids() }))?;
    let first = read_memory(&warden)?;
    ensure!(
        first.resident_bytes >= bytes,
        "pjwctl shows {} bytes of resident memory, and the job has {bytes}",
        first.resident_bytes
    );
    let window = Duration::from_millis(effort.pick(500, 4000));
    let (mut beside_reading, mut without_reading) = (Latencies::default(), Latencies::default());
    let mut costs_ms = Vec::new();
    for round in 0..effort.pick(2, 10) {
        interrupt.check()?;
        // The two take turns. Each one is first in every second round.
        for is_reading in [round % 2 == 0, round % 2 != 0] {
            let socket = warden.socket();
            if is_reading {
                costs_ms.extend(while_reading(&warden, || beside_reading.measure(&socket, window))?);
            } else {
                without_reading.measure(&socket, window)?;
            }
        }
    }
    let cost_ms = median(&costs_ms).context("no reading was complete: use a longer run")?;
    print_line(&format!("{} readings, each with {cost_ms:.0} ms of CPU time", costs_ms.len()))?;
    publish("memory", &figures(bytes >> 20, &beside_reading, &without_reading)?)
}

/// Returns the memory that the job is to have, in bytes.
fn job_bytes(effort: Effort) -> anyhow::Result<u64> {
    let mut arguments = env::args().skip_while(|argument| argument != "--gib");
    let wanted = match (arguments.next(), env::var("PJW_BENCH_MEMORY_GIB")) {
        (Some(_), _) => Some(arguments.next().unwrap_or_default()),
        (None, variable) => variable.ok(),
    };
    let Some(wanted) = wanted else {
        return Ok(effort.pick(1 << 28, DEFAULT_BYTES.min(available_bytes()? / 10 * 6)));
    };
    let gib: Option<u64> = wanted.parse().ok().filter(|gib| (1..=1 << 20).contains(gib));
    let gib = gib.with_context(|| {
        format!(
            "{wanted:?} is no size of the job: --gib and PJW_BENCH_MEMORY_GIB take a whole number of GiB, \
             such as 16"
        )
    })?;
    Ok(gib << 30)
}

/// The times of the calls, one entry for each turn. The unit is microseconds.
#[derive(Debug, Default)]
struct Latencies {
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
}

impl Latencies {
    /// Measures `GetStatus` as an interactive caller calls it: one call in each millisecond.
    fn measure(&mut self, socket: &Path, window: Duration) -> anyhow::Result<()> {
        let mut client = RawClient::connect(socket)?;
        let began = Instant::now();
        let mut times = Vec::new();
        while began.elapsed() < window {
            let called_at = Instant::now();
            client.call(STATUS_CALL)?;
            times.push(called_at.elapsed().as_secs_f64() * 1e6);
            thread::sleep(PAUSE);
        }
        self.p50_us.extend(quantile(&times, 0.5));
        self.p99_us.extend(quantile(&times, 0.99));
        Ok(())
    }
}

/// What `pjwctl show JOB --memory` shows.
#[derive(Debug, Clone, Copy)]
struct Reading {
    /// The CPU time of the reading in pjwd, in ms.
    cost_ms: f64,
    /// The sum of the resident set sizes, in bytes.
    resident_bytes: u64,
}

/// Reads the memory of the job once with `pjwctl show --memory`. Returns the CPU time of the reading and the resident
/// memory of the job.
fn read_memory(warden: &PrivateWarden) -> anyhow::Result<Reading> {
    let job = format!("manual:{JOB}");
    let output = warden.pjwctl_command(&["show", &job, "--memory", "--json"]).output();
    let output = output.context("can't start pjwctl")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "pjwctl show {job} --memory failed: {}", stderr.trim_end());
    let shown: Value = serde_json::from_slice(&output.stdout).context("pjwctl printed no JSON")?;
    let memory = &shown["memory"];
    let cost_us = memory["cost_us"].as_f64().context("pjwctl printed no cost_us")?;
    let resident_bytes = memory["rss"].as_u64().context("pjwctl printed no rss")?;
    Ok(Reading { cost_ms: cost_us / 1000.0, resident_bytes })
}

/// Does `work` while another thread reads the memory of the job again and again. Returns the CPU time of each
/// reading, in ms. `work` begins when the first reading has begun.
fn while_reading(
    warden: &PrivateWarden,
    work: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Vec<f64>> {
    let (is_over, has_begun) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut costs = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                has_begun.store(true, Ordering::Relaxed);
                costs.push(read_memory(warden)?.cost_ms);
            }
            anyhow::Ok(costs)
        });
        while !has_begun.load(Ordering::Relaxed) && !reading.is_finished() {
            thread::yield_now();
        }
        let worked = work();
        is_over.store(true, Ordering::Relaxed);
        let costs = reading.join().map_err(|_| anyhow!("the reading client failed"))?;
        worked.and(costs)
    })
}

/// Writes the quantiles of each turn to `memory.csv`, with a chart beside this file. Returns the figures of the medians
/// over all turns. `mib` is the memory of the job in MiB.
fn figures(mib: u64, beside_reading: &Latencies, without_reading: &Latencies) -> anyhow::Result<Vec<Figure>> {
    let points = |values: &[f64]| (1..).map(f64::from).zip(values.iter().copied()).collect();
    let lines = [
        ("p50, no reading", &without_reading.p50_us),
        ("p50 while memory is read", &beside_reading.p50_us),
        ("p99, no reading", &without_reading.p99_us),
        ("p99 while memory is read", &beside_reading.p99_us),
    ];
    let chart = Chart {
        title: format!("Time of status while {mib} MiB of a job are read"),
        x_label: "turn".into(),
        y_label: "us".into(),
        lines: lines.map(|(name, values)| (name.to_owned(), points(values))).into(),
    };
    chart.write(&target_directory()?, "memory")?;
    let figure = |what: &str, own: &[f64], peer: &[f64]| {
        let (own, peer) = median(own).zip(median(peer)).context("nothing was measured")?;
        let name = format!("status while {mib} MiB of a job are read: {what}");
        anyhow::Ok(Figure::new(&name, own, "us", "no reading", peer))
    };
    Ok(vec![
        figure("p50", &beside_reading.p50_us, &without_reading.p50_us)?,
        figure("p99", &beside_reading.p99_us, &without_reading.p99_us)?,
    ])
}
