//! Processes that share an address space: groups of tasks beside forked workers, threads, and a program that starts
//! others by vfork(2) all the time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use pjw_tests::daemon::Daemon;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::processes::{is_ended, is_installed, kill_process};

/// A program with eight roles. It prints the pids of its processes.
///
/// - `tasks`: four more processes in its address space.
/// - `vforking-tasks`: the same, and the last of them starts processes as `slow-vfork` does.
/// - `workers`: four forked workers.
/// - `threads`: eight threads.
/// - `vfork`: 125 processes a second on average by vfork and exec. It writes their number, and for how many ms it has
///   started processes, to the file of its second argument.
/// - `slow-vfork`: one process after the other by vfork, each of which executes its program when the test has opened
///   the FIFO of the third argument.
/// - `posix-spawn`: one process by posix_spawn, which executes its program when the test has opened the FIFO.
/// - `spawning-tasks`: as `tasks`. Then the first process, which has made the others, does the same as `posix-spawn`.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *fifo;
static void vfork_slowly(void) {
    for (;;) {
        int pid = vfork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            // Waits until the test opens the other end, fifo(7).
            close(open(fifo, O_RDONLY));
            execl("/bin/true", "true", NULL);
            _exit(1);
        }
        waitpid(pid, NULL, 0);
    }
}
static void spawn_slowly(void) {
    posix_spawn_file_actions_t actions;
    char *arguments[] = {"true", NULL};
    pid_t pid;
    posix_spawn_file_actions_init(&actions);
    // The child opens the FIFO before it executes the program. Until then, posix_spawn does not return.
    posix_spawn_file_actions_addopen(&actions, 0, fifo, O_RDONLY, 0);
    if (posix_spawn(&pid, "/bin/true", &actions, NULL, arguments, environ) == 0) waitpid(pid, NULL, 0);
}
static long long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}
static int task(void *vforks) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (vforks != NULL) vfork_slowly();
    for (;;) pause();
}
static void *thread(void *unused) { (void)unused; task(NULL); return 0; }

int main(int argc, char **argv) {
    const char *role = argc > 3 ? argv[1] : "";
    fifo = argc > 3 ? argv[3] : "";
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    printf("%d", getpid());
    int vforks = !strcmp(role, "vforking-tasks"), spawns = !strcmp(role, "spawning-tasks");
    for (int i = 0; i < 4 && (vforks || spawns || !strcmp(role, "tasks")); i++) {
        char *stack = malloc(1 << 16);
        printf(" %d", clone(task, stack + (1 << 16), CLONE_VM | SIGCHLD, vforks && i == 3 ? &vforks : NULL));
    }
    for (int i = 0; i < 4 && !strcmp(role, "workers"); i++) {
        fflush(stdout);
        int pid = fork();
        if (pid == 0) task(NULL);
        printf(" %d", pid);
    }
    for (int i = 0; i < 8 && !strcmp(role, "threads"); i++) {
        pthread_t id;
        pthread_create(&id, NULL, thread, NULL);
    }
    printf("\n");
    fflush(stdout);
    int file = argc > 3 ? open(argv[2], O_WRONLY | O_CREAT | O_TRUNC, 0600) : -1;
    long long begun = now_ms();
    for (long long count = 1; !strcmp(role, "vfork"); count++) {
        int pid = vfork();
        if (pid == 0) { execl("/bin/true", "true", NULL); _exit(1); }
        waitpid(pid, NULL, 0);
        long long elapsed = now_ms() - begun;
        char text[64];
        if (pwrite(file, text, (size_t)sprintf(text, "%lld %lld\n", count, elapsed), 0) < 0) return 1;
        // After a delay, the next processes follow at once.
        if (count * 8 > elapsed) usleep((useconds_t)(count * 8 - elapsed) * 1000);
    }
    if (!strcmp(role, "slow-vfork")) vfork_slowly();
    if (spawns || !strcmp(role, "posix-spawn")) spawn_slowly();
    for (;;) pause();
}
"#;

/// The program in one role. It ends with this value.
struct Program {
    child: Child,
    pids: Vec<u32>,
    fifo: PathBuf,
}

