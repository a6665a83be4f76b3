//! Measures the cost of pjwd in a steady state: its CPU time each second, and its memory. The cases differ in the
//! number of threads of the jobs, the number of threads in a process, and the share of threads that run. The peers
//! run at the same time: a loop that reads the same files by bare system calls at the same interval, and numad.
#![forbid(unsafe_code)]

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use pjw_benches::load::memory_process::available_bytes;
use pjw_benches::load::processes::{Activity, LoadProcesses};
use pjw_benches::measure::results::{Figure, print_line, publish};
use pjw_benches::measure::usage::ProcessUsage;
use pjw_benches::peers::numad::Numad;
use pjw_benches::peers::syscalls::SyscallScan;
use pjw_benches::programs::daemon::{EventSource, PrivateWarden, Programs};
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::parts::is_selected;
use pjw_benches::setup::scale::Scale;
use pjw_linux::sys::clock::own_thread_cpu_time;

/// The interval of pjwd (its default) and of the loop of bare system calls.
const INTERVAL: Duration = Duration::from_secs(1);
const INTERVAL_MS: u32 = 1000;
/// pjwd checks a process more rarely the longer the process is idle. After this number of scans the time between two
/// checks does not grow any more. The bench runs these scans at a short interval, else they would take two minutes.
const SETTLE_SCANS: u32 = 120;
const FAST_INTERVAL: Duration = Duration::from_millis(100);
/// The number of intervals in a measurement. A rescan takes place every ten intervals, and every eighth rescan reads
/// all threads. So one of these is in a measurement.
const MEASURED_INTERVALS: u32 = 80;
/// The most memory of a thread of a load process, in KiB: its stacks, and the data of the kernel.
const THREAD_KIB: u64 = 48;
/// The usual number of threads in a process.
const MEDIUM_PROCESS: usize = 50;
/// A large number of threads in a process.
const LARGE_PROCESS: usize = 1000;
/// With more spinning threads for each CPU, not every thread would run in an interval.
const MAX_SPINNING_PER_CPU: usize = 50;

/// A case: the number of threads, the number of threads in a process, what the threads do, and how many other threads
/// sleep beside them.
#[derive(Debug, Clone, Copy)]
struct Case {
    threads: usize,
    per_process: usize,
    activity: Activity,
    /// The number of additional sleeping threads, in processes of their own.
    idle_threads: usize,
}

impl Case {
    fn name(&self) -> String {
        let does = match self.activity {
            Activity::Sleeping => "idle",
            Activity::Waking(INTERVAL_MS) => "all run",
            Activity::Waking(_) => "1 % runs",
            Activity::Spinning => "all spin",
            Activity::TwoSpinning => "two of each spin",
        };
        let processes = self.threads.div_ceil(self.per_process);
        let name = format!("{} threads in {processes} processes, {does}", self.threads);
        if self.idle_threads == 0 { name } else { format!("{name}, beside {} that sleep", self.idle_threads) }
    }
}

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::prepare()?;
    let bench = Bench { effort, interrupt, programs, scale };
    let mut figures = Vec::new();
    for case in cases(effort, bench.scale.core_count).into_iter().filter(|case| is_selected(&case.name())) {
        match check_room_for(case.threads + case.idle_threads) {
            Ok(()) => figures.extend(bench.measure(case)?),
            Err(why) => print_line(&format!("skipped: {}: {why:#}", case.name()))?,
        }
    }
    publish("steady", &figures)
}

