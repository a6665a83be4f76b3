//! What a regular cycle costs: over 5,000 threads that sleep and over 500 that spin, each beside the bare system
//! calls of the same look in the same run.
//!
//! The cost is processor time of the thread that runs the cycle, not time on the wall: with 500 spinning threads on a
//! few cores, waiting for a turn would hide everything else.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::io::{Write, stdout};
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::getuid;
use pjw_benches::load::processes::{self, Activity, LoadProcesses};
use pjw_benches::measure::results::{Figure, median, write_json};
use pjw_benches::peers::syscalls::SyscallScan;
use pjw_benches::programs::interrupt::Interrupt;
use pjw_core::command::{Assign, Caller, Command};
use pjw_core::ids::{Pid, Uid};
use pjw_core::{
    cpuset::CpuSet, job::Amount, policy::Policy, ports::Journal, record::Record, state::WardenState,
};
use pjw_linux::topology::{TopologySource, load};
use pjw_linux::{node::LinuxNode, sys::clock};
use pjw_sources::{Host, wanted_variables};
use pjwd::warden::Warden;

const CYCLES: usize = 15;
/// Long enough that spinning threads have had a turn since the last look.
const PAUSE: Duration = Duration::from_millis(500);

/// A journal without a disk: its cost is not the cycle's.
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
    let interrupt = Interrupt::install()?;
    let figures = [
        measure_cycles("a cycle over 5,000 idle threads", 50, 100, Activity::Sleeping, &interrupt)?,
        measure_cycles("a cycle over 500 busy threads", 10, 50, Activity::Spinning, &interrupt)?,
    ];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the benches are in no workspace")?;
    let path = write_json(&root.join("target/bench"), "cycle", &figures)?;
    writeln!(stdout(), "written to {}", path.display()).context("nobody listens")
}

fn measure_cycles(
    name: &str,
    processes: usize,
    threads: usize,
    activity: Activity,
    interrupt: &Interrupt,
) -> anyhow::Result<Figure> {
    let load = LoadProcesses::start(processes, threads, activity, interrupt)?;
    let pids = load.pids();
    let mut warden = new_warden(&pids)?;
    let mut bare = SyscallScan::new()?;
    let (mut cycles, mut scans) = (Vec::new(), Vec::new());
    // The first cycles confine the load processes and find the busy threads.
    for round in 0..CYCLES + 5 {
        interrupt.check()?;
        thread::sleep(PAUSE);
        let request = warden.state().scan_request(false);
        let (cycle_ms, _) = cpu_time_ms(|| warden.run_cycle(request, &[]))?;
        let (scan_ms, thread_count) = cpu_time_ms(|| bare.scan(&pids))?;
        let thread_count = thread_count.context("a measured process ended")?;
        if thread_count != processes * threads {
            bail!("{thread_count} threads are there instead of {}", processes * threads);
        }
        if round >= 5 {
            cycles.push(cycle_ms);
            scans.push(scan_ms);
        }
    }
    let (Some(cycle), Some(scan)) = (median(&cycles), median(&scans)) else { bail!("nothing was measured") };
    let figure = Figure::new(name, cycle, "ms of CPU", "the same look by bare system calls", scan);
    writeln!(
        stdout(),
        "{name}: {cycle:.2} ms of CPU; the same look by bare system calls: {scan:.2} ms; ratio {:.2}",
        figure.ratio
    )
    .context("nobody listens")?;
    Ok(figure)
}

/// A warden for which the load processes are one job of one core.
fn new_warden(pids: &[u32]) -> anyhow::Result<Warden<LinuxNode, DiscardingJournal>> {
    let topology = load(TopologySource::Live)?;
    let node = LinuxNode::new(wanted_variables()).context("can't open /proc")?;
    let state = WardenState::new(topology, &CpuSet::new());
    let host = Host { name: clock::hostname(), flux_user: None };
    let mut warden = Warden::new(node, DiscardingJournal, state, Vec::new(), Policy::default(), host);
    let caller = Caller { uid: Uid(getuid().as_raw()), admin: true };
    let assign = Assign {
        amount: Some(Amount::Cores(1)),
        pids: pids.iter().copied().map(Pid).collect(),
        must_be_new: true,
        ..Assign::new("crowd".parse()?, caller)
    };
    let request = warden.state().scan_request(true);
    let report = warden.run_cycle(request, &[Command::Assign(assign)]);
    report.replies.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(warden)
}

/// What something costs this thread, in milliseconds.
fn cpu_time_ms<T>(work: impl FnOnce() -> T) -> anyhow::Result<(f64, T)> {
    let before = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).context("no thread clock")?;
    let done = work();
    let after = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).context("no thread clock")?;
    Ok((Duration::from(after - before).as_secs_f64() * 1000.0, done))
}