impl Program {
    fn start(path: &Path, role: &str) -> Self {
        let mut command = Command::new(path);
        command.arg(role).arg(count_of_vforks(path)).arg(fifo_of_vforks(path));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let pids = line.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        Self { child, pids, fifo: fifo_of_vforks(path) }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // A child of posix_spawn would wait at the FIFO after the end of its parent, too.
        let _ = open_fifo(&self.fifo);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The file with the number of processes that the role `vfork` has started.
fn count_of_vforks(path: &Path) -> PathBuf {
    path.with_extension("vforks")
}

/// Whether the role `vfork` has started 200 processes, and at least 100 in each second on average.
fn has_vfork_rate(path: &Path) -> bool {
    let text = fs::read_to_string(count_of_vforks(path)).unwrap_or_default();
    let numbers: Option<Vec<u64>> = text.split_whitespace().map(|number| number.parse().ok()).collect();
    matches!(numbers.as_deref(), Some(&[count, ms]) if count >= 200 && count * 1000 >= ms * 100)
}

/// The FIFO that holds up the children of the roles `slow-vfork`, `posix-spawn` and `spawning-tasks`.
fn fifo_of_vforks(path: &Path) -> PathBuf {
    path.with_extension("fifo")
}

/// Compiles the program, and makes its FIFO. `None` if there is no compiler.
fn program() -> Option<(tempfile::TempDir, PathBuf)> {
    if !is_installed("cc") {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("spaces.c"), dir.path().join("spaces"));
    fs::write(&source, PROGRAM).unwrap();
    let built = Command::new("cc").arg("-pthread").arg("-o").args([&program, &source]).status().unwrap();
    assert!(built.success());
    nix::unistd::mkfifo(&fifo_of_vforks(&program), Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    Some((dir, program))
}

const CONFIG: &str = "interval = \"200ms\"\nrescan_interval = \"400ms\"";
/// The interval of the configuration.
const INTERVAL: Duration = Duration::from_millis(200);
/// The time between two looks of the daemon. In each scan the daemon checks which processes share an address space,
/// unless the last check was shortly before: with BPF less than 400 ms (`TASK_SCAN_INTERVAL` of pjw-linux), without BPF
/// less than 50 ms (`CHECK_INTERVAL`). The second check of a process counts if it comes at least 7/8 of the interval
/// after the first one, which is 175 ms. So the last checks before the ends of two looks that are apart by the sum of both
/// times make a group.
#[derive(Debug, Clone, Copy)]
struct LookInterval(Duration);

impl LookInterval {
    const WITH_BPF: Self = Self(Duration::from_millis(600));
    const WITHOUT_BPF: Self = Self(Duration::from_millis(250));

    /// Calls `check` again and again until this time has passed. Then makes the daemon scan once more.
    fn wait_for_look(self, daemon: &Daemon, job: &str, mut check: impl FnMut()) {
        let begun = Instant::now();
        wait_until("the next look is due", || {
            check();
            begun.elapsed() >= self.0
        });
        // The call changes nothing: the job wants all its cores already. The daemon scans before it answers. For this
        // call it reads no process, but it makes a check of address spaces that is due.
        let reply: Result<Value, _> = daemon.call("Want", &json!({ "job": daemon.job_id(job) }));
        reply.unwrap();
        check();
    }
}

/// Whether the daemon scans threads with the BPF program, as it has logged at its start. If not, reports that the part
/// with BPF is skipped.
fn scans_by_bpf(daemon: &Daemon) -> bool {
    let log = daemon.log();
    let is_loaded = log.contains("many threads at once are read with a BPF program (task scan)");
    if !is_loaded {
        let why = log.lines().find(|line| line.contains("threads are read in /proc: "));
        skip(format_args!("the part with BPF: {}", why.unwrap()));
    }
    is_loaded
}

/// Starts a daemon that uses BPF where it can. Returns the time between its looks, too.
fn start_daemon() -> (Daemon, LookInterval) {
    let daemon = Daemon::start(CONFIG);
    let interval = if scans_by_bpf(&daemon) { LookInterval::WITH_BPF } else { LookInterval::WITHOUT_BPF };
    (daemon, interval)
}

/// Checks that a daemon of [`start_daemon`] which used BPF at its start has done so until now.
fn check_task_scan_stayed_on(daemon: &Daemon) {
    let log = daemon.log();
    assert!(!log.contains("the task scan stays off"), "{log}");
}

/// Starts a daemon that does not use BPF. Returns the time between its looks, too.
fn start_daemon_without_bpf() -> (Daemon, LookInterval) {
    let daemon = Daemon::start(&format!("scan = \"proc\"\n{CONFIG}"));
    let log = daemon.log();
    assert!(!log.contains("are read with a BPF program"), "{log}");
    (daemon, LookInterval::WITHOUT_BPF)
}

/// The processes of a job, each with the number of the address space that it shares, as `show` has them.
fn members(daemon: &Daemon, job: &str) -> BTreeMap<u32, Option<u64>> {
    let shown = daemon.pjwctl(&["show", &daemon.job_id(job), "--json"]);
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    let pid = |member: &Value| u32::try_from(member["pid"].as_u64().unwrap()).unwrap();
    let members = shown["members"].as_array().unwrap().iter();
    members.map(|member| (pid(member), member["address_space"].as_u64())).collect()
}

/// The processes of a job in each address space that several of them share.
fn groups(daemon: &Daemon, job: &str) -> Vec<BTreeSet<u32>> {
    groups_of(&members(daemon, job))
}

fn groups_of(members: &BTreeMap<u32, Option<u64>>) -> Vec<BTreeSet<u32>> {
    let mut groups: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
    for (&pid, space) in members {
        if let Some(space) = space {
            groups.entry(*space).or_default().insert(pid);
        }
    }
    let mut groups: Vec<BTreeSet<u32>> = groups.into_values().collect();
    groups.sort();
    groups
}

/// Whether each of these groups is a part of one of the groups `wholes`.
fn are_parts(groups: &[BTreeSet<u32>], wholes: &[BTreeSet<u32>]) -> bool {
    groups.iter().all(|group| wholes.iter().any(|whole| group.is_subset(whole)))
}

fn recognises_groups_and_nothing_else(daemon: &Daemon, interval: LookInterval) {
    let Some((_dir, path)) = program() else { return };
    let (one, two) = (Program::start(&path, "tasks"), Program::start(&path, "vforking-tasks"));
    let others = ["workers", "threads", "vfork", "slow-vfork"].map(|role| Program::start(&path, role));
    let all: Vec<u32> =
        [&one, &two].into_iter().chain(&others).flat_map(|program| program.pids.clone()).collect();
    assert_eq!((one.pids.len(), others[0].pids.len(), all.len()), (5, 5, 18));
    daemon.assign("mixed", 1, &all).unwrap();
    let mut expected: Vec<BTreeSet<u32>> =
        [&one, &two].map(|program| program.pids.iter().copied().collect()).into();
    expected.sort();
    for _ in 0..2 {
        interval.wait_for_look(daemon, "mixed", || {
            let found = groups(daemon, "mixed");
            assert!(are_parts(&found, &expected), "{found:?} are no groups of {expected:?}");
        });
    }
    assert_eq!(groups(daemon, "mixed"), expected, "both groups are recognised after two looks");
    nothing_changes_while_vforks_go_on(daemon, &path, &expected, &[two.pids[4], others[3].pids[0]]);
    let text = daemon.pjwctl(&["show", &daemon.job_id("mixed")]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.matches("5 tasks share an address space").count() == 2, "{text}");
    let why = daemon.pjwctl(&["explain", &one.pids[1].to_string()]);
    let why = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(why.contains("shares its address space with processes"), "{why}");
    // The end of a task ends its membership, and that of the last but one the group.
    one.pids[1..4].iter().for_each(|&pid| kill_process(pid));
    let left: BTreeSet<u32> = [one.pids[0], one.pids[4]].into();
    wait_until("two are left", || groups(daemon, "mixed").contains(&left));
    kill_process(one.pids[4]);
    wait_until("the group has ended", || groups(daemon, "mixed").len() == 1);
}

/// Nothing is missed or invented while at least 200 vforks go on, at least 100 a second, and until each of the two
/// parents of slow vforks has had two children, one after the other, that were in six answers of the daemon in a row.
/// Five intervals are between these answers, and a process that shares an address space is in a group after two looks
/// of a rescan, which are two intervals apart.
fn nothing_changes_while_vforks_go_on(
    daemon: &Daemon,
    program: &Path,
    expected: &[BTreeSet<u32>],
    parents: &[u32],
) {
    let mut answers: BTreeMap<u32, u32> = BTreeMap::new();
    let mut seen_long: BTreeMap<u32, u32> = BTreeMap::new();
    let mut ended = BTreeSet::new();
    wait_until("vforks have gone on for long enough", || {
        std::thread::sleep(INTERVAL);
        let members = members(daemon, "mixed");
        assert_eq!(groups_of(&members), expected);
        answers.retain(|pid, _| members.contains_key(pid));
        for &pid in members.keys().filter(|pid| !ended.contains(*pid)) {
            *answers.entry(pid).or_default() += 1;
            if answers[&pid] >= 6
                && let Some(parent) = parent_of(pid).filter(|parent| parents.contains(parent))
            {
                seen_long.insert(parent, pid);
            }
        }
        let are_seen = seen_long.len() == parents.len();
        if are_seen && ended.is_empty() {
            ended.extend(std::mem::take(&mut seen_long).into_values());
        }
        if ended.iter().any(|pid| !is_ended(*pid)) {
            // The first children execute their program and end, and each parent starts another child.
            let_children_go_on(program);
            return false;
        }
        are_seen && has_vfork_rate(program)
    });
}

/// Lets the children go on that wait at the FIFO. A child that is not there yet waits for the next call.
fn let_children_go_on(program: &Path) {
    if let Err(error) = open_fifo(&fifo_of_vforks(program)) {
        assert_eq!(error.raw_os_error(), Some(Errno::ENXIO as i32), "{error}");
    }
}

/// Opens a FIFO for writing. With `O_NONBLOCK` and without a reader, open(2) fails with `ENXIO` and does not wait:
/// fifo(7).
fn open_fifo(path: &Path) -> io::Result<File> {
    File::options().write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)
}

/// The parent of a process, or `None` if the process has ended.
fn parent_of(pid: u32) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// The child of the first process of `program` that is none of its tasks.
fn held_child(program: &Program) -> Option<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| !program.pids.contains(pid) && parent_of(*pid) == Some(program.pids[0]))
}

