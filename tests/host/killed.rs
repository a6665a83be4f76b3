//! The daemon is killed at any moment, while its jobs start daemons all the time: they fork twice and call setsid. The
//! next daemon, or `pjwd --release-all`, finds what is left, also if the state directory is lost.
//!
//! `PJW_ROUNDS=100` makes 100 rounds of each kind instead of 5.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::{Gid, Uid, setgid, setuid};
use pjw_core::cpuset::CpuSet;
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_linux::cgroup::{CgroupMounts, CpusetMount};
use pjw_tests::cpusets::{cgroup_of_process, find_hierarchy, remaining_cgroups};
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_until, wait_until_empty};

use crate::cpusets::undone::MachineState;
use crate::processes::{
    Shell, has_two_cores, has_variable, is_ended, kill_process, mask, masks, processes_with_variable,
};

const DEFAULT_ROUNDS: u64 = 5;
/// The daemon is killed within this time after the first command.
const LONGEST_LIFE: u64 = 400;
/// The configuration of the daemon.
const INTERVAL: &str = "interval = \"50ms\"\nrescan_interval = \"500ms\"\n";
/// The user of the jobs, if the tests run as root.
const NOBODY: u32 = 65_534;
/// The variable in the environment of all processes of a forker.
const MARK: &str = "PJW_TEST_FORKER";
/// The variable in the environment of a worker that has executed its program as the user of the jobs, and its value.
const IS_OF_USER: (&str, &str) = ("PJW_TEST_IS_OF_USER", "1");
/// The arguments by which the test program runs [`process_with_a_second_thread`].
const WORKER_ARGUMENTS: [&str; 3] = ["--exact", "killed::process_with_a_second_thread", "--ignored"];
/// The number of forkers that were started.
static FORKERS: AtomicU64 = AtomicU64::new(0);
/// Each daemon of the shell has a child that lives long and was never seen with its parent.
const FORK_ALL_THE_TIME: &str =
    "while :; do (setsid sh -c 'sleep 1000 & exec sleep 0.05' &); sleep 0.05; done &";

/// A shell that starts daemons all the time, and a process with a second thread.
struct Forker {
    shell: Shell,
    worker: Child,
    mark: String,
}

impl Forker {
    fn start(name: &str) -> Self {
        // Tests run side by side in one process, and each kills its own forkers only.
        let number = FORKERS.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{name}-{}-{number}", std::process::id());
        let mut command = Command::new("sh");
        command.env(MARK, &mark);
        if Uid::effective().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        let mut worker = Command::new(std::env::current_exe().unwrap());
        worker.args(WORKER_ARGUMENTS);
        worker
            .env(MARK, &mark)
            .env("RUST_TEST_THREADS", "2")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let worker = worker.spawn().unwrap();
        let mut forker = Self { shell: Shell::from_command(command), worker, mark };
        wait_until("the second thread runs", || {
            let worker = forker.worker.id();
            let (name, value) = IS_OF_USER;
            // The process has two threads and that user before it executes its program again, too.
            let is_users = !Uid::effective().is_root() || has_variable(worker, &format!("{name}={value}"));
            is_users && masks(&[worker]).len() == 2
        });
        forker.shell.send_line(FORK_ALL_THE_TIME);
        wait_until("daemons are started", || forker.processes().len() > 4);
        forker
    }

    /// The processes that get cores.
    fn pids(&self) -> [u32; 2] {
        [self.shell.pid(), self.worker.id()]
    }

    /// All processes of the forker.
    fn processes(&self) -> Vec<u32> {
        processes_with_variable(&format!("{MARK}={}", self.mark))
    }

    /// Ends the shells. The daemons that they started stay.
    fn stop_forking(&self) {
        let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        wait_until_empty("no shell forks", || {
            // A killed shell stays a zombie until this test waits for it.
            let is_shell =
                |pid: &u32| *pid != self.worker.id() && name(*pid).trim() != "sleep" && !is_ended(*pid);
            let shells: Vec<u32> = self.processes().into_iter().filter(is_shell).collect();
            shells.iter().for_each(|pid| kill_process(*pid));
            // Each of them may have had one more child before it was killed: the next list has the child.
            shells
        });
    }
}

