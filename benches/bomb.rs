//! Measures how fast pjwd answers `GetStatus` during a fork bomb: one job starts 20,000 processes that end at once.
//! Checks that a second job keeps its cores. The peer is an echo server on the same PUs. The two servers are called
//! in turns.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use pjw_benches::load::processes::{Activity, LoadProcesses};
use pjw_benches::measure::results::{Figure, print_line, publish, quantile};
use pjw_benches::measure::usage::ProcessUsage;
use pjw_benches::peers::echo::{EchoServer, RawClient};
use pjw_benches::programs::daemon::PrivateWarden;
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::programs::program::{Program, wait_for};
use pjw_benches::setup::Setup;
use serde_json::Value;

const STATUS_CALL: &[u8] = b"{\"method\":\"org.pjw.Warden.GetStatus\",\"parameters\":{}}\0";
/// The time between two calls.
const PAUSE: Duration = Duration::from_millis(2);
/// The cores of the second job are checked after this number of calls.
const CHECK_EVERY: usize = 50;
/// How long the job of the fork bomb may exist after its last process.
const JOB_END_TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::prepare()?;
    if scale.core_count < 2 {
        print_line("skipped: two jobs need two cores")?;
        return publish("bomb", &[]);
    }
    let warden = PrivateWarden::start_with_cpusets(&programs, &scale.unusable_pus, &interrupt)?;
    let neighbour = LoadProcesses::start(1, 10, Activity::Sleeping, &interrupt)?;
    let neighbour_cpus = pjw_core::cpuset::CpuSet::from(scale.usable_pus.last().context("there is no PU")?);
    warden.assign("neighbour", &neighbour_cpus, &neighbour.pids())?;
    let figures = run_fork_bomb(&warden, effort.pick(500, 20_000), &interrupt);
    warden.release_all()?;
    publish("bomb", &figures?)
}

/// The times of the answers during the fork bomb.
#[derive(Default)]
struct Answers {
    pjwd_ms: Vec<f64>,
    echo_ms: Vec<f64>,
}

/// Runs a job that starts `processes` processes as fast as possible. Meanwhile, measures the time of calls to pjwd and
/// to an echo server. Returns the figures.
///
/// # Errors
/// If the second job loses its cores, or if the job of the fork bomb does not end with its processes.
fn run_fork_bomb(
    warden: &PrivateWarden,
    processes: u32,
    interrupt: &StopSignal,
) -> anyhow::Result<Vec<Figure>> {
    let neighbour_cpus = job_cpus(warden, "manual:neighbour")?;
    let check_neighbour = || -> anyhow::Result<()> {
        let cpus = job_cpus(warden, "manual:neighbour")?;
        ensure!(cpus == neighbour_cpus, "the second job has lost its cores");
        Ok(())
    };
    let reply_bytes = RawClient::connect(&warden.socket())?.call(STATUS_CALL)?;
    let echo = EchoServer::start(reply_bytes, interrupt)?;
    let mut daemon_client = RawClient::connect(&warden.socket())?;
    let mut echo_client = RawClient::connect(&echo.socket())?;
    let script = format!("i=0; while [ $i -lt {processes} ]; do (:) & i=$((i+1)); done; wait");
    let mut command = warden.run_command("bomb", 1);
    let mut bomb = Program::start("the fork bomb", command.args(["sh", "-c", &script]))?;
    let began = Instant::now();
    let mut answers = Answers::default();
    let status = loop {
        interrupt.check()?;
        if let Some(status) = bomb.exit_status()? {
            break status;
        }
        answers.pjwd_ms.push(call_ms(&mut daemon_client)?);
        answers.echo_ms.push(call_ms(&mut echo_client)?);
        if answers.pjwd_ms.len().is_multiple_of(CHECK_EVERY) {
            check_neighbour()?;
        }
        std::thread::sleep(PAUSE);
    };
    if !status.success() {
        bail!("the fork bomb failed: {status}");
    }
    let took = began.elapsed().as_secs_f64();
    print_line(&format!("{processes} processes in {took:.1} s; {} calls", answers.pjwd_ms.len()))?;
    wait_for("the job of the fork bomb still exists", JOB_END_TIMEOUT, interrupt, || {
        Ok(warden.job("manual:bomb")?.is_none().then_some(()))
    })?;
    check_neighbour()?;
    print_line(&format!(
        "pjwd uses {:.1} MiB of memory afterwards",
        ProcessUsage::new(warden.pid())?.rss_mib()?
    ))?;
    answers.figures(processes)
}

/// Calls `GetStatus` and returns the time of the answer in milliseconds.
fn call_ms(client: &mut RawClient) -> anyhow::Result<f64> {
    let begin = Instant::now();
    client.call(STATUS_CALL)?;
    Ok(begin.elapsed().as_secs_f64() * 1000.0)
}

fn job_cpus(warden: &PrivateWarden, job: &str) -> anyhow::Result<Value> {
    Ok(warden.job(job)?.with_context(|| format!("there is no {job}"))?["cpus"].take())
}

impl Answers {
    fn figures(&self, processes: u32) -> anyhow::Result<Vec<Figure>> {
        let shares = [("p50", 0.5), ("p99", 0.99), ("max", 1.0)];
        let figure = |(name, share)| {
            let daemon = quantile(&self.pjwd_ms, share).context("nothing was measured")?;
            let echo = quantile(&self.echo_ms, share).context("nothing was measured")?;
            let name = format!("status while a job starts {processes} processes, {name}");
            Ok(Figure::new(&name, daemon, "ms", "an echo server", echo))
        };
        shares.into_iter().map(figure).collect()
    }
}