/// Returns the cases to measure on a machine with `cpus` CPUs: combinations of thread numbers, process sizes and
/// activities. Leaves out cases with more spinning threads than the CPUs can run.
fn cases(effort: Effort, cpus: usize) -> Vec<Case> {
    let sizes: &[usize] = effort.pick(&[1000], &[100, 1000, 10_000, 50_000]);
    let activities = [
        Activity::Sleeping,
        Activity::Waking(100 * INTERVAL_MS),
        Activity::Waking(INTERVAL_MS),
        Activity::Spinning,
    ];
    let mut cases = Vec::new();
    for &threads in sizes {
        for per_process in [MEDIUM_PROCESS, LARGE_PROCESS] {
            for activity in activities {
                let is_too_much = activity == Activity::Spinning && threads > MAX_SPINNING_PER_CPU * cpus;
                // The size of the processes affects only the listing of their threads, which one activity shows.
                let is_redundant = per_process == LARGE_PROCESS && activity != Activity::Sleeping;
                if !is_too_much && !is_redundant {
                    cases.push(Case {
                        threads,
                        per_process: per_process.min(threads),
                        activity,
                        idle_threads: 0,
                    });
                }
            }
        }
    }
    let (threads, idle_threads) = effort.pick((10, 990), (100, 9900));
    let few_active = Case {
        threads,
        per_process: MEDIUM_PROCESS.min(threads),
        activity: Activity::Waking(INTERVAL_MS),
        idle_threads,
    };
    let threads = effort.pick(1000, 10_000);
    let two_spinning =
        Case { threads, per_process: threads, activity: Activity::TwoSpinning, idle_threads: 0 };
    if effort == Effort::Quick {
        cases.truncate(2);
    }
    cases.extend([few_active, two_spinning]);
    cases
}

/// Checks whether `threads` more threads can run on this machine.
///
/// # Errors
/// If a limit of the kernel is too low or there is too little memory. The error is the reason for skipping the case.
fn check_room_for(threads: usize) -> anyhow::Result<()> {
    let number = |path: &str| -> anyhow::Result<u64> {
        let text = fs::read_to_string(path).with_context(|| format!("can't read {path}"))?;
        text.trim().parse().with_context(|| format!("{path} is not a number"))
    };
    let load = fs::read_to_string("/proc/loadavg").context("can't read /proc/loadavg")?;
    let present_threads =
        load.split_ascii_whitespace().nth(3).and_then(|field| field.split_once('/')?.1.parse().ok());
    let needed = u64::try_from(threads)? + present_threads.unwrap_or(0) + 500;
    for (path, what) in [
        ("/proc/sys/kernel/pid_max", "kernel.pid_max"),
        ("/proc/sys/kernel/threads-max", "kernel.threads-max"),
    ] {
        let most = number(path)?;
        if most < needed {
            bail!("{what} is {most}, which is too low: sysctl -w {what}={}", 2 * needed);
        }
    }
    let free_kib = available_bytes()? / 1024;
    let needed_kib = u64::try_from(threads)? * THREAD_KIB;
    if free_kib / 2 < needed_kib {
        bail!(
            "the threads need {} MiB of memory, and {} MiB are free, of which half may be used",
            needed_kib / 1024,
            free_kib / 1024
        );
    }
    Ok(())
}

struct Bench {
    effort: Effort,
    interrupt: StopSignal,
    programs: Programs,
    scale: Scale,
}

/// The cost of pjwd and of its peers: CPU time in milliseconds each second, and memory at the end of the measurement.
#[derive(Debug)]
struct Costs {
    pjwd_ms: f64,
    bare_ms: f64,
    rss_mib: f64,
    /// The CPU time of numad in milliseconds each second, and its memory in MiB.
    numad: Option<(f64, f64)>,
}

