//! Measures the page in which pjwd publishes the CPUs of a job: a read, beside the system call that returns a mask, and
//! the time from a change until a reader that waits for it has the new cores, beside a byte in a pipe.
//!
//! No daemon runs: the writer of the page is that of pjwd, in the process of the bench.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::io::{Read, Write, pipe};
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use nix::unistd::gettid;
use pjw_benches::measure::chart::Chart;
use pjw_benches::measure::results::{Figure, median, print_line, publish, quantile, target_directory};
use pjw_benches::setup::effort::Effort;
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::Tid;
use pjw_job::layout::CoreMapContent;
use pjw_job::{CORE_MAP_FILE_NAME, CoreMapReader, CoreMapWriter};
use pjw_linux::sys::affinity;

/// Where the page is made: in memory, as in the state directory of pjwd.
const MEMORY: &str = "/dev/shm";
/// The time between two changes: long enough that the reader sleeps again.
const PAUSE: Duration = Duration::from_micros(500);
/// The quantiles of the chart, in percent.
const PERCENTILES: [f64; 8] = [1.0, 10.0, 25.0, 50.0, 75.0, 90.0, 99.0, 99.9];

fn main() -> anyhow::Result<()> {
    let effort = Effort::from_arguments();
    let directory = tempfile::tempdir_in(if Path::new(MEMORY).is_dir() { MEMORY } else { "/tmp" })
        .context("can't make a temporary directory")?;
    let page = directory.path().join(CORE_MAP_FILE_NAME);
    let mut writer = CoreMapWriter::create(&page, &directory.path().join("temporary"), &content(1))?;
    let reader = CoreMapReader::open(&page)?;
    let mut reads = [const { Vec::new() }; 3];
    let (mut from_page, mut from_pipe) = (Vec::new(), Vec::new());
    let mut epoch = 1;
    for _ in 0..effort.pick(1, 5) {
        for (times, measured) in reads.iter_mut().zip(measure_reads(&reader, effort)?) {
            times.push(measured);
        }
        from_page.extend(changes_of_page(&mut writer, &reader, &mut epoch, effort)?);
        from_pipe.extend(bytes_in_pipe(effort)?);
    }
    report(&reads, &from_page, &from_pipe)
}

/// Prints the times, and writes the figures and the chart. `reads` has the times of the reads in the order of
/// [`measure_reads`], in ns. `from_page` and `from_pipe` have the times from a change to the reader, in µs.
fn report(reads: &[Vec<f64>; 3], from_page: &[f64], from_pipe: &[f64]) -> anyhow::Result<()> {
    let [has_cpu, whole, mask] = reads.each_ref().map(|times| median(times).unwrap_or(f64::NAN));
    let system_call = "sched_getaffinity";
    let mut figures = vec![
        Figure::new("a read of the whole page", whole, "ns", system_call, mask),
        Figure::new("whether the job has a CPU", has_cpu, "ns", system_call, mask),
    ];
    let at = |times: &[f64], share| quantile(times, share).unwrap_or(f64::NAN);
    print_line(&format!(
        "{:<40}{:>10}{:>10}{:>10}{:>10}",
        "from a change to the reader", "changes", "p50 us", "p99 us", "max us"
    ))?;
    for (name, times) in [("the page", from_page), ("a byte in a pipe", from_pipe)] {
        let (p50, p99, max) = (at(times, 0.5), at(times, 0.99), at(times, 1.0));
        print_line(&format!("{name:<40}{:>10}{p50:>10.1}{p99:>10.1}{max:>10.1}", times.len()))?;
    }
    for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
        let name = format!("from a change to a reader that waits, {name}");
        figures.push(Figure::new(
            &name,
            at(from_page, share),
            "us",
            "a byte in a pipe",
            at(from_pipe, share),
        ));
    }
    let points =
        |times: &[f64]| PERCENTILES.iter().map(|&percent| (percent, at(times, percent / 100.0))).collect();
    let chart = Chart {
        title: "From a change of the core map to a reader that waits for it".into(),
        x_label: "percent of the changes".into(),
        y_label: "us".into(),
        lines: vec![("the page".into(), points(from_page)), ("a byte in a pipe".into(), points(from_pipe))],
    };
    chart.write(&target_directory()?, "core_map")?;
    publish("core_map", &figures)
}

