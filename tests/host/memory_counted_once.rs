//! The memory of jobs whose processes share memory in different ways, against the amounts that the test has made: tasks
//! in one address space, forked workers that share pages copy-on-write, and threads.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pjw_tests::daemon::Daemon;
use pjw_tests::programs::program_path;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::wait_until;
use serde_json::Value;

use crate::memory::{MemoryCgroup, agree, memory, number, show};
use crate::processes::{Shell, is_installed};

const MIB: u64 = 1 << 20;
/// What the first process makes, and what each of the four others makes. The program has these numbers too.
const COMMON: u64 = 256 * MIB;
const OWN: u64 = 64 * MIB;
/// The difference that is allowed, in permille.
const TOLERANCE: u64 = 20;
/// How much more the peak of the job may be, in permille, without pages of files: it has the memory of the shell and of
/// pjwctl, and page tables.
const PEAK_TOLERANCE: u64 = 100;

/// A program that writes to each page of 256 MiB once. Four others write to each page of 64 MiB once: tasks, forked
/// workers or threads. The file `DIRECTORY/PID` says that a process has done so.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

static pthread_barrier_t barrier;
static void make(size_t mebibytes) {
    void *block = mmap(NULL, mebibytes << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) abort();
    memset(block, 1, mebibytes << 20);
}
static void ready(const char *directory) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", directory, getpid());
    close(open(path, O_CREAT | O_WRONLY, 0600));
}
static void *thread(void *unused) {
    (void)unused;
    make(64);
    pthread_barrier_wait(&barrier);
    for (;;) pause();
}
int main(int argc, char **argv) {
    const char *role = argc > 2 ? argv[1] : "", *directory = argv[argc - 1];
    if (!strcmp(role, "tasks")) {
        make(strcmp(getenv("PJW_RANK"), "0") ? 64 : 256 + 64);
    }
    if (!strcmp(role, "workers")) {
        make(256);
        for (int i = 0; i < 4; i++) {
            if (fork() == 0) { prctl(PR_SET_PDEATHSIG, 9); make(64); break; }
        }
    }
    if (!strcmp(role, "threads")) {
        make(256);
        pthread_barrier_init(&barrier, NULL, 5);
        pthread_t id;
        for (int i = 0; i < 4; i++) pthread_create(&id, NULL, thread, NULL);
        pthread_barrier_wait(&barrier);
    }
    ready(directory);
    for (;;) pause();
}
"#;

/// The job of a shell that runs the program in one role. If this user may make a memory cgroup, in one of its own.
struct Job {
    daemon: Daemon,
    // The processes end before their cgroup is removed.
    _shell: Shell,
    cgroup: Option<MemoryCgroup>,
    pids: BTreeSet<u32>,
}

impl Job {
    /// `None` if the program can't be built here.
    fn start(dir: &Path, role: &str, processes: usize) -> Option<Self> {
        let is_task = role == "tasks";
        let program = build(dir, if is_task { "-static-pie" } else { "-pie" })?;
        let ready = dir.join(role);
        fs::create_dir(&ready).unwrap();
        let daemon = Daemon::start("interval = \"200ms\"\n");
        let mut shell = Shell::start();
        let cgroup = MemoryCgroup::make();
        cgroup.iter().for_each(|cgroup| cgroup.add(shell.pid()));
        daemon.assign("farm", 1, &[shell.pid()]).unwrap();
        let run = format!("{} {role} {}", program.display(), ready.display());
        let spawn = format!("{} spawn --local -n 4 --share memory -- ", program_path("pjwctl").display());
        shell.send_line(&format!("{}{run} &", if is_task { spawn.as_str() } else { "" }));
        let mut pids = BTreeSet::new();
        wait_until("each process has made its memory", || {
            let names = fs::read_dir(&ready).unwrap().map(|entry| entry.unwrap().file_name());
            pids = names.map(|name| name.to_str().unwrap().parse().unwrap()).collect();
            pids.len() == processes
        });
        wait_until("all processes are in the job", || {
            let shown = show(&daemon, &[])["members"].clone();
            let members = shown.as_array().unwrap().iter().map(|one| number(&one["pid"]));
            let members: BTreeSet<u64> = members.collect();
            pids.iter().all(|&pid| members.contains(&u64::from(pid)))
        });
        Some(Self { daemon, _shell: shell, cgroup, pids })
    }

