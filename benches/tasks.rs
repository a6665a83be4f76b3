//! Measures tasks, which are processes in one address space, beside threads and processes. Four of the five parts are
//! figures of the paper about Process-in-Process:
//!
//! - `pages`: the page tables of shared memory (figure 9).
//! - `switch`: a switch between ranks on one core (figure 11).
//! - `start`: the start of up to 15 ranks (figure 12).
//! - `map`: mmap and munmap (figure 14).
//! - `exchange`: the exchange of halos between two ranks.
//!
//! The paper: Hori et al., "Process-in-Process: techniques for practical address-space sharing", HPDC 2018.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use pjw_benches::load::ranks::{RankProgram, RankWork, SharingWay};
use pjw_benches::measure::chart::Chart;
use pjw_benches::measure::results::{Figure, median, print_line, target_directory};
use pjw_benches::measure::start_cost::StartCost;
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::parts::run_parts;
use pjw_benches::setup::prepare_scale;
use pjw_core::cpuset::Pu;
use tempfile::TempDir;

const SHARED_MIB: u32 = 128;
const RANKS_ON_A_CORE: u32 = 50;
const MAX_STARTED_RANKS: u32 = 15;
/// The pause after each group that is started. The host of tasks ends some 10 ms after their start, and must not take
/// a CPU from the group that is measured next. Its CPU time counts in the next round of tasks, which waits for it.
const PAUSE: Duration = Duration::from_millis(30);

fn main() -> anyhow::Result<()> {
    let bench = Bench::prepare()?;
    let parts = [
        ("pages", pages as fn(&Bench) -> anyhow::Result<Vec<Figure>>),
        ("switch", switch),
        ("start", start),
        ("map", map),
        ("exchange", exchange),
    ];
    run_parts("tasks", &bench, &parts)
}

/// A line of a chart: its name, and its points.
type Line = (String, Vec<(f64, f64)>);

struct Bench {
    effort: Effort,
    interrupt: StopSignal,
    directory: TempDir,
    program: RankProgram,
    /// One PU of each core.
    pus: Vec<Pu>,
}

impl Bench {
    fn prepare() -> anyhow::Result<Self> {
        let (effort, interrupt) = (Effort::from_arguments(), StopSignal::install()?);
        let scale = prepare_scale(&interrupt)?;
        let directory = tempfile::tempdir().context("can't make a directory")?;
        let program = RankProgram::compile(directory.path())?;
        let pus = scale.usable_cores.iter().filter_map(|core| core.iter().next()).collect();
        Ok(Self { effort, interrupt, directory, program, pus })
    }

    /// Runs the work in all ways in turns. Returns the medians of the first numbers of each way, in the order of
    /// [`SharingWay::ALL`], and those of the second numbers, if the work has two.
    fn medians(&self, rounds: usize, work: &RankWork<'_>) -> anyhow::Result<([f64; 3], [Option<f64>; 3])> {
        let mut first_numbers: [Vec<f64>; 3] = Default::default();
        let mut second_numbers: [Vec<f64>; 3] = Default::default();
        for _ in 0..rounds {
            for (at, way) in SharingWay::ALL.into_iter().enumerate() {
                self.interrupt.check()?;
                let numbers = self.program.measure(way, work)?;
                first_numbers[at].push(*numbers.first().context("a rank has printed nothing")?);
                second_numbers[at].extend(numbers.get(1));
            }
        }
        let first_medians = first_numbers.map(|numbers| median(&numbers).unwrap_or(f64::NAN));
        Ok((first_medians, second_numbers.map(|numbers| median(&numbers))))
    }
}

/// Returns the figures that compare tasks with threads and with processes.
fn compare_ways(name: &str, unit: &str, [tasks, threads, processes]: [f64; 3]) -> [Figure; 2] {
    [
        Figure::new(name, tasks, unit, "threads", threads),
        Figure::new(name, tasks, unit, "processes", processes),
    ]
}

/// Returns a line for each way, without points.
fn empty_lines() -> [Line; 3] {
    SharingWay::ALL.map(|way| (way.name().to_owned(), Vec::new()))
}

/// Adds a point with the coordinate `x` to each line. `y_values` has one value for each line.
fn add_points(lines: &mut [Line], x: u32, y_values: impl IntoIterator<Item = f64>) {
    for ((_, points), y) in lines.iter_mut().zip(y_values) {
        points.push((f64::from(x), y));
    }
}

