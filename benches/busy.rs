//! Measures pjwd beside many processes of a plain user that fork or spin without a pause. A client with a real-time
//! priority measures the time of `assign`, `release`, `status` and of a hook, and the time until the job's process is
//! in its cpuset. Also measured is the time from the fork of a worker outside its job's cores until its mask is set.
//!
//! Two peers are servers with the normal priority: an echo server, and the listener of the bench `reaction`. The third
//! peer is the lower limit of a change of cpusets: the bare write(2) that moves a process to another cgroup, by the
//! client with the real-time priority.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::unistd::gettid;
use pjw_benches::load::forker::{self, Forker, WorkerStart};
use pjw_benches::load::processes::{Activity, LoadProcesses};
use pjw_benches::load::user_load::{self, UserActivity, UserLoad};
use pjw_benches::measure::results::{Figure, median, print_line, publish, quantile};
use pjw_benches::measure::usage::ProcessUsage;
use pjw_benches::peers::cgroups::Cgroup;
use pjw_benches::peers::cgrulesengd::find_sleep;
use pjw_benches::peers::echo::{EchoServer, RawClient};
use pjw_benches::peers::fork_listener::{self, ForkListener};
use pjw_benches::programs::daemon::{EventSource, PrivateWarden};
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_linux::sys::realtime;

/// The loads: the name in the figures, what each process does, and the number of processes.
const LOADS: [(&str, UserActivity, usize); 2] = [
    ("beside 200 processes that fork", UserActivity::Forking, 200),
    ("beside 1,000 processes that spin", UserActivity::Spinning, 1000),
];
/// The time between two calls.
const PAUSE: Duration = Duration::from_millis(15);
/// The longest pause between two workers.
const WORKER_PAUSE: Duration = Duration::from_millis(40);
const STATUS_CALL: &[u8] = b"{\"method\":\"org.pjw.Warden.GetStatus\",\"parameters\":{}}\0";
const ECHO: &str = "an echo server with the normal priority";
const BARE_MOVE: &str = "the bare move of a process to another cgroup";
const IN_CPUSET: &str = "assign, until the process is in its cpuset";
/// How long the bench waits until a process is in its cpuset.
const CPUSET_TIMEOUT: Duration = Duration::from_secs(10);
const LISTENER: &str = "the bare calls with the normal priority";

/// The measured times of a round, in ms, by the name of what was measured.
type Times = BTreeMap<&'static str, Vec<f64>>;

fn main() -> anyhow::Result<()> {
    user_load::run_as_leader()?;
    forker::run_as_forker()?;
    fork_listener::run_as_fork_listener()?;
    let setup = Setup::prepare()?;
    let mut figures = Vec::new();
    for (name, activity, processes) in LOADS {
        let processes = setup.effort.pick(processes / 20, processes);
        let mut rounds = Vec::new();
        for _ in 0..setup.effort.pick(1, 5) {
            rounds.push(measure_round(&setup, activity, processes)?);
        }
        figures.extend(compare(name, &rounds)?);
    }
    publish("busy", &figures)
}

/// Starts a daemon and the load `activity` with `processes` processes, and measures one round. Returns the measured
/// times by name, in ms. The times in cpusets are missing if no cpuset can be made.
fn measure_round(setup: &Setup, activity: UserActivity, processes: usize) -> anyhow::Result<Times> {
    let Setup { effort, interrupt, programs, scale } = setup;
    let keys = format!("housekeeping = \"{}\"\nlog_level = \"debug\"\n", scale.unusable_pus);
    let warden = PrivateWarden::start_with_config(programs, &keys, EventSource::ProcEvents, interrupt)?;
    let target = LoadProcesses::start(1, 1, Activity::Sleeping, interrupt)?;
    let reply_bytes = RawClient::connect(&warden.socket())?.call(STATUS_CALL)?;
    let echo = EchoServer::start(reply_bytes, interrupt)?;
    let bystander = LoadProcesses::start(1, 1, Activity::Sleeping, interrupt)?;
    let cgroup = match make_cgroup(&scale.usable_cores[0]) {
        Ok(cgroup) => Some(cgroup),
        Err(error) => {
            print_line(&format!("skipped: {BARE_MOVE}: {error:#}"))?;
            None
        }
    };
    let daemon = ProcessUsage::new(warden.pid())?;
    let load = UserLoad::start(activity, processes, interrupt)?;
    interrupt.sleep_until(Instant::now() + Duration::from_secs(1))?;
    let (begun, cpu_before) = (Instant::now(), daemon.cpu_time()?);
    let mut times = with_realtime_priority(|| {
        let client = Client { warden: &warden, echo: &echo, target: &target, interrupt };
        let mut times = client.call_repeatedly(*effort)?;
        if let Some(cgroup) = &cgroup {
            times.insert(BARE_MOVE, bare_moves(*effort, cgroup, bystander.pids()[0], interrupt)?);
        }
        Ok(times)
    })?;
    let share = daemon.cpu_time()?.saturating_sub(cpu_before).as_secs_f64() / begun.elapsed().as_secs_f64();
    print_line(&format!("pjwd uses {:.1} % of a CPU beside {processes} processes", share * 100.0))?;
    times.extend(measure_births(*effort, &warden, &scale.usable_cores, interrupt)?);
    drop(load);
    warden.release_all()?;
    Ok(times)
}

