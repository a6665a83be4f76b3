//! The processes of the bench `farm`. A master must have one thread, so the bench starts its own executable again for
//! each farm. The main function of the bench calls [`run_as_farm_process`] first.

use std::env;
use std::fs;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write, stdin, stdout};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::time::{ClockId, clock_gettime};
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_linux::sys::affinity;
use pjw_spawn::farm::{Farm, ItemResult, RunningFarm};

const ARGUMENT: &str = "--farm-process";
const PAGE_BYTES: usize = 4096;
/// The size in bytes of the data that all worker processes of a measured farm need. The workers of a farm can share
/// this data.
pub const COMMON_BYTES: usize = 64 << 20;
/// The size in bytes of the data that each worker loads for itself and shares with no other process.
pub const PRIVATE_BYTES_PER_WORKER: usize = 16 << 20;

/// When the workers of a farm (a group of worker processes) are forked from the master (the process that starts the
/// farm).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForkTime {
    /// The workers are forked after the master has loaded the data that all workers need. The workers share this data
    /// with the master.
    Late,
    /// The workers are forked before this data is loaded. Each worker loads the data for itself.
    Early,
}

/// The way in which a bench computes a number of items: by a farm (a group of worker processes that take items from a
/// queue), by a farm with a reader and a writer process, or in equal parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemWay {
    /// By a farm: each worker process takes the next item from a queue when it has computed an item.
    Farm,
    /// By a farm with two additional processes. The reader process passes 64 bytes to a worker for each item. The
    /// writer process writes the results.
    FarmWithReaderAndWriter,
    /// Each worker computes the same fixed number of items. A worker communicates only once, when all of its items are
    /// computed.
    EvenSplit,
}

/// A job that the bench `farm` measures. In its serial part, only one process computes. The items are computed by
/// worker processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// The CPU time of the serial part, in ms. Two thirds of this time are used before the items, and one third after
    /// them.
    pub serial_ms: u32,
    /// The number of items.
    pub items: u32,
    /// The CPU time of one item.
    pub item_cpu_time: Duration,
    /// The number of worker processes. 0 for a program without workers, which computes all items itself.
    pub workers: u32,
}

/// The parameters of a farm with a reader process and a writer process: the number of workers, the number of items, and
/// the CPU time of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReaderAndWriter {
    /// The number of worker processes, without the reader and the writer.
    pub workers: u32,
    /// The number of items.
    pub items: u32,
    /// The CPU time that a worker needs for one item.
    pub item_cpu_time: Duration,
    /// The CPU time that the reader needs for one item. The writer needs the same CPU time for the result of the item.
    pub io: Duration,
}

impl ItemWay {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Farm, "farm"),
        (Self::FarmWithReaderAndWriter, "reader-and-writer"),
        (Self::EvenSplit, "even-split"),
    ];

    fn word(self) -> &'static str {
        Self::ALL.into_iter().find(|(way, _)| *way == self).map_or("", |(_, word)| word)
    }
}

/// Computes until this process has used the additional CPU time `time`.
///
/// # Errors
/// If the clock of the process can't be read.
pub fn compute(time: Duration) -> anyhow::Result<()> {
    let now = || clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(Duration::from);
    let end = now()? + time;
    while now()? < end {}
    Ok(())
}

/// Measures how long a group of `workers` worker processes takes to compute `items` items, in seconds. `way` says how
/// the workers share the items. `item_cpu_time` is the CPU time of one item. The measurement runs in a process of its
/// own.
///
/// # Errors
/// If the process can't be started or fails.
pub fn measure_items(way: ItemWay, workers: u32, items: u32, item_cpu_time: Duration) -> anyhow::Result<f64> {
    let item_ns = item_cpu_time.as_nanos().to_string();
    run_farm_process(&["items", way.word(), &workers.to_string(), &items.to_string(), &item_ns])
}

