//! Measures a program with barriers on fewer and fewer cores. Its team is fixed, with one thread for each PU that the
//! job had at the start, or it follows the core map of the job. The program is `adaptive_team.c`, the example of
//! pjw-job-c, with OpenMP. The job gives up cores by requests to a private pjwd, as `pjwctl assign` sends them.
//!
//! The limit is the share of the cores: on k of n cores, k/n of the rate of the fixed team on all cores.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use pjw_benches::load::compiled::{compile, library_flags};
use pjw_benches::measure::chart::Chart;
use pjw_benches::measure::results::{Figure, median, print_line, publish, target_directory};
use pjw_benches::programs::daemon::PrivateWarden;
use pjw_benches::programs::program::Program;
use pjw_benches::setup::Setup;

const SOURCE: &str = include_str!("../crates/pjw-job-c/examples/adaptive_team.c");
const JOB: &str = "team";
/// How many different numbers of cores are measured at most.
const MAX_COUNTS: usize = 16;
/// How long a change of the cores may take until the team has its new size and speed.
const SETTLE_TIME: Duration = Duration::from_millis(300);
const LINE_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
enum Team {
    Fixed,
    Following,
}

const TEAMS: [Team; 2] = [Team::Fixed, Team::Following];

impl Team {
    fn name(self) -> &'static str {
        match self {
            Team::Fixed => "fixed team",
            Team::Following => "team that follows the core map",
        }
    }

    fn argument(self) -> Option<&'static str> {
        match self {
            Team::Fixed => Some("fixed"),
            Team::Following => None,
        }
    }
}

fn main() -> anyhow::Result<()> {
    let setup = Setup::prepare()?;
    let directory = tempfile::tempdir().context("can't make a temporary directory")?;
    let program = match compile_program(directory.path()) {
        Ok(program) => program,
        Err(why) => return print_line(&format!("skipped: cc compiles no program with OpenMP here: {why:#}")),
    };
    let counts = core_counts(setup.scale.core_count);
    // For each team and each number of cores, the rates of all rounds.
    let mut rates = TEAMS.map(|_| vec![Vec::new(); counts.len()]);
    for round in 0..setup.effort.pick(1, 7) {
        for turn in 0..TEAMS.len() {
            let at = (turn + round) % TEAMS.len();
            let measured = measure(&setup, &program, TEAMS[at], &counts)?;
            for (rates_of_count, measured) in rates[at].iter_mut().zip(measured) {
                rates_of_count.extend(measured);
            }
        }
    }
    report(&counts, &rates)
}

fn compile_program(directory: &Path) -> anyhow::Result<PathBuf> {
    let library = library_flags(directory, "pjw_job", "pjw-job-c")?;
    let mut flags = vec!["-O2", "-fopenmp"];
    flags.extend(library.iter().map(String::as_str));
    compile(directory, "adaptive_team", SOURCE, &flags)
}

/// The numbers of cores that are measured: all cores first, one last, and those between at equal distances.
fn core_counts(cores: usize) -> Vec<usize> {
    let steps = cores.min(MAX_COUNTS);
    let mut counts: Vec<usize> = (1..=steps).rev().map(|step| cores * step / steps).collect();
    if let Some(last) = counts.last_mut() {
        *last = 1;
    }
    counts
}

/// Returns the rates of the program in phases per second: for each number of cores, one rate for each 100 ms.
fn measure(setup: &Setup, program: &Path, team: Team, counts: &[usize]) -> anyhow::Result<Vec<Vec<f64>>> {
    let warden =
        PrivateWarden::start_with_cpusets(&setup.programs, &setup.scale.unusable_pus, &setup.interrupt)?;
    let mut command = warden.run_command(JOB, setup.scale.core_count);
    command.arg(program).args(team.argument());
    let mut program = Program::start(team.name(), &mut command)?;
    // The program is in its job, and a fixed team has its size.
    program.read_line(LINE_TIMEOUT, &setup.interrupt)?;
    let measure_rates = |count: &usize| {
        warden.assign_cores(JOB, *count, &[])?;
        setup.interrupt.sleep_until(Instant::now() + SETTLE_TIME)?;
        program.discard_lines();
        read_rates(setup, &mut program)
    };
    counts.iter().map(measure_rates).collect()
}

/// Returns the rates of `program` in phases per second, one for each line that the program prints (each 100 ms). Reads
/// lines for 2 s, or 0.3 s in a quick run.
fn read_rates(setup: &Setup, program: &mut Program) -> anyhow::Result<Vec<f64>> {
    let mut read = || -> anyhow::Result<(f64, f64)> {
        let line = program.read_line(LINE_TIMEOUT, &setup.interrupt)?;
        let numbers: Vec<f64> = line.split(' ').filter_map(|number| number.parse().ok()).collect();
        let [seconds, _threads, phases] = numbers[..] else { bail!("the program printed {line:?}") };
        Ok((seconds, phases))
    };
    let (begin_s, mut phases_before) = read()?;
    let (mut seconds_before, mut rates) = (begin_s, Vec::new());
    while seconds_before - begin_s < setup.effort.pick(0.3, 2.0) {
        let (seconds, phases) = read()?;
        rates.push((phases - phases_before) / (seconds - seconds_before));
        (seconds_before, phases_before) = (seconds, phases);
    }
    Ok(rates)
}

/// Prints the table of the rates, and writes the figures and the chart. `rates` has the measured rates by team and
/// number of cores.
fn report(counts: &[usize], rates: &[Vec<Vec<f64>>; TEAMS.len()]) -> anyhow::Result<()> {
    let medians = rates.each_ref().map(|rates_by_count| {
        rates_by_count.iter().map(|rates| median(rates).unwrap_or(f64::NAN)).collect::<Vec<f64>>()
    });
    let [fixed, following] = &medians;
    let share = |count: usize| count as f64 / counts[0] as f64;
    let limits: Vec<f64> = counts.iter().map(|count| fixed[0] * share(*count)).collect();
    print_line("")?;
    print_line(&format!("{:>6}{:>14}{:>14}{:>14}", "cores", "limit", "fixed", "following"))?;
    for (at, count) in counts.iter().enumerate() {
        let relative = |rate: f64| format!("x{:.3}", rate / limits[at]);
        let (fixed, following) = (relative(fixed[at]), relative(following[at]));
        print_line(&format!("{count:>6}{:>12.0}/s{fixed:>14}{following:>14}", limits[at]))?;
    }
    let points =
        |rates: &[f64]| counts.iter().map(|count| *count as f64).zip(rates.iter().copied()).collect();
    let mut lines = vec![("k/n of the fixed team on all cores".to_owned(), points(&limits))];
    let mut figures = Vec::new();
    for (team, rates) in TEAMS.iter().zip(&medians) {
        lines.push((team.name().to_owned(), points(rates)));
        figures.extend(counts.iter().enumerate().map(|(at, count)| {
            let name = format!("{}, {count} of {} cores", team.name(), counts[0]);
            Figure::new(&name, rates[at], "phases/s", "the share of the cores", limits[at])
        }));
    }
    let chart = Chart {
        title: "A program with barriers, on fewer and fewer cores".into(),
        x_label: "cores".into(),
        y_label: "phases per second".into(),
        lines,
    };
    chart.write(&target_directory()?, "adapting")?;
    publish("adapting", &figures)
}
