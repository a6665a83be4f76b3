//! How fast pjwd answers `GetStatus`, and `GetJob` with its first page of members, while ten thousand threads are in its
//! jobs, and how many answers it gives each second to one client and to several. Beside a server that sends as many bytes
//! over the same kind of socket and thinks of nothing.
#![forbid(unsafe_code)]

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use pjw_benches::load::processes::{Activity, Processes};
use pjw_benches::measure::results::{Figure, median, publish, quantile, say};
use pjw_benches::peers::echo::{Echo, Line};
use pjw_benches::programs::daemon::{Hearing, Warden};
use pjw_benches::programs::interrupt::Interrupt;
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_ipc::client::Client;
use serde_json::{Value, json};

/// What is asked: its name here, the method, and its parameters.
const QUESTIONS: [(&str, &str, &str); 2] =
    [("status", "GetStatus", "{}"), ("a job and its members", "GetJob", "{\"job\":\"manual:control\"}")];
const PER_PROCESS: usize = 50;
const CLIENTS: usize = 4;

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::find()?;
    let threads = effort.pick(1000, 10_000);
    let load = Processes::start(threads / PER_PROCESS, PER_PROCESS, Activity::Sleeping, &interrupt)?;
    let keys = format!("housekeeping = \"{}\"\n", scale.not_ours);
    let warden = Warden::configured(&programs, &keys, Hearing::Events, &interrupt)?;
    let _: Value = Client::connect(&warden.socket())?
        .call("Assign", &json!({ "job": "control", "cores": 1, "pids": load.pids() }))?;
    let seen = warden.status()?["jobs"][0]["threads"].as_u64().unwrap_or(0);
    if usize::try_from(seen)? < threads {
        bail!("pjwd sees {seen} threads of {threads}");
    }
    let mut figures = Vec::new();
    for (name, method, parameters) in QUESTIONS {
        let bytes =
            format!("{{\"method\":\"org.pjw.Warden.{method}\",\"parameters\":{parameters}}}\0").into_bytes();
        let window = Duration::from_millis(effort.pick(300, 2000));
        let bench = Bench {
            window,
            interrupt: &interrupt,
            bytes,
            method,
            parameters: serde_json::from_str(parameters)?,
        };
        figures.extend(bench.compare(&format!("{name} beside {threads} threads"), &warden, effort)?);
    }
    publish("control", &figures)
}

struct Bench<'a> {
    window: Duration,
    interrupt: &'a Interrupt,
    /// The question as it is sent.
    bytes: Vec<u8>,
    method: &'a str,
    parameters: Value,
}

/// What one server did.
#[derive(Default)]
struct Answers {
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
    connecting_us: Vec<f64>,
    one_per_s: Vec<f64>,
    several_per_s: Vec<f64>,
}

impl Answers {
    fn add(&mut self, others: Answers) {
        self.p50_us.extend(others.p50_us);
        self.p99_us.extend(others.p99_us);
        self.connecting_us.extend(others.connecting_us);
        self.one_per_s.extend(others.one_per_s);
        self.several_per_s.extend(others.several_per_s);
    }
}

