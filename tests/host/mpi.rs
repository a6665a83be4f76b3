//! MPI leaves an affinity mask by itself: it reads the cores of the machine from hwloc, not its own mask, and binds
//! its rank to the first core. With pjwd the mask of the rank is repaired. In a cpuset the rank never leaves its
//! cores. Two runs side by side do not share cores.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use pjw_core::cpuset::CpuSet;
use pjw_linux::proc::procfs::{Stat, parse_stat};
use pjw_linux::topology::{TopologySource, load_topology};
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::processes::{
    KillOnDrop, Shell, core_count, has_cpusets, has_own_core_each, has_two_cores, is_installed, mask, masks,
};

/// A script that waits until the file `$0` exists, and then executes its arguments.
const WHEN_FILE_EXISTS: &str = "until [ -e \"$0\" ]; do sleep 0.05; done; exec \"$@\"";

/// How long the rank must compute on its cores, in ticks of 10 ms: ten scans of the daemon.
const MIN_RUN_TICKS: u64 = 50;

/// An MPI launcher, as Debian and Ubuntu install it.
struct MpiLauncher {
    mpirun: &'static str,
    /// Arguments that make the launcher bind its rank, if it does not bind it by default.
    bind_arguments: &'static [&'static str],
    /// A part of the output of `--version`, for versions that are known to bind outside their own mask.
    known_version: &'static str,
    /// Whether the launcher starts more ranks than it finds cores.
    oversubscribes: bool,
}

const OPEN_MPI: MpiLauncher = MpiLauncher {
    mpirun: "mpirun.openmpi",
    bind_arguments: &[],
    known_version: ") 4.1.",
    oversubscribes: false,
};
const MPICH: MpiLauncher = MpiLauncher {
    mpirun: "mpirun.mpich",
    bind_arguments: &["-bind-to", "core"],
    known_version: "Version: 4.",
    oversubscribes: true,
};

impl MpiLauncher {
    /// Returns a command that runs one rank. The rank writes its process id to a file and computes.
    fn command_words(&self, rank: &Path) -> Vec<String> {
        let program = format!("echo $$ >{}; while :; do :; done", rank.display());
        let command_words =
            [&[self.mpirun], self.bind_arguments, &["-np", "1", "sh", "-c", &program]].concat();
        command_words.into_iter().map(str::to_owned).collect()
    }

    /// Returns a command that runs so many ranks with the bindings that are the launcher's default. Each rank adds its
    /// process id to a file and computes.
    fn default_command_words(&self, ranks: usize, file: &Path) -> Vec<String> {
        let program = format!("echo $$ >>{}; while :; do :; done", file.display());
        let ranks = ranks.to_string();
        [self.mpirun, "-np", &ranks, "sh", "-c", &program].map(str::to_owned).to_vec()
    }

    /// Whether this version is known to leave its mask. Other versions may respect it.
    fn is_known_version(&self) -> bool {
        let output = Command::new(self.mpirun).arg("--version").output().unwrap().stdout;
        let output = String::from_utf8_lossy(&output).into_owned();
        output.split_ascii_whitespace().collect::<Vec<_>>().join(" ").contains(self.known_version)
    }
}

/// A running `mpirun`.
struct MpiRun(Child);

impl MpiRun {
    fn new(mut command: Command, temporary_dir: &Path) -> Self {
        // Without the variables of a batch system in which the tests may run: the launchers would use that batch
        // system. Open MPI does not run as root without the two variables, and looks for a remote shell unless there
        // is only one machine. Its own files go to `temporary_dir`.
        let kept = ["PATH", "HOME"].into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        let kept: Vec<_> = kept.collect();
        command.env_clear().envs(kept);
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        command.envs([("OMPI_MCA_plm", "isolated"), ("HYDRA_LAUNCHER", "fork")]);
        command.env("TMPDIR", temporary_dir).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for MpiRun {
    fn drop(&mut self) {
        let group = Pid::from_raw(self.0.id().cast_signed());
        let _ = killpg(group, Signal::SIGTERM);
        wait_until("mpirun ends", || self.0.try_wait().is_ok_and(|ended| ended.is_some()));
    }
}

fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)
}

