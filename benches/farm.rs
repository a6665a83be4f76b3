//! Measures a farm, in four parts:
//!
//! - `memory`: the memory of workers that are forked late, forked early, or started one by one (figure 2 of the paper).
//! - `serial`: the efficiency of jobs with a serial part (table 1 of the paper).
//! - `items`: the rate of short items, beside Python's `multiprocessing.Pool` and `xargs -P`.
//! - `cores`: the rate of a farm with a reader and a writer in a job of pjw, beside the same farm outside of pjw.
//!
//! The paper, about AthenaMP: Binet et al., "Multicore in production: advantages and limits of the multi-process
//! approach in the ATLAS experiment", J. Phys.: Conf. Ser. 368 (2012) 012018.
#![forbid(unsafe_code)]

use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use pjw_benches::load::farm_process::{
    ForkTime, ItemWay, Job, ReaderAndWriter, measure_instances, measure_items, measure_job, measure_memory,
    reader_and_writer_command, run_as_farm_process,
};
use pjw_benches::measure::chart::Chart;
use pjw_benches::measure::results::{Figure, median, print_line, quantile, target_directory};
use pjw_benches::peers::item_pools::ItemPool;
use pjw_benches::programs::daemon::{PrivateWarden, Programs};
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::programs::program::Program;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::parts::run_parts;
use pjw_benches::setup::prepare_scale;
use pjw_benches::setup::scale::Scale;
use pjw_spawn::farm::advise::FarmCosts;

const ITEM: Duration = Duration::from_millis(1);
const LATE: &str = "late fork";
const EARLY: &str = "early fork";
const INSTANCES: &str = "instances";
const FARM: &str = "a farm";
/// The name of [`ItemPool::PythonFarm`] in the results.
const PYTHON_FARM: &str = "pjw_farm in Python";
const SPLIT: &str = "even split, known before";
const JOB: &str = "farm";
/// The time between two looks at the job of a farm.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

fn main() -> anyhow::Result<()> {
    run_as_farm_process()?;
    let bench = Bench::prepare()?;
    run_parts("farm", &bench, &[("memory", memory), ("serial", serial), ("items", items), ("cores", cores)])
}

struct Bench {
    effort: Effort,
    interrupt: StopSignal,
    scale: Scale,
    /// The workers of the part `serial`: one on each core, at most 8.
    workers: u32,
}

impl Bench {
    fn prepare() -> anyhow::Result<Self> {
        let (effort, interrupt) = (Effort::from_arguments(), StopSignal::install()?);
        let scale = prepare_scale(&interrupt)?;
        let workers = u32::try_from(scale.core_count.min(8))?;
        Ok(Self { effort, interrupt, scale, workers })
    }

