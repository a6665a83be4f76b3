//! Pools.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;

use super::*;
use crate::ExitStatus;
use crate::pool::{WorkerPool, WorkerPoolError, WorkerPoolWaitError};
use crate::proxy::ForkError;
use crate::proxy::templates::channel::Channel;

/// Says its rank and its process id, and waits for a signal.
const WORKER: &str = r#"
#include <stdio.h>
#include <unistd.h>
int main(int argc, char **argv) { printf("%s %d\n", argv[1], getpid()); fflush(stdout); for (;;) pause(); }
"#;

/// Starts a pool of so many workers and spares of the program in the directory. Returns the pool, and the lines that
/// the workers print.
fn start_pool(
    program: &Path,
    workers: u32,
    spares: usize,
) -> (WorkerPool, impl Iterator<Item = String> + use<>) {
    let context = context(program, &["A=1"]).add_rank_variables();
    let (first, reader) = with_output(instance(0, &["worker", "w%r"]));
    let instances: Vec<_> = (0..workers)
        .map(|rank| {
            let mut own = instance(rank, &["worker", "w%r"]);
            own.stdio = first.stdio.clone();
            own
        })
        .collect();
    drop(first);
    (
        WorkerPool::start(&context, instances, spares).unwrap(),
        BufReader::new(reader).lines().map(Result::unwrap),
    )
}

/// Kills a worker. Returns what the pool says of it.
fn kill_worker(pool: &mut WorkerPool, index: usize) -> Option<Result<(), ForkError>> {
    pool.worker(index).unwrap().send_signal(libc::SIGKILL).unwrap();
    let ended = pool.wait(None).unwrap().unwrap();
    assert_eq!((ended.index, ended.exit), (index, ExitStatus::Signal(libc::SIGKILL)));
    ended.replacement
}

/// Drops a pool, and then kills its workers, which run on.
fn end_pool(pool: WorkerPool, workers: usize) {
    let pids: Vec<u32> = (0..workers).map(|index| pool.worker(index).unwrap().pid.0).collect();
    drop(pool);
    for pid in pids {
        life::kill_process(pid);
        nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(pid.cast_signed()), None).unwrap();
    }
}

/// The children of the calling thread, in the order of their creation.
fn children() -> Vec<u32> {
    let path = format!("/proc/self/task/{}/children", nix::unistd::gettid());
    fs::read_to_string(path).unwrap().split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// The template of the only pool of the calling thread: it is older than the spares.
fn template_of(pool: &WorkerPool, workers: usize) -> u32 {
    let is_worker = |pid: &u32| (0..workers).any(|index| pool.worker(index).unwrap().pid.0 == *pid);
    children().into_iter().find(|pid| !is_worker(pid)).unwrap()
}

/// Changes the mask of the next process of a worker to a PU that no machine has, as if the PU of the worker were
/// offline.
fn take_offline(pool: &mut WorkerPool, index: usize) {
    let instance = pool.instance_mut(index);
    *instance = on(instance.clone(), "8000");
}

#[test]
fn a_worker_that_is_killed_is_replaced_by_a_spare_with_its_arguments() {
    let directory = tempfile::tempdir().unwrap();
    let (mut pool, mut lines) = start_pool(&compile(directory.path(), "worker", WORKER, &[]), 3, 2);
    let mut begun: Vec<String> = lines.by_ref().take(3).collect();
    begun.sort();
    let pids: Vec<u32> = (0..3).map(|index| pool.worker(index).unwrap().pid.0).collect();
    assert_eq!(begun, [0, 1, 2].map(|rank| format!("w{rank} {}", pids[rank])));
    for round in 0..20 {
        let index = round % 3;
        let before = pool.worker(index).unwrap().pid;
        kill_worker(&mut pool, index).unwrap().unwrap();
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
    end_pool(pool, 3);
    // The last ends of the pipe are closed: no spare is left.
    assert_eq!(lines.next(), None);
}

#[test]
fn a_worker_is_replaced_although_the_next_spare_was_killed() {
    let directory = tempfile::tempdir().unwrap();
    let (mut pool, mut lines) = start_pool(&compile(directory.path(), "worker", WORKER, &[]), 1, 2);
    assert!(lines.next().unwrap().starts_with("w0 "));
    let [_template, _worker, spare, other] = children()[..] else { panic!("{:?}", children()) };
    life::kill_process(spare);
    kill_worker(&mut pool, 0).unwrap().unwrap();
    let now = pool.worker(0).unwrap().pid;
    assert_ne!(now.0, other, "the worker is a new fork");
    assert_eq!(lines.next().unwrap(), format!("w0 {now}"));
    assert_eq!(pool.ready_spare_count(), 1);
    end_pool(pool, 1);
    assert_eq!(lines.next(), None);
}

#[test]
fn a_spare_that_has_ended_is_not_started_although_its_channel_is_open_elsewhere() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "worker", WORKER, &[]), &["A=1"]);
    let own = instance(0, &["worker", "x"]);
    let mut template = crate::proxy::Template::load_until_main(&context, &own).unwrap();
    let mut spare = template.make_spare().unwrap();
    let [_template, pid] = children()[..] else { panic!("{:?}", children()) };
    // As if a process that another thread has forked meanwhile had the other end.
    let (channel, _open) = Channel::pair().unwrap();
    spare.channel = channel;
    life::kill_process(pid);
    assert_eq!(template.start_spare(spare, &own).unwrap_err(), ForkError::Ended);
}

