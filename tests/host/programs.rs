//! Real programs of several kinds in jobs: how they bind themselves, and how they create processes and threads. Each
//! hot thread has a core for itself as soon as there are as many cores, and a program that binds itself is left alone.
//!
//! A program that is not installed is skipped with one line.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_tests::daemon::Daemon;
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::mpi::first_and_second;
use crate::processes::{KillOnDrop, Shell, has_own_core_each, has_two_cores, is_installed, mask, masks};

/// Two threads that compute until they are killed. Each prints its thread id and its mask to a file of its own.
const OPENMP: &str = r#"
#define _GNU_SOURCE
#include <omp.h>
#include <sched.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int argc, char **argv) {
#pragma omp parallel num_threads(2)
    {
        char name[4096], ready[4096];
        snprintf(name, sizeof name, "%s/.%d", argv[1], omp_get_thread_num());
        snprintf(ready, sizeof ready, "%s/%d", argv[1], omp_get_thread_num());
        FILE *file = fopen(name, "w");
        fprintf(file, "%ld\n", syscall(SYS_gettid));
        fclose(file);
        rename(name, ready);
        for (volatile unsigned long n = 0;; n++) {}
    }
}
"#;

/// Creates a thread that computes a little, waits for its end, and begins again. Writes the number of ended threads to
/// a file.
const SHORT_THREADS: &str = r#"
#include <pthread.h>
#include <stdio.h>
static void *work(void *nothing) {
    for (volatile int n = 0; n < 20000; n++) {}
    return nothing;
}
int main(int argc, char **argv) {
    for (unsigned long ended = 0;; ended += 4) {
        pthread_t threads[4];
        for (int n = 0; n < 4; n++) if (pthread_create(&threads[n], 0, work, 0)) return 1;
        for (int n = 0; n < 4; n++) pthread_join(threads[n], 0);
        if (ended % 100 == 0) {
            FILE *file = fopen(argv[1], "w");
            fprintf(file, "%lu\n", ended);
            fclose(file);
        }
    }
}
"#;

const MULTIPROCESSING: &str = "
import multiprocessing, os, sys
def work(n):
    with open(os.path.join(sys.argv[1], '.%d' % n), 'w') as file:
        file.write('%d\\n' % os.getpid())
    os.rename(file.name, os.path.join(sys.argv[1], str(n)))
    while True: pass
if __name__ == '__main__':
    multiprocessing.get_context('fork').Pool(2).map(work, range(2), 1)
";

const CONCURRENT_FUTURES: &str = "
import concurrent.futures, multiprocessing, os, sys
def work(n):
    with open(os.path.join(sys.argv[1], '.%d' % n), 'w') as file:
        file.write('%d\\n' % os.getpid())
    os.rename(file.name, os.path.join(sys.argv[1], str(n)))
    while True: pass
if __name__ == '__main__':
    context = multiprocessing.get_context('fork')
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        list(pool.map(work, range(2)))
";

