//! A farm: the memory of workers that are forked late, early, or started one by one (figure 2 of the AthenaMP paper); the
//! efficiency of jobs with a serial part (table 1 of the paper); and the rate of short items, beside Python's
//! `multiprocessing.Pool` and `xargs -P`.
//!
//! The paper: Binet et al., "Multicore in production: advantages and limits of the multi-process approach in the ATLAS
//! experiment", J. Phys.: Conf. Ser. 368 (2012) 012018.
#![forbid(unsafe_code)]

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use pjw_benches::load::farm_process::{
    ForkTime, ItemWay, Job, measure_instances, measure_items, measure_job, measure_memory,
    run_as_farm_process,
};
use pjw_benches::measure::chart::Chart;
use pjw_benches::measure::results::{Figure, median, print_line};
use pjw_benches::peers::item_pools::ItemPool;
use pjw_benches::programs::interrupt::Interrupt;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::parts::run_parts;
use pjw_benches::setup::prepare_scale;
use pjw_spawn::farm::advise::FarmCosts;

const ITEM: Duration = Duration::from_millis(1);
const LATE: &str = "late fork";
const EARLY: &str = "early fork";
const INSTANCES: &str = "instances";
const FARM: &str = "a farm";
/// The name of [`ItemPool::PythonFarm`].
const PYTHON_FARM: &str = "pjw_farm in Python";
const SPLIT: &str = "even split, known before";

fn main() -> anyhow::Result<()> {
    run_as_farm_process()?;
    let bench = Bench::prepare()?;
    run_parts("farm", &bench, &[("memory", memory), ("serial", serial), ("items", items)])
}

struct Bench {
    effort: Effort,
    interrupt: Interrupt,
    /// The workers of the parts that measure time: one on each core, at most 8.
    workers: u32,
}

impl Bench {
    fn prepare() -> anyhow::Result<Self> {
        let (effort, interrupt) = (Effort::from_arguments(), Interrupt::install()?);
        let scale = prepare_scale(&interrupt)?;
        let workers = u32::try_from(scale.core_count.min(8))?;
        Ok(Self { effort, interrupt, workers })
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

/// Figure 2: the memory of a farm and of programs that are started one by one, by the number of workers.
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
        across: "workers".into(),
        up: "PSS of all processes, MB".into(),
        lines: lines.into(),
    };
    chart.write(&target_directory()?, "farm-memory")?;
    Ok(figures)
}

/// Table 1: the core time of a program without a farm, as a share of that of the farm for the same items, by the number of
/// items. The farm holds all its cores also during its serial part.
fn serial(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let serial_ms = bench.effort.pick(20, 400);
    let workers = bench.workers;
    let costs = FarmCosts { serial: Duration::from_millis(serial_ms.into()), item: ITEM, workers };
    let mut lines = [("measured".to_owned(), Vec::new()), ("calculated".to_owned(), Vec::new())];
    let mut figures = Vec::new();
    // The work of all items, as a multiple of the serial part.
    for factor in [1, 2, 5, 10, 20] {
        let items = serial_ms * factor;
        let job = Job { serial_ms, items, item: ITEM, workers };
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
        across: "work of all items / serial part".into(),
        up: "share".into(),
        lines: lines.into(),
    };
    chart.write(&target_directory()?, "farm-serial")?;
    Ok(figures)
}

/// The rate of items of 1 ms on two workers.
fn items(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let (workers, items) = (2, bench.effort.pick(50, 2000));
    let directory = tempfile::tempdir().context("can't make a directory")?;
    let pools = [ItemPool::PythonFarm, ItemPool::PythonPool, ItemPool::xargs(directory.path(), items, ITEM)?];
    let own = |way| -> Way<'_> { Box::new(move || measure_items(way, workers, items, ITEM)) };
    let mut names = vec![FARM, SPLIT, "a farm with reader and writer"];
    let mut ways = vec![own(ItemWay::Farm), own(ItemWay::EvenSplit), own(ItemWay::FarmWithReaderAndWriter)];
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

/// The CPU time of the children that were waited for, in seconds.
fn cpu_time_of_children() -> anyhow::Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("can't read the CPU time of children")?;
    let microseconds = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Ok(Duration::from_micros(microseconds.unsigned_abs()).as_secs_f64())
}

fn target_directory() -> anyhow::Result<std::path::PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the benches are in no workspace")?;
    Ok(root.join("target/bench"))
}
