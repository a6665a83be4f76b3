//! MPI leaves an affinity jail by itself: it asks hwloc for the machine's cores, not its own mask for those it was left,
//! and binds its rank to the first. Under the warden the rank is put back, and behind a wall it never gets out.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use pjw_core::cpuset::CpuSet;
use pjw_linux::proc::procfs::{Stat, parse_stat};
use pjw_linux::topology::{TopologySource, load};
use pjw_tests::daemon::{Daemon, Keeping};
use pjw_tests::patience::{until, until_true};
use serde_json::{Value, json};

use crate::processes::{EndOf, installed, mask, masks, two_cores, walls};

/// So long must the rank compute inside before it counts as kept there: ten looks of the daemon.
const HELD_TICKS: u64 = 50;

/// An MPI as Debian and Ubuntu install it.
struct Mpi {
    mpirun: &'static str,
    /// What makes it bind its rank, beside its default.
    binds: &'static [&'static str],
    /// What its `--version` says where it is known to bind outside its own mask.
    known: &'static str,
}

const OPEN_MPI: Mpi = Mpi { mpirun: "mpirun.openmpi", binds: &[], known: ") 4.1." };
const MPICH: Mpi = Mpi { mpirun: "mpirun.mpich", binds: &["-bind-to", "core"], known: "Version: 4." };

impl Mpi {
    /// One rank that writes its process id to a file and computes.
    fn words(&self, rank: &Path) -> Vec<String> {
        let program = format!("echo $$ >{}; while :; do :; done", rank.display());
        let words = [&[self.mpirun], self.binds, &["-np", "1", "sh", "-c", &program]].concat();
        words.into_iter().map(str::to_owned).collect()
    }

    /// Whether this version is known to leave its mask. Others may have learned better.
    fn is_known(&self) -> bool {
        let said = Command::new(self.mpirun).arg("--version").output().unwrap().stdout;
        let said = String::from_utf8_lossy(&said).into_owned();
        said.split_ascii_whitespace().collect::<Vec<_>>().join(" ").contains(self.known)
    }
}

/// A running `mpirun`.
struct Launched(Child);

impl Launched {
    fn new(mut command: Command, scratch: &Path) -> Self {
        // Nothing of a batch system that the tests may run in, which it would ask. Open MPI refuses root unless it is
        // told, and looks for a remote shell unless there is one machine only; its own files go with the test.
        let kept = ["PATH", "HOME"].into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        let kept: Vec<_> = kept.collect();
        command.env_clear().envs(kept);
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        command.envs([("OMPI_MCA_plm", "isolated"), ("HYDRA_LAUNCHER", "fork")]);
        command.env("TMPDIR", scratch).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        let group = Pid::from_raw(self.0.id().cast_signed());
        let _ = killpg(group, Signal::SIGTERM);
        until_true("mpirun ends", || self.0.try_wait().is_ok_and(|ended| ended.is_some()));
    }
}

fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)
}

/// Whether a process may run on these PUs only, and last did.
fn is_on(pid: u32, cpus: &CpuSet) -> bool {
    let may = mask(pid);
    !may.is_empty() && may.is_subset(cpus) && stat(pid).is_some_and(|stat| cpus.contains(stat.last_cpu))
}

fn rank_in(file: &Path, launched: &mut Launched) -> u32 {
    until("the rank runs", || {
        assert!(launched.0.try_wait().unwrap().is_none(), "mpirun ended early");
        std::fs::read_to_string(file).ok()?.trim().parse().ok()
    })
}

/// The PUs of the machine's first and second core.
fn first_and_second() -> (CpuSet, CpuSet) {
    let topology = load(TopologySource::Live).unwrap();
    let mut cores = topology.pus_by_core().map(|pus| pus.iter().copied().collect::<CpuSet>());
    (cores.next().unwrap(), cores.next().unwrap())
}

/// Without the warden: jailed on the second core by a mask, the rank runs on the first.
fn leaves_its_jail(mpi: &Mpi, scratch: &Path) {
    let (first, second) = first_and_second();
    let file = scratch.join("free");
    let mut command = Command::new("taskset");
    command.arg("-c").arg(second.to_string()).args(mpi.words(&file));
    let mut launched = Launched::new(command, scratch);
    let rank = rank_in(&file, &mut launched);
    let _end = EndOf(rank);
    until_true("the rank has left its jail", || is_on(rank, &first));
    assert_eq!(mask(launched.0.id()), second, "it is the rank that leaves, not mpirun");
}

/// `mpirun` under `pjwctl run` on the second core, its rank, and what the job holds.
fn launched_by_pjw(mpi: &Mpi, daemon: &Daemon) -> (Launched, u32, CpuSet) {
    let (_, second) = first_and_second();
    let file = daemon.dir().join("kept");
    let (id, list) = (daemon.id("mpi"), second.to_string());
    let mut command = daemon.pjwctl_command(&["run", "--job", &id, "--cpus", &list, "--"]);
    command.args(mpi.words(&file));
    let mut launched = Launched::new(command, daemon.dir());
    let rank = rank_in(&file, &mut launched);
    let cpus: CpuSet = daemon.job("mpi").unwrap().cpus.parse().unwrap();
    assert_eq!(cpus, second);
    (launched, rank, cpus)
}