const JAVA: &str = "
public class Spin {
    static volatile long n;
    public static void main(String[] arguments) throws Exception {
        Thread[] threads = new Thread[2];
        for (int i = 0; i < 2; i++) { threads[i] = new Thread(() -> { while (true) n++; }, \"spin-\" + i); threads[i].start(); }
        for (Thread thread : threads) thread.join();
    }
}
";

const GO: &str = "
package main
func spin() { for n := 0; ; n++ { } }
func main() { go spin(); spin() }
";

/// Starts as many threads as the Go runtime uses CPUs, which compute until they are killed, and writes their ids to
/// files. Then writes its process id, the number of CPUs and the number of threads that it has found.
const GO_SIZE: &str = r#"
package main
import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
)
func write(name string, text string) {
	hidden := filepath.Join(os.Args[1], "." + name)
	if err := os.WriteFile(hidden, []byte(text), 0o644); err != nil { panic(err) }
	if err := os.Rename(hidden, filepath.Join(os.Args[1], name)); err != nil { panic(err) }
}
func main() {
	threads := runtime.GOMAXPROCS(0)
	var started sync.WaitGroup
	started.Add(threads)
	for i := 0; i < threads; i++ {
		go func(i int) {
			runtime.LockOSThread()
			write(fmt.Sprint(i), fmt.Sprint(syscall.Gettid()))
			started.Done()
			for n := 0; ; n++ { }
		}(i)
	}
	started.Wait()
	write("size", fmt.Sprint(os.Getpid(), runtime.NumCPU(), threads))
	select { }
}
"#;

/// A running program in a job of two cores.
struct ProgramInJob {
    cpus: CpuSet,
    /// The directory to which the workers write their ids.
    dir: tempfile::TempDir,
    pid: u32,
    /// The changes of masks in the job before the program was started.
    changes_before: Vec<String>,
    /// All processes of the program end when this value is dropped.
    _shell: Shell,
}

/// Reads often, so that a thread soon counts as hot.
const READS_OFTEN: &str = "interval = \"50ms\"\n";
/// No thread is pinned.
const WITHOUT_PINS: &str = "[balance]\npin = false\n";

/// The daemon of these tests.
fn start_daemon() -> Daemon {
    Daemon::start(READS_OFTEN)
}

/// Replaces the configuration of the daemon, and puts the new one into force.
fn reload(daemon: &Daemon, config: &str) {
    daemon.configure(config);
    let done = daemon.pjwctl(&["reload"]);
    assert!(done.status.success(), "{done:?}");
}

/// Starts a program in a job of two cores. In `line`, the shell's `$DIR` is an empty directory.
fn start(daemon: &Daemon, line: &str) -> ProgramInJob {
    let dir = tempfile::tempdir().unwrap();
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 2, &[shell.pid()]).unwrap();
    let changes_before = mask_changes(daemon);
    shell.send_line(&format!("DIR={}; export DIR", dir.path().display()));
    let pid = shell.background(&format!("exec env {line}"));
    ProgramInJob { cpus, dir, pid, changes_before, _shell: shell }
}

/// Compiles a C program. `None` if there is no compiler, or if the compiler lacks a library; the test is then skipped.
pub fn compile(dir: &Path, source: &str, flags: &[&str]) -> Option<PathBuf> {
    if !is_installed("gcc") {
        return None;
    }
    let (file, program) = (dir.join("program.c"), dir.join("program"));
    std::fs::write(&file, source).unwrap();
    let output =
        Command::new("gcc").args(["-O1", "-o"]).arg(&program).arg(&file).args(flags).output().unwrap();
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        pjw_tests::skipping::skip(format_args!("gcc {flags:?} fails: {why}"));
        return None;
    }
    Some(program)
}

/// Waits until two workers have written their ids, and returns these.
fn worker_ids(program: &ProgramInJob) -> [u32; 2] {
    ["0", "1"].map(|name| {
        wait_for("the worker runs", || {
            std::fs::read_to_string(program.dir.path().join(name)).ok()?.trim().parse().ok()
        })
    })
}

/// The hot threads of the job, as pjwd sees them.
fn hot_threads(daemon: &Daemon) -> Vec<u32> {
    let job: Value = daemon.call("GetJob", &json!({ "job": daemon.job_id("a") })).unwrap();
    let threads =
        job["members"].as_array().unwrap().iter().flat_map(|member| member["threads"].as_array().unwrap());
    let hot = threads.filter(|thread| thread["hot"] == true);
    hot.map(|thread| u32::try_from(thread["tid"].as_u64().unwrap()).unwrap()).collect()
}

/// The kinds of the events of the job that report a change of a mask.
fn mask_changes(daemon: &Daemon) -> Vec<String> {
    let job: Value = daemon.call("GetJob", &json!({ "job": daemon.job_id("a") })).unwrap();
    let kinds =
        job["history"].as_array().unwrap().iter().map(|event| event["event"].as_str().unwrap().to_owned());
    kinds
        .filter(|kind| ["confined", "repaired", "rebalanced", "violation"].contains(&kind.as_str()))
        .collect()
}

/// The CPU time of a process, in ticks of 10 ms. `None` if the process has ended.
fn run_ticks(tid: u32) -> Option<u64> {
    let text = std::fs::read(format!("/proc/{tid}/stat")).ok()?;
    pjw_linux::proc::procfs::parse_stat(&text).map(|stat| stat.run_ticks)
}

