//! Processes that share an address space: groups of tasks beside forked workers, threads, and a program that starts
//! others by vfork(2) all the time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pjw_tests::daemon::Daemon;
use pjw_tests::waiting::wait_until;
use serde_json::Value;

use crate::processes::is_installed;

/// A program with four roles. It prints the pids of its processes.
///
/// - `tasks`: four more processes in its address space.
/// - `workers`: four forked workers.
/// - `threads`: eight threads.
/// - `vfork`: about 100 processes a second by vfork and exec.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static int task(void *unused) {
    (void)unused;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) pause();
}
static void *thread(void *unused) { task(unused); return 0; }

int main(int argc, char **argv) {
    const char *role = argc > 1 ? argv[1] : "";
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    printf("%d", getpid());
    for (int i = 0; i < 4 && !strcmp(role, "tasks"); i++) {
        char *stack = malloc(1 << 16);
        printf(" %d", clone(task, stack + (1 << 16), CLONE_VM | SIGCHLD, NULL));
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
    while (!strcmp(role, "vfork")) {
        int pid = vfork();
        if (pid == 0) { execl("/bin/true", "true", NULL); _exit(1); }
        waitpid(pid, NULL, 0);
        usleep(8000);
    }
    for (;;) pause();
}
"#;

/// The program in one role. It ends with this value.
struct Program {
    child: Child,
    pids: Vec<u32>,
}

impl Program {
    fn start(path: &std::path::Path, role: &str) -> Self {
        let mut child = Command::new(path).arg(role).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { child, pids: line.split_whitespace().map(|pid| pid.parse().unwrap()).collect() }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Compiles the program. `None` if there is no compiler.
fn program() -> Option<(tempfile::TempDir, std::path::PathBuf)> {
    if !is_installed("cc") {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("spaces.c"), dir.path().join("spaces"));
    fs::write(&source, PROGRAM).unwrap();
    let built = Command::new("cc").arg("-pthread").arg("-o").args([&program, &source]).status().unwrap();
    assert!(built.success());
    Some((dir, program))
}

const CONFIG: &str = "interval = \"200ms\"\nrescan_interval = \"400ms\"";

/// The processes of a job in each address space that several of them share, as `show` marks them.
fn groups(daemon: &Daemon, job: &str) -> Vec<BTreeSet<u32>> {
    let shown = daemon.pjwctl(&["show", &daemon.job_id(job), "--json"]);
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    let mut groups: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
    for member in shown["members"].as_array().unwrap() {
        if let Some(space) = member["address_space"].as_u64() {
            let pid = u32::try_from(member["pid"].as_u64().unwrap()).unwrap();
            groups.entry(space).or_default().insert(pid);
        }
    }
    let mut groups: Vec<BTreeSet<u32>> = groups.into_values().collect();
    groups.sort();
    groups
}

fn recognises_groups_and_nothing_else(daemon: &Daemon) {
    let Some((_dir, path)) = program() else { return };
    let (one, two) = (Program::start(&path, "tasks"), Program::start(&path, "tasks"));
    let others = ["workers", "threads", "vfork"].map(|role| Program::start(&path, role));
    let all: Vec<u32> =
        [&one, &two].into_iter().chain(&others).flat_map(|program| program.pids.clone()).collect();
    assert_eq!((one.pids.len(), others[0].pids.len(), all.len()), (5, 5, 17));
    daemon.assign("mixed", 1, &all).unwrap();
    let mut expected: Vec<BTreeSet<u32>> =
        [&one, &two].map(|program| program.pids.iter().copied().collect()).into();
    expected.sort();
    wait_until("both groups are recognised", || {
        let found = groups(daemon, "mixed");
        let is_part = |group: &BTreeSet<u32>| expected.iter().any(|whole| group.is_subset(whole));
        assert!(found.iter().all(is_part), "{found:?} are no groups of {expected:?}");
        found == expected
    });
    // For some scans: nothing is missed or invented while vforks go on.
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        assert_eq!(groups(daemon, "mixed"), expected);
    }
    let text = daemon.pjwctl(&["show", &daemon.job_id("mixed")]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.matches("5 tasks share an address space").count() == 2, "{text}");
    let why = daemon.pjwctl(&["explain", &one.pids[1].to_string()]);
    let why = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(why.contains("shares its address space with processes"), "{why}");
    // The end of a task ends its membership, and that of the last but one the group.
    one.pids[1..4].iter().for_each(|&pid| kill(pid));
    let left: BTreeSet<u32> = [one.pids[0], one.pids[4]].into();
    wait_until("two are left", || groups(daemon, "mixed").contains(&left));
    kill(one.pids[4]);
    wait_until("the group has ended", || groups(daemon, "mixed").len() == 1);
}

fn kill(pid: u32) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[test]
fn groups_of_tasks_are_recognised_beside_workers_threads_and_vforks() {
    recognises_groups_and_nothing_else(&Daemon::start(CONFIG));
}

#[test]
fn groups_of_tasks_are_recognised_without_bpf() {
    recognises_groups_and_nothing_else(&Daemon::start(&format!("scan = \"proc\"\n{CONFIG}")));
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
