//! `pjwctl spawn` that is killed: nothing of it is left, but the instances that were to live on.

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, Uid};
use pjw_tests::cpusets::remaining_cgroups_of_daemon;
use pjw_tests::daemon::Daemon;
use pjw_tests::programs::program_path;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until, wait_until_empty};

use crate::processes::{is_ended, kill_process, processes_with_variable};

/// The variable in the environment of the instances of a killed pjwctl.
pub(super) const MARK: &str = "PJW_TEST_SPAWN";
/// A number from which the points in time, the signals and the options follow. Without it they follow from the time.
const SEED: &str = "PJW_TEST_SEED";
/// The points in time at which pjwctl is killed, and the time of the last one after its start.
const KILLS: usize = 50;
/// The most kills, if none of the first ones was amid the start of instances.
const MOST_KILLS: usize = 10 * KILLS;
const LAST_POINT_MICROSECONDS: u64 = 150_000;
/// The signals that end a process, signal(7). Not SIGSEGV and SIGBUS: a handler of Rust's runtime takes the first one
/// that another process sends before the beginning of `main`. Not SIGPIPE: Rust's runtime ignores
/// it. The numbers are SIGSTKFLT and SIGIO, whose names not every shell knows, and real-time signals.
const SIGNALS: [&str; 23] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "FPE", "KILL", "USR1", "USR2", "ALRM", "TERM", "XCPU",
    "XFSZ", "VTALRM", "PROF", "PWR", "SYS", "16", "29", "34", "50", "64",
];

/// The signals that end a start, docs/spawn.md. Others wait until all instances have begun.
const ENDING_SIGNALS: [&str; 5] = ["HUP", "INT", "QUIT", "TERM", "KILL"];
const NEVER: &str = "--proxy=never";
const LATE: &str = "--proxy=late";
const PROXIES: &[&str] = match cfg!(target_arch = "x86_64") {
    true => &[NEVER, "--proxy=auto", "--proxy=always", LATE],
    false => &[NEVER, "--proxy=auto"],
};

/// Random numbers: splitmix64.
struct Random(u64);

impl Random {
    /// Makes random numbers, and prints where they begin.
    fn start() -> Self {
        let of_time = || {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
            now.as_secs() ^ (u64::from(now.subsec_nanos()) << 32)
        };
        let seed = std::env::var(SEED).map_or_else(|_| of_time(), |text| text.parse().unwrap());
        println!("to do the same again: {SEED}={seed}");
        Self(seed)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::try_from(self.below(list.len() as u64)).unwrap()]
    }
}

/// The processes with the mark of this test in their environment.
pub(super) fn marked_processes(mark: &str) -> Vec<u32> {
    processes_with_variable(&format!("{MARK}={mark}"))
}

/// Whether a process sleeps as instances do. A template waits for a message, and a process that has not begun its
/// program has no timer.
fn sleeps_as_an_instance(pid: &u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/wchan")).is_ok_and(|place| place.contains("nanosleep"))
}

/// The marked processes that do not sleep as instances do.
fn marked_without_instances(mark: &str) -> Vec<u32> {
    marked_processes(mark).into_iter().filter(|pid| !sleeps_as_an_instance(pid)).collect()
}

/// The mounted replicas that this process sees: each lies in a tmpfs with its memory on one NUMA node. Other programs
/// of the machine mount a tmpfs without this option at any time: a login does so for `/run/user/UID`.
fn replica_mounts() -> BTreeSet<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let is_replica = |line: &&str| line.contains(" - tmpfs ") && line.contains("mpol=bind");
    mounts.lines().filter(is_replica).map(str::to_owned).collect()
}

/// The number of instances that pjwctl starts in this test.
const INSTANCES: usize = 40;

/// The processes that a process has started and not waited for.
fn child_count(pid: u32) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children =
        tasks.map(|task| std::fs::read_to_string(task.path().join("children")).unwrap_or_default());
    children.map(|pids| pids.split_whitespace().count()).sum()
}

