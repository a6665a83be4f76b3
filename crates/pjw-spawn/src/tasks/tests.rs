//! A round with tasks that start and tasks that fail, each at another moment.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use pjw_core::cpuset::Pu;
use tempfile::TempDir;

use super::AddressSpace;
use crate::layout::ExecArrays;
use crate::{Arguments, ExitStatus, Instance, Placement, SpawnContext, SpawnError, SpawnStep, Stdio};

/// Compiles the program of the tasks. `None` if tasks can't run here.
fn task_program() -> Option<(PathBuf, TempDir)> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("task");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/task.c");
    let flags = ["-O1", "-static-pie", "-pthread"];
    let compiled = Command::new("cc").args(flags).arg("-o").arg(&path).arg(source).status().unwrap();
    (cfg!(target_arch = "x86_64") && compiled.success()).then_some((path, directory))
}

/// A task that ends with this exit code.
fn instance(rank: u32, code: i32, placement: Placement) -> Instance {
    Instance {
        rank,
        size: 6,
        arguments: Arc::new(Arguments::literal(&["task", "exit", code.to_string().as_str()]).unwrap()),
        variables: Vec::new(),
        placement: Arc::new(placement),
        stdio: Stdio::default(),
    }
}

/// Starts tasks in one round: the host, which would take the first requests alone, is stopped until all have come.
fn start_together(
    space: &mut AddressSpace,
    layout: &mut ExecArrays,
    instances: &[Instance],
) -> Vec<Result<ExitStatus, SpawnError>> {
    let host = Pid::from_raw(space.host_pid().0.cast_signed());
    kill(host, Signal::SIGSTOP).unwrap();
    let stopped = waitpid(host, Some(WaitPidFlag::WUNTRACED)).unwrap();
    assert_eq!(stopped, WaitStatus::Stopped(host, Signal::SIGSTOP));
    for instance in instances {
        space.send_request(instance, layout).unwrap();
    }
    kill(host, Signal::SIGCONT).unwrap();
    let children: Vec<_> = instances.iter().map(|_| space.wait_for_oldest_request()).collect();
    children.into_iter().map(|child| child.map(|child| child.wait().unwrap())).collect()
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
        assert_eq!(start_together(&mut space, &mut layout, &group), expected);
    }
}
