//! Measures the CPU time of one scan of 10,000 threads, for each thread: by pjwd's own code, by the `procfs` crate,
//! and by bare system calls.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use pjw_benches::load::processes::{self, Activity, LoadProcesses};
use pjw_benches::measure::results::{Figure, median, print_line, publish};
use pjw_benches::peers::syscalls::SyscallScan;
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::setup::effort::Effort;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::{ids::Pid, ports::MachineInterface, snapshot::Observed};
use pjw_linux::{bpf::TaskScan, node::LinuxMachine, sys::clock::own_thread_cpu_time};
use pjw_sources::job_variable_names;
use procfs::process::Process;

/// A way to read the state, the run time and the mask of all threads of some processes.
trait ScanMethod {
    fn name(&self) -> String;
    /// Scans the processes once and returns the number of threads.
    fn scan(&mut self, pids: &[u32]) -> anyhow::Result<usize>;
}

/// Returns all ways to scan, first those of pjw.
fn scan_methods() -> anyhow::Result<Vec<Box<dyn ScanMethod>>> {
    let mut methods: Vec<Box<dyn ScanMethod>> = Vec::new();
    match TaskScan::load() {
        Ok(scan) => {
            let mut node = open_node()?;
            node.set_task_scan(Some(scan));
            methods.push(Box::new(PjwScan { node, kind: ScanKind::FullRescan, source: "BPF" }));
        }
        Err(why) => print_line(&format!("skipped: scans by BPF: {why}"))?,
    }
    let proc_scan = |kind| -> anyhow::Result<Box<dyn ScanMethod>> {
        Ok(Box::new(PjwScan { node: open_node()?, kind, source: "/proc" }))
    };
    methods.extend([proc_scan(ScanKind::Members)?, proc_scan(ScanKind::FullRescan)?]);
    methods.extend::<[Box<dyn ScanMethod>; 3]>([
        Box::new(PjwFirstScan),
        Box::new(BareCalls(SyscallScan::new()?)),
        Box::new(ProcfsCrate),
    ]);
    Ok(methods)
}

fn open_node() -> anyhow::Result<LinuxMachine> {
    LinuxMachine::new(job_variable_names()).context("can't open /proc")
}

/// Which processes a scan of pjwd reads.
enum ScanKind {
    /// The scan of each interval: the members of jobs.
    Members,
    /// A full rescan: all processes, and the threads of the members.
    FullRescan,
}

/// A scan by the code of pjwd.
struct PjwScan {
    node: LinuxMachine,
    kind: ScanKind,
    /// What the scan reads: `BPF` or `/proc`.
    source: &'static str,
}

impl ScanMethod for PjwScan {
    fn name(&self) -> String {
        match self.kind {
            ScanKind::Members => format!("pjw by {}, members", self.source),
            ScanKind::FullRescan => format!("pjw by {}, a full scan (the whole machine too)", self.source),
        }
    }

    fn scan(&mut self, pids: &[u32]) -> anyhow::Result<usize> {
        Ok(count_threads(&mut self.node, pids, matches!(self.kind, ScanKind::FullRescan)))
    }
}

/// The first scan of pjwd, when nothing is cached.
struct PjwFirstScan;

impl ScanMethod for PjwFirstScan {
    fn name(&self) -> String {
        "pjw by /proc, the first scan".to_owned()
    }

    fn scan(&mut self, pids: &[u32]) -> anyhow::Result<usize> {
        Ok(count_threads(&mut open_node()?, pids, false))
    }
}

/// Scans the processes `pids` with `node`, and returns the number of their threads. If `full` is true, the scan also
/// reads all other processes of the machine.
fn count_threads(node: &mut LinuxMachine, pids: &[u32], full: bool) -> usize {
    let members: BTreeSet<Pid> = pids.iter().copied().map(Pid).collect();
    let scope = if full { ScanScope::Full } else { ScanScope::Partial(members.clone()) };
    let request = ScanRequest {
        scope,
        pids_to_read_threads_of: members.clone(),
        active_threads: BTreeMap::new(),
        cgroups: BTreeSet::new(),
        idle_watch: Arc::default(),
    };
    let snapshot = node.scan(&request);
    let members = members.iter().filter_map(|pid| snapshot.processes.get(pid));
    let threads = members.filter_map(|observed| match observed {
        Observed::Present(process) => process.threads.as_ref().map(Vec::len),
        Observed::Gone => None,
    });
    threads.sum()
}

