//! Measures what lending gives to a batch program, and what it costs the owner of the cores. A server whose demand
//! changes between 10 and 90 % of its cores runs beside a batch program with barriers that takes every core it can get:
//! alone, both without anything, with cgroup weights, with half of the cores for each, with a daemon that moves cores
//! once a second, and with pjwd. The server's throughput and latencies, the batch program's throughput, and the share
//! of the core time that the server leaves and the batch program uses are compared.
#![forbid(unsafe_code)]

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use pjw_benches::measure::chart::Chart;
use pjw_benches::measure::results::{Figure, median, print_line, publish, target_directory};
use pjw_benches::peers::cgroups::Cgroup;
use pjw_benches::programs::daemon::{EventSource, PrivateWarden, Programs};
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::programs::program::Program;
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::parts::is_selected;
use pjw_benches::setup::scale::{Scale, pus_of};
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::{Pid, Tid};
use pjw_linux::sys::{affinity, cpu_time::process_cpu_time};
use serde_json::Value;

const PROGRAM: &str = "pjw-bench-lending";
/// The length of a request, in microseconds.
const REQUEST_US: u64 = 300;
/// The demand of the steps, in percent of what the server's cores can answer: steps of some lengths, and spikes of one
/// step.
const DEMAND: &str = "10,10,30,30,50,50,70,70,90,90,50,50,10,90,10,10,90,10,30,70";
const STEPS: u64 = 20;
const TIMEOUT: Duration = Duration::from_secs(120);
/// The keys of the private daemon. The kernel gives a lent core back at the owner's wake-up, so no buffer is needed on
/// few cores.
const KEYS: &str = "[lending]\nenabled = true\nbuffer = 0\nlend_after = \"100ms\"\n";

/// How the server and the batch program are separated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Separation {
    /// There is only the server.
    Alone,
    /// There is only the server, once more. The difference to [`Separation::Alone`] is the noise of the machine.
    AloneAgain,
    /// Both programs run without separation.
    Nothing,
    /// Each program has a cgroup, with weights of 100 to 1.
    Weights,
    /// The batch program has a cgroup with idle priority, and may run on all cores: what the kernel gives without a
    /// daemon.
    Idle,
    /// Each program has half of the cores.
    Halves,
    /// The batch program gets the cores that the server did not use in the last second.
    EachSecond,
    /// The server is a guaranteed job with all cores, the batch program a besteffort job.
    Warden,
}

const SEPARATIONS: [Separation; 8] = [
    Separation::Alone,
    Separation::AloneAgain,
    Separation::Nothing,
    Separation::Weights,
    Separation::Idle,
    Separation::Halves,
    Separation::EachSecond,
    Separation::Warden,
];

impl Separation {
    fn name(self) -> &'static str {
        match self {
            Separation::Alone => "server alone",
            Separation::AloneAgain => "server alone, again",
            Separation::Nothing => "nothing between them",
            Separation::Weights => "cgroup weights 100:1",
            Separation::Idle => "cgroup idle priority",
            Separation::Halves => "half of the cores each",
            Separation::EachSecond => "cores moved once a second",
            Separation::Warden => "pjw",
        }
    }
}

/// The results of one run, or their medians.
#[derive(Debug, Clone)]
struct Measures {
    answers_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    /// Phases of the batch program per second.
    phases_per_s: f64,
    /// The share of the core time that the server left and the batch program used.
    harvested: f64,
}

/// The results of one run, with their course over time.
#[derive(Debug, Clone)]
struct Run {
    measures: Measures,
    /// The answers of the server in each second.
    server_over_time: Vec<f64>,
    /// The phases of the batch program in each second.
    batch_over_time: Vec<f64>,
}

/// The runs of each separation.
type Runs = [Vec<Run>; SEPARATIONS.len()];

