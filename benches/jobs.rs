//! Measures the CPU time that pjwd uses each second while many jobs are idle, by the number of jobs. Cpusets keep the
//! jobs on their cores in one half of the cases, and masks in the other half. The peer is a loop that scans the same
//! processes by bare system calls at the same interval, in the same seconds.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use anyhow::Context;
use pjw_benches::load::idle_jobs::{ENFORCEMENTS, IdleJobs};
use pjw_benches::measure::results::{Figure, print_line, publish};
use pjw_benches::measure::usage::ProcessUsage;
use pjw_benches::peers::syscalls::SyscallScan;
use pjw_benches::programs::daemon::{EventSource, PrivateWarden};
use pjw_benches::setup::Setup;
use pjw_linux::sys::clock::own_thread_cpu_time;

/// The interval of pjwd by default, and of the bare loop.
const INTERVAL: Duration = Duration::from_secs(1);
/// The shorter interval at which pjwd first scans, so that it knows after a short time which processes are idle.
const SHORT_INTERVAL: Duration = Duration::from_millis(100);
/// pjwd scans idle processes more rarely the longer they are idle. After this number of intervals, the time between two
/// scans does not grow any more.
const SETTLING_INTERVALS: u32 = 120;
/// One rescan of eight is full, and rescans are ten intervals apart: this number of intervals contains one full rescan.
const MEASURED_INTERVALS: u32 = 80;

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::prepare()?;
    let sizes: &[usize] = effort.pick(&[16], &[128, 512]);
    let mut figures = Vec::new();
    for (enforcement, way) in ENFORCEMENTS {
        let keys = |interval: Duration| {
            let interval = interval.as_millis();
            let unusable_pus = &scale.unusable_pus;
            format!(
                "enforcement = \"{enforcement}\"\ninterval = \"{interval}ms\"\nhousekeeping = \"{unusable_pus}\"\n\
                 on_exhausted = \"share\"\n"
            )
        };
        let warden = PrivateWarden::start_with_config(
            &programs,
            &keys(SHORT_INTERVAL),
            EventSource::ProcEvents,
            &interrupt,
        )?;
        let mut jobs = IdleJobs::default();
        for &size in sizes {
            jobs.grow(&warden, size, &interrupt)?;
            interrupt.sleep_until(Instant::now() + SHORT_INTERVAL * effort.pick(10, SETTLING_INTERVALS))?;
            warden.reconfigure(&keys(INTERVAL))?;
            interrupt.sleep_until(Instant::now() + INTERVAL * effort.pick(1, 12))?;

            let pids = jobs.pids();
            let mut bare = SyscallScan::new()?;
            let daemon = ProcessUsage::new(warden.pid())?;
            let (begin, cpu_before) = (Instant::now(), daemon.cpu_time()?);
            let mut bare_cpu = Duration::ZERO;
            for number in 1..=effort.pick(2, MEASURED_INTERVALS) {
                let before = own_thread_cpu_time();
                bare.scan(&pids).context("a process of the load ended")?;
                bare_cpu += own_thread_cpu_time().saturating_sub(before);
                interrupt.sleep_until(begin + INTERVAL * number)?;
            }
            let ms_per_s = |cpu: Duration| cpu.as_secs_f64() * 1000.0 / begin.elapsed().as_secs_f64();
            let (ours, bare) = (ms_per_s(daemon.cpu_time()?.saturating_sub(cpu_before)), ms_per_s(bare_cpu));
            let name =
                format!("{size} idle jobs of {} processes, kept by {way}", IdleJobs::PROCESSES_PER_JOB);
            print_line(&format!(
                "{name}: pjwd {ours:.2} ms of CPU each second, bare system calls {bare:.2} ms"
            ))?;
            figures.push(Figure::new(&name, ours, "ms/s", "bare system calls", bare));
            warden.reconfigure(&keys(SHORT_INTERVAL))?;
        }
        warden.release_all()?;
    }
    publish("jobs", &figures)
}