impl Bench {
    /// Starts the load of `case` as a job of pjwd, and measures the CPU time of pjwd, of numad and of a loop of bare
    /// system calls. Returns the figures. numad is left out if it is not installed.
    fn measure(&self, case: Case) -> anyhow::Result<Vec<Figure>> {
        let load = LoadProcesses::start(
            case.threads.div_ceil(case.per_process),
            case.per_process,
            case.activity,
            &self.interrupt,
        )?;
        let idle_load = LoadProcesses::start(
            case.idle_threads / MEDIUM_PROCESS,
            MEDIUM_PROCESS,
            Activity::Sleeping,
            &self.interrupt,
        )?;
        let load_pids = load.pids();
        let all_pids = [load_pids.clone(), idle_load.pids()].concat();
        let keys = |interval: Duration| {
            let (interval, unusable_pus) = (interval.as_millis(), &self.scale.unusable_pus);
            format!(
                "enforcement = \"auto\"\ninterval = \"{interval}ms\"\nhousekeeping = \"{unusable_pus}\"\n"
            )
        };
        let warden = PrivateWarden::start_with_config(
            &self.programs,
            &keys(FAST_INTERVAL),
            EventSource::ProcEvents,
            &self.interrupt,
        )?;
        warden.assign("steady", &self.scale.usable_cores[0], &all_pids)?;
        let thread_count = warden.status()?["jobs"][0]["threads"].as_u64().unwrap_or(0);
        if usize::try_from(thread_count)? < case.threads + idle_load.pids().len() * MEDIUM_PROCESS {
            bail!("pjwd sees {thread_count} threads of {}", case.name());
        }
        let numad = match Numad::start(&all_pids, &self.interrupt) {
            Ok(numad) => Some(numad),
            Err(error) => {
                self.interrupt.check()?;
                print_line(&format!("skipped: numad: {error:#}"))?;
                None
            }
        };
        let mut bare = SyscallScan::new()?;
        if matches!(case.activity, Activity::Sleeping) || case.idle_threads > 0 {
            self.interrupt.sleep_until(Instant::now() + FAST_INTERVAL * SETTLE_SCANS)?;
        }
        warden.reconfigure(&keys(INTERVAL))?;
        // The first scans cost more: pjwd learns the demand of the threads, and the bare loop has read none of its
        // files. After a new configuration, the next rescan reads everything.
        self.measure_window(&warden, numad.as_ref(), &mut bare, &load_pids, self.effort.pick(2, 12))?;
        let intervals = self.effort.pick(3, MEASURED_INTERVALS);
        let costs = self.measure_window(&warden, numad.as_ref(), &mut bare, &load_pids, intervals)?;
        warden.release_all()?;
        costs.figures(&case.name())
    }

    /// Measures the costs during `intervals` intervals. The bare loop scans once in each interval.
    fn measure_window(
        &self,
        warden: &PrivateWarden,
        numad: Option<&Numad>,
        bare: &mut SyscallScan,
        pids: &[u32],
        intervals: u32,
    ) -> anyhow::Result<Costs> {
        let pjwd = ProcessUsage::new(warden.pid())?;
        let numad_usage = numad.map(|numad| ProcessUsage::new(numad.pid())).transpose()?;
        let numad_cpu = || numad_usage.as_ref().map(ProcessUsage::cpu_time).transpose();
        let (began, before, numad_before) = (Instant::now(), pjwd.cpu_time()?, numad_cpu()?);
        let mut scan_time = Duration::ZERO;
        for number in 1..=intervals {
            let before_scan = own_thread_cpu_time();
            bare.scan(pids).context("a measured process ended")?;
            scan_time += own_thread_cpu_time().saturating_sub(before_scan);
            self.interrupt.sleep_until(began + INTERVAL * number)?;
        }
        let ms_per_s = |cpu: Duration| cpu.as_secs_f64() * 1000.0 / began.elapsed().as_secs_f64();
        let pjwd_ms = ms_per_s(pjwd.cpu_time()?.saturating_sub(before));
        let (bare_ms, rss_mib) = (ms_per_s(scan_time), pjwd.rss_mib()?);
        let numad = match (&numad_usage, numad_before) {
            (Some(numad_usage), Some(before)) => {
                Some((ms_per_s(numad_usage.cpu_time()?.saturating_sub(before)), numad_usage.rss_mib()?))
            }
            _ => None,
        };
        Ok(Costs { pjwd_ms, bare_ms, rss_mib, numad })
    }
}

impl Costs {
    /// Prints the costs of the case with the name `case`, and returns the figures that compare pjwd with its peers.
    fn figures(&self, case: &str) -> anyhow::Result<Vec<Figure>> {
        let &Costs { pjwd_ms: pjwd, bare_ms: bare, rss_mib: rss, numad } = self;
        let mut figures = vec![Figure::new(case, pjwd, "ms/s", "bare system calls", bare)];
        if let Some((numad, numad_rss)) = numad {
            figures.push(Figure::new(case, pjwd, "ms/s", "numad -i 1:1", numad));
            figures.push(Figure::new(&format!("{case}: memory"), rss, "MiB", "numad -i 1:1", numad_rss));
        }
        print_line(&format!(
            "{case}: pjwd {pjwd:.2} ms of CPU each second, {rss:.1} MiB; bare calls {bare:.2} ms"
        ))?;
        Ok(figures)
    }
}