    /// The memory is read by the pages of the processes, and estimated if the job has a memory cgroup. `used`, `own`
    /// and `resident` are what the program has made, in bytes: the PSS, the USS and the RSS.
    fn check(&self, used: u64, own: u64, resident: u64) {
        let read = memory(&self.daemon);
        self.agrees(&read, "pss", used);
        self.agrees(&read, "uss", own);
        self.agrees(&read, "rss", resident);
        let is_peak = |peak: &Value| {
            // The peak of a cgroup has the pages of files too, as many as were not in the page cache before.
            let of_files = self.cgroup.as_ref().map_or(0, MemoryCgroup::file_pages);
            let limits = used * (1000 - TOLERANCE)..=used * (1000 + PEAK_TOLERANCE) + 1000 * of_files;
            limits.contains(&(number(peak) * 1000))
        };
        assert!(is_peak(&read["peak"]), "{read}");
        if self.cgroup.is_none() {
            skip("this user may make no memory cgroup here: nothing is estimated");
            return;
        }
        let estimate = show(&self.daemon, &[])["memory"].clone();
        assert_eq!(estimate["source"], "cgroup", "{estimate}");
        self.agrees(&estimate, "rss", resident);
        assert!(agree(number(&estimate["pss"]), used, TOLERANCE), "{estimate}");
        self.daemon.release("farm").unwrap();
        let report = self.daemon.pjwctl(&["report", &self.daemon.job_id("farm"), "--json"]);
        let report: Value = serde_json::from_slice(&report.stdout).unwrap();
        assert!(is_peak(&report["memory_peak"]), "{report}");
    }

    /// A sum of the job, without the shell and pjwctl, is what the program has made.
    fn agrees(&self, read: &Value, name: &str, made: u64) {
        let launchers = self.rows(read).1.iter().map(|row| number(&row[name])).sum::<u64>();
        let of_program = number(&read[name]) - launchers;
        assert!(agree(of_program, made, TOLERANCE), "{name} is {of_program} instead of {made}: {read}");
    }

    /// The rows of the processes that have made memory, and those of the others in other address spaces.
    fn rows<'r>(&self, read: &'r Value) -> (Vec<&'r Value>, Vec<&'r Value>) {
        let rows = read["processes"].as_array().unwrap();
        let own = rows.iter().filter(|row| self.pids.iter().any(|&pid| row["pid"] == pid));
        let spaces: BTreeSet<u64> = own.map(|row| number(&row["address_space"])).collect();
        rows.iter()
            .partition(|row| row["address_space"].as_u64().is_some_and(|space| spaces.contains(&space)))
    }
}

fn build(dir: &Path, flag: &str) -> Option<PathBuf> {
    if !is_installed("cc") {
        return None;
    }
    let (source, program) = (dir.join("memory.c"), dir.join("memory"));
    fs::write(&source, PROGRAM).unwrap();
    let flags = [flag, "-fPIE", "-pthread", "-o"];
    let built = Command::new("cc").args(flags).args([&program, &source]).output().unwrap();
    if !built.status.success() {
        skip("cc can't link this program here");
        return None;
    }
    Some(program)
}

/// The page tables of the job as pjw reports them, and the sum that the kernel has for one process of each address space
/// (`VmPTE` in `/proc/PID/status`, proc_pid_status(5)), in bytes.
fn page_tables(job: &Job) -> (u64, u64) {
    let read = memory(&job.daemon);
    let mut spaces = BTreeSet::new();
    let of_kernel = |row: &Value| {
        let status = fs::read_to_string(format!("/proc/{}/status", row["pid"])).unwrap();
        let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
        1024 * kilobytes.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    let rows = read["processes"].as_array().unwrap().iter();
    // A process that shares its address space with none has no number.
    let one_of_each =
        rows.filter(|row| row["address_space"].as_u64().is_none_or(|space| spaces.insert(space)));
    let sum: u64 = one_of_each.map(of_kernel).sum();
    (number(&read["page_tables"]), sum)
}

#[test]
fn the_memory_of_tasks_counts_once() {
    if !cfg!(target_arch = "x86_64") {
        skip("tasks run on x86-64 only");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(job) = Job::start(dir.path(), "tasks", 4) else { return };
    let (of_job, of_kernel) = page_tables(&job);
    assert!(
        agree(of_job, of_kernel, TOLERANCE),
        "the page tables of four tasks count once: {of_job} {of_kernel}"
    );
    let read = memory(&job.daemon);
    let (tasks, _) = job.rows(&read);
    assert!(tasks.iter().all(|row| row["address_space"] == tasks[0]["address_space"]), "{read}");
    let text = job.daemon.pjwctl(&["show", &job.daemon.job_id("farm"), "--memory"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("of them share the address"), "{text}");
    let all = COMMON + 4 * OWN;
    job.check(all, all, all);
}

#[test]
fn the_memory_that_forked_workers_share_counts_once() {
    let dir = tempfile::tempdir().unwrap();
    let Some(job) = Job::start(dir.path(), "workers", 5) else { return };
    job.check(COMMON + 4 * OWN, 4 * OWN, 5 * COMMON + 4 * OWN);
}

#[test]
fn the_memory_of_threads_counts_once() {
    let dir = tempfile::tempdir().unwrap();
    let Some(job) = Job::start(dir.path(), "threads", 1) else { return };
    let all = COMMON + 4 * OWN;
    job.check(all, all, all);
}
