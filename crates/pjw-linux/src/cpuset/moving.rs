//! Moves a process from one cgroup to another. The start time guards against a reused process id.

use nix::errno::Errno;
use pjw_core::cpuset_group::CpusetOutcome;
use pjw_core::ids::{ProcessId, Tid, is_cgroup_within};

use super::bounds::refusal;
use super::context::{CpusetContext, Result, refused};
use crate::{cgroup::CgroupDir, proc::procfs::ProcDir};

/// Moves a process with all its threads between two cgroup paths.
pub(super) fn move_between(
    context: &mut CpusetContext<'_>,
    process: ProcessId,
    from: &str,
    to: &str,
) -> Result<CpusetOutcome> {
    const DONE: CpusetOutcome = CpusetOutcome::Done { effective: None };
    let (from, to) = (context.cgroup(from)?, context.cgroup(to)?);
    let here = cgroup_of(context.proc, process).ok_or(CpusetOutcome::Gone)?;
    if here == to.path {
        return Ok(DONE);
    }
    // Elsewhere, another program moved the process. A cgroup below `from`, made by the job itself, counts as
    // `from`.
    if !is_cgroup_within(&here, &from.path) {
        return Err(CpusetOutcome::Gone);
    }
    if !to.exists() {
        return Err(refused(format!(
            "process {process} can't move to the cgroup {}: the cgroup no longer exists",
            to.path
        )));
    }
    match to.write_file("cgroup.procs", &process.pid.to_string()) {
        Ok(()) => Ok(DONE),
        Err(Errno::ESRCH) => Err(CpusetOutcome::Gone),
        Err(errno) => Err(explain_refusal(context.proc, process, &to, errno)),
    }
}

fn explain_refusal(proc: &mut ProcDir, process: ProcessId, to: &CgroupDir, errno: Errno) -> CpusetOutcome {
    if cgroup_of(proc, process).is_none() {
        return CpusetOutcome::Gone;
    }
    let why = match errno {
        Errno::ENOENT | Errno::ENODEV | Errno::ENOTDIR => "the cgroup no longer exists",
        Errno::EBUSY if to.is_unified() => "the cgroup has child cgroups now and can't hold processes",
        Errno::EOPNOTSUPP => "the cgroup is threaded",
        Errno::ENOSPC => "the cgroup has no CPUs or no memory nodes",
        Errno::EINVAL => "the kernel does not let this process move",
        _ => return refusal(to, &format!("take process {process}"))(errno),
    };
    refused(format!("process {process} can't move to the cgroup {}: {why} ({errno:?})", to.path))
}

/// The cgroup of a process in the cpuset hierarchy. `None` if the process has ended or the id belongs to
/// another process.
pub(super) fn cgroup_of(proc: &mut ProcDir, process: ProcessId) -> Option<String> {
    let is_alive = is_alive(proc, process);
    proc.cpuset_path(process.pid).filter(|_| is_alive)
}

/// The cgroup of a process in the v1 hierarchy with this controller. `None` if there is no such hierarchy, the
/// process has ended, or the id belongs to another process.
pub(super) fn cgroup_in(proc: &mut ProcDir, process: ProcessId, controller: &str) -> Option<String> {
    let is_alive = is_alive(proc, process);
    let cgroups = proc.cgroups(process.pid).ok().filter(|_| is_alive)?;
    let has = |controllers: &str| controllers.split(',').any(|listed| listed == controller);
    cgroups.into_iter().find(|(controllers, _)| has(controllers)).map(|(_, path)| path)
}

fn is_alive(proc: &mut ProcDir, process: ProcessId) -> bool {
    let Ok(stat) = proc.thread_stat(process.pid, Tid(process.pid.0)) else { return false };
    // Other threads may remain after the first thread has ended.
    stat.start == process.start
        && (!matches!(stat.state, 'Z' | 'X') || proc.tids(process.pid).is_ok_and(|tids| tids.len() > 1))
}