/// Waits until pjwd, which scans each 300 ms, has seen these threads run for some time.
fn wait_until_seen_hot(daemon: &Daemon, tids: &[u32]) {
    let before: Vec<Option<u64>> = tids.iter().map(|&tid| run_ticks(tid)).collect();
    // Ten scans of the daemon. All of these threads may be of one process, whose time is read.
    let enough = 300 * tids.len() as u64;
    wait_until("the threads have run for three seconds", || {
        tids.iter().zip(&before).all(|(&tid, before)| run_ticks(tid) >= before.map(|ticks| ticks + enough))
    });
    wait_until("pjwd knows that they are hot", || {
        let hot = hot_threads(daemon);
        tids.iter().all(|tid| hot.contains(tid))
    });
}

/// The other tests scan twenty times as often. How long it takes is printed: other tests may keep the machine busy.
#[test]
fn with_the_default_interval_hot_threads_get_a_core_each_and_stay_there() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let mut shell = Shell::start();
    let spinners = [(); 2].map(|()| KillOnDrop(shell.background("while :; do :; done")));
    let pids = spinners.each_ref().map(|spinner| spinner.0);
    daemon.assign("a", 2, &[&[shell.pid()], &pids[..]].concat()).unwrap();
    let begun = Instant::now();
    wait_until("each thread has a core for itself", || has_own_core_each(&pids));
    println!("each thread had a core for itself after {} ms", begun.elapsed().as_millis());
    let ticks = pids.map(run_ticks);
    let (mut masks, mut moves) = (pids.map(mask), 0);
    // Ten seconds in five waits: on a busy machine the threads get a part of a core only.
    for step in 1..=5 {
        wait_until("each thread has run for two seconds more", || {
            let now = pids.map(mask);
            moves += now.iter().zip(&masks).filter(|(now, before)| now != before).count();
            masks = now;
            let end = |before: Option<u64>| before.map(|ticks| ticks + 200 * step);
            pids.iter().zip(ticks).all(|(&pid, before)| run_ticks(pid) >= end(before))
        });
    }
    assert!(moves <= 2, "{moves} moves");
    assert!(has_own_core_each(&pids), "{masks:?}");
}

fn check_workers_get_a_core_each(line: &str) {
    let daemon = start_daemon();
    let program = start(&daemon, line);
    let workers = worker_ids(&program);
    wait_until("each worker has a core for itself", || has_own_core_each(&workers));
    assert!(workers.iter().all(|&tid| mask(tid).is_subset(&program.cpus)));
}

#[test]
fn openmp_threads_without_bindings_get_a_core_each() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = has_two_cores().then(|| compile(dir.path(), OPENMP, &["-fopenmp"])).flatten() else {
        return;
    };
    check_workers_get_a_core_each(&format!("OMP_PROC_BIND=false {} $DIR", program.display()));
}

/// As `mpirun --bind-to core -np 1` starts it: the threads inherit the mask of the process.
#[test]
fn openmp_threads_of_a_process_that_its_launcher_bound_to_one_pu_get_a_core_each() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = has_two_cores().then(|| compile(dir.path(), OPENMP, &["-fopenmp"])).flatten() else {
        return;
    };
    let first_pu = r#"sed -n "s/^Cpus_allowed_list:[^0-9]*\([0-9]*\).*/\1/p" /proc/self/status"#;
    let launcher = format!(r#"sh -c 'exec taskset -c "$({first_pu})" "$0" "$DIR"'"#);
    check_workers_get_a_core_each(&format!("OMP_PROC_BIND=false {launcher} {}", program.display()));
}

#[test]
fn an_openmp_program_that_binds_itself_is_never_touched() {
    let dir = tempfile::tempdir().unwrap();
    let Some(binary) = has_two_cores().then(|| compile(dir.path(), OPENMP, &["-fopenmp"])).flatten() else {
        return;
    };
    // A thread that runs or waits for a PU during two intervals is pinned, and its program then finds only this PU. On
    // a busy machine, the program may need longer until it has read its mask. So threads are pinned from then on.
    let config = "interval = \"300ms\"\n";
    let daemon = Daemon::start(&format!("{config}{WITHOUT_PINS}"));
    let program = start(&daemon, &format!("OMP_PROC_BIND=true OMP_PLACES=cores {} $DIR", binary.display()));
    let threads = worker_ids(&program);
    let own = threads.map(mask);
    assert!(!own[0].intersects(&own[1]), "{own:?}: the program binds its threads to different cores");
    reload(&daemon, config);
    wait_until_seen_hot(&daemon, &threads);
    assert_eq!(threads.map(mask), own);
    assert_eq!(mask_changes(&daemon), program.changes_before, "pjwd changed no mask");
    let job = daemon.job("a").unwrap();
    assert_eq!((job.pinned, job.violations), (0, 0));
    daemon.release("a").unwrap();
    assert_eq!(threads.map(mask), own, "the bindings are the program's, so a release keeps them");
}