struct Bench {
    effort: Effort,
    interrupt: StopSignal,
    programs: Programs,
    cpus: CpuSet,
    cores: usize,
    /// The PUs of the server and of the batch program for [`Separation::Halves`].
    halves: (CpuSet, CpuSet),
    /// The number of iterations of a request, as the program takes it.
    iterations: String,
}

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::prepare()?;
    let bench = Bench::new(effort, interrupt, programs, &scale)?;
    let mut runs: Runs = Default::default();
    let mut skipped = [false; SEPARATIONS.len()];
    for round in 0..effort.pick(1, 3) {
        for turn in 0..SEPARATIONS.len() {
            let at = (turn + round) % SEPARATIONS.len();
            if skipped[at] || !is_selected(SEPARATIONS[at].name()) {
                continue;
            }
            match bench.run(SEPARATIONS[at]) {
                Ok(run) => {
                    print_run(SEPARATIONS[at], &run.measures)?;
                    runs[at].push(run);
                }
                Err(why) if SEPARATIONS[at] != Separation::Warden => {
                    skipped[at] = true;
                    print_line(&format!("skipped: {}: {why:#}", SEPARATIONS[at].name()))?;
                }
                Err(why) => return Err(why),
            }
        }
    }
    report(&runs)
}

fn print_run(separation: Separation, measures: &Measures) -> anyhow::Result<()> {
    let Measures { p99_us, harvested, .. } = measures;
    let used = 100.0 * harvested;
    print_line(&format!("{}: p99 {p99_us:.0} us, {used:.0} % of the idle core time used", separation.name()))
}

/// Prints the table, and writes the figures, the table and the chart.
fn report(runs: &Runs) -> anyhow::Result<()> {
    let rows: Vec<Row> = (0..SEPARATIONS.len()).filter_map(|at| row(runs, at)).collect();
    print_line(&format!(
        "{:<28}{:>11}{:>9}{:>9}{:>10}{:>12}{:>11}",
        "", "answers/s", "p50 us", "p99 us", "p99.9 us", "batch/s", "idle used"
    ))?;
    for Row { name, medians } in &rows {
        let Measures { answers_per_s, p50_us, p99_us, p999_us, phases_per_s, harvested } = medians;
        print_line(&format!(
            "{name:<28}{answers_per_s:>11.0}{p50_us:>9.0}{p99_us:>9.0}{p999_us:>10.0}{phases_per_s:>12.0}{:>10.0}%",
            100.0 * harvested,
        ))?;
    }
    let mut figures = figures(&rows);
    figures.extend(spread(runs)?);
    let directory = target_directory()?;
    chart(runs).write(&directory, "lending")?;
    let table = directory.join("lending_table.csv");
    std::fs::write(&table, table_csv(&rows)).with_context(|| format!("can't write {}", table.display()))?;
    publish("lending", &figures)
}

/// The medians of the runs of one separation.
struct Row {
    name: &'static str,
    medians: Measures,
}

/// Returns the row of the table for the separation with the index `at`: the medians of its runs. `None` if this
/// separation was skipped.
fn row(runs: &Runs, at: usize) -> Option<Row> {
    let median_of = |value: fn(&Measures) -> f64| {
        median(&runs[at].iter().map(|run| value(&run.measures)).collect::<Vec<f64>>())
    };
    let medians = Measures {
        answers_per_s: median_of(|run| run.answers_per_s)?,
        p50_us: median_of(|run| run.p50_us)?,
        p99_us: median_of(|run| run.p99_us)?,
        p999_us: median_of(|run| run.p999_us)?,
        phases_per_s: median_of(|run| run.phases_per_s)?,
        harvested: median_of(|run| run.harvested)?,
    };
    Some(Row { name: SEPARATIONS[at].name(), medians })
}

/// Returns the figures of the table. The server in each separation is compared with the server alone. The batch program
/// is compared with its run without separation.
fn figures(rows: &[Row]) -> Vec<Figure> {
    let row_of = |separation: Separation| rows.iter().find(|row| row.name == separation.name());
    let Some(alone) = row_of(Separation::Alone) else { return Vec::new() };
    let mut figures = Vec::new();
    for Row { name, medians } in rows.iter().filter(|row| row.name != alone.name) {
        for (what, value, unit, peer) in [
            ("server p50", medians.p50_us, "us", alone.medians.p50_us),
            ("server p99", medians.p99_us, "us", alone.medians.p99_us),
            ("server p99.9", medians.p999_us, "us", alone.medians.p999_us),
            ("server throughput", medians.answers_per_s, "1/s", alone.medians.answers_per_s),
        ] {
            figures.push(Figure::new(&format!("{what}, {name}"), value, unit, alone.name, peer));
        }
        let used = format!("idle core time used, {name}");
        figures.push(Figure::new(&used, medians.harvested, "share", "all of it", 1.0));
        let phases = medians.phases_per_s;
        let Some(nothing) = row_of(Separation::Nothing).filter(|_| phases > 0.0) else { continue };
        let batch = format!("batch throughput, {name}");
        figures.push(Figure::new(&batch, phases, "1/s", nothing.name, nothing.medians.phases_per_s));
    }
    figures
}

