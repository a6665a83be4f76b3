//! What one look at ten thousand threads costs, by thread: the warden's own look, the `procfs` crate's, and the bare
//! system calls. Processor time of the thread that looks.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, bail};
use nix::time::{ClockId, clock_gettime};
use pjw_benches::load::processes::{self, Activity, Processes};
use pjw_benches::measure::results::{Figure, median, publish, say};
use pjw_benches::peers::syscalls::Syscalls;
use pjw_benches::programs::interrupt::Interrupt;
use pjw_benches::setup::effort::Effort;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::{ids::Pid, ports::Node, snapshot::Observed};
use pjw_linux::{bpf::TaskScan, node::LinuxNode};
use pjw_sources::wanted_variables;
use procfs::process::Process;
use std::time::Duration;

/// A way to look at all threads of some processes, and to learn of each its state, its run time and its mask.
trait Way {
    fn name(&self) -> String;
    /// Looks once; how many threads were seen.
    fn look(&mut self, pids: &[u32]) -> anyhow::Result<usize>;
}

/// All ways, ours first.
fn ways() -> anyhow::Result<Vec<Box<dyn Way>>> {
    let mut ours: Vec<Box<dyn Way>> = Vec::new();
    match TaskScan::load() {
        Ok(scan) => {
            let mut node = node()?;
            node.use_task_scan(Some(scan));
            ours.push(Box::new(Warden { node, scope: Whom::Everybody, by: "BPF" }));
        }
        Err(why) => say(&format!("skipped: looks by BPF: {why}"))?,
    }
    let by_proc = |scope| -> anyhow::Result<Box<dyn Way>> {
        Ok(Box::new(Warden { node: node()?, scope, by: "/proc" }))
    };
    ours.extend([by_proc(Whom::Members)?, by_proc(Whom::Everybody)?]);
    ours.extend::<[Box<dyn Way>; 3]>([
        Box::new(Stranger),
        Box::new(BareCalls(Syscalls::new()?)),
        Box::new(CrateProcfs),
    ]);
    Ok(ours)
}

fn node() -> anyhow::Result<LinuxNode> {
    LinuxNode::new(wanted_variables()).context("can't open /proc")
}

enum Whom {
    /// As in each interval.
    Members,
    /// As in a full rescan: everybody, and the members' threads.
    Everybody,
}

struct Warden {
    node: LinuxNode,
    scope: Whom,
    by: &'static str,
}

impl Way for Warden {
    fn name(&self) -> String {
        match self.scope {
            Whom::Members => format!("pjw by {}, members", self.by),
            Whom::Everybody => format!("pjw by {}, a full look (the whole machine too)", self.by),
        }
    }

    fn look(&mut self, pids: &[u32]) -> anyhow::Result<usize> {
        Ok(observe(&mut self.node, pids, matches!(self.scope, Whom::Everybody)))
    }
}

/// The warden's first look of all: nothing is remembered.
struct Stranger;

impl Way for Stranger {
    fn name(&self) -> String {
        "pjw by /proc, the first look".to_owned()
    }

    fn look(&mut self, pids: &[u32]) -> anyhow::Result<usize> {
        Ok(observe(&mut node()?, pids, false))
    }
}

fn observe(node: &mut LinuxNode, pids: &[u32], everybody: bool) -> usize {
    let members: BTreeSet<Pid> = pids.iter().copied().map(Pid).collect();
    let scope = if everybody { ScanScope::Full } else { ScanScope::Partial(members.clone()) };
    let look = ScanRequest {
        scope,
        threads_of: members.clone(),
        cgroups: BTreeSet::new(),
        idle_watch: Arc::default(),
    };
    let snapshot = node.observe(&look);
    let members = members.iter().filter_map(|pid| snapshot.processes.get(pid));
    let threads = members.filter_map(|seen| match seen {
        Observed::Present(process) => process.threads.as_ref().map(Vec::len),
        Observed::Gone => None,
    });
    threads.sum()
}

