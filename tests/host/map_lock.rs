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
use crate::processes::is_installed;

/// A program with four threads that are busy all the time: they map and unmap memory (`map`), or compute and write to one file
/// (`write`), whose lock they wait for.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
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
int main(int argc, char **argv) {
    prctl(PR_SET_PDEATHSIG, 9);
    if (argc > 2 && !strcmp(argv[1], "write")) {
        file = open(argv[2], O_CREAT | O_WRONLY, 0600);
        if (file < 0) abort();
    }
    pthread_t id;
    for (int i = 0; i < 4; i++) pthread_create(&id, NULL, work, NULL);
    for (;;) pause();
}
"#;

struct Busy(Child);

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
        let busy = Self(child);
        daemon.assign("farm", 1, &[busy.0.id()]).unwrap();
        wait_until("the daemon knows its five threads", || {
            let shown = daemon.pjwctl(&["show", &daemon.job_id("farm"), "--json"]);
            let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
            shown["members"][0]["threads"].as_array().is_some_and(|threads| threads.len() == 5)
        });
        Some(busy)
    }

    fn waits_for_lock(&self) -> bool {
        let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
        let pid = Pid(self.0.id());
        let tids: Vec<Tid> = proc.tids(pid).unwrap();
        let mut waits =
            |tid: &Tid| proc.thread_activity(pid, *tid).is_ok_and(|activity| activity.waits_for_map_lock);
        (0..1000).any(|_| tids.iter().any(&mut waits))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn threads_that_map_and_unmap_all_the_time_are_named_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start("interval = \"100ms\"\n");
    let Some(busy) = Busy::start(dir.path(), "map", &daemon) else { return };
    if !busy.waits_for_lock() {
        skip("this kernel shows no user where a thread sleeps (/proc/PID/wchan)");
        return;
    }
    let mut found = Value::Null;
    wait_until("the waits are found", || {
        found = memory(&daemon)["map_lock_waits"][0].clone();
        !found.is_null()
    });
    assert_eq!(found["pids"], serde_json::json!([busy.0.id()]));
    // A thread that was active in no sample is not counted.
    assert!(found["threads"].as_u64().is_some_and(|threads| (2..=4).contains(&threads)), "{found}");
    let text = daemon.pjwctl(&["show", &daemon.job_id("farm"), "--memory"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("wait for one another to map") && text.contains("GLIBC_TUNABLES"), "{text}");
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