/// The rank computes for a while and is inside all the time, as is all that belongs to it; what the job's history is.
fn stays_inside(mpi: &Mpi, daemon: &Daemon, (mpirun, rank): (u32, u32), cpus: &CpuSet) -> Vec<Value> {
    let before = stat(rank).unwrap().run_ticks;
    until_true("it has computed for a while", || {
        let now = (mask(rank), stat(rank).unwrap());
        assert!(is_on(rank, cpus), "{}: {now:?} is outside {cpus}", mpi.mpirun);
        now.1.run_ticks >= before + HELD_TICKS
    });
    let mut job: Value = daemon.call("GetJob", &json!({ "job": daemon.id("mpi") })).unwrap();
    let members = job["members"].as_array().unwrap();
    let pids: Vec<u32> =
        members.iter().map(|member| u32::try_from(member["pid"].as_u64().unwrap()).unwrap()).collect();
    assert!(pids.contains(&rank) && pids.contains(&mpirun), "{pids:?}");
    for (tid, allowed) in masks(&pids) {
        assert!(allowed.parse::<CpuSet>().unwrap().is_subset(cpus), "thread {tid} may run on {allowed}");
    }
    let Value::Array(history) = job["history"].take() else { panic!("a job has a history") };
    history
}

/// Kept by masks: the rank, and all that belongs to it, runs on the job's core within a cycle and stays.
fn is_put_back(mpi: &Mpi, known: bool, daemon: &Daemon) {
    let (launched, rank, cpus) = launched_by_pjw(mpi, daemon);
    let _end = EndOf(rank);
    until_true("the rank is inside", || is_on(rank, &cpus));
    let history = stays_inside(mpi, daemon, (launched.0.id(), rank), &cpus);
    // The first is that of pjwctl itself, on its way to become mpirun.
    let put = history.iter().filter(|event| event["event"] == "confined" || event["event"] == "repaired");
    assert!(!known || put.count() >= 2, "the rank was never outside, or nobody put it back: {history:?}");
}

/// Behind a wall the rank is inside from its first look at itself, whatever it binds itself to.
fn is_never_outside(mpi: &Mpi, daemon: &Daemon) {
    let (launched, rank, cpus) = launched_by_pjw(mpi, daemon);
    let _end = EndOf(rank);
    let now = (mask(rank), stat(rank).unwrap());
    assert!(is_on(rank, &cpus), "{}: {now:?} is outside {cpus}", mpi.mpirun);
    stays_inside(mpi, daemon, (launched.0.id(), rank), &cpus);
    let job = daemon.job("mpi").unwrap();
    assert_eq!((job.enforcement.as_str(), job.violations), ("cpuset", 0));
}

/// What an MPI does without the warden; whether that is known of this version.
fn without_pjw(mpi: &Mpi, daemon: &Daemon) -> bool {
    let known = mpi.is_known();
    if known {
        leaves_its_jail(mpi, daemon.dir());
    } else {
        pjw_tests::skipping::skip(format_args!("this {} may heed its mask: only that is shown", mpi.mpirun));
    }
    known
}

/// Whether this machine has what is needed to show something; says so if not.
fn can_run(mpi: &Mpi) -> bool {
    two_cores() && installed(mpi.mpirun) && installed("taskset")
}

fn leaves_its_jail_and_is_put_back(mpi: &Mpi) {
    if !can_run(mpi) {
        return;
    }
    let daemon = Daemon::keeping(Keeping::Masks, "interval = \"50ms\"\n");
    let known = without_pjw(mpi, &daemon);
    is_put_back(mpi, known, &daemon);
}

/// No cycle but those that a wish or a birth begins: it is the wall that holds the rank.
fn leaves_its_jail_and_no_wall(mpi: &Mpi) {
    if !can_run(mpi) || !walls() {
        return;
    }
    let daemon = Daemon::keeping(Keeping::Walls, "interval = \"10m\"\nrescan_interval = \"10m\"\n");
    without_pjw(mpi, &daemon);
    is_never_outside(mpi, &daemon);
}

#[test]
fn open_mpi_leaves_its_mask_and_is_confined_again() {
    leaves_its_jail_and_is_put_back(&OPEN_MPI);
}

#[test]
fn mpich_leaves_its_mask_and_is_confined_again() {
    leaves_its_jail_and_is_put_back(&MPICH);
}

#[test]
fn open_mpi_leaves_its_mask_but_not_its_cpuset() {
    leaves_its_jail_and_no_wall(&OPEN_MPI);
}

#[test]
fn mpich_leaves_its_mask_but_not_its_cpuset() {
    leaves_its_jail_and_no_wall(&MPICH);
}