/// A child of posix_spawn that has not executed its program is in no group at any look. The tasks of its parent are in
/// one after two looks.
fn a_held_child_is_in_no_group(daemon: &Daemon, interval: LookInterval) {
    if !Path::new("/proc/thread-self/children").exists() {
        return skip("this kernel does not list the children of a thread (CONFIG_PROC_CHILDREN)");
    }
    let Some((_dir, path)) = program() else { return };
    let (alone, tasks) = (Program::start(&path, "posix-spawn"), Program::start(&path, "spawning-tasks"));
    let held = [&alone, &tasks].map(|program| wait_for("posix_spawn has begun", || held_child(program)));
    let all: Vec<u32> = [alone.pids.as_slice(), &tasks.pids, &held].concat();
    assert_eq!(all.len(), 8);
    daemon.assign("held", 1, &all).unwrap();
    let expected = [tasks.pids.iter().copied().collect::<BTreeSet<u32>>()];
    for look in 1..=8 {
        interval.wait_for_look(daemon, "held", || {
            let members = members(daemon, "held");
            assert!(held.iter().all(|pid| members.contains_key(pid)), "{members:?}");
            let found = groups_of(&members);
            assert!(are_parts(&found, &expected), "look {look}: {found:?}, but only {expected:?} is a group");
        });
        assert!(look < 2 || groups(daemon, "held") == expected, "{expected:?} is recognised after two looks");
    }
    // Until the end, both children were held.
    for (pid, parent) in held.into_iter().zip([&alone, &tasks]) {
        assert_eq!(parent_of(pid), Some(parent.pids[0]));
        assert_eq!(fs::read_link(format!("/proc/{pid}/exe")).unwrap(), path.canonicalize().unwrap());
    }
}