impl Bench<'_> {
    fn compare(&self, what: &str, warden: &Warden, effort: Effort) -> anyhow::Result<Vec<Figure>> {
        let _: Value = Client::connect(&warden.socket())?.call(self.method, &self.parameters)?;
        let length = Line::connect(&warden.socket())?.ask(&self.bytes)?;
        say(&format!("{what}: an answer has {length} bytes"))?;
        let echo = Echo::start(length, self.interrupt)?;
        let mut measured = Measured::default();
        for round in 0..effort.pick(2, 9) {
            // In turns, and who begins changes.
            let sockets = [(true, warden.socket()), (false, echo.socket())];
            for at in [round % 2, (round + 1) % 2] {
                let (is_ours, socket) = &sockets[at];
                measured.of(*is_ours).add(self.look(socket)?);
            }
            measured.through_client_us.push(self.through_client(&warden.socket())?);
        }
        measured.figures(what)
    }

    fn look(&self, socket: &Path) -> anyhow::Result<Answers> {
        self.interrupt.check()?;
        let mut line = Line::connect(socket)?;
        let (one, times) = asked(self.window, || line.ask(&self.bytes).map(drop))?;
        let (_, connecting) = asked(self.window / 4, || Line::connect(socket)?.ask(&self.bytes).map(drop))?;
        let (Some(p50), Some(p99)) = (quantile(&times, 0.5), quantile(&times, 0.99)) else {
            bail!("nobody answers at {}", socket.display());
        };
        Ok(Answers {
            p50_us: vec![p50],
            p99_us: vec![p99],
            connecting_us: quantile(&connecting, 0.5).into_iter().collect(),
            one_per_s: vec![one],
            several_per_s: vec![self.several(socket)?],
        })
    }

    fn several(&self, socket: &Path) -> anyhow::Result<f64> {
        let window = self.window;
        thread::scope(|scope| {
            let ask = || {
                let mut line = Line::connect(socket)?;
                asked(window, || line.ask(&self.bytes).map(drop)).map(|(per_second, _)| per_second)
            };
            let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(ask)).collect();
            let answers =
                clients.into_iter().map(|client| client.join().map_err(|_| anyhow!("a client failed"))?);
            answers.sum()
        })
    }

    /// The same question through pjwctl's client, which understands the answer.
    fn through_client(&self, socket: &Path) -> anyhow::Result<f64> {
        let mut client = Client::connect(socket)?;
        let (_, times) = asked(self.window / 4, || {
            client.call::<Value>(self.method, &self.parameters).map(drop).map_err(anyhow::Error::from)
        })?;
        quantile(&times, 0.5).context("nobody answers")
    }
}

/// Asks for so long; how many answers came each second, and how long each took in microseconds.
#[expect(clippy::cast_precision_loss, reason = "a count of answers")]
fn asked(window: Duration, mut ask: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<(f64, Vec<f64>)> {
    let began = Instant::now();
    let mut times = Vec::new();
    while began.elapsed() < window {
        let asked = Instant::now();
        ask()?;
        times.push(asked.elapsed().as_secs_f64() * 1e6);
    }
    Ok((times.len() as f64 / began.elapsed().as_secs_f64(), times))
}

#[derive(Default)]
struct Measured {
    ours: Answers,
    echo: Answers,
    through_client_us: Vec<f64>,
}

impl Measured {
    fn of(&mut self, is_ours: bool) -> &mut Answers {
        if is_ours { &mut self.ours } else { &mut self.echo }
    }

    fn figures(&self, question: &str) -> anyhow::Result<Vec<Figure>> {
        let Self { ours, echo, through_client_us } = self;
        let figure = |what: &str, unit: &str, ours: &[f64], peer: &str, theirs: &[f64]| {
            let both = median(ours).zip(median(theirs)).context("nothing was measured")?;
            anyhow::Ok(Figure::new(&format!("{question}: {what}"), both.0, unit, peer, both.1))
        };
        let echoed = "an echo of the same size";
        let several = format!("{CLIENTS} clients");
        Ok(vec![
            figure("p50", "us", &ours.p50_us, echoed, &echo.p50_us)?,
            figure("p99", "us", &ours.p99_us, echoed, &echo.p99_us)?,
            figure("p50 with a new connection", "us", &ours.connecting_us, echoed, &echo.connecting_us)?,
            figure("answers to one client", "1/s", &ours.one_per_s, echoed, &echo.one_per_s)?,
            figure(
                &format!("answers to {several}"),
                "1/s",
                &ours.several_per_s,
                echoed,
                &echo.several_per_s,
            )?,
            figure("p50 through pjw-ipc's client", "us", through_client_us, echoed, &echo.p50_us)?,
        ])
    }
}