/// Returns a command that runs a farm (a group of worker processes that compute items) with a reader and a writer
/// process. The command prints how long the farm took, in seconds. `launcher` is a command that starts another command,
/// whose words are appended to it. Without `launcher`, the farm is started directly.
///
/// If `cores` is not empty, worker i is bound to the entry i of the list by sched_setaffinity(2). The reader and the
/// writer are not bound.
///
/// # Errors
/// If the path of this program can't be read.
pub fn reader_and_writer_command(
    farm: ReaderAndWriter,
    cores: &[CpuSet],
    launcher: Option<Command>,
) -> anyhow::Result<Command> {
    let executable = env::current_exe().context("can't read the path of this program")?;
    let mut command = match launcher {
        Some(mut command) => {
            command.arg(executable);
            command
        }
        None => Command::new(executable),
    };
    let ReaderAndWriter { workers, items, item_cpu_time, io } = farm;
    command.args([ARGUMENT, "reader-and-writer", &workers.to_string(), &items.to_string()]);
    command.args([item_cpu_time.as_nanos().to_string(), io.as_nanos().to_string()]);
    command.args(cores.iter().map(ToString::to_string));
    Ok(command)
}

/// Measures how long `job` takes, in seconds. The job runs in a process of its own.
///
/// # Errors
/// If the process can't be started or fails.
pub fn measure_job(job: Job) -> anyhow::Result<f64> {
    let Job { serial_ms, items, item_cpu_time, workers } = job;
    let item_ns = item_cpu_time.as_nanos().to_string();
    run_farm_process(&["job", &serial_ms.to_string(), &items.to_string(), &item_ns, &workers.to_string()])
}

/// Measures the memory of a farm (a group of worker processes) with `workers` workers, in MiB: the sum of the
/// proportional set sizes (PSS) of the workers and of the process that started the farm. The farm runs in a process of
/// its own.
///
/// # Errors
/// If the process can't be started or fails.
pub fn measure_memory(fork_time: ForkTime, workers: u32) -> anyhow::Result<f64> {
    let word = if fork_time == ForkTime::Late { "late" } else { "early" };
    run_farm_process(&["memory", word, &workers.to_string()])
}

/// Measures the memory of `count` processes that are started one by one and share no data, in MiB: the sum of their
/// proportional set sizes (PSS). Each process loads [`COMMON_BYTES`] and [`PRIVATE_BYTES_PER_WORKER`] bytes of data.
///
/// # Errors
/// If a process can't be started or fails.
pub fn measure_instances(count: u32) -> anyhow::Result<f64> {
    let mut instances: Vec<Child> = Vec::new();
    for _ in 0..count {
        let mut command = own_command(&["instance"])?;
        instances.push(command.stdin(Stdio::piped()).spawn().context("can't start an instance")?);
    }
    // The pipes stay open, because each instance writes once more at its end.
    let mut outputs = Vec::new();
    for instance in &mut instances {
        let mut line = String::new();
        let mut output = BufReader::new(instance.stdout.take().context("an instance has no output")?);
        output.read_line(&mut line).context("an instance is not ready")?;
        ensure!(line == "ready\n", "an instance failed");
        outputs.push(output);
    }
    let mut kib = 0.0;
    for instance in &instances {
        kib += pss_kib(instance.id())?;
    }
    for mut instance in instances {
        drop(instance.stdin.take());
        ensure!(instance.wait()?.success(), "an instance failed");
    }
    Ok(kib / 1024.0)
}

fn own_command(arguments: &[&str]) -> anyhow::Result<Command> {
    let executable = env::current_exe().context("can't read the path of this program")?;
    let mut command = Command::new(executable);
    command.arg(ARGUMENT).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
    Ok(command)
}

/// Runs a farm process with the arguments `arguments`, and returns the number that it prints.
fn run_farm_process(arguments: &[&str]) -> anyhow::Result<f64> {
    let output = own_command(arguments)?.stderr(Stdio::inherit()).output().context("can't start a farm")?;
    ensure!(output.status.success(), "the farm {} failed: {}", arguments.join(" "), output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("the farm answered {text:?}"))
}