#[test]
fn a_pool_whose_template_was_killed_loads_it_again_for_workers_and_spares() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "worker", WORKER, &[]);
    for spares in [0, 1] {
        let (mut pool, mut lines) = start_pool(&program, 2, spares);
        assert_eq!(lines.by_ref().take(2).count(), 2);
        for round in 0..4 {
            if round % 2 == 0 {
                life::kill_process(template_of(&pool, 2));
            }
            kill_worker(&mut pool, round % 2).unwrap().unwrap();
            let now = pool.worker(round % 2).unwrap().pid;
            assert_eq!(
                lines.next().unwrap(),
                format!("w{} {now}", round % 2),
                "{spares} spares, round {round}"
            );
            assert!(pool.wait(Some(0)).unwrap().is_none());
            assert_eq!(pool.ready_spare_count(), spares);
        }
        end_pool(pool, 2);
        assert_eq!(lines.next(), None);
    }
}

#[test]
fn a_replacement_that_failed_is_tried_again() {
    let directory = tempfile::tempdir().unwrap();
    let (program, away) = (compile(directory.path(), "worker", WORKER, &[]), directory.path().join("away"));
    let (mut pool, mut lines) = start_pool(&program, 1, 0);
    assert!(lines.next().unwrap().starts_with("w0 "));
    life::kill_process(template_of(&pool, 1));
    fs::rename(&program, &away).unwrap();
    let failed = kill_worker(&mut pool, 0).unwrap().unwrap_err();
    assert!(failed.to_string().contains("No such file or directory"), "{failed}");
    assert!(pool.wait(Some(0)).unwrap().is_none());
    assert!(pool.worker(0).is_none());
    fs::rename(&away, &program).unwrap();
    assert!(pool.wait(Some(0)).unwrap().is_none());
    let now = pool.worker(0).unwrap().pid;
    assert_eq!(lines.next().unwrap(), format!("w0 {now}"));
    end_pool(pool, 1);
}

#[test]
fn a_worker_that_cannot_be_replaced_keeps_no_other_and_no_spare_from_being_made() {
    let directory = tempfile::tempdir().unwrap();
    let (program, away) = (compile(directory.path(), "worker", WORKER, &[]), directory.path().join("away"));
    let (mut pool, mut lines) = start_pool(&program, 3, 1);
    assert_eq!(lines.by_ref().take(3).count(), 3);
    let template = template_of(&pool, 3);
    take_offline(&mut pool, 0);
    let failed = kill_worker(&mut pool, 0).unwrap().unwrap_err();
    assert!(matches!(failed, ForkError::Failed(_)), "{failed}");
    life::kill_process(template);
    fs::rename(&program, &away).unwrap();
    for index in [1, 2] {
        assert!(matches!(kill_worker(&mut pool, index), Some(Err(ForkError::NotReloaded(_)))));
    }
    let error = pool.wait(None).unwrap_err();
    assert!(
        matches!(error, WorkerPoolWaitError::NotReplaced(ForkError::Failed(_))),
        "the first error: {error}"
    );
    fs::rename(&away, &program).unwrap();
    // The second time, a spare is used up by the worker that can't be replaced.
    for _ in 0..2 {
        assert!(pool.wait(Some(0)).unwrap().is_none());
        assert!(pool.worker(0).is_none());
        assert_eq!(pool.ready_spare_count(), 1);
    }
    let mut begun: Vec<String> = lines.by_ref().take(2).collect();
    begun.sort();
    assert_eq!(begun, [1, 2].map(|index| format!("w{index} {}", pool.worker(index).unwrap().pid)));
    *pool.instance_mut(0) = pool.instance_mut(1).clone();
    assert!(pool.wait(Some(0)).unwrap().is_none());
    assert_eq!(lines.next().unwrap(), format!("w1 {}", pool.worker(0).unwrap().pid));
    end_pool(pool, 3);
    assert_eq!(lines.next(), None);
}