#[test]
fn groups_of_tasks_are_recognised_beside_workers_threads_and_vforks() {
    let (daemon, interval) = start_daemon();
    recognises_groups_and_nothing_else(&daemon, interval);
    check_task_scan_stayed_on(&daemon);
}

#[test]
fn groups_of_tasks_are_recognised_without_bpf() {
    let (daemon, interval) = start_daemon_without_bpf();
    recognises_groups_and_nothing_else(&daemon, interval);
}

#[test]
fn a_child_that_posix_spawn_holds_is_in_no_group() {
    let (daemon, interval) = start_daemon();
    a_held_child_is_in_no_group(&daemon, interval);
    check_task_scan_stayed_on(&daemon);
}

#[test]
fn a_child_that_posix_spawn_holds_is_in_no_group_without_bpf() {
    let (daemon, interval) = start_daemon_without_bpf();
    a_held_child_is_in_no_group(&daemon, interval);
}

#[test]
fn an_address_space_in_two_jobs_is_told() {
    let Some((_dir, path)) = program() else { return };
    let tasks = Program::start(&path, "tasks");
    let daemon = Daemon::start(CONFIG);
    daemon.assign("one", 1, &tasks.pids[1..3]).unwrap();
    if daemon.assign("two", 1, &tasks.pids[3..5]).is_err() {
        println!("skipped: this machine has cores for one job only");
        return;
    }
    let told = || {
        let status = daemon.status();
        let of = |job: &str| {
            let job = daemon.job_id(job);
            status
                .warnings
                .iter()
                .any(|warning| warning.code == "shared-memory-between-jobs" && warning.job == job)
        };
        of("one") && of("two")
    };
    wait_until("both jobs are named", told);
    daemon.release("two").unwrap();
    daemon.assign("one", 1, &tasks.pids[3..5]).unwrap();
    wait_until("the warning has ended", || {
        !daemon.status().warnings.iter().any(|warning| warning.code == "shared-memory-between-jobs")
    });
}