fn write_chart(
    name: &str,
    title: &str,
    x_label: &str,
    y_label: &str,
    lines: Vec<Line>,
) -> anyhow::Result<()> {
    let chart = Chart { title: title.into(), x_label: x_label.into(), y_label: y_label.into(), lines };
    chart.write(&target_directory()?, name)
}

/// Measures the size of the page tables of memory that all ranks use, for several numbers of ranks. Writes the chart,
/// and returns the figures. The stacks of threads are at other addresses in each run, so the results differ between
/// runs.
fn pages(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let counts = bench.effort.pick(&[1, 3][..], &[1, 10, 20, 30, 40, 50][..]);
    let (mut figures, mut lines) = (Vec::new(), empty_lines());
    for &count in counts {
        let work = RankWork { part: "pages", count, argument: SHARED_MIB, pus: &bench.pus, socket: None };
        let (values, _) = bench.medians(bench.effort.pick(1, 11), &work)?;
        add_points(&mut lines, count, values);
        let name = format!("page tables of {SHARED_MIB} MiB, {count} ranks");
        figures.extend(compare_ways(&name, "KiB", values));
    }
    let title = format!("Page tables of {SHARED_MIB} MiB that all ranks share");
    write_chart("tasks-pages", &title, "ranks", "KiB", lines.into())?;
    Ok(figures)
}

/// Measures the time and the dTLB misses of a switch between ranks on one core, for several numbers of bytes that each
/// rank copies between two switches. Writes the charts, and returns the figures. Without dTLB misses if the machine has
/// no such counter, or if this user may not use it.
fn switch(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let sizes = bench.effort.pick(&[0, 16][..], &[0, 4, 16, 64][..]);
    let count = bench.effort.pick(5, RANKS_ON_A_CORE);
    let (mut figures, mut lines, mut miss_lines) = (Vec::new(), empty_lines(), empty_lines());
    let mut why_uncounted = None;
    for &kib in sizes {
        let pus = bench.pus.get(..1).context("there is no core")?;
        let work = RankWork { part: "switch", count, argument: kib << 10, pus, socket: None };
        let (values, misses) = bench.medians(bench.effort.pick(1, 11), &work)?;
        add_points(&mut lines, kib, values);
        let name = format!("switch of {count} ranks on a core, {kib} KiB copied");
        figures.extend(compare_ways(&name, "us", values));
        let [tasks, threads, processes] =
            misses.map(|misses| misses.context("a rank has printed no dTLB misses"));
        let misses = [tasks?, threads?, processes?];
        // A negative number is the negated errno of perf_event_open(2).
        why_uncounted = misses.into_iter().find(|misses| *misses < 0.0);
        if why_uncounted.is_none() {
            let name = format!("dTLB load misses of a switch of {count} ranks, {kib} KiB copied");
            figures.extend(compare_ways(&name, "misses", misses));
            add_points(&mut miss_lines, kib, misses);
        }
    }
    let x_label = "KiB copied";
    write_chart("tasks-switch", "A switch between ranks on one core", x_label, "us", lines.into())?;
    match why_uncounted {
        None => {
            write_chart("tasks-dtlb", "dTLB load misses of a switch", x_label, "misses", miss_lines.into())?;
        }
        Some(errno) => {
            let error = std::io::Error::from_raw_os_error(format!("{:.0}", -errno).parse()?);
            // Without the permission, it is unknown whether the machine has the counter.
            let claim = match error.kind() {
                std::io::ErrorKind::PermissionDenied => "",
                _ => " has no such counter here",
            };
            print_line(&format!("skipped: dTLB misses: perf_event_open(2){claim}: {error}"))?;
        }
    }
    Ok(figures)
}

/// Starts a number of ranks, and waits for their end.
type Start<'a> = dyn Fn(u32) -> anyhow::Result<()> + 'a;