    /// Runs each way in turns. Returns the median of each, and the median of the CPU time of its processes in seconds.
    fn medians_and_cpu_times(&self, rounds: usize, ways: &[Way<'_>]) -> anyhow::Result<Vec<(f64, f64)>> {
        let mut values = vec![(Vec::new(), Vec::new()); ways.len()];
        for _ in 0..rounds {
            for (way, (values, cpu_times)) in ways.iter().zip(&mut values) {
                self.interrupt.check()?;
                let before = cpu_time_of_children()?;
                values.push(way()?);
                cpu_times.push(cpu_time_of_children()? - before);
            }
        }
        let medians = values.iter().map(|(values, cpu_times)| median(values).zip(median(cpu_times)));
        medians.map(|medians| medians.context("nothing was measured")).collect()
    }

    /// Runs each way in turns. Returns the median of each.
    fn medians(&self, rounds: usize, ways: &[Way<'_>]) -> anyhow::Result<Vec<f64>> {
        Ok(self.medians_and_cpu_times(rounds, ways)?.into_iter().map(|(value, _)| value).collect())
    }
}

/// A way to measure one value.
type Way<'a> = Box<dyn Fn() -> anyhow::Result<f64> + 'a>;

/// Measures the memory of a farm and of programs that are started one by one, for several numbers of workers. Writes
/// the chart, and returns the figures (figure 2).
fn memory(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let most = bench.effort.pick(3, 8);
    let names = [LATE, EARLY, INSTANCES];
    let mut lines = names.map(|name| (name.to_owned(), Vec::new()));
    let mut figures = Vec::new();
    for workers in 1..=most {
        let ways: [Way<'_>; 3] = [
            Box::new(move || measure_memory(ForkTime::Late, workers)),
            Box::new(move || measure_memory(ForkTime::Early, workers)),
            Box::new(move || measure_instances(workers)),
        ];
        let values = bench.medians(bench.effort.pick(1, 3), &ways)?;
        for ((_, points), value) in lines.iter_mut().zip(&values) {
            points.push((f64::from(workers), *value));
        }
        let [late, early, instances] = values[..] else { continue };
        for (name, value) in [(LATE, late), (EARLY, early)] {
            let title = format!("{workers} workers, {name}: memory");
            figures.push(Figure::new(&title, value, "MB", &format!("{workers} {INSTANCES}"), instances));
        }
    }
    let chart = Chart {
        title: "Memory of a farm with 80 % common data".into(),
        x_label: "workers".into(),
        y_label: "PSS of all processes, MB".into(),
        lines: lines.into(),
    };
    chart.write(&target_directory()?, "farm-memory")?;
    Ok(figures)
}

/// Measures which share of the core time of a farm a program without a farm needs for the same items, for several
/// numbers of items. Compares the share with that of `pjwctl advise`. Writes the chart, and returns the figures (table
/// 1). A farm occupies all its cores also during its serial part.
fn serial(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let serial_ms = bench.effort.pick(20, 400);
    let workers = bench.workers;
    let costs = FarmCosts { serial: Duration::from_millis(serial_ms.into()), item: ITEM, workers };
    let mut lines = [("measured".to_owned(), Vec::new()), ("calculated".to_owned(), Vec::new())];
    let mut figures = Vec::new();
    // The work of all items, as a multiple of the serial part.
    for factor in [1, 2, 5, 10, 20] {
        let items = serial_ms * factor;
        let job = Job { serial_ms, items, item_cpu_time: ITEM, workers };
        let ways: [Way<'_>; 2] =
            [Box::new(move || measure_job(job)), Box::new(move || measure_job(Job { workers: 0, ..job }))];
        let values = bench.medians(bench.effort.pick(1, 3), &ways)?;
        let [farm, alone] = values[..] else { continue };
        let measured = alone / (farm * f64::from(workers));
        let calculated = f64::from(costs.efficiency_permille(items.into())) / 1000.0;
        for ((_, points), value) in lines.iter_mut().zip([measured, calculated]) {
            points.push((f64::from(factor), value));
        }
        let title =
            format!("{items} items of 1 ms, serial part {serial_ms} ms, {workers} workers: core time used");
        figures.push(Figure::new(&title, measured, "share", "pjwctl advise", calculated));
    }
    let chart = Chart {
        title: format!(
            "Share of the core time of a farm of {workers} workers that a program without a farm needs"
        ),
        x_label: "work of all items / serial part".into(),
        y_label: "share".into(),
        lines: lines.into(),
    };
    chart.write(&target_directory()?, "farm-serial")?;
    Ok(figures)
}

/// Measures the rate of items of 1 ms on two workers, for farms and for other pools. A pool that is not installed is
/// skipped. Returns the figures that compare the farms with the other ways.
fn items(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let (workers, items) = (2, bench.effort.pick(50, 2000));
    let directory = tempfile::tempdir().context("can't make a directory")?;
    let pools = [ItemPool::PythonFarm, ItemPool::PythonPool, ItemPool::xargs(directory.path(), items, ITEM)?];
    let farm = |way| -> Way<'_> { Box::new(move || measure_items(way, workers, items, ITEM)) };
    let mut names = vec![FARM, SPLIT, "a farm with reader and writer"];
    let mut ways =
        vec![farm(ItemWay::Farm), farm(ItemWay::EvenSplit), farm(ItemWay::FarmWithReaderAndWriter)];
    for pool in &pools {
        match pool.measure(workers, 4, ITEM) {
            Ok(_) => {
                names.push(pool.name());
                ways.push(Box::new(|| pool.measure(workers, items, ITEM)));
            }
            Err(error) => print_line(&format!("skipped: {}: {error:#}", pool.name()))?,
        }
    }
    let medians = bench.medians_and_cpu_times(bench.effort.pick(1, 7), &ways)?;
    let mut figures = Vec::new();
    let is_farm = |name: &&str| [FARM, PYTHON_FARM].contains(name);
    for own in (0..names.len()).filter(|at| is_farm(&names[*at])) {
        for peer in (0..names.len()).filter(|peer| *peer != own) {
            let (own_name, count) = (names[own], f64::from(items));
            let rates = [own, peer].map(|at| count / medians[at].0);
            let cpu_times = [own, peer].map(|at| medians[at].1 / count * 1e6);
            let title = |what| format!("{own_name}, items of 1 ms on 2 workers: {what}");
            figures.push(Figure::new(&title("rate"), rates[0], "1/s", names[peer], rates[1]));
            let title = title("CPU time of an item");
            figures.push(Figure::new(&title, cpu_times[0], "us", names[peer], cpu_times[1]));
        }
    }
    figures.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(figures)
}

/// How a farm with a reader and a writer is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placing {
    /// In a job of pjw with all cores.
    Job,
    /// Outside of pjw, and not bound.
    Free,
    /// Outside of pjw. Each worker is bound to a core for itself, and the reader and the writer are not bound.
    ByHand,
}

impl Placing {
    const ALL: [Self; 3] = [Self::Job, Self::Free, Self::ByHand];

    fn name(self) -> &'static str {
        match self {
            Self::Job => "a job of pjw",
            Self::Free => "not bound",
            Self::ByHand => "workers bound by hand",
        }
    }
}

/// Measures the rate of a farm with a reader, a writer and one worker on each core, for each way to place its
/// processes. Writes the chart, and returns the figures. Measures nothing if the programs of pjw are missing.
fn cores(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let programs = match Programs::for_benches() {
        Ok(programs) => programs,
        Err(error) => {
            print_line(&format!("skipped: a farm in a job of pjw: {error:#}"))?;
            return Ok(Vec::new());
        }
    };
    let workers = u32::try_from(bench.scale.core_count)?;
    let items = workers * bench.effort.pick(100, 8000);
    let (mut figures, mut lines) = (Vec::new(), Vec::new());
    for (load, io) in [("do little", Duration::ZERO), ("use 0.2 cores each", ITEM / 5 / workers)] {
        let farm = ReaderAndWriter { workers, items, item_cpu_time: ITEM, io };
        let mut rates: [Vec<f64>; Placing::ALL.len()] = Default::default();
        for round in 0..bench.effort.pick(1, 7) {
            for turn in 0..rates.len() {
                let at = (round + turn) % rates.len();
                let seconds = bench.measure_placed(farm, Placing::ALL[at], &programs)?;
                rates[at].push(f64::from(items) / seconds);
            }
        }
        let title = format!("a farm of {workers} workers whose reader and writer {load}");
        figures.extend(compare_rates(&title, &rates)?);
        lines.extend(Placing::ALL.iter().zip(&rates).map(|(placing, rates)| {
            let points = (1..).map(f64::from).zip(rates.iter().copied()).collect();
            (format!("reader and writer {load}, {}", placing.name()), points)
        }));
    }
    let chart = Chart {
        title: format!("Rate of a farm of {workers} workers with a reader and a writer"),
        x_label: "round".into(),
        y_label: "items of 1 ms each second".into(),
        lines,
    };
    chart.write(&target_directory()?, "farm-cores")?;
    Ok(figures)
}

impl Bench {
    /// Returns the run time of a farm whose processes are placed as `placing` says, in seconds. A daemon runs only if
    /// the farm is its job.
    fn measure_placed(
        &self,
        farm: ReaderAndWriter,
        placing: Placing,
        programs: &Programs,
    ) -> anyhow::Result<f64> {
        let Self { interrupt, scale, .. } = self;
        match placing {
            Placing::Free => self.run_farm(&mut reader_and_writer_command(farm, &[], None)?, None),
            Placing::ByHand => {
                self.run_farm(&mut reader_and_writer_command(farm, &scale.usable_cores, None)?, None)
            }
            Placing::Job => {
                let warden = PrivateWarden::start_with_cpusets(programs, &scale.unusable_pus, interrupt)?;
                let launcher = warden.run_command(JOB, scale.core_count);
                self.run_farm(&mut reader_and_writer_command(farm, &[], Some(launcher))?, Some(&warden))
            }
        }
    }