/// Stops a child of this test, so that it starts no more processes until it gets SIGCONT. Returns when all its threads
/// have stopped, or when it has ended.
fn stop(pid: u32) {
    let pid = Pid::from_raw(pid.cast_signed());
    let _ = kill(pid, Signal::SIGSTOP);
    let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    wait_until("pjwctl has stopped or ended", || {
        waitid(Id::Pid(pid), flags).unwrap() != WaitStatus::StillAlive
    });
}

/// The numbers of kills before the first process of pjwctl, amid the start of instances, after it, and at moments that
/// are not known: while pjwctl ran on, or had templates as children too.
#[derive(Debug, Default)]
struct Moments {
    before: usize,
    amid: usize,
    after: usize,
    unknown: usize,
}

impl Moments {
    /// Waits for the moment of a kill: so many microseconds after the begin of pjwctl, or after its first process. Then
    /// pjwctl is stopped. Returns the number of its children.
    fn wait_for_one(&mut self, pjwctl: u32, point: u64, follows_first: bool, proxy: &str) -> usize {
        if follows_first {
            // With --async pjwctl may have started all instances and ended.
            wait_until("a process begins", || child_count(pjwctl) > 0 || is_ended(pjwctl));
        }
        std::thread::sleep(Duration::from_micros(point));
        if follows_first {
            stop(pjwctl);
        }
        let children = child_count(pjwctl);
        let is_known = follows_first && proxy == NEVER;
        match children {
            _ if is_ended(pjwctl) => self.after += 1,
            0 => self.before += 1,
            1..INSTANCES if is_known => self.amid += 1,
            INSTANCES if is_known => self.after += 1,
            _ => self.unknown += 1,
        }
        children
    }
}

/// Whether the kernel lists the children of a process: the option CONFIG_PROC_CHILDREN of Linux. If not, reports that
/// the test is skipped.
fn has_lists_of_children() -> bool {
    let has_lists = std::fs::exists("/proc/thread-self/children").unwrap();
    if !has_lists {
        skip("this kernel has no /proc/PID/task/TID/children: CONFIG_PROC_CHILDREN is off");
    }
    has_lists
}

/// Whether a process ignores a signal that nohup(1), or a shell that starts a program in the background, lets it ignore.
/// False if the process has ended.
fn ignores_usual_signals(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let is_ignored = |signal: Signal| ignored & (1_u64 << (signal as i32 - 1)) != 0;
    [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT].into_iter().any(is_ignored)
}

/// Starts `pjwctl spawn` without core dumps: some of the signals make one. Returns when no signal to it is lost.
fn start_marked(daemon: Option<(&Daemon, &str)>, words: &[&str], mark: &str) -> Child {
    let mut command = Command::new("sh");
    // nohup(1), or a shell that started this test in the background, lets it and its children ignore some signals.
    let as_usual = "ulimit -c 0; exec env --default-signal \"$@\"";
    command.args(["-c", as_usual, "sh"]).arg(program_path("pjwctl"));
    match daemon {
        Some((daemon, cores)) => {
            command.arg("--socket").arg(daemon.socket()).args(["spawn", "--cores", cores])
        }
        None => command.args(["spawn", "--local"]),
    };
    command.args(["-n", &INSTANCES.to_string()]).args(words).env(MARK, mark);
    // A test may send a signal to pjwctl and its instances together, as a terminal does.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().unwrap();
    // env may not have been executed yet.
    wait_until("no signal is ignored", || !ignores_usual_signals(child.id()));
    child
}

