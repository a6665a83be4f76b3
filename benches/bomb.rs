//! A fork bomb: one job starts twenty thousand processes that end at once. How fast does pjwd answer `status` meanwhile,
//! and does a second job keep its cores? Beside a server that thinks of nothing, asked in turns with it on the same PUs.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use pjw_benches::load::processes::{Activity, Processes};
use pjw_benches::measure::results::{Figure, publish, quantile, say};
use pjw_benches::measure::usage::Usage;
use pjw_benches::peers::echo::{Echo, Line};
use pjw_benches::programs::daemon::{Hearing, Warden};
use pjw_benches::programs::interrupt::Interrupt;
use pjw_benches::programs::program::{Program, until};
use pjw_benches::setup::Setup;
use serde_json::Value;

const QUESTION: &[u8] = b"{\"method\":\"org.pjw.Warden.GetStatus\",\"parameters\":{}}\0";
/// Between two questions.
const PAUSE: Duration = Duration::from_millis(2);
/// The second job's cores are compared with what they were at every so manieth question.
const COMPARED: usize = 50;
const CLEAN_AT_MOST: Duration = Duration::from_secs(30);

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::find()?;
    if scale.cores < 2 {
        say("skipped: two jobs need two cores")?;
        return publish("bomb", &[]);
    }
    let keys = format!("enforcement = \"auto\"\nhousekeeping = \"{}\"\n", scale.not_ours);
    let warden = Warden::configured(&programs, &keys, Hearing::Events, &interrupt)?;
    let neighbour = Processes::start(1, 10, Activity::Sleeping, &interrupt)?;
    let own = pjw_core::cpuset::CpuSet::from(scale.ours.last().context("there is no PU")?);
    warden.assign("neighbour", &own, &neighbour.pids())?;
    let figures = explode(&warden, effort.pick(500, 20_000), &interrupt);
    warden.release_all()?;
    publish("bomb", &figures?)
}

/// What was heard while the bomb went off.
#[derive(Default)]
struct Answers {
    ours_ms: Vec<f64>,
    echo_ms: Vec<f64>,
}

fn explode(warden: &Warden, processes: u32, interrupt: &Interrupt) -> anyhow::Result<Vec<Figure>> {
    let before = cpus_of(warden, "manual:neighbour")?;
    let length = Line::connect(&warden.socket())?.ask(QUESTION)?;
    let echo = Echo::start(length, interrupt)?;
    let mut lines = [Line::connect(&warden.socket())?, Line::connect(&echo.socket())?];
    let words = format!("i=0; while [ $i -lt {processes} ]; do (:) & i=$((i+1)); done; wait");
    let mut command = warden.run("bomb", 1);
    let mut bomb = Program::start("the bomb", command.args(["sh", "-c", &words]))?;
    let began = Instant::now();
    let mut answers = Answers::default();
    let status = loop {
        interrupt.check()?;
        if let Some(status) = bomb.ended()? {
            break status;
        }
        let [ours, theirs] = &mut lines;
        answers.ours_ms.push(timed(ours)?);
        answers.echo_ms.push(timed(theirs)?);
        if answers.ours_ms.len().is_multiple_of(COMPARED) && cpus_of(warden, "manual:neighbour")? != before {
            bail!("the neighbour has lost its cores");
        }
        std::thread::sleep(PAUSE);
    };
    if !status.success() {
        bail!("the bomb did not go off: {status}");
    }
    let took = began.elapsed().as_secs_f64();
    say(&format!("{processes} processes in {took:.1} s; {} times asked", answers.ours_ms.len()))?;
    until("the bomb's job is still there", CLEAN_AT_MOST, interrupt, || {
        Ok(warden.job("manual:bomb")?.is_none().then_some(()))
    })?;
    if cpus_of(warden, "manual:neighbour")? != before {
        bail!("the neighbour has lost its cores");
    }
    say(&format!("pjwd has {:.1} MiB afterwards", Usage::of(warden.pid())?.rss_mib()?))?;
    answers.figures(processes)
}

/// Milliseconds that an answer takes.
fn timed(line: &mut Line) -> anyhow::Result<f64> {
    let begin = Instant::now();
    line.ask(QUESTION)?;
    Ok(begin.elapsed().as_secs_f64() * 1000.0)
}

fn cpus_of(warden: &Warden, job: &str) -> anyhow::Result<Value> {
    Ok(warden.job(job)?.with_context(|| format!("{job} is gone"))?["cpus"].take())
}

impl Answers {
    fn figures(&self, processes: u32) -> anyhow::Result<Vec<Figure>> {
        let shares = [("p50", 0.5), ("p99", 0.99), ("max", 1.0)];
        let figure = |(name, share)| {
            let ours = quantile(&self.ours_ms, share).context("nobody was asked")?;
            let theirs = quantile(&self.echo_ms, share).context("nobody was asked")?;
            let name = format!("status while a job starts {processes} processes, {name}");
            Ok(Figure::new(&name, ours, "ms", "an echo server", theirs))
        };
        shares.into_iter().map(figure).collect()
    }
}
