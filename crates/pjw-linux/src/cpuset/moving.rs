//! Moves a process from one cgroup to another. The start time guards against a reused process id.

use nix::errno::Errno;
use pjw_core::cpuset_group::CpusetOutcome;
use pjw_core::ids::{ProcessId, Tid, is_cgroup_within};
use pjw_core::process_cgroups::ProcessCgroups;

use super::context::{CpusetContext, Result, refused_outcome};
use super::writing::errno_to_outcome;
use crate::{cgroup::CgroupDir, proc::procfs::ProcDir};

/// Reads the cgroups of `process`. `None` if the process has ended, even if another process now has its pid.
pub(super) fn process_cgroups(proc: &mut ProcDir, process: ProcessId) -> Option<ProcessCgroups> {
    if !is_alive(proc, process) {
        return None;
    }
    proc.cgroups(process.pid).ok()
}

/// Moves `process`, which is in the cgroups `cgroups`, with all its threads to the cgroup at the path `to`. The process
/// must be in the cgroup at the path `from` or in a cgroup below it. If it is already in the cgroup `to`, this function
/// has no effect.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the process has ended or is in another cgroup. [`CpusetOutcome::Refused`] if the cgroup
/// `to` does not exist, or the kernel refuses the move.
pub(super) fn move_between(
    context: &mut CpusetContext<'_>,
    process: ProcessId,
    cgroups: &ProcessCgroups,
    from: &str,
    to: &str,
) -> Result<()> {
    let (from, to) = (context.cgroup(from)?, context.cgroup(to)?);
    let here = cgroups.cpuset_path().ok_or(CpusetOutcome::Gone)?;
    if here == to.path {
        return Ok(());
    }
    // A process that is not in `from` was moved by another program. A cgroup below `from`, made by the job itself,
    // counts as `from`.
    if !is_cgroup_within(here, &from.path) {
        return Err(CpusetOutcome::Gone);
    }
    match to.write_file("cgroup.procs", &process.pid.to_string()) {
        Ok(()) => Ok(()),
        Err(Errno::ESRCH) => Err(CpusetOutcome::Gone),
        Err(errno) => Err(explain_refusal(context.proc, process, &to, errno)),
    }
}

/// Returns the outcome of a move of `process` to the cgroup `to` that the kernel has refused with the error `errno`:
/// [`CpusetOutcome::Gone`] if the process has ended, and otherwise [`CpusetOutcome::Refused`] with the reason as text
/// for users.
fn explain_refusal(proc: &mut ProcDir, process: ProcessId, to: &CgroupDir, errno: Errno) -> CpusetOutcome {
    if process_cpuset_path(proc, process).is_none() {
        return CpusetOutcome::Gone;
    }
    let why = match errno {
        Errno::ENOENT | Errno::ENODEV | Errno::ENOTDIR => "the cgroup no longer exists",
        Errno::EBUSY if to.is_unified() => "the cgroup has child cgroups now and can't hold processes",
        Errno::EOPNOTSUPP => "the cgroup is threaded",
        Errno::ENOSPC => "the cgroup has no CPUs or no memory nodes",
        Errno::EINVAL => "the kernel does not let this process move",
        _ => return errno_to_outcome(to, &format!("take process {process}"))(errno),
    };
    refused_outcome(format!("process {process} can't move to the cgroup {}: {why} ({errno:?})", to.path))
}

/// Returns the path of the cgroup of `process` in the hierarchy with the cpuset controller. `None` if the process has
/// ended, even if another process now has its pid.
pub(super) fn process_cpuset_path(proc: &mut ProcDir, process: ProcessId) -> Option<String> {
    process_cgroups(proc, process)?.cpuset_path().map(str::to_owned)
}

/// Returns the path of the cgroup of `process` in the v1 hierarchy with the controller `controller`. `None` if there
/// is no such hierarchy, or if the process has ended, even if another process now has its pid.
pub(super) fn process_cgroup_path(
    proc: &mut ProcDir,
    process: ProcessId,
    controller: &str,
) -> Option<String> {
    process_cgroups(proc, process)?.v1_path(controller).map(str::to_owned)
}

fn is_alive(proc: &mut ProcDir, process: ProcessId) -> bool {
    let Ok(stat) = proc.thread_stat(process.pid, Tid(process.pid.0)) else { return false };
    // Other threads may remain after the first thread has ended.
    stat.start == process.start
        && (!matches!(stat.state, 'Z' | 'X') || proc.tids(process.pid).is_ok_and(|tids| tids.len() > 1))
}