/// Whether a process may run only on these PUs, and last ran on one of them.
fn is_on(pid: u32, cpus: &CpuSet) -> bool {
    let allowed = mask(pid);
    !allowed.is_empty()
        && allowed.is_subset(cpus)
        && stat(pid).is_some_and(|stat| cpus.contains(stat.last_cpu))
}

fn read_rank_pid(file: &Path, run: &mut MpiRun) -> u32 {
    wait_for("the rank runs", || {
        assert!(run.0.try_wait().unwrap().is_none(), "mpirun ended early");
        std::fs::read_to_string(file).ok()?.trim().parse().ok()
    })
}

/// Returns the PUs of the first and of the second core of the machine.
pub fn first_and_second() -> (CpuSet, CpuSet) {
    let topology = load_topology(TopologySource::Live).unwrap();
    let mut cores = topology.pus_by_core().map(|pus| pus.iter().copied().collect::<CpuSet>());
    (cores.next().unwrap(), cores.next().unwrap())
}

/// Checks that, without pjwd, a rank with a mask of the second core runs on the first core.
fn check_rank_leaves_its_mask(mpi: &MpiLauncher, temporary_dir: &Path) {
    let (first, second) = first_and_second();
    let file = temporary_dir.join("free");
    let mut command = Command::new("taskset");
    command.arg("-c").arg(second.to_string()).args(mpi.command_words(&file));
    let mut run = MpiRun::new(command, temporary_dir);
    let rank = read_rank_pid(&file, &mut run);
    let _end = KillOnDrop(rank);
    wait_until("the rank has left its mask", || is_on(rank, &first));
    assert_eq!(mask(run.0.id()), second, "mpirun itself keeps its mask");
}

/// Starts `mpirun` by `pjwctl run` on the second core. Returns the run, the process id of the rank, and the CPUs of
/// the job.
///
/// `mpirun` begins when the status says that `enforcement` keeps the job there. On a busy machine, the kernel moves the
/// process into the cpuset of its job after the command has begun. Until then only a mask keeps it there, which MPI
/// leaves.
fn launch_in_job(mpi: &MpiLauncher, daemon: &Daemon, enforcement: &str) -> (MpiRun, u32, CpuSet) {
    let (_, second) = first_and_second();
    let (file, may_begin) = (daemon.dir().join("kept"), daemon.dir().join("may_begin"));
    let (id, list) = (daemon.job_id("mpi"), second.to_string());
    let mut command = daemon.pjwctl_command(&["run", "--job", &id, "--cpus", &list, "--"]);
    command.args(["sh", "-c", WHEN_FILE_EXISTS]).arg(&may_begin).args(mpi.command_words(&file));
    let mut run = MpiRun::new(command, daemon.dir());
    wait_until("the process of mpirun is kept on the core of its job", || {
        daemon.job("mpi").is_some_and(|job| job.processes > 0 && job.enforcement == enforcement)
    });
    std::fs::write(&may_begin, "").unwrap();
    let rank = read_rank_pid(&file, &mut run);
    let cpus: CpuSet = daemon.job("mpi").unwrap().cpus.parse().unwrap();
    assert_eq!(cpus, second);
    (run, rank, cpus)
}

/// Checks that the rank and all members of its job stay on the CPUs of the job while the rank computes. Returns the
/// events of the job.
fn check_stays_inside(
    mpi: &MpiLauncher,
    daemon: &Daemon,
    (mpirun, rank): (u32, u32),
    cpus: &CpuSet,
) -> Vec<Value> {
    let before = stat(rank).unwrap().run_ticks;
    wait_until("the rank has computed for a while", || {
        let now = (mask(rank), stat(rank).unwrap());
        assert!(is_on(rank, cpus), "{}: {now:?} is outside {cpus}", mpi.mpirun);
        now.1.run_ticks >= before + MIN_RUN_TICKS
    });
    // A new process is a member as soon as the daemon has handled the event of its fork.
    let (mut job, pids) = wait_for("mpirun and its rank are members of the job", || {
        let job: Value = daemon.call("GetJob", &json!({ "job": daemon.job_id("mpi") })).unwrap();
        let members = job["members"].as_array().unwrap().iter();
        let pids: Vec<u32> =
            members.map(|member| u32::try_from(member["pid"].as_u64().unwrap()).unwrap()).collect();
        (pids.contains(&rank) && pids.contains(&mpirun)).then_some((job, pids))
    });
    for (tid, allowed) in masks(&pids) {
        assert!(allowed.parse::<CpuSet>().unwrap().is_subset(cpus), "thread {tid} may run on {allowed}");
    }
    let Value::Array(history) = job["history"].take() else { panic!("a job has a history") };
    history
}