#[test]
fn a_wait_without_a_limit_fails_if_no_worker_runs() {
    let directory = tempfile::tempdir().unwrap();
    let (mut pool, mut lines) = start_pool(&compile(directory.path(), "worker", WORKER, &[]), 1, 1);
    assert!(lines.next().unwrap().starts_with("w0 "));
    let good = pool.instance_mut(0).clone();
    take_offline(&mut pool, 0);
    kill_worker(&mut pool, 0).unwrap().unwrap_err();
    for _ in 0..2 {
        let error = pool.wait(None).unwrap_err();
        assert!(matches!(error, WorkerPoolWaitError::NotReplaced(ForkError::Failed(_))), "{error}");
        assert!(error.to_string().contains("no worker runs"), "{error}");
    }
    assert!(pool.wait(Some(0)).unwrap().is_none(), "with a limit the wait ends");
    *pool.instance_mut(0) = good;
    assert!(pool.wait(Some(0)).unwrap().is_none());
    assert_eq!(lines.next().unwrap(), format!("w0 {}", pool.worker(0).unwrap().pid));
    end_pool(pool, 1);
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
    assert!(matches!(pool.wait(None), Err(WorkerPoolWaitError::AllDone)));
}

/// Runs the test `name` of this module again, in a process of its own with at most 40 descriptors by default. Returns
/// whether this is that process.
fn is_run_with_few_descriptors(name: &str) -> bool {
    const VARIABLE: &str = "PJW_TEST_FEW_DESCRIPTORS";
    if std::env::var_os(VARIABLE).is_some() {
        return true;
    }
    let test = format!("proxy::templates::tests::pool::{name}");
    let run = std::process::Command::new("sh")
        .args(["-c", "ulimit -S -n 40 && exec \"$0\" --exact \"$1\""])
        .arg(std::env::current_exe().unwrap())
        .arg(test)
        .env(VARIABLE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(
        run.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&run.stderr)
    );
    false
}

#[test]
fn a_pool_raises_the_limit_of_descriptors() {
    if !is_run_with_few_descriptors("a_pool_raises_the_limit_of_descriptors") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (pool, lines) = start_pool(&compile(directory.path(), "worker", WORKER, &[]), 30, 20);
    assert_eq!(lines.take(30).count(), 30);
    end_pool(pool, 30);
}

#[test]
fn a_fork_whose_pidfd_finds_no_place_is_no_process_afterwards() {
    use std::os::fd::AsRawFd;

    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if !is_run_with_few_descriptors("a_fork_whose_pidfd_finds_no_place_is_no_process_afterwards") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "worker", WORKER, &[]), &["A=1"]);
    let own = instance(0, &["worker", "x"]);
    let mut template = crate::proxy::Template::load_until_main(&context, &own).unwrap();
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let lowest_free = fs::File::open("/dev/null").unwrap().as_raw_fd();
    setrlimit(Resource::RLIMIT_NOFILE, lowest_free.try_into().unwrap(), hard).unwrap();
    let failed = template.fork(&own).unwrap_err();
    setrlimit(Resource::RLIMIT_NOFILE, 40, hard).unwrap();
    assert!(failed.to_string().contains("Too many open files"), "{failed}");
    assert_eq!(children(), [template.pid().0]);
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
    let error = pool.wait(None).unwrap_err();
    assert!(matches!(error, WorkerPoolWaitError::SystemCall(nix::errno::Errno::ECHILD)), "{error}");
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
    let first = instance(0, &["worker", "x"]);
    let mut template = crate::proxy::Template::load_until_main(&context, &first).unwrap();
    let spares: Vec<_> = (0..3).map(|_| template.make_spare().unwrap()).collect();
    let pids = children();
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