impl Drop for Forker {
    fn drop(&mut self) {
        self.stop_forking();
        self.processes().into_iter().for_each(kill_process);
        let _ = self.worker.wait();
    }
}

/// Has two threads: the test harness runs this function in the second one. Ends with the test that starts it.
///
/// As root, becomes a process of another user, and executes the program again: a daemon reads the user of a process
/// when the process executes a program. That user need not have access to the directory of the program.
#[test]
#[ignore = "started by the tests of this file"]
fn process_with_a_second_thread() {
    if std::env::var_os(MARK).is_some() {
        if Uid::effective().is_root() {
            setgid(Gid::from_raw(NOBODY)).unwrap();
            setuid(Uid::from_raw(NOBODY)).unwrap();
            let (name, value) = IS_OF_USER;
            let error = Command::new("/proc/self/exe").args(WORKER_ARGUMENTS).env(name, value).exec();
            panic!("{error}");
        }
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    }
}

/// A number from the time, so that each run kills at other moments.
fn random(below: u64) -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::from(now.subsec_nanos()) / 7 % below
}

fn rounds() -> u64 {
    std::env::var("PJW_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(DEFAULT_ROUNDS)
}

/// Gives commands until the daemon is killed. In every second round the daemon is killed within a moment of the first
/// command, else of its answer.
fn kill_at_any_moment(daemon: &mut Daemon, forkers: &[Forker; 2], round: u64) {
    let [one, two] = forkers.each_ref().map(Forker::pids);
    let running = &*daemon;
    let (answered, first_answer) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while let Ok(of_one) = running.assign("a", 1, &one)
                && answered.send(()).is_ok()
                && let Ok(of_two) = running.assign("b", 1, &two)
            {
                assert!(!of_one.intersects(&of_two), "{of_one} and {of_two}");
                if running.release("a").is_err() {
                    break;
                }
            }
        });
        if (round / 2).is_multiple_of(2) {
            let _ = first_answer.recv();
        }
        std::thread::sleep(Duration::from_millis(random(LONGEST_LIFE)));
        running.signal(Signal::SIGKILL);
    });
    daemon.kill();
}

/// Two new shells get cores, as far as there are free ones. Then no PU belongs to two jobs, by the daemon's account, by
/// the cpusets with processes, and by the masks of the processes.
///
/// After a loss of the state without cpusets, the forkers are in no job, and go on forking with masks that the daemon
/// names at its rescans. Then only the processes of one moment are checked.
fn check_owners(daemon: &Daemon, forkers: &[Forker; 2], machine: &CpuSet, is_lost: bool) {
    let fresh = [Shell::start(), Shell::start()];
    for (name, shell) in ["fresh-one", "fresh-two"].iter().zip(&fresh) {
        match daemon.assign(name, 1, &[shell.pid()]) {
            Ok(cpus) => assert!(mask(shell.pid()).is_subset(&cpus), "{name}: {}", mask(shell.pid())),
            Err(refusal) => {
                let status = daemon.status();
                let held = status.jobs.iter().map(|job| job.cpus.parse::<CpuSet>().unwrap());
                let held = held.fold(CpuSet::new(), |all, cpus| all.union(&cpus));
                assert!(machine.is_subset(&held), "{name}: {refusal}, but jobs hold {held}");
            }
        }
    }
    check_cpusets_and_account(daemon);
    // A process that was released a moment ago may have a child with its mask.
    let owners = || {
        let of_forkers = forkers.iter().map(Forker::processes);
        of_forkers.chain(fresh.iter().map(|shell| vec![shell.pid()])).collect::<Vec<Vec<u32>>>()
    };
    let of_one_moment = is_lost.then(owners);
    wait_until_empty("no PU has two owners", || {
        shared_pus(daemon, of_one_moment.clone().unwrap_or_else(owners), machine)
    });
    for name in ["fresh-one", "fresh-two"] {
        if daemon.job(name).is_some() {
            daemon.release(name).unwrap();
        }
    }
}