/// Runs a Python program with a pool of workers, and checks that each worker gets a core.
fn check_python_workers_get_a_core_each(program: &str) {
    if !has_two_cores() || !is_installed("python3") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("pool.py");
    std::fs::write(&script, program).unwrap();
    check_workers_get_a_core_each(&format!("python3 {} $DIR", script.display()));
}

#[test]
fn the_workers_of_python_multiprocessing_get_a_core_each() {
    check_python_workers_get_a_core_each(MULTIPROCESSING);
}

#[test]
fn the_workers_of_python_concurrent_futures_get_a_core_each() {
    check_python_workers_get_a_core_each(CONCURRENT_FUTURES);
}

/// Starts a program with two hot threads whose ids are not known, and checks that each gets a core.
fn check_hot_threads_get_a_core_each(line: &str) {
    let daemon = Daemon::start(&format!("{READS_OFTEN}{WITHOUT_PINS}"));
    let _program = start(&daemon, line);
    // A run-time system that is pinned before it has counted its PUs runs one thread only. It also has threads of its
    // own, which run at the start only.
    wait_until("two threads are hot", || hot_threads(&daemon).len() == 2);
    reload(&daemon, READS_OFTEN);
    wait_until("two threads are hot, each on a core for itself", || {
        let hot = hot_threads(&daemon);
        hot.len() == 2 && has_own_core_each(&hot)
    });
}

#[test]
fn the_hot_threads_of_a_java_program_get_a_core_each() {
    if !has_two_cores() || !is_installed("java") || !is_installed("javac") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("Spin.java"), JAVA).unwrap();
    let compiled = Command::new("javac").arg("Spin.java").current_dir(dir.path()).status().unwrap();
    assert!(compiled.success());
    check_hot_threads_get_a_core_each(&format!("java -cp {} Spin", dir.path().display()));
}

/// Builds a Go program. `None` if Go is not installed; the test is then skipped.
fn build_go(dir: &Path, source: &str) -> Option<PathBuf> {
    if !is_installed("go") {
        return None;
    }
    std::fs::write(dir.join("program.go"), source).unwrap();
    let mut build = Command::new("go");
    build.args(["build", "-o", "program", "program.go"]).current_dir(dir);
    build.envs([("GOCACHE", dir.join("cache")), ("GOPATH", dir.join("path"))]);
    let built = build.envs([("GO111MODULE", "off"), ("CGO_ENABLED", "0")]).status().unwrap();
    assert!(built.success());
    Some(dir.join("program"))
}

#[test]
fn the_hot_threads_of_a_go_program_get_a_core_each() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = has_two_cores().then(|| build_go(dir.path(), GO)).flatten() else { return };
    check_hot_threads_get_a_core_each(program.to_str().unwrap());
}