/// A scan by bare system calls.
struct BareCalls(SyscallScan);

impl ScanMethod for BareCalls {
    fn name(&self) -> String {
        "bare system calls".to_owned()
    }

    fn scan(&mut self, pids: &[u32]) -> anyhow::Result<usize> {
        self.0.scan(pids).context("a measured process ended")
    }
}

/// A scan by the `procfs` crate. The crate can't read `schedstat` of all threads, so this scan reads the same facts
/// elsewhere: `stat` for the state and the run time, `status` for the mask.
struct ProcfsCrate;

impl ScanMethod for ProcfsCrate {
    fn name(&self) -> String {
        "the procfs crate".to_owned()
    }

    fn scan(&mut self, pids: &[u32]) -> anyhow::Result<usize> {
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
    processes::run_as_load_process()?;
    let effort = Effort::from_arguments();
    let interrupt = StopSignal::install()?;
    let threads = effort.pick(2000, 10_000);
    let mut figures = Vec::new();
    for (per_process, does, activity) in [
        (50, "idle", Activity::Sleeping),
        (1000, "idle", Activity::Sleeping),
        (50, "all run", Activity::Waking(500)),
    ] {
        let load = LoadProcesses::start(threads / per_process, per_process, activity, &interrupt)?;
        let what = format!("{threads} threads in {} processes, {does}", threads / per_process);
        figures.extend(compare(&what, &load.pids(), threads, activity, (effort, &interrupt))?);
    }
    publish("scan", &figures)
}

/// Measures all ways to scan in turns, each round in another order, and compares those of pjw with the others.
#[expect(clippy::cast_precision_loss, reason = "thousands of threads")]
fn compare(
    what: &str,
    pids: &[u32],
    threads: usize,
    activity: Activity,
    (effort, interrupt): (Effort, &StopSignal),
) -> anyhow::Result<Vec<Figure>> {
    let mut scan_methods = scan_methods()?;
    let mut costs_ns: Vec<Vec<f64>> = vec![Vec::new(); scan_methods.len()];
    // The first round fills the caches and is not measured.
    for round in 0..=effort.pick(3, 15) {
        for turn in 0..scan_methods.len() {
            interrupt.check()?;
            if matches!(activity, Activity::Waking(_)) {
                // All threads have run since the last scan after this time.
                thread::sleep(Duration::from_millis(600));
            }
            let at = (turn + round) % scan_methods.len();
            let method = &mut scan_methods[at];
            let before = own_thread_cpu_time();
            let threads_found = method.scan(pids)?;
            let cpu_time = own_thread_cpu_time().saturating_sub(before);
            if threads_found != threads {
                bail!("{} found {threads_found} threads of {threads}", method.name());
            }
            if round > 0 {
                costs_ns[at].push(cpu_time.as_secs_f64() * 1e9 / threads as f64);
            }
        }
    }
    let medians: Vec<f64> = costs_ns.iter().filter_map(|costs| median(costs)).collect();
    let names: Vec<String> = scan_methods.iter().map(|method| method.name()).collect();
    for (name, cpu_time) in names.iter().zip(&medians) {
        print_line(&format!("{what}: {name}: {cpu_time:.0} ns per thread"))?;
    }
    let mut figures = Vec::new();
    for (own, value) in names.iter().zip(&medians).filter(|(name, _)| name.starts_with("pjw")) {
        let name = format!("{what}: {own}");
        for (peer, peer_value) in names.iter().zip(&medians).filter(|(name, _)| !name.starts_with("pjw")) {
            figures.push(Figure::new(&name, *value, "ns/thread", peer, *peer_value));
        }
    }
    Ok(figures)
}