    /// Runs a farm, and returns the run time that the farm prints, in seconds. With a daemon, prints how many threads
    /// the daemon has pinned.
    fn run_farm(&self, command: &mut Command, warden: Option<&PrivateWarden>) -> anyhow::Result<f64> {
        let mut program = Program::start("a farm", command)?;
        let mut most_pinned = 0;
        let line = loop {
            self.interrupt.check()?;
            if let Some(line) = program.try_read_line(LOOK_INTERVAL) {
                break line;
            }
            if let Some(status) = program.exit_status()? {
                break program
                    .try_read_line(LOOK_INTERVAL)
                    .with_context(|| format!("a farm ended: {status}"))?;
            }
            if let Some(warden) = warden {
                let job = warden.job(&format!("manual:{JOB}"))?;
                let pinned = job.and_then(|job| job["pinned"].as_u64()).unwrap_or(0);
                most_pinned = most_pinned.max(pinned);
            }
        };
        if warden.is_some() {
            print_line(&format!("pjwd has pinned at most {most_pinned} threads of the farm at a time"))?;
        }
        line.parse().with_context(|| format!("a farm printed {line:?} instead of its time"))
    }
}

/// Prints the ratios of the rounds, and returns the figures of the medians. `rates` has the rates of each placing.
fn compare_rates(title: &str, rates: &[Vec<f64>; Placing::ALL.len()]) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let pairs =
        [(Placing::Job, Placing::Free), (Placing::Job, Placing::ByHand), (Placing::ByHand, Placing::Free)];
    for (own, peer) in pairs {
        let [own_rates, peer_rates] = [own, peer].map(|placing| &rates[placing as usize]);
        let ratios: Vec<f64> = own_rates.iter().zip(peer_rates).map(|(own, peer)| own / peer).collect();
        let name = format!("{title}, {}: rate", own.name());
        let medians = median(own_rates).zip(median(peer_rates)).context("nothing was measured")?;
        let ratio = |share| quantile(&ratios, share).unwrap_or(f64::NAN);
        print_line(&format!(
            "{name}: compared with {}, in each of {} rounds: x{:.4} in the median, x{:.4} to x{:.4}",
            peer.name(),
            ratios.len(),
            median(&ratios).unwrap_or(f64::NAN),
            ratio(0.0),
            ratio(1.0)
        ))?;
        figures.push(Figure::new(&name, medians.0, "1/s", peer.name(), medians.1));
    }
    Ok(figures)
}

/// Returns the CPU time of the children that were waited for, in seconds.
fn cpu_time_of_children() -> anyhow::Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("can't read the CPU time of children")?;
    let microseconds = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Ok(Duration::from_micros(microseconds.unsigned_abs()).as_secs_f64())
}
