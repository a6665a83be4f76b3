//! Moving a process from one cgroup to another: that process, not a later one of the same number.

use nix::errno::Errno;
use pjw_core::process::{Pid, ProcessId, Tid};
use pjw_core::snapshot::Marks;
use pjw_core::wall::WallOutcome;

use super::bounds::cant;
use super::refused;
use super::tree::{Group, Tree};
use crate::procfs::Proc;

/// Moves a process with all its threads.
pub(super) fn go(proc: &mut Proc, tree: &Tree, process: ProcessId, from: &Group, to: &Group) -> WallOutcome {
    const DONE: WallOutcome = WallOutcome::Done { effective: None };
    let Some(here) = whereabouts(proc, process) else { return WallOutcome::Gone };
    if here == to.path {
        return DONE;
    }
    // Somebody else moved it; a group that a job made inside its wall is still the wall.
    let inside = here.strip_prefix(&from.path);
    if !inside.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
        return WallOutcome::Gone;
    }
    if !to.exists() {
        return refused(format!("process {process} can't go to the cgroup {}: it is gone", to.path));
    }
    match to.write("cgroup.procs", &process.pid.to_string()) {
        Ok(()) => DONE,
        Err(Errno::ESRCH) => WallOutcome::Gone,
        Err(errno) => refuse(proc, tree, process, to, errno),
    }
}

fn refuse(proc: &mut Proc, tree: &Tree, process: ProcessId, to: &Group, errno: Errno) -> WallOutcome {
    if whereabouts(proc, process).is_none() {
        return WallOutcome::Gone;
    }
    let why = match errno {
        Errno::ENOENT | Errno::ENODEV => "it is gone",
        Errno::EBUSY if tree.unified => "it has cgroups of its own below it now, and may have no process",
        Errno::EOPNOTSUPP => "it is a threaded cgroup",
        Errno::ENOSPC => "it has no CPUs or no memory",
        Errno::EINVAL => "the kernel keeps this process where it is",
        _ => match cant(to, &format!("take process {process}"), errno) {
            WallOutcome::Gone => return WallOutcome::Gone,
            other => return other,
        },
    };
    refused(format!("process {process} can't go to the cgroup {}: {why} ({errno:?})", to.path))
}

/// Where a process is in the hierarchy of the cpusets; `None` if it is gone, or another has its number.
pub(super) fn whereabouts(proc: &mut Proc, process: ProcessId) -> Option<String> {
    let cgroups = proc.cgroups(process.pid).ok()?;
    let stat = proc.thread_stat(process.pid, Tid(process.pid.0)).ok()?;
    let same =
        stat.start == process.start && (!matches!(stat.state, 'Z' | 'X') || outlived(proc, process.pid));
    let path = Marks { cgroups, ..Marks::default() }.cpuset_path()?.to_owned();
    same.then_some(path)
}

/// Whether threads of a process live on after its first one has ended.
fn outlived(proc: &mut Proc, pid: Pid) -> bool {
    proc.tids(pid).is_ok_and(|tids| tids.len() > 1)
}