/// Checks that, with enforcement by masks, the rank and all members of its job run on the job's core after a cycle,
/// and stay there.
fn check_is_confined_again(mpi: &MpiLauncher, is_known: bool, daemon: &Daemon) {
    let (run, rank, cpus) = launch_in_job(mpi, daemon, "affinity");
    let _end = KillOnDrop(rank);
    wait_until("the rank is on the job's core", || is_on(rank, &cpus));
    let history = check_stays_inside(mpi, daemon, (run.0.id(), rank), &cpus);
    // The first event is that of pjwctl itself, before it executes mpirun.
    let confined =
        history.iter().filter(|event| event["event"] == "confined" || event["event"] == "repaired");
    assert!(
        !is_known || confined.count() >= 2,
        "the rank was never outside its core, or its mask was not repaired: {history:?}"
    );
}

/// Checks that, in a cpuset, the rank is on the job's core from the start, whatever mask it sets.
fn check_is_never_outside(mpi: &MpiLauncher, daemon: &Daemon) {
    let (run, rank, cpus) = launch_in_job(mpi, daemon, "cpuset");
    let _end = KillOnDrop(rank);
    let now = (mask(rank), stat(rank).unwrap());
    assert!(is_on(rank, &cpus), "{}: {now:?} is outside {cpus}", mpi.mpirun);
    check_stays_inside(mpi, daemon, (run.0.id(), rank), &cpus);
    // The daemon says so when a scan has found each process in the cpuset.
    wait_until("all processes of the job are in its cpuset", || {
        daemon.job("mpi").is_some_and(|job| job.enforcement == "cpuset")
    });
    assert_eq!(daemon.job("mpi").unwrap().violations, 0);
}

/// Checks what the launcher does without pjwd. Returns whether that is known for this version.
fn check_without_pjw(mpi: &MpiLauncher, daemon: &Daemon) -> bool {
    let is_known = mpi.is_known_version();
    if is_known {
        check_rank_leaves_its_mask(mpi, daemon.dir());
    } else {
        pjw_tests::skipping::skip(format_args!(
            "this {} may respect its mask: only the part with pjwd is tested",
            mpi.mpirun
        ));
    }
    is_known
}

/// Whether this machine has the launcher and two cores. If not, reports that the test is skipped.
fn can_run(mpi: &MpiLauncher) -> bool {
    has_two_cores() && is_installed(mpi.mpirun) && is_installed("taskset")
}

fn check_with_masks(mpi: &MpiLauncher) {
    if !can_run(mpi) {
        return;
    }
    let daemon = Daemon::start_with(Enforcement::Affinity, "interval = \"50ms\"\n");
    let is_known = check_without_pjw(mpi, &daemon);
    check_is_confined_again(mpi, is_known, &daemon);
}

/// Only requests and forks start a cycle here, so the cpuset alone keeps the rank on its core.
fn check_with_cpuset(mpi: &MpiLauncher) {
    if !can_run(mpi) || !has_cpusets() {
        return;
    }
    let daemon = Daemon::start_with(Enforcement::Cpuset, "interval = \"10m\"\nrescan_interval = \"10m\"\n");
    check_without_pjw(mpi, &daemon);
    check_is_never_outside(mpi, &daemon);
}

#[test]
fn open_mpi_leaves_its_mask_and_is_confined_again() {
    check_with_masks(&OPEN_MPI);
}

#[test]
fn mpich_leaves_its_mask_and_is_confined_again() {
    check_with_masks(&MPICH);
}

#[test]
fn open_mpi_leaves_its_mask_but_not_its_cpuset() {
    check_with_cpuset(&OPEN_MPI);
}