#[test]
fn pjwctl_killed_at_any_moment_leaves_no_process_no_job_no_mount_and_no_cgroup() {
    if !has_lists_of_children() {
        return;
    }
    let daemon = Daemon::start("");
    let cgroups = daemon.own_cgroups().unwrap();
    let mark = format!("spawn-{}", std::process::id());
    let mut random = Random::start();
    let mounts = replica_mounts();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("multi");
    std::fs::write(&file, "0-9,30-39 sleep 1000\n* sleep 1001\n").unwrap();
    let multi = format!("--multi={}", file.display());
    let ways: &[&str] = match Uid::effective().is_root() {
        true => &["", "--label", "--async", &multi, "--replicate"],
        false => &["", "--label", "--async", &multi],
    };
    // Two cores have two threads that start instances.
    let cores: &[&str] = if daemon.status().node.cores > 1 { &["1", "2"] } else { &["1"] };
    let mut moments = Moments::default();
    for kills in 0..MOST_KILLS {
        if kills >= KILLS && moments.amid > 0 {
            break;
        }
        let daemon_of_job = (random.below(5) > 0).then_some((&daemon, random.one_of(cores)));
        let (way, proxy) = (random.one_of(ways), random.one_of(PROXIES));
        // The program never calls pspawn_fork_here. So the start ends by such a signal only: one that pjwctl reads, or
        // one that kills the program. Then each instance executes the program, and is killed with the others.
        let signals: &[&str] = if proxy == LATE { &ENDING_SIGNALS } else { &SIGNALS };
        let (signal, point) = (random.one_of(signals), random.below(LAST_POINT_MICROSECONDS));
        // Half of the points follow the first process: what comes before it takes most of the time.
        let follows_first = random.below(2) == 0;
        let place = if follows_first { "the first process" } else { "the begin" };
        let point = if follows_first { point / 4 } else { point };
        // To pjwctl alone, or also to its instances and templates.
        let target = random.one_of(&["", "-"]);
        let to = if target.is_empty() { "pjwctl" } else { "its process group" };
        let case = format!("{proxy} {way}, SIG{signal} to {to} {point} us after {place}");
        println!("{case}");
        let mut words = vec![proxy, way];
        words.retain(|word| !word.is_empty());
        words.extend(if way == multi { &[][..] } else { &["--", "sleep", "1000"] });
        let mut pjwctl = start_marked(daemon_of_job, &words, &mark);
        let children = moments.wait_for_one(pjwctl.id(), point, follows_first, proxy);
        let send = format!("kill -{signal} {target}{0} && kill -CONT {0}", pjwctl.id());
        assert!(Command::new("sh").args(["-c", &send]).status().unwrap().success(), "{case}");
        let status = wait_for(&format!("pjwctl ends: {case}"), || pjwctl.try_wait().unwrap());
        let lives_on = way == "--async" && proxy != LATE;
        if lives_on {
            wait_until_empty(&format!("only instances are left: {case}"), || marked_without_instances(&mark));
        } else {
            assert!(!status.success(), "{case}: {status}");
        }
        wait_until_empty(&format!("no instance is left: {case}"), || {
            let left = marked_processes(&mark);
            left.iter().filter(|_| lives_on).for_each(|pid| kill_process(*pid));
            left
        });
        wait_until(&format!("the job is over: {case}"), || daemon.status().jobs.is_empty());
        // Not at the end of the daemon, which removes what is left.
        wait_until_empty(&format!("no cgroup is left: {case}"), || remaining_cgroups_of_daemon(&cgroups));
        assert_eq!(replica_mounts(), mounts, "{case}");
        println!("{children} processes had been started");
    }
    println!("{moments:?}");
    assert!(moments.amid > 0, "no kill was amid the start: {moments:?}");
}

#[test]
fn a_signal_ends_the_start_of_a_program_that_never_calls_fork_here() {
    let mark = format!("late-{}", std::process::id());
    let mut pjwctl = start_marked(None, &[LATE, "--", "sleep", "1000"], &mark);
    wait_until("the program sleeps", || marked_processes(&mark).iter().any(sleeps_as_an_instance));
    let send = format!("kill -TERM {}", pjwctl.id());
    assert!(Command::new("sh").args(["-c", &send]).status().unwrap().success());
    // No instance has begun, and the signal is the reason.
    assert_eq!(wait_for("pjwctl ends", || pjwctl.try_wait().unwrap()).code(), Some(128 + 15));
    wait_until_empty("nothing is left", || marked_processes(&mark));
}