struct BareCalls(Syscalls);

impl Way for BareCalls {
    fn name(&self) -> String {
        "bare system calls".to_owned()
    }

    fn look(&mut self, pids: &[u32]) -> anyhow::Result<usize> {
        self.0.look(pids).context("a measured process ended")
    }
}

/// The crate has no schedstat of a thread that is not this program's main one by task, so it reads what it has of the
/// same facts: `stat` for state and time, and `status` for the mask.
struct CrateProcfs;

impl Way for CrateProcfs {
    fn name(&self) -> String {
        "the procfs crate".to_owned()
    }

    fn look(&mut self, pids: &[u32]) -> anyhow::Result<usize> {
        let mut threads = 0;
        for &pid in pids {
            for task in Process::new(pid.cast_signed())?.tasks()? {
                let task = task?;
                let (stat, status) = (task.stat()?, task.status()?);
                threads += usize::from(stat.utime < u64::MAX && status.cpus_allowed.is_some());
            }
        }
        Ok(threads)
    }
}

fn main() -> anyhow::Result<()> {
    processes::attend()?;
    let effort = Effort::asked();
    let interrupt = Interrupt::watch()?;
    let threads = effort.pick(2000, 10_000);
    let mut figures = Vec::new();
    for (per_process, does, activity) in [
        (50, "idle", Activity::Sleeping),
        (1000, "idle", Activity::Sleeping),
        (50, "all run", Activity::Waking(500)),
    ] {
        let load = Processes::start(threads / per_process, per_process, activity, &interrupt)?;
        let what = format!("{threads} threads in {} processes, {does}", threads / per_process);
        figures.extend(compare(&what, &load.pids(), threads, activity, (effort, &interrupt))?);
    }
    publish("scan", &figures)
}

/// All ways in turns, each round in another order; ours beside the others.
#[expect(clippy::cast_precision_loss, reason = "thousands of threads")]
fn compare(
    what: &str,
    pids: &[u32],
    threads: usize,
    activity: Activity,
    (effort, interrupt): (Effort, &Interrupt),
) -> anyhow::Result<Vec<Figure>> {
    let mut ways = ways()?;
    let mut costs: Vec<Vec<f64>> = vec![Vec::new(); ways.len()];
    // The first round meets everybody.
    for round in 0..=effort.pick(3, 15) {
        for turn in 0..ways.len() {
            interrupt.check()?;
            if matches!(activity, Activity::Waking(_)) {
                // Everybody has run since the last look.
                std::thread::sleep(Duration::from_millis(600));
            }
            let number = (turn + round) % ways.len();
            let way = &mut ways[number];
            let cpu = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
            let before = cpu()?;
            let seen = way.look(pids)?;
            let cost = cpu()?.saturating_sub(before);
            if seen != threads {
                bail!("{} saw {seen} threads of {threads}", way.name());
            }
            if round > 0 {
                costs[number].push(cost.as_secs_f64() * 1e9 / threads as f64);
            }
        }
    }
    let medians: Vec<f64> = costs.iter().filter_map(|costs| median(costs)).collect();
    let names: Vec<String> = ways.iter().map(|way| way.name()).collect();
    for (name, cost) in names.iter().zip(&medians) {
        say(&format!("{what}: {name}: {cost:.0} ns per thread"))?;
    }
    let ours = names.iter().zip(&medians).filter(|(name, _)| name.starts_with("pjw"));
    let peers = || names.iter().zip(&medians).filter(|(name, _)| !name.starts_with("pjw"));
    let beside = |(ours, &value): (&String, &f64)| {
        let name = format!("{what}: {ours}");
        peers()
            .map(move |(peer, &theirs)| Figure::new(&name, value, "ns/thread", peer, theirs))
            .collect::<Vec<_>>()
    };
    Ok(ours.flat_map(beside).collect())
}