#[test]
fn mpich_leaves_its_mask_but_not_its_cpuset() {
    check_with_cpuset(&MPICH);
}

fn read_rank_pids(file: &Path, ranks: usize, run: &mut MpiRun) -> Vec<u32> {
    wait_for("the ranks run", || {
        assert!(run.0.try_wait().unwrap().is_none(), "mpirun ended early");
        let pids: Option<Vec<u32>> =
            std::fs::read_to_string(file).ok()?.lines().map(|line| line.parse().ok()).collect();
        pids.filter(|pids| pids.len() == ranks)
    })
}

/// Starts two runs of two ranks with default bindings, each by `pjwctl run` on half of the cores. Checks that each rank
/// has a core for itself, if there are four cores. With two cores, that the ranks of each run are on the core of their
/// job; Open MPI then starts one rank.
fn check_two_runs_side_by_side(mpi: &MpiLauncher) {
    if !has_two_cores() || !is_installed(mpi.mpirun) {
        return;
    }
    let daemon = Daemon::start("interval = \"50ms\"\n");
    let cores = (core_count() / 2).min(2);
    let ranks_of_a_run = if mpi.oversubscribes { 2 } else { cores as usize };
    let has_enough_cores = ranks_of_a_run <= cores as usize;
    let cores = cores.to_string();
    let mut runs = Vec::new();
    for name in ["first", "second"] {
        let file = daemon.dir().join(name);
        let mut command =
            daemon.pjwctl_command(&["run", "--job", &daemon.job_id(name), "--cores", &cores, "--"]);
        command.args(mpi.default_command_words(ranks_of_a_run, &file));
        let mut run = MpiRun::new(command, daemon.dir());
        let ranks = read_rank_pids(&file, ranks_of_a_run, &mut run);
        let ends: Vec<KillOnDrop> = ranks.iter().copied().map(KillOnDrop).collect();
        let cpus: CpuSet = daemon.job(name).unwrap().cpus.parse().unwrap();
        runs.push((run, ranks, cpus, ends));
    }
    assert!(!runs[0].2.intersects(&runs[1].2), "the jobs share no PU");
    wait_until("each rank is on the cores of its job, and on one of its own if there are as many", || {
        runs.iter().all(|(_, ranks, cpus, _)| {
            let is_apart = !has_enough_cores || has_own_core_each(ranks);
            is_apart && ranks.iter().all(|&rank| is_on(rank, cpus))
        })
    });
}

/// Two runs of one rank in a job of two cores: Open MPI binds both ranks to the first core.
fn check_two_runs_in_one_job(mpi: &MpiLauncher) {
    if !has_two_cores() || !is_installed(mpi.mpirun) {
        return;
    }
    let daemon = Daemon::start("interval = \"50ms\"\n");
    let mut shell = Shell::start();
    daemon.assign("mpi", 2, &[shell.pid()]).unwrap();
    let (mut ranks, mut ends) = (Vec::new(), Vec::new());
    for name in ["first", "second"] {
        let file = daemon.dir().join(name);
        let words = mpi.default_command_words(1, &file);
        let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
        let variables = format!(
            "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_plm=isolated HYDRA_LAUNCHER=fork TMPDIR={}",
            daemon.dir().display()
        );
        shell.background(&format!("env {variables} {} </dev/null", quoted.join(" ")));
        let rank: u32 =
            wait_for("the rank runs", || std::fs::read_to_string(&file).ok()?.trim().parse().ok());
        ranks.push(rank);
        ends.push(KillOnDrop(rank));
    }
    wait_until("each rank has a core for itself", || has_own_core_each(&ranks));
}

#[test]
fn two_runs_of_open_mpi_side_by_side_keep_to_their_cores() {
    check_two_runs_side_by_side(&OPEN_MPI);
}

#[test]
fn two_runs_of_mpich_side_by_side_keep_to_their_cores() {
    check_two_runs_side_by_side(&MPICH);
}

#[test]
fn two_runs_of_open_mpi_in_one_job_are_not_stacked() {
    check_two_runs_in_one_job(&OPEN_MPI);
}

#[test]
fn two_runs_of_mpich_in_one_job_are_not_stacked() {
    check_two_runs_in_one_job(&MPICH);
}