/// The PUs on which the masks of processes of two owners meet, with the processes. Except processes that the daemon
/// names as those whose masks it can't know.
fn shared_pus(daemon: &Daemon, owners: Vec<Vec<u32>>, machine: &CpuSet) -> Vec<(u32, String)> {
    let unknown = named(&warnings_text(daemon));
    let mut users: BTreeMap<u32, BTreeMap<usize, u32>> = BTreeMap::new();
    for (owner, pids) in owners.into_iter().enumerate() {
        for pid in pids.into_iter().filter(|pid| !unknown.contains_key(pid) && !is_ended(*pid)) {
            let cpus = mask(pid);
            // A process in no job may run everywhere.
            if !machine.is_subset(&cpus) {
                for pu in cpus.iter() {
                    users.entry(pu.0).or_default().insert(owner, pid);
                }
            }
        }
    }
    users.retain(|_, owners| owners.len() > 1);
    users.into_iter().map(|(pu, owners)| (pu, format!("{owners:?}"))).collect()
}

fn check_cpusets_and_account(daemon: &Daemon) {
    let mut owners: BTreeMap<u32, String> = BTreeMap::new();
    let of_jobs = daemon.status().jobs.into_iter().map(|job| (job.id, job.cpus.parse().unwrap()));
    for (name, cpus) in of_jobs {
        let cpus: CpuSet = cpus;
        for pu in cpus.iter() {
            let other = owners.insert(pu.0, name.clone());
            assert_eq!(other, None, "PU {pu} belongs to {name} too\n{}", daemon.log());
        }
    }
    let Some(hierarchy) = CpusetMount::from_mounts(&CgroupMounts::read()) else { return };
    let machine: CpuSet = daemon.status().node.cpus.parse().unwrap();
    let mut inside: BTreeMap<u32, String> = BTreeMap::new();
    for dir in remaining_cgroups(daemon.tag()) {
        let read = |file: &str| std::fs::read_to_string(dir.join(file)).unwrap_or_default();
        if read("cgroup.procs").is_empty() {
            continue;
        }
        let file = if hierarchy.is_unified { "cpuset.cpus.effective" } else { "cpuset.cpus" };
        let cpus: CpuSet = read(file).trim().parse().unwrap_or_default();
        // The cpuset of a released job is opened before it is removed, and holds no core.
        if machine.is_subset(&cpus) {
            continue;
        }
        for pu in cpus.iter() {
            let other = inside.insert(pu.0, dir.display().to_string());
            assert_eq!(other, None, "PU {pu} is in {} too\n{}", dir.display(), daemon.log());
        }
    }
}

/// The processes of the forkers with a thread whose mask is not that before the first command, and those with another
/// cgroup.
fn changed(forkers: &[Forker; 2], before: &(CpuSet, Option<String>)) -> Vec<(u32, String)> {
    let pids = forkers.iter().flat_map(Forker::processes);
    let states = pids.map(|pid| (pid, masks(&[pid]), cgroup_of_process(pid)));
    let (mask, cgroup) = (before.0.to_string(), &before.1);
    let is_changed = |(pid, masks, now): &(u32, Vec<(u32, String)>, Option<String>)| {
        let are_same = masks.iter().all(|(tid, now)| *now == mask || !is_thread(*pid, *tid));
        let is_as_before = are_same && now == cgroup;
        !is_as_before && !is_ended(*pid)
    };
    let stat = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let changed = states.filter(is_changed);
    changed.map(|(pid, masks, cgroup)| (pid, format!("{masks:?} {cgroup:?} {}", stat(pid)))).collect()
}

fn is_thread(pid: u32, tid: u32) -> bool {
    std::fs::exists(format!("/proc/{pid}/task/{tid}")).unwrap_or_default()
}