/// Makes the content of the core map of a job with own, borrowed and leaving CPUs. `epoch` is the number of the
/// version.
fn content(epoch: u64) -> CoreMapContent {
    CoreMapContent {
        epoch,
        is_live: true,
        is_truncated: false,
        own: CpuSet::from_range(Pu(0), Pu(63)),
        borrowed: CpuSet::from_range(Pu(128), Pu(191)),
        leaving: CpuSet::from_range(Pu(128), Pu(131)),
        lent: CpuSet::new(),
        leaving_at_ns: Some(epoch),
        core_count: 128,
    }
}

/// Returns three mean times in ns: of the check whether the job has a CPU, of a read of the whole page, and of
/// sched_getaffinity(2).
fn measure_reads(reader: &CoreMapReader, effort: Effort) -> anyhow::Result<[f64; 3]> {
    let (count, own_tid) = (effort.pick(1_000, 1_000_000), Tid(gettid().as_raw().unsigned_abs()));
    let begin = Instant::now();
    for _ in 0..count {
        black_box(reader.has_cpu(black_box(Pu(3))));
    }
    let has_cpu = begin.elapsed();
    let begin = Instant::now();
    for _ in 0..count {
        black_box(reader.read()?);
    }
    let whole = begin.elapsed();
    let begin = Instant::now();
    for _ in 0..count {
        black_box(affinity::get_mask(own_tid)?);
    }
    let mask = begin.elapsed();
    Ok([has_cpu, whole, mask].map(|time| time.as_secs_f64() * 1e9 / f64::from(count)))
}

/// Returns the times in µs from just before the write of a core map until a thread that waited for the change has read
/// it. Adds the number of writes to `epoch`.
fn changes_of_page(
    writer: &mut CoreMapWriter,
    reader: &CoreMapReader,
    epoch: &mut u64,
    effort: Effort,
) -> anyhow::Result<Vec<f64>> {
    let first = *epoch;
    let count = effort.pick(100, 4_000);
    *epoch += count;
    let change = |number: u64| Ok(writer.write(&content(first + number))?);
    let wait = |number: u64| {
        black_box(reader.wait_for_change(first + number - 1, None)?);
        Ok(())
    };
    times_between(count, change, wait)
}

/// Returns the times in µs from just before the write of a byte to a pipe until a thread that waited for the byte has
/// read it.
fn bytes_in_pipe(effort: Effort) -> anyhow::Result<Vec<f64>> {
    let (mut output, mut input) = pipe().context("can't make a pipe")?;
    let change = |_| Ok(input.write_all(&[1])?);
    let wait = |_| Ok(output.read_exact(&mut [0])?);
    times_between(effort.pick(100, 4_000), change, wait)
}

/// Calls `change` in this thread and `wait` in another, `count` times, with the numbers from 1. Returns the times in µs
/// from just before each change to the end of its wait.
fn times_between(
    count: u64,
    mut change: impl FnMut(u64) -> anyhow::Result<()>,
    mut wait: impl FnMut(u64) -> anyhow::Result<()> + Send,
) -> anyhow::Result<Vec<f64>> {
    let begun = Mutex::new(Instant::now());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| -> anyhow::Result<Vec<f64>> {
            let mut times = Vec::new();
            for number in 1..=count {
                wait(number)?;
                let end = Instant::now();
                let begun = *begun.lock().map_err(|_| anyhow!("the other thread has failed"))?;
                times.push(end.saturating_duration_since(begun).as_secs_f64() * 1e6);
            }
            Ok(times)
        });
        for number in 1..=count {
            thread::sleep(PAUSE);
            *begun.lock().map_err(|_| anyhow!("the other thread has failed"))? = Instant::now();
            change(number)?;
        }
        waiting.join().map_err(|_| anyhow!("the thread that waits has failed"))?
    })
}
