//! A round with tasks that start and tasks that fail, each at another moment.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use pjw_core::cpuset::Pu;
use tempfile::TempDir;

use super::AddressSpace;
use crate::child::wait_without_reaping;
use crate::layout::ExecArrays;
use crate::{Arguments, Child, ExitStatus, Instance, Placement, SpawnContext, SpawnError, SpawnStep, Stdio};

/// The most rounds in which a task kills the host, if none of the kills was amid a round.
const MOST_ROUNDS: usize = 100;

/// Compiles the program of the tasks. `None` if tasks can't run here.
fn task_program() -> Option<(PathBuf, TempDir)> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("task");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/task.c");
    let flags = ["-O1", "-static-pie", "-pthread"];
    let compiled = Command::new("cc").args(flags).arg("-o").arg(&path).arg(source).status().unwrap();
    (cfg!(target_arch = "x86_64") && compiled.success()).then_some((path, directory))
}

/// A task with these arguments.
fn task(rank: u32, arguments: &[&str]) -> Instance {
    Instance {
        rank,
        size: 6,
        arguments: Arc::new(Arguments::literal(arguments).unwrap()),
        variables: Vec::new(),
        placement: Arc::default(),
        stdio: Stdio::default(),
    }
}

/// A task that ends with this exit code.
fn instance(rank: u32, code: i32, placement: Placement) -> Instance {
    let code = code.to_string();
    Instance { placement: Arc::new(placement), ..task(rank, &["task", "exit", code.as_str()]) }
}

/// Stops the host, so that it finds all requests at once that are sent before it continues. Returns its process id.
fn stop_host(space: &AddressSpace) -> Pid {
    let host = Pid::from_raw(space.host_pid().0.cast_signed());
    kill(host, Signal::SIGSTOP).unwrap();
    let stopped = waitpid(host, Some(WaitPidFlag::WUNTRACED)).unwrap();
    assert_eq!(stopped, WaitStatus::Stopped(host, Signal::SIGSTOP));
    host
}

/// Starts tasks in one round: the host, which would take the first requests alone, is stopped until all have come.
fn start_together(
    space: &mut AddressSpace,
    layout: &mut ExecArrays,
    instances: &[Instance],
) -> Vec<Result<Child, SpawnError>> {
    let host = stop_host(space);
    for instance in instances {
        space.send_request(instance, layout).unwrap();
    }
    kill(host, Signal::SIGCONT).unwrap();
    instances.iter().map(|_| space.wait_for_oldest_request()).collect()
}

#[test]
fn tasks_that_fail_in_a_round_are_reported_in_their_places_and_all_others_start() {
    let Some((path, _directory)) = task_program() else {
        return eprintln!("skipped: cc can't link a static program for x86-64 here");
    };
    let context = SpawnContext::new(&path).unwrap().add_rank_variables().share_memory().unwrap();
    let mut layout = ExecArrays::new(&context.setup.environment, true);
    let no_cgroup =
        Placement { cgroup: Some(Arc::new(File::open("/").unwrap().into())), ..Placement::default() };
    let no_cpu = Placement::on_cpus(Pu::MAX.into());
    let group = [
        instance(0, 10, Placement::default()),
        instance(1, 11, no_cgroup),
        instance(2, 12, Placement::default()),
        instance(3, 13, no_cpu),
        instance(4, 14, Placement::default()),
        instance(6, 16, Placement::default()),
        instance(5, 15, Placement::default()),
    ];
    let error = |step, errno| Err(SpawnError { step, errno });
    let expected = [
        Ok(ExitStatus::Code(10)),
        // At clone3(2), in the task itself, and before the program is mapped.
        error(SpawnStep::Cgroup, Errno::EBADF),
        Ok(ExitStatus::Code(12)),
        error(SpawnStep::Mask, Errno::EINVAL),
        Ok(ExitStatus::Code(14)),
        error(SpawnStep::Clone, Errno::EINVAL),
        Ok(ExitStatus::Code(15)),
    ];
    let mut space = AddressSpace::create(&context, 6, 6).unwrap();
    // The second round needs the slots of all tasks of the first one, also of those that failed.
    for _ in 0..2 {
        let children = start_together(&mut space, &mut layout, &group);
        let ends: Vec<_> =
            children.into_iter().map(|child| child.map(|child| child.wait().unwrap())).collect();
        assert_eq!(ends, expected);
    }
}