/// The processes for which a text has a command that widens their masks, with the command.
fn named(text: &str) -> BTreeMap<u32, String> {
    let mut commands = BTreeMap::new();
    // For several processes the command is a loop.
    let (mut is_list, mut pids): (bool, Vec<u32>) = (false, Vec::new());
    let mut words = text.split_ascii_whitespace();
    while let Some(word) = words.next() {
        match word {
            "in" => (is_list, pids) = (true, Vec::new()),
            "-pac" => {
                let (list, pid) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
                pids.extend(pid.parse::<u32>().ok());
                commands.extend(pids.drain(..).map(|pid| (pid, format!("taskset -pac {list} {pid}"))));
            }
            word if is_list => match word.trim_end_matches(';').parse() {
                Ok(pid) => pids.push(pid),
                Err(_) => is_list = false,
            },
            _ => {}
        }
    }
    commands
}

/// Undoes everything, by the next daemon or without one. Returns the text that names unknown masks.
fn undo(killed: &mut Killed, with_a_daemon: bool, is_lost: bool) -> String {
    let Killed { daemon, forkers, before, .. } = killed;
    if with_a_daemon {
        daemon.spawn();
        check_owners(daemon, forkers, &before.0, is_lost);
        let done = daemon.pjwctl(&["release", "--all"]);
        assert!(done.status.success(), "{done:?}\n{}", daemon.log());
        return warnings_text(daemon);
    }
    let done = daemon.release_all_command().output().unwrap();
    assert!(done.status.success(), "{done:?}\n{}", daemon.log());
    String::from_utf8_lossy(&done.stderr).into_owned()
}

fn warnings_text(daemon: &Daemon) -> String {
    let warnings = daemon.status().warnings.into_iter();
    let warnings: Vec<String> =
        warnings.map(|warning| format!("{}: {} {}", warning.code, warning.text, warning.remedy)).collect();
    warnings.join("\n")
}

/// A daemon that was killed while its jobs started daemons.
struct Killed {
    daemon: Daemon,
    own_cgroups: OwnCgroupNames,
    forkers: [Forker; 2],
    /// The mask and the cgroup of each process before the first command.
    before: (CpuSet, Option<String>),
}

impl Killed {
    fn at_any_moment(mut daemon: Daemon, round: u64) -> Self {
        // The path of the state directory gives the names, and the directory may be deleted.
        let own_cgroups = daemon.own_cgroups().unwrap();
        let forkers = [Forker::start("one"), Forker::start("two")];
        let first = forkers[0].shell.pid();
        let before = (mask(first), cgroup_of_process(first));
        kill_at_any_moment(&mut daemon, &forkers, round);
        Self { daemon, own_cgroups, forkers, before }
    }
}

/// The state of the machine before the jobs of a test, if it can be read.
fn machine_state() -> Option<MachineState> {
    find_hierarchy().is_ok().then(MachineState::read_before)
}

/// Waits until the machine is as it was, with all cgroups and threads. `own` are the cgroups of the daemon.
fn check_machine(before: Option<&MachineState>, own: &OwnCgroupNames) {
    if let Some(before) = before {
        before.wait_until_restored_beside(own);
    }
}

/// Starts a daemon, and reads the state of the machine before.
fn start_daemon(enforcement: Enforcement) -> (Daemon, Option<MachineState>) {
    let mut daemon = Daemon::prepare_with(enforcement, INTERVAL);
    let machine = machine_state();
    daemon.spawn();
    (daemon, machine)
}