/// Prints how much the p99 of the server alone differs between its runs, beside what pjw changes. A change by less than
/// this spread can't be told from the noise of the machine. Returns the spread as a figure.
fn spread(runs: &Runs) -> anyhow::Result<Option<Figure>> {
    let p99s = |wanted: &[Separation]| -> Vec<f64> {
        let runs = SEPARATIONS.iter().zip(runs).filter(|(separation, _)| wanted.contains(separation));
        runs.flat_map(|(_, runs)| runs).map(|run| run.measures.p99_us).collect()
    };
    let (alone, pjw) = (p99s(&[Separation::Alone, Separation::AloneAgain]), p99s(&[Separation::Warden]));
    let least = alone.iter().copied().fold(f64::INFINITY, f64::min);
    let most = alone.iter().copied().fold(0.0, f64::max);
    let Some((alone_median, pjw_median)) = median(&alone).zip(median(&pjw)) else { return Ok(None) };
    print_line(&format!(
        "p99: the runs of the server alone differ by x{:.2} ({least:.0} to {most:.0} us); pjw has x{:.2} of their median",
        most / least,
        pjw_median / alone_median
    ))?;
    Ok(Some(Figure::new("server p99, the slowest run alone", most, "us", "the fastest run alone", least)))
}

/// Returns the table as CSV.
fn table_csv(rows: &[Row]) -> String {
    let mut csv =
        String::from("separation,answers_per_s,p50_us,p99_us,p99_9_us,batch_per_s,idle_core_time_used\n");
    for Row { name, medians } in rows {
        let Measures { answers_per_s, p50_us, p99_us, p999_us, phases_per_s, harvested } = medians;
        let name = name.replace(',', ";");
        csv += &format!(
            "{name},{answers_per_s:.1},{p50_us:.1},{p99_us:.1},{p999_us:.1},{phases_per_s:.1},{harvested:.4}\n"
        );
    }
    csv
}

/// Makes the chart of the throughput of the server and of the batch program over time, in the first run without
/// separation and in the first run with pjw.
fn chart(runs: &Runs) -> Chart {
    let points = |values: &[f64]| (0..).map(f64::from).zip(values.iter().copied()).collect::<Vec<_>>();
    let mut lines = Vec::new();
    for (separation, runs) in SEPARATIONS.iter().zip(runs) {
        if ![Separation::Nothing, Separation::Warden].contains(separation) {
            continue;
        }
        let Some(run) = runs.first() else { continue };
        let name = separation.name();
        lines.push((format!("server, {name}"), points(&run.server_over_time)));
        lines.push((format!("batch, {name}"), points(&run.batch_over_time)));
    }
    Chart {
        title: "A server whose demand changes, beside a batch program".into(),
        x_label: "second".into(),
        y_label: "answers and phases per second".into(),
        lines,
    }
}

