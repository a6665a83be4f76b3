//! Measures the CPU time of a regular cycle: over 5,000 sleeping threads and over 500 spinning threads. The peer is
//! the same scan by bare system calls, in the same run.
//!
//! The cost is the CPU time of the thread that runs the cycle, not the elapsed time. 500 threads spin on a few cores,
//! so the elapsed time would mostly be the wait for a core.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::unistd::getuid;
use pjw_benches::load::processes::{self, Activity, LoadProcesses};
use pjw_benches::measure::results::{Figure, median, print_line, target_directory, write_json};
use pjw_benches::peers::syscalls::SyscallScan;
use pjw_benches::programs::interrupt::StopSignal;
use pjw_core::command::{AssignCommand, Caller, Command};
use pjw_core::ids::{Pid, Uid};
use pjw_core::{
    cpuset::CpuSet, job::CpuRequest, policy::Policy, ports::Journal, record::Record, state::WardenState,
};
use pjw_linux::topology::{TopologySource, load_topology};
use pjw_linux::{node::LinuxMachine, sys::clock};
use pjw_sources::{LocalHost, job_variable_names};
use pjwd::warden::Warden;

const MEASURED_CYCLES: usize = 15;
/// The first cycles confine the load processes and find the busy threads. They are not measured.
const WARM_UP_CYCLES: usize = 5;
/// The time between two scans: long enough for each spinning thread to run.
const PAUSE: Duration = Duration::from_millis(500);

/// A journal that writes nothing, so that the cost of a disk is not measured.
struct DiscardingJournal;

impl Journal for DiscardingJournal {
    type Fault = Infallible;

    fn append(&mut self, _: &[Record]) -> Result<(), Infallible> {
        Ok(())
    }

    fn reserve(&mut self, _: u64) -> bool {
        true
    }

    fn rewrite(&mut self, _: &[Record]) -> Result<(), Infallible> {
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    processes::run_as_load_process()?;
    let interrupt = StopSignal::install()?;
    let figures = [
        measure_cycles("a cycle over 5,000 idle threads", 50, 100, Activity::Sleeping, &interrupt)?,
        measure_cycles("a cycle over 500 busy threads", 10, 50, Activity::Spinning, &interrupt)?,
    ];
    let path = write_json(&target_directory()?, "cycle", &figures)?;
    print_line(&format!("written to {}", path.display()))
}

/// Measures the CPU time of a cycle for a job with `processes` load processes of `threads` threads each, and of a scan
/// of the same threads by bare system calls. Prints both medians, and returns them as a figure with the name `name`.
fn measure_cycles(
    name: &str,
    processes: usize,
    threads: usize,
    activity: Activity,
    interrupt: &StopSignal,
) -> anyhow::Result<Figure> {
    let load = LoadProcesses::start(processes, threads, activity, interrupt)?;
    let pids = load.pids();
    let mut warden = new_warden(&pids)?;
    let mut bare = SyscallScan::new()?;
    let (mut cycles, mut scans) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP_CYCLES + MEASURED_CYCLES {
        interrupt.check()?;
        thread::sleep(PAUSE);
        let request = warden.state().scan_request(false);
        let (cycle_ms, _) = cpu_time_ms(|| warden.run_cycle(request, &[]));
        let (scan_ms, thread_count) = cpu_time_ms(|| bare.scan(&pids));
        let thread_count = thread_count.context("a measured process ended")?;
        if thread_count != processes * threads {
            bail!("the scan found {thread_count} threads instead of {}", processes * threads);
        }
        if round >= WARM_UP_CYCLES {
            cycles.push(cycle_ms);
            scans.push(scan_ms);
        }
    }
    let (Some(cycle), Some(scan)) = (median(&cycles), median(&scans)) else { bail!("nothing was measured") };
    let figure = Figure::new(name, cycle, "ms of CPU", "the same scan by bare system calls", scan);
    print_line(&format!(
        "{name}: {cycle:.2} ms of CPU; the same scan by bare system calls: {scan:.2} ms; ratio {:.2}",
        figure.ratio
    ))?;
    Ok(figure)
}

/// Makes a warden with one job of one core, which has the load processes.
fn new_warden(pids: &[u32]) -> anyhow::Result<Warden<LinuxMachine, DiscardingJournal>> {
    let topology = load_topology(TopologySource::Live)?;
    let node = LinuxMachine::new(job_variable_names()).context("can't open /proc")?;
    let state = WardenState::new(topology, &CpuSet::new());
    let host = LocalHost { name: clock::hostname(), flux_user: None };
    let mut warden = Warden::new(node, DiscardingJournal, state, Vec::new(), Policy::default(), host);
    let caller = Caller { uid: Uid(getuid().as_raw()), is_admin: true };
    let assign = AssignCommand {
        cpu_request: Some(CpuRequest::Cores(1)),
        pids: pids.iter().copied().map(Pid).collect(),
        must_be_new: true,
        ..AssignCommand::new("crowd".parse()?, caller)
    };
    let request = warden.state().scan_request(true);
    let report = warden.run_cycle(request, &[Command::Assign(assign)]);
    report.replies.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(warden)
}

/// Runs `work`. Returns the CPU time that this thread used for it, in milliseconds, and the result of `work`.
fn cpu_time_ms<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let before = clock::own_thread_cpu_time();
    let result = work();
    (clock::own_thread_cpu_time().saturating_sub(before).as_secs_f64() * 1000.0, result)
}