fn kill_rounds(enforcement: Enforcement) {
    let mut found = 0;
    for round in 0..rounds() {
        let (daemon, machine) = start_daemon(enforcement);
        // In the order in which they are dropped again: the daemon first.
        let mut killed = Killed::at_any_moment(daemon, round);
        found += changed(&killed.forkers, &killed.before).len();
        undo(&mut killed, round % 2 == 0, false);
        let Killed { forkers, before, daemon, .. } = &killed;
        wait_until_empty(&format!("no cgroup is left in round {round}"), || remaining_cgroups(daemon.tag()));
        wait_until_empty(&format!("everything is as before in round {round}"), || changed(forkers, before));
        check_machine(machine.as_ref(), &killed.own_cgroups);
    }
    // In the first round the daemon is killed after the answer to a command, so that there is a job.
    assert!(found > 0, "there was nothing to undo");
}

fn kill_rounds_with_lost_state(enforcement: Enforcement) {
    let mut found = 0;
    for round in 0..rounds() {
        let with_a_daemon = round % 2 == 0;
        let by_masks = with_a_daemon && enforcement == Enforcement::Affinity;
        // By the lock file a daemon knows that the directory is lost. A daemon beside another has no lock file.
        let alone =
            (by_masks && round % 4 == 0).then(|| Daemon::start_alone(enforcement, INTERVAL)).flatten();
        let is_garbage = by_masks && alone.is_none();
        // A daemon that keeps its jobs by masks changes nothing of the machine before the first command.
        let with_state = |daemon| (daemon, machine_state());
        let (daemon, machine) = alone.map_or_else(|| start_daemon(enforcement), with_state);
        // In the order in which they are dropped again: the daemon first.
        let mut killed = Killed::at_any_moment(daemon, round);
        found += changed(&killed.forkers, &killed.before).len();
        if is_garbage {
            killed.daemon.damage_state();
        } else {
            killed.daemon.lose_state();
        }
        let stop_forking = |killed: &Killed| killed.forkers.iter().for_each(Forker::stop_forking);
        // The text of `pjwd --release-all` names the processes of one moment. A daemon names them all the time.
        if !with_a_daemon {
            stop_forking(&killed);
        }
        let text = undo(&mut killed, with_a_daemon, by_masks);
        stop_forking(&killed);
        let Killed { forkers, before, daemon, .. } = &killed;
        wait_until_empty(&format!("no cgroup is left in round {round}"), || remaining_cgroups(daemon.tag()));
        let unnamed = |text: &str| {
            let named = named(text);
            changed(forkers, before)
                .into_iter()
                .filter(|(pid, _)| !named.contains_key(pid))
                .collect::<Vec<_>>()
        };
        let text = if with_a_daemon {
            wait_until_empty(&format!("each unknown mask is named in round {round}"), || {
                unnamed(&warnings_text(daemon))
            });
            warnings_text(daemon)
        } else {
            text
        };
        assert_eq!(unnamed(&text), [], "round {round}: {text}");
        let commands = named(&text);
        for (pid, command) in
            changed(forkers, before).iter().filter_map(|(pid, _)| commands.get_key_value(pid))
        {
            let done = Command::new("sh").args(["-c", command]).output().unwrap();
            // Some of the processes live for 50 ms only.
            assert!(done.status.success() || is_ended(*pid), "{command}: {done:?}");
        }
        wait_until_empty("the named commands widen the masks", || changed(forkers, before));
        check_machine(machine.as_ref(), &killed.own_cgroups);
    }
    // In the first round the daemon is killed after the answer to a command, so that there is a job.
    assert!(found > 0, "there was nothing to undo");
}

#[test]
fn a_daemon_killed_at_any_moment_leaves_nothing_that_a_release_does_not_undo() {
    if !has_two_cores() {
        return;
    }
    if !Uid::effective().is_root() && rounds() <= DEFAULT_ROUNDS {
        skip(
            "a plain user has no BPF task scan: README names the gap. PJW_ROUNDS runs the rounds all the same",
        );
        return;
    }
    Enforcement::available().into_iter().for_each(kill_rounds);
}

#[test]
fn a_daemon_killed_at_any_moment_and_a_lost_state_directory_leave_nothing_unnamed() {
    if !has_two_cores() {
        return;
    }
    Enforcement::available().into_iter().for_each(kill_rounds_with_lost_state);
}