impl Bench {
    fn new(effort: Effort, interrupt: StopSignal, programs: Programs, scale: &Scale) -> anyhow::Result<Self> {
        let cores = &scale.usable_cores;
        let half = cores.split_at(cores.len() / 2);
        let output = Command::new(programs.path(PROGRAM))
            .args(["calibrate", "--request-us", &REQUEST_US.to_string()])
            .output()
            .context("can't start the program of the bench: make build")?;
        if !output.status.success() {
            bail!(
                "the program of the bench can't measure its speed: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let iterations = String::from_utf8(output.stdout)?.trim().to_owned();
        let (cpus, halves) = (pus_of(cores), (pus_of(half.0), pus_of(half.1)));
        Ok(Self { effort, interrupt, programs, cpus, cores: cores.len(), halves, iterations })
    }

    fn start_batch(&self, mut launcher: Command) -> anyhow::Result<Program> {
        let threads = self.cores.to_string();
        launcher.arg(self.programs.path(PROGRAM));
        launcher.args(["batch", "--threads", &threads, "--iterations", &self.iterations]);
        Program::start_until_ready("the batch program", &mut launcher, TIMEOUT, &self.interrupt)
    }

    fn start_server(&self, mut launcher: Command) -> anyhow::Result<Program> {
        let (workers, request_us) = (self.cores.to_string(), REQUEST_US.to_string());
        let step_ms = self.step_ms().to_string();
        launcher.arg(self.programs.path(PROGRAM));
        launcher.args(["server", "--workers", &workers, "--iterations", &self.iterations]);
        launcher.args(["--request-us", &request_us, "--demand", DEMAND, "--step-ms", &step_ms]);
        Program::start_until_ready("the server", &mut launcher, TIMEOUT, &self.interrupt)
    }

    fn step_ms(&self) -> u64 {
        self.effort.pick(100, 1000)
    }

    /// Returns the beginning of a command that binds a program to `cpus`.
    fn taskset_command(cpus: &CpuSet) -> Command {
        let mut command = Command::new("taskset");
        command.arg("-c").arg(cpus.to_string());
        command
    }

    /// Starts the server and the batch program, separated as `separation` says, and measures both until the server
    /// ends.
    ///
    /// # Errors
    /// If the separation is not possible on this machine.
    fn run(&self, separation: Separation) -> anyhow::Result<Run> {
        let everywhere = || Self::taskset_command(&self.cpus);
        match separation {
            Separation::Alone | Separation::AloneAgain => {
                let server = self.start_server(everywhere())?;
                self.measure(server, None)
            }
            Separation::Nothing => {
                let batch = self.start_batch(everywhere())?;
                let server = self.start_server(everywhere())?;
                self.measure(server, Some(batch))
            }
            Separation::Weights => {
                let groups = (Cgroup::new("cpu", "server")?, Cgroup::new("cpu", "batch")?);
                groups.0.set_weight(100)?;
                groups.1.set_weight(1)?;
                let batch = self.start_batch(groups.1.run_command())?;
                let server = self.start_server(groups.0.run_command())?;
                self.measure(server, Some(batch))
            }
            Separation::Idle => {
                let group = Cgroup::new("cpu", "batch")?;
                group.set_idle()?;
                let batch = self.start_batch(group.run_command())?;
                let server = self.start_server(everywhere())?;
                self.measure(server, Some(batch))
            }
            Separation::Halves => {
                let batch = self.start_batch(Self::taskset_command(&self.halves.1))?;
                let server = self.start_server(Self::taskset_command(&self.halves.0))?;
                self.measure(server, Some(batch))
            }
            Separation::EachSecond => self.move_cores_each_second(everywhere()),
            Separation::Warden => self.run_with_warden(),
        }
    }

    /// Measures both programs while a thread moves cores between them, as koordlet does. Each second, the batch program
    /// gets the cores that the server did not use in the last second, but at least one. `launcher` is the beginning of
    /// the command of the batch program.
    fn move_cores_each_second(&self, launcher: Command) -> anyhow::Result<Run> {
        let batch = self.start_batch(launcher)?;
        let server = self.start_server(Self::taskset_command(&self.cpus))?;
        let (server_pid, batch_pid, is_over) = (server.pid(), batch.pid(), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                let server_cpu_time = || process_cpu_time(Pid(server_pid)).unwrap_or_default();
                let mut before = server_cpu_time();
                while !is_over.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_secs(1));
                    let now = server_cpu_time();
                    let used_ms = now.saturating_sub(before).as_millis();
                    let used_cores = usize::try_from(used_ms.div_ceil(1000)).unwrap_or(usize::MAX);
                    before = now;
                    let left = self.cores.saturating_sub(used_cores).max(1);
                    let cpus: CpuSet = self.cpus.iter().skip(self.cpus.len().saturating_sub(left)).collect();
                    for tid in threads_of(batch_pid) {
                        // A thread may have ended.
                        let _ = affinity::set_mask(Tid(tid), &cpus);
                    }
                }
            });
            let run = self.measure(server, Some(batch));
            is_over.store(true, Ordering::Relaxed);
            run
        })
    }

    /// Measures both programs as jobs of pjwd: the server owns the cores, and the batch program borrows them. Prints
    /// the CPU time of pjwd.
    fn run_with_warden(&self) -> anyhow::Result<Run> {
        let keys = format!("enforcement = \"auto\"\nhousekeeping = \"\"\n{KEYS}");
        let warden = PrivateWarden::start_with_config(
            &self.programs,
            &keys,
            EventSource::ProcEvents,
            &self.interrupt,
        )?;
        let cores = self.cores.to_string();
        let run = ["run", "--job", "batch", "--cores", &cores, "--class", "besteffort", "--"];
        // The owner comes first, so that the batch program begins with borrowed cores.
        let reserve = ["assign", "server", "--cores", &cores, "--class", "guaranteed"];
        let reserved = warden.pjwctl_command(&reserve).output().context("can't start pjwctl")?;
        anyhow::ensure!(reserved.status.success(), "{}", String::from_utf8_lossy(&reserved.stderr));
        let batch = self.start_batch(warden.pjwctl_command(&run))?;
        let server = self.start_server(Self::taskset_command(&self.cpus))?;
        let pid = server.pid().to_string();
        let joined = warden
            .pjwctl_command(&["assign", "server", "--pid", &pid])
            .output()
            .context("can't start pjwctl")?;
        anyhow::ensure!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
        let (begin, before) = (Instant::now(), process_cpu_time(Pid(warden.pid())).unwrap_or_default());
        let run = self.measure(server, Some(batch))?;
        let used = process_cpu_time(Pid(warden.pid())).unwrap_or_default().saturating_sub(before);
        let used_ms_per_s = 1000.0 * used.as_secs_f64() / begin.elapsed().as_secs_f64();
        print_line(&format!("pjwd used {used_ms_per_s:.1} ms of CPU time each second"))?;
        drop(warden);
        Ok(run)
    }

    /// Measures the server and the batch program until the server ends. `batch` is `None` for the server alone.
    fn measure(&self, mut server: Program, mut batch: Option<Program>) -> anyhow::Result<Run> {
        let begin = Instant::now();
        let cpu_time_of = |program: &Option<Program>| {
            program.as_ref().and_then(|program| process_cpu_time(Pid(program.pid()))).unwrap_or_default()
        };
        batch.iter_mut().for_each(Program::discard_lines);
        let batch_cpu_before = cpu_time_of(&batch);
        let server_pid = Pid(server.pid());
        let mut server_cpu = Duration::ZERO;
        let limit = Duration::from_millis(self.step_ms() * STEPS) + TIMEOUT;
        // The number of phases in each line of the batch program, which prints a line each 100 ms.
        let mut phases = Vec::new();
        let mut line = None;
        while line.is_none() {
            server_cpu = process_cpu_time(server_pid).unwrap_or(server_cpu);
            if let Some(batch) = &mut batch {
                phases.push(batch.read_line(TIMEOUT, &self.interrupt)?.parse::<f64>()?);
            }
            line = server.try_read_line(Duration::from_millis(if batch.is_some() { 1 } else { 100 }));
            anyhow::ensure!(begin.elapsed() < limit, "the server did not end in {} s", limit.as_secs());
        }
        let elapsed = begin.elapsed();
        let batch_cpu = cpu_time_of(&batch).saturating_sub(batch_cpu_before);
        let result: Value = serde_json::from_str(&line.context("the server printed nothing")?)?;
        let number = |key: &str| result[key].as_f64().unwrap_or(f64::NAN);
        let left_core_s = elapsed.as_secs_f64() * self.cores as f64 - server_cpu.as_secs_f64();
        let server_over_time =
            result["per_second"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
        let finished_phases = phases.last().copied().unwrap_or(0.0) - phases.first().copied().unwrap_or(0.0);
        let each_second: Vec<f64> = phases.iter().step_by(10).copied().collect();
        let measures = Measures {
            answers_per_s: number("completed") / number("seconds"),
            p50_us: number("p50_us"),
            p99_us: number("p99_us"),
            p999_us: number("p999_us"),
            phases_per_s: finished_phases / elapsed.as_secs_f64(),
            harvested: batch_cpu.as_secs_f64() / left_core_s,
        };
        Ok(Run {
            measures,
            server_over_time,
            batch_over_time: each_second.windows(2).map(|pair| pair[1] - pair[0]).collect(),
        })
    }
}

/// Returns the thread ids of the process `pid`.
fn threads_of(pid: u32) -> Vec<u32> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok()).collect()
}
