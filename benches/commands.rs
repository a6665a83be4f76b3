//! What one `assign` and one `release` cost beside many idle jobs: the CPU time of pjwd, and the time until the answer.
//! The peer changes the cpuset or the mask of the process as the command does, by bare system calls.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use anyhow::Context;
use pjw_benches::load::idle_jobs::{ENFORCEMENTS, IdleJobs};
use pjw_benches::load::processes::{Activity, LoadProcesses};
use pjw_benches::measure::results::{Figure, median, print_line, publish};
use pjw_benches::measure::usage::ProcessUsage;
use pjw_benches::peers::cgroups::Cgroup;
use pjw_benches::programs::daemon::{EventSource, PrivateWarden};
use pjw_benches::setup::Setup;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_linux::sys::{affinity, clock::own_thread_cpu_time};

const COMMAND_JOB: &str = "commands";

/// The cost of each call of one command: the CPU time of the daemon, and the time until the answer, both in ms.
#[derive(Default)]
struct Costs {
    cpu_ms: Vec<f64>,
    answer_ms: Vec<f64>,
}

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::prepare()?;
    let sizes: &[usize] = effort.pick(&[8, 16], &[32, 100, 128, 300, 512, 600]);
    let mut figures = Vec::new();
    for (enforcement, way) in ENFORCEMENTS {
        let keys = format!(
            "enforcement = \"{enforcement}\"\nhousekeeping = \"{}\"\non_exhausted = \"share\"\n",
            scale.unusable_pus
        );
        let warden = PrivateWarden::start_with_config(&programs, &keys, EventSource::ProcEvents, &interrupt)?;
        let daemon = ProcessUsage::new(warden.pid())?;
        let process = LoadProcesses::start(1, 1, Activity::Sleeping, &interrupt)?;
        let pids = process.pids();
        let mut jobs = IdleJobs::default();
        for &size in sizes {
            jobs.grow(&warden, size, &interrupt)?;
            interrupt.sleep_until(Instant::now() + Duration::from_secs(effort.pick(1, 15)))?;
            let (mut assign, mut release, mut bare_ms) = (Costs::default(), Costs::default(), Vec::new());
            for _ in 0..effort.pick(3, 40) {
                interrupt.sleep_until(Instant::now() + Duration::from_millis(effort.pick(10, 60)))?;
                assign.measure(&daemon, || warden.assign_cores(COMMAND_JOB, 1, &pids))?;
                release.measure(&daemon, || warden.release(COMMAND_JOB))?;
                bare_ms.push(bare_change(enforcement == "auto", &scale.usable_cores[0], pids[0])?);
            }
            let bare = median(&bare_ms).context("nothing was measured")?;
            for (command, costs) in [("assign", assign), ("release", release)] {
                let medians = median(&costs.cpu_ms).zip(median(&costs.answer_ms));
                let (cpu, answer) = medians.context("nothing was measured")?;
                let name = format!("{command} beside {size} jobs, kept by {way}");
                print_line(&format!("{name}: {cpu:.2} ms of CPU, answer after {answer:.2} ms"))?;
                figures.push(Figure::new(&format!("{name}: CPU"), cpu, "ms", "bare system calls", bare));
                figures.push(Figure::new(
                    &format!("{name}: answer"),
                    answer,
                    "ms",
                    "bare system calls",
                    bare,
                ));
            }
        }
        warden.release_all()?;
    }
    publish("commands", &figures)
}

impl Costs {
    fn measure(
        &mut self,
        daemon: &ProcessUsage,
        command: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (begin, before) = (Instant::now(), daemon.cpu_time()?);
        command()?;
        self.answer_ms.push(begin.elapsed().as_secs_f64() * 1000.0);
        self.cpu_ms.push(daemon.cpu_time()?.saturating_sub(before).as_secs_f64() * 1000.0);
        Ok(())
    }
}

/// Puts the process `pid` on the PUs `core` with bare system calls, and back. Returns half of the CPU time, in ms: the
/// work of one command. If `by_cpuset` is true, moves the process into a new cgroup. Otherwise, sets its affinity mask.
fn bare_change(by_cpuset: bool, core: &CpuSet, pid: u32) -> anyhow::Result<f64> {
    let before = own_thread_cpu_time();
    if by_cpuset {
        let cgroup = Cgroup::new("cpuset", "command")?;
        cgroup.set_cpus(core)?;
        cgroup.move_in_and_back(pid)?;
    } else {
        let original = affinity::get_mask(Tid(pid)).context("can't read the mask")?;
        affinity::set_mask(Tid(pid), core).context("can't set the mask")?;
        affinity::set_mask(Tid(pid), &original).context("can't set the mask")?;
    }
    Ok(own_thread_cpu_time().saturating_sub(before).as_secs_f64() * 1000.0 / 2.0)
}