/// Measures the start and the end of ranks that do nothing, for several numbers of ranks. For threads, this includes
/// the process that contains them. Writes the chart, and returns the figures.
fn start(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let counts = bench.effort.pick(&[MAX_STARTED_RANKS][..], &[1, 5, 10, MAX_STARTED_RANKS][..]);
    let ways: [(&str, &Start<'_>); 4] = [
        ("tasks", &|count| bench.program.start_nothing(SharingWay::Tasks, count)),
        ("threads of a process", &|count| bench.program.start_nothing(SharingWay::Threads, count)),
        ("posix_spawn", &|count| posix_spawn(bench.program.path(), count)),
        ("pjw-spawn without --share", &|count| bench.program.start_nothing(SharingWay::Processes, count)),
    ];
    let mut figures = Vec::new();
    let mut lines = ways.map(|(name, _)| (name.to_owned(), Vec::new()));
    for &count in counts {
        let mut costs: [Vec<StartCost>; 4] = Default::default();
        for _ in 0..bench.effort.pick(2, 101) {
            for ((_, way), costs) in ways.iter().zip(&mut costs) {
                bench.interrupt.check()?;
                costs.push(StartCost::measure(count, || way(count))?);
                std::thread::sleep(PAUSE);
            }
        }
        let medians: Vec<StartCost> = costs.iter().filter_map(|costs| StartCost::median(costs)).collect();
        let time_us = |cost: &StartCost| f64::from(count) * 1e6 / cost.rate;
        add_points(&mut lines, count, medians.iter().map(time_us));
        let tasks = medians.first().context("nothing was measured")?;
        for ((name, _), other) in ways.iter().zip(&medians).skip(1) {
            let title = |what| format!("start and end of {count} ranks: {what}");
            figures.push(Figure::new(&title("CPU time of each"), tasks.cpu_us, "us", name, other.cpu_us));
            figures.push(Figure::new(&title("time"), time_us(tasks), "us", name, time_us(other)));
        }
    }
    write_chart("tasks-start", "Start and end of ranks that do nothing", "ranks", "us", lines.into())?;
    Ok(figures)
}

/// Starts `count` processes of the program by posix_spawn(3), which the standard library uses, and waits for all.
fn posix_spawn(program: &Path, count: u32) -> anyhow::Result<()> {
    let start = |_| Command::new(program).arg("nothing").stdin(Stdio::null()).spawn();
    let children: Vec<_> = (0..count).map(start).collect::<Result<_, _>>()?;
    for mut child in children {
        child.wait()?;
    }
    Ok(())
}

/// Measures mmap(2) and munmap(2) of 64 KiB, for several numbers of ranks that call them at the same time. Writes the
/// chart, and returns the figures.
fn map(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let most = u32::try_from(bench.pus.len().min(16))?;
    let (mut figures, mut lines) = (Vec::new(), empty_lines());
    for count in (1..=most).filter(|count| count.is_power_of_two() || *count == most) {
        let argument = bench.effort.pick(100, 20_000);
        let work = RankWork { part: "map", count, argument, pus: &bench.pus, socket: None };
        let (values, _) = bench.medians(bench.effort.pick(1, 5), &work)?;
        add_points(&mut lines, count, values);
        let name = format!("mmap, first use and munmap of 64 KiB, {count} ranks");
        figures.extend(compare_ways(&name, "us", values));
    }
    write_chart("tasks-map", "mmap, first use and munmap of 64 KiB", "ranks", "us", lines.into())?;
    Ok(figures)
}

/// Measures the exchange of halos (boundary values) between two ranks on two cores, for several sizes. Writes the
/// chart, and returns the figures.
fn exchange(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    const NAMES: [&str; 4] =
        ["tasks, load and store", "threads, load and store", "processes, memory files", "processes, sockets"];
    let sizes = bench.effort.pick(&[8][..], &[1, 8, 64, 512][..]);
    let mut figures = Vec::new();
    let mut lines = NAMES.map(|name| (name.to_owned(), Vec::new()));
    for &kib in sizes {
        let mut values: [Vec<f64>; NAMES.len()] = Default::default();
        for round in 0..bench.effort.pick(1, 5) {
            let socket = bench.directory.path().join(format!("socket.{kib}.{round}"));
            let work =
                RankWork { part: "exchange", count: 2, argument: kib << 10, pus: &bench.pus, socket: None };
            let ways = [
                (SharingWay::Tasks, work),
                (SharingWay::Threads, work),
                (SharingWay::Processes, work),
                (SharingWay::Processes, RankWork { socket: Some(&socket), ..work }),
            ];
            for ((way, work), values) in ways.iter().zip(&mut values) {
                bench.interrupt.check()?;
                values.extend(bench.program.measure(*way, work)?.first());
            }
        }
        let medians = values.map(|values| median(&values).unwrap_or(f64::NAN));
        add_points(&mut lines, kib, medians);
        for peer in 1..NAMES.len() {
            let name = format!("exchange of halos of {kib} KiB");
            figures.push(Figure::new(&name, medians[0], "us", NAMES[peer], medians[peer]));
        }
    }
    write_chart("tasks-exchange", "Exchange of halos between two ranks", "KiB", "us", lines.into())?;
    Ok(figures)
}