#[test]
fn no_task_is_left_of_a_round_whose_host_was_killed_and_each_error_says_so() {
    let Some((path, _directory)) = task_program() else {
        return eprintln!("skipped: cc can't link a static program for x86-64 here");
    };
    let context = SpawnContext::new(&path).unwrap().add_rank_variables().share_memory().unwrap();
    let mut layout = ExecArrays::new(&context.setup.environment, true);
    let is_amid = (0..MOST_ROUNDS).any(|_| {
        let mut space = AddressSpace::create(&context, 6, 6).unwrap();
        let host = space.host_pid().0.to_string();
        let (reader, writer) = std::io::pipe().unwrap();
        let output = Arc::new(OwnedFd::from(writer));
        let instances = (0..6).map(|rank| {
            // The host makes the first task first, and answers when the last one has begun.
            let arguments = if rank == 0 { ["task", "kill", host.as_str()] } else { ["task", "wait", ""] };
            let stdio = Stdio { output: Some(Arc::clone(&output)), ..Stdio::default() };
            Instance { stdio, ..task(rank, &arguments) }
        });
        let group: Vec<Instance> = instances.collect();
        let results = start_together(&mut space, &mut layout, &group);
        drop((group, output));
        let is_answered = results.iter().all(Result::is_ok);
        for result in results {
            match result {
                Ok(child) => {
                    child.send_signal(libc::SIGKILL).unwrap();
                    child.wait().unwrap();
                }
                Err(SpawnError { step, errno }) => {
                    assert_eq!((step, errno), (SpawnStep::Clone, Errno::EOWNERDEAD));
                }
            }
        }
        // Each task that runs holds the pipe. What the tasks have written is no event here.
        let mut end = [PollFd::new(reader.as_fd(), PollFlags::empty())];
        assert_eq!(poll(&mut end, 60_000_u16).unwrap(), 1, "a task holds the pipe after 60 s");
        !is_answered
    });
    assert!(is_amid, "the host has answered in each of {MOST_ROUNDS} rounds before it was killed");
}

#[test]
fn a_host_that_cannot_receive_a_request_ends_beside_living_tasks_and_the_error_says_so() {
    let Some((path, _directory)) = task_program() else {
        return eprintln!("skipped: cc can't link a static program for x86-64 here");
    };
    // If the test fails, its thread ends, and the kernel kills the tasks and the host.
    let context = SpawnContext::new(&path).unwrap().add_rank_variables().kill_when_launcher_ends();
    let context = context.share_memory().unwrap();
    let mut layout = ExecArrays::new(&context.setup.environment, true);
    let (_reader, writer) = std::io::pipe().unwrap();
    let output = Arc::new(OwnedFd::from(writer));
    let waiting = |rank| Instance {
        stdio: Stdio { output: Some(Arc::clone(&output)), ..Stdio::default() },
        ..task(rank, &["task", "wait"])
    };
    let mut space = AddressSpace::create(&context, 6, 6).unwrap();
    let first = space.start(&waiting(0)).unwrap();
    let host = stop_host(&space);
    space.send_request(&waiting(1), &mut layout).unwrap();
    // Too short for a request.
    rustix::io::write(&space.socket, b"x").unwrap();
    space.send_request(&waiting(2), &mut layout).unwrap();
    kill(host, Signal::SIGCONT).unwrap();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = sender.send([space.wait_for_oldest_request(), space.wait_for_oldest_request()]);
    });
    let received = receiver.recv_timeout(Duration::from_secs(60));
    let [second, third] = received.expect("after 60 s, a request has neither a task nor an error");
    let ended = SpawnError { step: SpawnStep::Clone, errno: Errno::ENOTRECOVERABLE };
    assert_eq!(third.unwrap_err(), ended);
    // The request of the second task was received.
    for task in [first, second.unwrap()] {
        assert_eq!(task.try_wait(), Ok(None));
        task.kill_and_wait();
    }
}

#[test]
fn a_host_ends_with_its_last_task_although_another_process_has_a_copy_of_the_connection() {
    let Some((path, _directory)) = task_program() else {
        return eprintln!("skipped: cc can't link a static program for x86-64 here");
    };
    let context = SpawnContext::new(&path).unwrap().add_rank_variables().share_memory().unwrap();
    let mut space = AddressSpace::create(&context, 6, 6).unwrap();
    // Stands for the copy in a process that another thread has forked and that executes no program.
    let copy = space.socket.try_clone().unwrap();
    let child = space.start(&instance(0, 7, Placement::default())).unwrap();
    assert_eq!(child.wait(), Ok(ExitStatus::Code(7)));
    let host = space.host_pid();
    drop(space);
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = sender.send(wait_without_reaping(host));
    });
    let ended = receiver.recv_timeout(Duration::from_secs(60)).expect("the host still lives after 60 s");
    // Another test that makes an address space may have waited for this host.
    assert!([Ok(ExitStatus::Code(0)), Err(Errno::ECHILD)].contains(&ended), "{ended:?}");
    drop(copy);
}