/// Starts a Go program by `pjwctl run` in a job of some cores, with `GOMAXPROCS` of the user if that is given. Checks
/// that it finds the size of its job, and that all its threads stay inside.
///
/// The program counts the PUs of its mask. On a busy machine, it may run or wait for a PU during two intervals before,
/// and a pinned thread has one PU. So threads are pinned when it has counted.
fn check_go_program_keeps_to_its_job(daemon: &Daemon, program: &Path, cores: u32, own_threads: Option<u32>) {
    let dir = tempfile::tempdir().unwrap();
    reload(daemon, &format!("{READS_OFTEN}{WITHOUT_PINS}"));
    let (id, cores) = (daemon.job_id("go"), cores.to_string());
    let mut command = daemon.pjwctl_command(&["run", "--job", &id, "--cores", &cores, "--"]);
    command.arg(program).arg(dir.path()).env_remove("GOMAXPROCS").env_remove("PJW_VARIABLES");
    command.envs(own_threads.map(|threads| ("GOMAXPROCS", threads.to_string())));
    let run = Shell::from_command(command);
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).ok();
    let size = wait_for("the program has written its size", || read("size"));
    reload(daemon, READS_OFTEN);
    let numbers: Vec<u32> = size.split_whitespace().map(|number| number.parse().unwrap()).collect();
    let [pid, found_cpus, threads] = numbers[..] else { panic!("the program wrote {size:?}") };
    let cpus: CpuSet = daemon.job("go").unwrap().cpus.parse().unwrap();
    let size = u32::try_from(cpus.len()).unwrap();
    assert_eq!((found_cpus, threads), (size, own_threads.unwrap_or(size)), "in a job on {cpus}");
    let tids: Vec<u32> = (0..threads).map(|name| read(&name.to_string()).unwrap().parse().unwrap()).collect();
    wait_until("each thread has run for 0.2 s, and all threads were inside", || {
        for (tid, allowed) in masks(&[pid]) {
            let allowed: CpuSet = allowed.parse().unwrap();
            assert!(allowed.is_subset(&cpus), "thread {tid} may run on {allowed}, and the job has {cpus}");
        }
        tids.iter().all(|&tid| run_ticks(tid).is_some_and(|ticks| ticks >= 20))
    });
    assert_eq!(daemon.job("go").unwrap().violations, 0);
    drop(run);
    wait_until("the job has ended", || daemon.job("go").is_none());
}

#[test]
fn a_go_program_finds_the_size_of_its_job_and_all_its_threads_stay_inside() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = has_two_cores().then(|| build_go(dir.path(), GO_SIZE)).flatten() else { return };
    let daemon = start_daemon();
    for (cores, own_threads) in [(1, None), (2, None), (1, Some(3))] {
        check_go_program_keeps_to_its_job(&daemon, &program, cores, own_threads);
    }
}

#[test]
fn a_program_that_creates_and_ends_threads_all_the_time_stays_inside() {
    let dir = tempfile::tempdir().unwrap();
    let Some(binary) = has_two_cores().then(|| compile(dir.path(), SHORT_THREADS, &["-pthread"])).flatten()
    else {
        return;
    };
    let daemon = start_daemon();
    let program = start(&daemon, &format!("{} $DIR/ended", binary.display()));
    let count = program.dir.path().join("ended");
    wait_until("two thousand threads have ended, and all that ran were inside", || {
        for (tid, allowed) in masks(&[program.pid]) {
            let allowed: CpuSet = allowed.parse().unwrap();
            assert!(allowed.is_subset(&program.cpus), "thread {tid} may run on {allowed}");
        }
        let ended = std::fs::read_to_string(&count).unwrap_or_default();
        ended.trim().parse::<u64>().is_ok_and(|ended| ended >= 2000)
    });
    assert_eq!(daemon.job("a").unwrap().violations, 0);
    let before = pjw_linux::sys::affinity::get_mask(Tid(std::process::id())).unwrap();
    daemon.release("a").unwrap();
    wait_until("the masks are those from before the job", || mask(program.pid) == before);
}

#[test]
fn all_processes_of_a_parallel_make_are_inside_from_their_first_instruction() {
    if !has_two_cores() || !is_installed("make") {
        return;
    }
    let daemon = start_daemon();
    let dir = tempfile::tempdir().unwrap();
    let pu = first_and_second().1.first().unwrap().to_string();
    // cat reads its own mask first of all.
    let rules = "TARGETS := $(addprefix t,$(shell seq 60))\nall: $(TARGETS)\n\
                 t%:\n\t@cat /proc/self/status >$@; n=0; while [ $$n -lt 2000 ]; do n=$$((n+1)); done\n";
    std::fs::write(dir.path().join("Makefile"), rules).unwrap();
    let output = daemon.pjwctl(&[
        "run",
        "--job",
        &daemon.job_id("a"),
        "--cpus",
        &pu,
        "--",
        "make",
        "-s",
        "-j8",
        "-C",
        dir.path().to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{output:?}");
    for target in 1..=60 {
        let status = std::fs::read_to_string(dir.path().join(format!("t{target}"))).unwrap();
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        assert_eq!(list.trim(), pu, "target {target}");
    }
}