fn make_cgroup(cpus: &CpuSet) -> anyhow::Result<Cgroup> {
    let cgroup = Cgroup::new("cpuset", "busy")?;
    cgroup.set_cpus(cpus)?;
    Ok(cgroup)
}

/// Runs `measure` on this thread with the lowest real-time priority, so that the client does not wait for a CPU itself.
/// The children of this program do not inherit the priority.
fn with_realtime_priority<T>(measure: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let tid = Tid(u32::try_from(gettid().as_raw())?);
    realtime::set_realtime_policy(tid)
        .context("this program may have no real-time priority: run it as root")?;
    let measured = measure();
    realtime::set_normal_policy(tid)?;
    measured
}

/// The client with the real-time priority, and what it talks to.
struct Client<'a> {
    warden: &'a PrivateWarden,
    echo: &'a EchoServer,
    target: &'a LoadProcesses,
    interrupt: &'a StopSignal,
}

impl Client<'_> {
    /// Measures commands and calls to the daemon and calls to the echo server, one after the other. Returns the times
    /// in ms by name. Also measures the time until the assigned process is in its cpuset.
    fn call_repeatedly(&self, effort: Effort) -> anyhow::Result<Times> {
        let Self { warden, echo, target, interrupt } = *self;
        let mut times = Times::new();
        let mut measure = |name, call: &mut dyn FnMut() -> anyhow::Result<()>| -> anyhow::Result<Duration> {
            interrupt.sleep_until(Instant::now() + PAUSE)?;
            let begin = Instant::now();
            call()?;
            let took = begin.elapsed();
            times.entry(name).or_default().push(took.as_secs_f64() * 1000.0);
            Ok(took)
        };
        let mut until_in_cpuset = Vec::new();
        for round in 0..effort.pick(5, 200) {
            // `measure` calls the daemon after the pause.
            let begin = Instant::now() + PAUSE;
            measure("assign", &mut || warden.assign_cores("busy", 1, &target.pids()))?;
            // In the other rounds, the daemon may still move the process when the release comes.
            if round % 2 == 0 && self.wait_until_in_cpuset()? {
                until_in_cpuset.push(begin.elapsed().as_secs_f64() * 1000.0);
            }
            measure("release", &mut || warden.release("busy"))?;
            measure("status", &mut || RawClient::connect(&warden.socket())?.call(STATUS_CALL).map(drop))?;
            measure(ECHO, &mut || RawClient::connect(&echo.socket())?.call(STATUS_CALL).map(drop))?;
            if round % 10 == 0 {
                measure("prolog hook", &mut || run_prolog(warden))?;
                warden.call::<serde_json::Value>("ReleaseAll", &serde_json::json!({}))?;
            }
        }
        times.insert(IN_CPUSET, until_in_cpuset);
        Ok(times)
    }

    /// Waits until the process is in the cpuset of its job. Returns false if masks keep the job, because this machine
    /// has no cpusets.
    fn wait_until_in_cpuset(&self) -> anyhow::Result<bool> {
        let path = format!("/proc/{}/cgroup", self.target.pids()[0]);
        let deadline = Instant::now() + CPUSET_TIMEOUT;
        while !fs::read_to_string(&path).context("the target ended")?.contains("busy") {
            if Instant::now() > deadline {
                return Ok(false);
            }
            self.interrupt.sleep_until(Instant::now() + Duration::from_millis(1))?;
        }
        Ok(true)
    }
}