/// Runs one measurement of a farm (a group of worker processes) and ends the process, if the arguments of this program
/// request this. Otherwise returns at once. A farm must be started by a process with a single thread, so a bench starts
/// its own program again for each measurement.
///
/// # Errors
/// If the measurement fails, or if the arguments are invalid.
pub fn run_as_farm_process() -> anyhow::Result<()> {
    let arguments: Vec<String> = env::args().skip_while(|argument| argument != ARGUMENT).skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let answer = match words[..] {
        [] => return Ok(()),
        ["items", way, workers, items, item_ns] => {
            let item_cpu_time = Duration::from_nanos(item_ns.parse()?);
            time_of_items(way_of(way)?, workers.parse()?, items.parse()?, item_cpu_time)?
        }
        ["reader-and-writer", workers, items, item_ns, io_ns, ref cores @ ..] => {
            let cores: Result<Vec<CpuSet>, _> = cores.iter().map(|cpus| cpus.parse()).collect();
            let farm = ReaderAndWriter {
                workers: workers.parse()?,
                items: items.parse()?,
                item_cpu_time: Duration::from_nanos(item_ns.parse()?),
                io: Duration::from_nanos(io_ns.parse()?),
            };
            reader_and_writer(farm, &cores?)?
        }
        ["job", serial_ms, items, item_ns, workers] => time_of_job(Job {
            serial_ms: serial_ms.parse()?,
            items: items.parse()?,
            item_cpu_time: Duration::from_nanos(item_ns.parse()?),
            workers: workers.parse()?,
        })?,
        ["memory", "late", workers] => memory_of(ForkTime::Late, workers.parse()?)?,
        ["memory", "early", workers] => memory_of(ForkTime::Early, workers.parse()?)?,
        ["instance"] => run_instance()?,
        _ => bail!("{ARGUMENT} has unknown arguments: {words:?}"),
    };
    let mut out = stdout().lock();
    writeln!(out, "{answer}").and_then(|()| out.flush()).context("can't write the answer")?;
    drop(out);
    std::process::exit(0)
}

fn way_of(word: &str) -> anyhow::Result<ItemWay> {
    ItemWay::ALL.into_iter().find(|(_, other)| *other == word).map(|(way, _)| way).context("an unknown way")
}

/// Computes as [`compute`] does. The error is the one with which an item of a farm fails.
fn compute_in_farm(time: Duration) -> Result<(), i32> {
    compute(time).map_err(|_| 1)
}

/// Waits for all results of the farm, and returns their number.
fn finish(running: RunningFarm<'_>) -> anyhow::Result<usize> {
    let results: Vec<ItemResult> = running.collect::<Result<_, _>>()?;
    Ok(results.len())
}

/// Returns the time in seconds in which `workers` workers compute `items` items in the way `way`. `item_cpu_time` is
/// the CPU time of one item.
///
/// # Errors
/// If an item fails, or if results are missing.
fn time_of_items(way: ItemWay, workers: u32, items: u32, item_cpu_time: Duration) -> anyhow::Result<f64> {
    if way == ItemWay::FarmWithReaderAndWriter {
        return reader_and_writer(ReaderAndWriter { workers, items, item_cpu_time, io: Duration::ZERO }, &[]);
    }
    let begin = Instant::now();
    let farm = Farm::new(workers);
    let (expected, running) = if way == ItemWay::EvenSplit {
        (workers, farm.start(workers.into(), |_, _| compute_in_farm(item_cpu_time * (items / workers))))
    } else {
        (items, farm.start(items.into(), |_, _| compute_in_farm(item_cpu_time)))
    };
    let done = finish(running?)?;
    ensure!(done == expected as usize, "{done} of {expected} items came back");
    Ok(begin.elapsed().as_secs_f64())
}

/// Runs a farm whose reader passes 64 bytes for each item, and whose writer writes them to a file. If `cores` is not
/// empty, binds worker i to the entry i of `cores`. Returns the run time in seconds.
fn reader_and_writer(farm: ReaderAndWriter, cores: &[CpuSet]) -> anyhow::Result<f64> {
    let ReaderAndWriter { workers, items, item_cpu_time, io } = farm;
    let begin = Instant::now();
    let sink = tempfile::tempfile().context("can't make a file")?;
    let write_result = move |result: &ItemResult| {
        let pjw_spawn::farm::Outcome::Done(bytes) = &result.outcome else { return Err(1) };
        compute_in_farm(io)?;
        (&sink).write_all(bytes).map_err(|_| 1)
    };
    let running = Farm::new(workers).writer(write_result).start_with_reader(
        |number, bytes| {
            bytes.resize(64, 1);
            compute_in_farm(io)?;
            Ok(number < items.into())
        },
        |read, result| {
            result.extend_from_slice(read.bytes);
            compute_in_farm(item_cpu_time)
        },
    )?;
    for (pid, cpus) in running.worker_pids().into_iter().zip(cores) {
        affinity::set_mask(Tid(pid.0), cpus).context("can't bind a worker")?;
    }
    let done = finish(running)?;
    ensure!(done == items as usize, "{done} of {items} items came back");
    Ok(begin.elapsed().as_secs_f64())
}

