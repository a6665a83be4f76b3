//! Measures how fast pjwd answers `GetStatus`, and `GetJob` with its first page of members, with 10,000 threads in
//! its jobs. Measures the time of an answer, and the answers each second to one client and to four. The peer is an
//! echo server on the same kind of socket with answers of the same size.
#![forbid(unsafe_code)]

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use pjw_benches::load::processes::{Activity, LoadProcesses};
use pjw_benches::measure::results::{Figure, median, print_line, publish, quantile};
use pjw_benches::peers::echo::{EchoServer, RawClient};
use pjw_benches::programs::daemon::{EventSource, PrivateWarden};
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_ipc::client::Client;
use serde_json::{Value, json};

/// The calls: the name in the figures, the method, and the parameters.
const CALLS: [(&str, &str, &str); 2] =
    [("status", "GetStatus", "{}"), ("a job and its members", "GetJob", "{\"job\":\"manual:control\"}")];
const THREADS_PER_PROCESS: usize = 50;
const CLIENTS: usize = 4;

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::prepare()?;
    let threads = effort.pick(1000, 10_000);
    let load = LoadProcesses::start(
        threads / THREADS_PER_PROCESS,
        THREADS_PER_PROCESS,
        Activity::Sleeping,
        &interrupt,
    )?;
    let keys = format!("housekeeping = \"{}\"\n", scale.unusable_pus);
    let warden = PrivateWarden::start_with_config(&programs, &keys, EventSource::ProcEvents, &interrupt)?;
    let _: Value = Client::connect(&warden.socket())?
        .call("Assign", &json!({ "job": "control", "cores": 1, "pids": load.pids() }))?;
    let thread_count = warden.status()?["jobs"][0]["threads"].as_u64().unwrap_or(0);
    if usize::try_from(thread_count)? < threads {
        bail!("pjwd sees {thread_count} threads of {threads}");
    }
    let mut figures = Vec::new();
    for (name, method, parameters) in CALLS {
        let request =
            format!("{{\"method\":\"org.pjw.Warden.{method}\",\"parameters\":{parameters}}}\0").into_bytes();
        let window = Duration::from_millis(effort.pick(300, 2000));
        let bench = Bench {
            window,
            interrupt: &interrupt,
            request,
            method,
            parameters: serde_json::from_str(parameters)?,
        };
        figures.extend(bench.compare(&format!("{name} beside {threads} threads"), &warden, effort)?);
    }
    publish("control", &figures)
}

struct Bench<'a> {
    window: Duration,
    interrupt: &'a StopSignal,
    /// The request, as it is sent.
    request: Vec<u8>,
    method: &'a str,
    parameters: Value,
}

/// The measurements of one server, with one value for each round.
#[derive(Default)]
struct Answers {
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
    connecting_us: Vec<f64>,
    /// The answers each second to one client.
    one_per_s: Vec<f64>,
    /// The answers each second to [`CLIENTS`] clients together.
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
    /// Measures calls to pjwd and to an echo server whose replies have the same size. Returns the figures. `what` is
    /// the name of the call in the results.
    fn compare(&self, what: &str, warden: &PrivateWarden, effort: Effort) -> anyhow::Result<Vec<Figure>> {
        let _: Value = Client::connect(&warden.socket())?.call(self.method, &self.parameters)?;
        let reply_bytes = RawClient::connect(&warden.socket())?.call(&self.request)?;
        print_line(&format!("{what}: an answer has {reply_bytes} bytes"))?;
        let echo = EchoServer::start(reply_bytes, self.interrupt)?;
        let mut measured = Measured::default();
        for round in 0..effort.pick(2, 9) {
            // The servers take turns. Each one is first in every second round.
            let mut servers = [(&mut measured.pjwd, warden.socket()), (&mut measured.echo, echo.socket())];
            for at in [round % 2, (round + 1) % 2] {
                let (answers, socket) = &mut servers[at];
                answers.add(self.measure_server(socket)?);
            }
            measured.through_client_us.push(self.measure_client_us(&warden.socket())?);
        }
        measured.figures(what)
    }

