//! Moves a process from one cgroup to another. The start time guards against a reused process id.

use nix::errno::Errno;
use pjw_core::cpuset_group::CpusetOutcome;
use pjw_core::ids::ProcessId;
use pjw_core::ids::{Pid, Tid};
use pjw_core::snapshot::BatchAttributes;

use super::bounds::refusal;
use super::context::refused;
use crate::cgroup::{CgroupDir, CpusetMount};
use crate::proc::procfs::Proc;

/// Moves a process with all its threads.
pub(super) fn move_process(
    proc: &mut Proc,
    hierarchy: &CpusetMount,
    process: ProcessId,
    from: &CgroupDir,
    to: &CgroupDir,
) -> CpusetOutcome {
    const DONE: CpusetOutcome = CpusetOutcome::Done { effective: None };
    let Some(here) = cgroup_of(proc, process) else { return CpusetOutcome::Gone };
    if here == to.path {
        return DONE;
    }
    // Elsewhere, another program moved the process. A cgroup below `from`, made by the job itself, counts as
    // `from`.
    let inside = here.strip_prefix(&from.path);
    if !inside.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
        return CpusetOutcome::Gone;
    }
    if !to.exists() {
        return refused(format!(
            "process {process} can't move to the cgroup {}: the cgroup no longer exists",
            to.path
        ));
    }
    match to.write("cgroup.procs", &process.pid.to_string()) {
        Ok(()) => DONE,
        Err(Errno::ESRCH) => CpusetOutcome::Gone,
        Err(errno) => explain_refusal(proc, hierarchy, process, to, errno),
    }
}

fn explain_refusal(
    proc: &mut Proc,
    hierarchy: &CpusetMount,
    process: ProcessId,
    to: &CgroupDir,
    errno: Errno,
) -> CpusetOutcome {
    if cgroup_of(proc, process).is_none() {
        return CpusetOutcome::Gone;
    }
    let why = match errno {
        Errno::ENOENT | Errno::ENODEV => "the cgroup no longer exists",
        Errno::EBUSY if hierarchy.unified => "the cgroup has child cgroups now and can't hold processes",
        Errno::EOPNOTSUPP => "the cgroup is threaded",
        Errno::ENOSPC => "the cgroup has no CPUs or no memory nodes",
        Errno::EINVAL => "the kernel does not let this process move",
        _ => match refusal(to, &format!("take process {process}"), errno) {
            CpusetOutcome::Gone => return CpusetOutcome::Gone,
            other => return other,
        },
    };
    refused(format!("process {process} can't move to the cgroup {}: {why} ({errno:?})", to.path))
}

/// The cgroup of a process in the cpuset hierarchy. `None` if the process has ended or the id belongs to
/// another process.
pub(super) fn cgroup_of(proc: &mut Proc, process: ProcessId) -> Option<String> {
    let cgroups = proc.cgroups(process.pid).ok()?;
    let stat = proc.thread_stat(process.pid, Tid(process.pid.0)).ok()?;
    let same = stat.start == process.start
        && (!matches!(stat.state, 'Z' | 'X') || has_other_threads(proc, process.pid));
    let path = BatchAttributes { cgroups, ..BatchAttributes::default() }.cpuset_path()?.to_owned();
    same.then_some(path)
}

/// Whether other threads remain after the first thread has ended.
fn has_other_threads(proc: &mut Proc, pid: Pid) -> bool {
    proc.tids(pid).is_ok_and(|tids| tids.len() > 1)
}