/// Runs `job` in this process, and returns the run time in seconds. The serial part comes in two pieces: two thirds
/// of it before the items, and the rest after them. Without workers, this process computes the items itself.
fn time_of_job(job: Job) -> anyhow::Result<f64> {
    let begin = Instant::now();
    let serial = Duration::from_millis(job.serial_ms.into());
    compute(serial * 2 / 3)?;
    if job.workers == 0 {
        for _ in 0..job.items {
            compute(job.item_cpu_time)?;
        }
    } else {
        let running =
            Farm::new(job.workers).start(job.items.into(), |_, _| compute_in_farm(job.item_cpu_time))?;
        ensure!(finish(running)? == job.items as usize, "not all items came back");
    }
    compute(serial / 3)?;
    Ok(begin.elapsed().as_secs_f64())
}

/// Returns `bytes` bytes of new memory. Each of its pages was written, so that the kernel has allocated it.
fn load(bytes: usize) -> Vec<u8> {
    let mut memory = vec![0; bytes];
    memory.chunks_mut(PAGE_BYTES).for_each(|page| page[0] = 1);
    black_box(memory)
}

/// Reads each page of `memory`.
fn read_all(memory: &[u8]) -> u64 {
    black_box(memory.chunks(PAGE_BYTES).map(|page| u64::from(page[0])).sum())
}

/// Returns the memory in MiB that a farm with `workers` workers uses while all workers have their data. This is the
/// sum of the proportional set sizes (PSS) of the workers and of this process, which is the master. `fork_time` says
/// whether the workers are forked before or after the common data is loaded.
fn memory_of(fork_time: ForkTime, workers: u32) -> anyhow::Result<f64> {
    let semaphore = || EventFd::from_flags(EfdFlags::EFD_SEMAPHORE).context("can't make a semaphore");
    let (ready, may_end) = (semaphore()?, semaphore()?);
    let common = if fork_time == ForkTime::Late { load(COMMON_BYTES) } else { Vec::new() };
    let running = Farm::new(workers).start(workers.into(), |_, _| {
        let loaded = if fork_time == ForkTime::Late { Vec::new() } else { load(COMMON_BYTES) };
        let own = load(PRIVATE_BYTES_PER_WORKER);
        read_all(&common);
        ready.write(1).map_err(|errno| errno as i32)?;
        may_end.read().map_err(|errno| errno as i32)?;
        drop(black_box((loaded, own)));
        Ok(())
    })?;
    for _ in 0..workers {
        ready.read()?;
    }
    let mut kib = pss_kib(std::process::id())?;
    for pid in running.worker_pids() {
        kib += pss_kib(pid.0)?;
    }
    may_end.write(workers.into())?;
    finish(running)?;
    Ok(kib / 1024.0)
}

/// Runs as one of several processes that do not share their data. Loads the data, prints `ready`, and waits until
/// standard input is closed. The result has no meaning.
fn run_instance() -> anyhow::Result<f64> {
    let memory = (load(COMMON_BYTES), load(PRIVATE_BYTES_PER_WORKER));
    let mut out = stdout().lock();
    writeln!(out, "ready").and_then(|()| out.flush()).context("can't write")?;
    drop(out);
    stdin().lock().read_to_end(&mut Vec::new()).context("can't wait")?;
    Ok(f64::from(black_box(memory).0[0]))
}

/// Returns the proportional set size of the process `pid` in KiB: each shared page counts in part.
fn pss_kib(pid: u32) -> anyhow::Result<f64> {
    let path = PathBuf::from(format!("/proc/{pid}/smaps_rollup"));
    let text = fs::read_to_string(&path).with_context(|| format!("can't read {}", path.display()))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).context("there is no Pss")?;
    line.trim().trim_end_matches(" kB").parse().context("Pss is not a number")
}