    /// Measures the calls to the server at `socket`: latencies in µs with one connection, latencies with a new
    /// connection for each call, and the numbers of answers each second to one client and to several clients.
    fn measure_server(&self, socket: &Path) -> anyhow::Result<Answers> {
        self.interrupt.check()?;
        let mut client = RawClient::connect(socket)?;
        let (one_per_s, times) = call_repeatedly(self.window, || client.call(&self.request).map(drop))?;
        let (_, connecting) =
            call_repeatedly(self.window / 4, || RawClient::connect(socket)?.call(&self.request).map(drop))?;
        let (Some(p50), Some(p99)) = (quantile(&times, 0.5), quantile(&times, 0.99)) else {
            bail!("no answer from {}", socket.display());
        };
        Ok(Answers {
            p50_us: vec![p50],
            p99_us: vec![p99],
            connecting_us: quantile(&connecting, 0.5).into_iter().collect(),
            one_per_s: vec![one_per_s],
            several_per_s: vec![self.measure_several_clients(socket)?],
        })
    }

    /// Returns the number of answers each second that the server at `socket` gives to [`CLIENTS`] clients together.
    fn measure_several_clients(&self, socket: &Path) -> anyhow::Result<f64> {
        let window = self.window;
        thread::scope(|scope| {
            let client = || {
                let mut client = RawClient::connect(socket)?;
                call_repeatedly(window, || client.call(&self.request).map(drop))
                    .map(|(per_second, _)| per_second)
            };
            let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
            let answers =
                clients.into_iter().map(|client| client.join().map_err(|_| anyhow!("a client failed"))?);
            answers.sum()
        })
    }

    /// Returns the median time of the same call by the client of pjwctl, which parses the answer, in microseconds.
    fn measure_client_us(&self, socket: &Path) -> anyhow::Result<f64> {
        let mut client = Client::connect(socket)?;
        let (_, times) = call_repeatedly(self.window / 4, || {
            client.call::<Value>(self.method, &self.parameters).map(drop).map_err(anyhow::Error::from)
        })?;
        quantile(&times, 0.5).context("no answer from pjwd")
    }
}

/// Calls `call` again and again during `window`. Returns the calls each second, and the time of each call in
/// microseconds.
#[expect(clippy::cast_precision_loss, reason = "a count of answers")]
fn call_repeatedly(
    window: Duration,
    mut call: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<(f64, Vec<f64>)> {
    let began = Instant::now();
    let mut times = Vec::new();
    while began.elapsed() < window {
        let called_at = Instant::now();
        call()?;
        times.push(called_at.elapsed().as_secs_f64() * 1e6);
    }
    Ok((times.len() as f64 / began.elapsed().as_secs_f64(), times))
}

#[derive(Default)]
struct Measured {
    pjwd: Answers,
    echo: Answers,
    through_client_us: Vec<f64>,
}

impl Measured {
    /// Returns the figures of the medians over all rounds. `call_name` is the name of the call in the results.
    fn figures(&self, call_name: &str) -> anyhow::Result<Vec<Figure>> {
        let Self { pjwd, echo, through_client_us } = self;
        let figure = |what: &str, unit: &str, own_values: &[f64], peer: &str, peer_values: &[f64]| {
            let medians = median(own_values).zip(median(peer_values)).context("nothing was measured")?;
            anyhow::Ok(Figure::new(&format!("{call_name}: {what}"), medians.0, unit, peer, medians.1))
        };
        let echoed = "an echo of the same size";
        let several = format!("{CLIENTS} clients");
        Ok(vec![
            figure("p50", "us", &pjwd.p50_us, echoed, &echo.p50_us)?,
            figure("p99", "us", &pjwd.p99_us, echoed, &echo.p99_us)?,
            figure("p50 with a new connection", "us", &pjwd.connecting_us, echoed, &echo.connecting_us)?,
            figure("answers to one client", "1/s", &pjwd.one_per_s, echoed, &echo.one_per_s)?,
            figure(
                &format!("answers to {several}"),
                "1/s",
                &pjwd.several_per_s,
                echoed,
                &echo.several_per_s,
            )?,
            figure("p50 through pjw-ipc's client", "us", through_client_us, echoed, &echo.p50_us)?,
        ])
    }
}
