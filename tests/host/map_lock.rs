//! Advice for threads of one address space that wait for one another to map and unmap memory.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use pjw_core::ids::{Pid, Tid};
use pjw_linux::proc::procfs::ProcDir;
use pjw_tests::daemon::Daemon;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::wait_until;
use serde_json::Value;

use crate::memory::memory;
use crate::processes::{is_asleep, is_installed};

/// A program with four threads that are active all the time: they map and unmap memory (`map`), or compute and write to
/// one file (`write`), whose lock they wait for. As `tasks` it has four processes with its address space instead, which
/// map and unmap memory.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>
static int file = -1;
static void *work(void *unused) {
    (void)unused;
    static char block[1 << 16];
    volatile unsigned long sum = 0;
    for (;;) {
        if (file < 0) {
            void *memory = mmap(NULL, 1 << 18, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) abort();
            munmap(memory, 1 << 18);
        } else {
            for (int i = 0; i < 10000; i++) sum += i;
            if (pwrite(file, block, sizeof block, 0) < 0) abort();
        }
    }
}
static int task(void *unused) {
    prctl(PR_SET_PDEATHSIG, 9);
    work(unused);
    return 0;
}
int main(int argc, char **argv) {
    prctl(PR_SET_PDEATHSIG, 9);
    if (argc < 3) return 1;
    if (!strcmp(argv[1], "write")) {
        file = open(argv[2], O_CREAT | O_WRONLY, 0600);
        if (file < 0) abort();
    }
    for (int i = 0; i < 4; i++) {
        pthread_t id;
        char *stack = malloc(1 << 16);
        if (strcmp(argv[1], "tasks")) pthread_create(&id, NULL, work, NULL);
        else if (clone(task, stack + (1 << 16), CLONE_VM | SIGCHLD, NULL) < 0) abort();
    }
    for (;;) pause();
}
"#;

/// The program, and the pids of its processes.
struct Busy {
    child: Child,
    pids: Vec<u32>,
}

impl Busy {
    /// Starts the program in a job of one core, in which the threads also wait for the PU.
    fn start(dir: &Path, role: &str, daemon: &Daemon) -> Option<Self> {
        if !is_installed("cc") {
            return None;
        }
        let (source, program) = (dir.join("busy.c"), dir.join("busy"));
        fs::write(&source, PROGRAM).unwrap();
        let built = Command::new("cc").args(["-O1", "-pthread", "-o"]).args([&program, &source]).status();
        assert!(built.unwrap().success());
        let mut command = Command::new(&program);
        let child = command.arg(role).arg(dir.join("file")).stdin(Stdio::null()).spawn().unwrap();
        let mut busy = Self { child, pids: Vec::new() };
        daemon.assign("farm", 1, &[busy.child.id()]).unwrap();
        // The first thread may wait for the PU for long after it has started the last one, and is busy until it sleeps.
        wait_until("the daemon knows its five threads, and the first one sleeps", || {
            let shown = daemon.pjwctl(&["show", &daemon.job_id("farm"), "--json"]);
            let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
            let members = shown["members"].as_array().unwrap();
            busy.pids = members.iter().filter_map(|one| u32::try_from(one["pid"].as_u64()?).ok()).collect();
            let threads = members.iter().map(|one| one["threads"].as_array().unwrap().len()).sum::<usize>();
            threads == 5 && is_asleep(busy.child.id())
        });
        Some(busy)
    }

    fn waits_for_lock(&self) -> bool {
        let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
        let threads = |&pid: &u32| proc.tids(Pid(pid)).unwrap().into_iter().map(move |tid| (Pid(pid), tid));
        let threads: Vec<(Pid, Tid)> = self.pids.iter().flat_map(threads).collect();
        let mut waits = |&(pid, tid): &(Pid, Tid)| {
            proc.thread_activity(pid, tid).is_ok_and(|activity| activity.waits_for_map_lock)
        };
        (0..1000).any(|_| threads.iter().any(&mut waits))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The waits that the daemon finds in this role. `None` if they can't be seen here.
fn found_waits(daemon: &Daemon, role: &str) -> Option<(Busy, Value)> {
    let dir = tempfile::tempdir().unwrap();
    let busy = Busy::start(dir.path(), role, daemon)?;
    if !busy.waits_for_lock() {
        skip("this kernel shows no user where a thread sleeps (/proc/PID/wchan)");
        return None;
    }
    let mut found = Value::Null;
    wait_until("the waits are found", || {
        found = memory(daemon)["map_lock_waits"][0].clone();
        !found.is_null()
    });
    Some((busy, found))
}

#[test]
fn tasks_of_one_thread_each_that_map_and_unmap_memory_are_named_together() {
    let daemon = Daemon::start("interval = \"100ms\"\n");
    let Some((busy, found)) = found_waits(&daemon, "tasks") else { return };
    let main = u64::from(busy.child.id());
    let named: Vec<u64> = found["pids"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
    assert_eq!(busy.pids.len(), 5);
    assert!((2..=4).contains(&named.len()) && !named.contains(&main), "{found}");
    assert!(named.iter().all(|pid| busy.pids.iter().any(|task| u64::from(*task) == *pid)), "{found}");
    let text = found["text"].as_str();
    assert!(text.is_some_and(|text| text.contains("active threads of processes")), "{found}");
}

#[test]
fn threads_that_map_and_unmap_all_the_time_are_named_with_a_remedy() {
    let daemon = Daemon::start("interval = \"100ms\"\n");
    let Some((busy, found)) = found_waits(&daemon, "map") else { return };
    assert_eq!(found["pids"], serde_json::json!([busy.child.id()]));
    // A thread that was active in no sample is not counted.
    assert!(found["threads"].as_u64().is_some_and(|threads| (2..=4).contains(&threads)), "{found}");
    // Each call of show reads anew, and may find too few waits if other programs use the core. explain tells the last
    // reading.
    let (mut text, mut why) = (String::new(), String::new());
    wait_until("the text for people names the waits, and explain too", || {
        let shown = daemon.pjwctl(&["show", &daemon.job_id("farm"), "--memory"]);
        text = String::from_utf8_lossy(&shown.stdout).into_owned();
        let explained = daemon.pjwctl(&["explain", &daemon.job_id("farm")]);
        why = String::from_utf8_lossy(&explained.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
        text.contains("wait for one another to map")
            && why.contains("wait for one another to map and unmap memory")
    });
    assert!(text.contains("GLIBC_TUNABLES"), "{text}");
    assert!(why.contains(&format!("pjwctl show {} --memory has the remedy", daemon.job_id("farm"))), "{why}");
}

#[test]
fn threads_that_compute_and_wait_for_other_locks_get_no_advice() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start("interval = \"100ms\"\n");
    let Some(_busy) = Busy::start(dir.path(), "write", &daemon) else { return };
    for _ in 0..5 {
        let read = memory(&daemon);
        assert_eq!(read["map_lock_waits"], serde_json::json!([]), "{read}");
    }
}
