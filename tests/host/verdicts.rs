//! The verdict `bound` on real jobs: only a program that binds too many of its threads to the same CPU gets it.

use std::path::{Path, PathBuf};

use pjw_core::cpuset::CpuSet;
use pjw_tests::daemon::Daemon;
use pjw_tests::waiting::wait_until;
use serde_json::{Value, json};

use crate::processes::{Shell, has_two_cores, is_ended, is_installed};
use crate::programs::compile;

/// Computes for 15 s in a thread for each argument, which is the number of the CPU to which the thread binds itself.
const BOUND_THREADS: &str = r"
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
static void *work(void *cpu) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(atoi(cpu), &mask);
    if (sched_setaffinity(0, sizeof mask, &mask)) exit(2);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    for (time_t end = now.tv_sec + 15; now.tv_sec < end; clock_gettime(CLOCK_MONOTONIC, &now)) {}
    return 0;
}
int main(int argc, char **argv) {
    pthread_t threads[8];
    for (int n = 1; n < argc; n++) if (pthread_create(&threads[n - 1], 0, work, argv[n])) return 1;
    for (int n = 1; n < argc; n++) pthread_join(threads[n - 1], 0);
}
";

/// A job of two cores. Its program has not begun.
struct BoundJob {
    daemon: Daemon,
    shell: Shell,
    /// A PU of each of the two cores.
    pus: [u32; 2],
}

impl BoundJob {
    fn start() -> Self {
        let daemon = Daemon::start("affinity = \"respect\"\n");
        let shell = Shell::start();
        let cpus: CpuSet = daemon.assign("a", 2, &[shell.pid()]).unwrap();
        let pus = [cpus.first().unwrap().0, cpus.iter().last().unwrap().0];
        Self { daemon, shell, pus }
    }

    /// Runs the program with threads that are bound to these PUs. Returns the verdict in the report of the job, and the
    /// text of the report.
    fn run(mut self, program: &Path, pus: &[u32]) -> (String, String) {
        let arguments: String = pus.iter().map(|pu| format!(" {pu}")).collect();
        self.shell.send_line(&format!("exec {}{arguments}", program.display()));
        wait_until("the program has ended", || is_ended(self.shell.pid()));
        drop(self.shell);
        let id = self.daemon.job_id("a");
        let text = || {
            let output = self.daemon.pjwctl(&["report", &id]);
            output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
        };
        wait_until("the job has a report", || text().is_some());
        let reply: Value = self.daemon.call("GetReports", &json!({ "job": id })).unwrap();
        let verdict = reply["reports"][0]["verdict"].as_str().unwrap_or_default().to_owned();
        (verdict, text().unwrap())
    }
}

fn compiled(dir: &Path) -> Option<PathBuf> {
    has_two_cores().then(|| compile(dir, BOUND_THREADS, &["-pthread"])).flatten()
}

#[test]
fn threads_that_their_program_bound_to_one_cpu_of_two_get_the_verdict_bound_with_its_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = compiled(dir.path()) else { return };
    let job = BoundJob::start();
    let pu = job.pus[0];
    let (verdict, text) = job.run(&program, &[pu, pu, pu]);
    assert_eq!(verdict, "bound", "{text}");
    assert!(text.contains("verdict     bound") && text.contains("OMP_PROC_BIND=false"), "{text}");
}

#[test]
fn threads_that_their_program_bound_to_a_cpu_each_are_not_judged_as_bound_though_other_programs_run_there() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = compiled(dir.path()).filter(|_| is_installed("taskset")) else { return };
    let job = BoundJob::start();
    let pus = job.pus;
    let mut others = Shell::start();
    for pu in pus {
        others.background(&format!("taskset -c {pu} sh -c 'while :; do :; done'"));
    }
    let (verdict, text) = job.run(&program, &pus);
    assert_ne!(verdict, "bound", "{text}");
}