/// Moves the process `pid` into `cgroup` and back, again and again. Returns the time of each move, which is one
/// write(2), in ms.
fn bare_moves(effort: Effort, cgroup: &Cgroup, pid: u32, interrupt: &StopSignal) -> anyhow::Result<Vec<f64>> {
    let mut times = Vec::new();
    for _ in 0..effort.pick(5, 100) {
        for move_process in [Cgroup::move_in, Cgroup::move_back] {
            interrupt.sleep_until(Instant::now() + PAUSE)?;
            let begin = Instant::now();
            move_process(cgroup, pid)?;
            times.push(begin.elapsed().as_secs_f64() * 1000.0);
        }
    }
    Ok(times)
}

/// Runs the prolog hook of Slurm, with a real-time priority. Prints the reason if the hook gives up.
fn run_prolog(warden: &PrivateWarden) -> anyhow::Result<()> {
    let hook = warden.pjwctl_command(&[]);
    let mut command = std::process::Command::new("chrt");
    command.args(["-f", "1"]).arg(hook.get_program());
    command.args(["hook", "slurm-prolog", "--cores", "1", "--strict", "--socket"]).arg(warden.socket());
    command.envs([("SLURM_JOB_ID", "7"), ("SLURM_JOB_UID", "65534"), ("SLURM_CONF", "/nowhere/slurm.conf")]);
    let output = command.stdin(Stdio::null()).output().context("can't run chrt")?;
    if !output.status.success() {
        print_line(String::from_utf8_lossy(&output.stderr).trim_end())?;
    }
    Ok(())
}

/// Measures for workers that are forked outside of their job's cores how long it takes until their mask is set: by
/// pjwd, and by a program that makes only the necessary system calls. Returns the times in ms, by the kernel's clock.
fn measure_births(
    effort: Effort,
    warden: &PrivateWarden,
    cores: &[CpuSet],
    interrupt: &StopSignal,
) -> anyhow::Result<Times> {
    let count = effort.pick(5, 60);
    let (core, sleep) = (&cores[0], find_sleep()?);
    let forker = Forker::start(WorkerStart::OutsideJob, (count, WORKER_PAUSE), core, &sleep, interrupt)?;
    warden.assign("births", core, &[forker.pid()])?;
    forker.wait_for_times(interrupt)?;
    // The job ends with the forker.
    warden.release_all()?;
    let forker = Forker::start(WorkerStart::OutsideJob, (count, WORKER_PAUSE), core, &sleep, interrupt)?;
    let listener = ForkListener::start(forker.pid(), core, core, interrupt)?;
    forker.wait_for_times(interrupt)?;
    let bare = listener.reaction_times_ms(count, interrupt)?;
    Ok(Times::from([("birth", warden.reaction_times_ms()), (LISTENER, bare)]))
}

/// Returns the figures that compare pjwd with its peers under the load `load`. Each value is the median over the rounds
/// of a quantile.
fn compare(load: &str, rounds: &[Times]) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let peers = [
        ("assign", ECHO),
        ("assign", BARE_MOVE),
        (IN_CPUSET, BARE_MOVE),
        ("release", ECHO),
        ("release", BARE_MOVE),
        ("status", ECHO),
        ("prolog hook", ECHO),
        ("birth", LISTENER),
    ];
    for (what, peer) in peers {
        for (quantile_name, share) in [("p50", 0.5), ("p99", 0.99), ("max", 1.0)] {
            let median_of = |name| {
                let quantiles: Vec<f64> =
                    rounds.iter().filter_map(|round| quantile(round.get(name)?, share)).collect();
                median(&quantiles)
            };
            let name = format!("{what} {load}, {quantile_name}");
            match median_of(what).zip(median_of(peer)) {
                Some((value, peer_value)) => figures.push(Figure::new(&name, value, "ms", peer, peer_value)),
                // This machine has no cpusets.
                None if [what, peer].iter().any(|name| [BARE_MOVE, IN_CPUSET].contains(name)) => {}
                None => bail!("nothing was measured: {name}"),
            }
        }
    }
    Ok(figures)
}
