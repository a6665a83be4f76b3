//! Pools.

use std::fs;
use std::io::{BufRead, BufReader};

use super::*;
use crate::ExitStatus;
use crate::pool::{WorkerPool, WorkerPoolError};

/// Says its rank and its process id, and waits for a signal.
const WORKER: &str = r#"
#include <stdio.h>
#include <unistd.h>
int main(int argc, char **argv) { printf("%s %d\n", argv[1], getpid()); fflush(stdout); for (;;) pause(); }
"#;

#[test]
fn a_worker_that_is_killed_is_replaced_by_a_spare_with_its_arguments() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "worker", WORKER, &[]), &["A=1"]).add_rank_variables();
    let (first, reader) = with_output(instance(0, &["worker", "w%r"]));
    let instances: Vec<_> = (0..3)
        .map(|rank| {
            let mut own = instance(rank, &["worker", "w%r"]);
            own.stdio = first.stdio.clone();
            own
        })
        .collect();
    drop(first);
    let mut lines = BufReader::new(reader).lines().map(Result::unwrap);
    let mut pool = WorkerPool::start(&context, instances, 2).unwrap();
    let mut begun: Vec<String> = lines.by_ref().take(3).collect();
    begun.sort();
    let pids: Vec<u32> = (0..3).map(|index| pool.worker(index).unwrap().pid.0).collect();
    assert_eq!(begun, [0, 1, 2].map(|rank| format!("w{rank} {}", pids[rank])));
    for round in 0..20 {
        let index = round % 3;
        let before = pool.worker(index).unwrap().pid;
        pool.worker(index).unwrap().send_signal(libc::SIGKILL).unwrap();
        let ended = pool.wait(None).unwrap().unwrap();
        assert_eq!((ended.index, ended.exit), (index, ExitStatus::Signal(libc::SIGKILL)));
        ended.replacement.unwrap().unwrap();
        let now = pool.worker(index).unwrap().pid;
        assert_ne!(now, before);
        assert_eq!(lines.next().unwrap(), format!("w{index} {now}"));
        assert_eq!(
            fs::read(format!("/proc/{}/cmdline", now.0)).unwrap(),
            format!("worker\0w{index}\0").as_bytes()
        );
        assert_eq!(pool.ready_spare_count(), 1);
        assert!(pool.wait(Some(0)).unwrap().is_none());
        assert_eq!(pool.ready_spare_count(), 2);
    }
    let workers: Vec<_> = (0..3).map(|index| pool.worker(index).unwrap().pid.0).collect();
    for index in 0..3 {
        pool.worker(index).unwrap().send_signal(libc::SIGKILL).unwrap();
    }
    drop(pool);
    for pid in workers {
        let _ = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(pid.cast_signed()), None);
    }
    // The last ends of the pipe are closed: no spare is left.
    assert_eq!(lines.next(), None);
}

#[test]
fn a_worker_that_is_done_is_not_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "true", "int main(void) { return 0; }", &[]);
    let mut pool = WorkerPool::start(&context(&program, &[]), vec![instance(0, &["true"])], 1).unwrap();
    let ended = pool.wait(None).unwrap().unwrap();
    assert!(ended.exit == ExitStatus::Code(0) && ended.replacement.is_none());
    assert!(pool.worker(0).is_none());
    assert!(pool.wait(Some(0)).unwrap().is_none());
}

#[test]
fn a_worker_whose_exit_status_another_has_taken_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "worker", WORKER, &[]);
    let mut pool =
        WorkerPool::start(&context(&program, &[]), vec![instance(0, &["worker", "x"])], 0).unwrap();
    let before = pool.worker(0).unwrap().pid;
    pool.worker(0).unwrap().send_signal(libc::SIGKILL).unwrap();
    pool.worker(0).unwrap().wait().unwrap();
    assert_eq!(pool.wait(None).unwrap_err(), nix::errno::Errno::ECHILD);
    assert_ne!(pool.worker(0).unwrap().pid, before);
    assert!(pool.wait(Some(0)).unwrap().is_none());
    pool.worker(0).unwrap().send_signal(libc::SIGKILL).unwrap();
    assert_eq!(pool.worker(0).unwrap().wait(), Ok(ExitStatus::Signal(libc::SIGKILL)));
}

#[test]
fn a_process_that_ignores_sigchld_can_have_no_pool() {
    let (context, instances) = (context("/bin/true".as_ref(), &[]), vec![instance(0, &["true"])]);
    // The action of a signal is the whole process's, so a process of its own ignores the signal.
    // SAFETY: the new process only calls the function below and ends.
    let process = unsafe { libc::fork() };
    if process == 0 {
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        let refused = WorkerPool::start(&context, instances, 1);
        let is_refused = matches!(refused, Err(WorkerPoolError::ChildSignalIgnored));
        // SAFETY: as above.
        unsafe { libc::_exit(if is_refused { 0 } else { 1 }) };
    }
    let process = nix::unistd::Pid::from_raw(process);
    let end = nix::sys::wait::waitpid(process, None).unwrap();
    assert_eq!(end, nix::sys::wait::WaitStatus::Exited(process, 0));
}

#[test]
fn a_spare_sleeps_until_it_is_needed_and_ends_with_the_pool() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "worker", WORKER, &[]), &["A=1"]);
    let mut template = crate::proxy::Template::load(&context, &instance(0, &["worker", "x"])).unwrap();
    let spares: Vec<_> = (0..3).map(|_| template.make_spare().unwrap()).collect();
    let children = fs::read_to_string(format!("/proc/self/task/{}/children", nix::unistd::gettid())).unwrap();
    let pids: Vec<&str> = children.split_whitespace().collect();
    assert_eq!(pids.len(), 4, "a template and three spares");
    for pid in &pids {
        // 47 is recvmsg(2).
        while !fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap().starts_with("47 ") {
            std::thread::yield_now();
        }
    }
    drop(spares);
    drop(template);
    for pid in pids {
        assert!(fs::metadata(format!("/proc/{pid}")).is_err(), "{pid} is left");
    }
}
