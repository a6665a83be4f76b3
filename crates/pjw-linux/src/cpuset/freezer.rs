//! Freezing the processes of a job: `cgroup.freeze` in v2, a twin in the hierarchy of the freezer in v1.
//!
//! The kernel freezes a process when it runs next, so a frozen job may still run for a moment. Nothing here waits for
//! that. In v1 the twin exists only while the job is frozen. A process that another program has put into a cgroup of
//! the freezer stays there: batch systems find the processes of their jobs by this cgroup.

use std::path::Path;

use nix::errno::Errno;
use pjw_core::cpuset_group::CpusetOutcome;
use pjw_core::ids::{Pid, ProcessId, is_cgroup_within};
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_core::process_cgroups::ProcessCgroups;

use super::context::{CpusetContext, Result, refused_outcome};
use super::writing::errno_to_outcome;
use super::{moving, twins};
use crate::cgroup::{CgroupDir, CgroupMounts, CpusetMount};
use crate::proc::procfs::ProcDir;
use crate::proc::signal::is_killed;

/// The file of a v2 cgroup that freezes its processes.
const FREEZE: &str = "cgroup.freeze";
/// The file of a v1 cgroup with the freezer controller that freezes its processes.
const FREEZER_STATE: &str = "freezer.state";
/// The name of the v1 controller that freezes cgroups.
const FREEZER: &str = "freezer";

/// Freezes the processes in the cgroup `group` of a job if `frozen` is true, and thaws them if it is false. pjw must
/// have created the cgroup.
pub(super) fn set_frozen(context: &mut CpusetContext<'_>, group: &CgroupDir, frozen: bool) -> Result<()> {
    if frozen { freeze(context, group) } else { thaw(context.hierarchy, group) }
}

/// Freezes the processes in the cgroup `group` of a job. Does not wait until all processes have stopped. In cgroup v1,
/// creates a twin, which is a cgroup at the same path in the hierarchy with the freezer controller, and moves the
/// processes into the twin. If that fails, thaws the moved processes and removes the twin.
///
/// # Errors
/// If the kernel can't freeze cgroups (v2 before Linux 5.2, v1 without this controller) or refuses a step, or if
/// another program has put a process into a cgroup of the freezer.
fn freeze(context: &mut CpusetContext<'_>, group: &CgroupDir) -> Result<()> {
    if group.is_unified() {
        return match group.read_file(FREEZE).as_deref() {
            Ok("1") => Ok(()),
            Ok(_) => group.write_file(FREEZE, "1").map_err(errno_to_outcome(group, "be frozen")),
            Err(Errno::ENOENT) if group.exists() => Err(refused_outcome(format!(
                "the cgroup {} can't be frozen: that needs Linux 5.2",
                group.path
            ))),
            Err(errno) => Err(errno_to_outcome(group, "be frozen")(*errno)),
        };
    }
    let twin = twin_of(context.hierarchy, group)?;
    twins::create_v1_cgroup(&twin, |_| Ok(()))?;
    let frozen = write_state(&twin, "FROZEN").and_then(|()| move_processes_in(context, group, &twin));
    if frozen.is_err() {
        let _ = thaw(context.hierarchy, group);
    }
    frozen
}

/// Returns the twin of `group`, the v1 cgroup of a job: the cgroup at the same path in the hierarchy with the freezer
/// controller. The twin need not exist.
///
/// # Errors
/// If pjwd freezes no jobs at this path, or if no v1 hierarchy with the freezer controller is mounted.
fn twin_of(hierarchy: &CpusetMount, group: &CgroupDir) -> Result<CgroupDir> {
    if twins::besteffort_job_path(&group.path).as_ref() != Some(&group.path) {
        return Err(refused_outcome(format!("the cgroup {} is not in a place for frozen jobs", group.path)));
    }
    hierarchy.v1_freezer_cgroup(&group.path).ok_or_else(|| {
        refused_outcome(format!(
            "the cgroup {} can't be frozen: no v1 hierarchy with the freezer is mounted",
            group.path
        ))
    })
}

fn write_state(twin: &CgroupDir, state: &str) -> Result<()> {
    if twin.read_file(FREEZER_STATE).is_ok_and(|now| now == state) {
        return Ok(());
    }
    twin.write_file(FREEZER_STATE, state).map_err(errno_to_outcome(twin, &format!("become {state}")))
}

/// Moves the processes of the cgroup `group` into `twin`, a frozen cgroup in the v1 hierarchy with the freezer
/// controller. Repeats this until no process is found outside `twin`, because processes fork meanwhile. A frozen
/// process does not fork.
///
/// # Errors
/// If another program has put a process into a cgroup of the freezer, if the kernel refuses a move, or if processes are
/// still found outside after [`twins::MAX_PASSES`] passes.
fn move_processes_in(context: &mut CpusetContext<'_>, group: &CgroupDir, twin: &CgroupDir) -> Result<()> {
    for _ in 0..twins::MAX_PASSES {
        let mut is_complete = true;
        for pid in group.processes() {
            match freezer_cgroup(context.proc, pid) {
                None => {}
                Some(here) if is_cgroup_within(&here, &twin.path) => {}
                Some(here) if is_unused_by_others(&here) => {
                    is_complete = false;
                    move_in(twin, pid)?;
                }
                Some(here) => {
                    return Err(refused_outcome(format!(
                        "process {pid} can't be frozen: another program has put it into {here} of the freezer"
                    )));
                }
            }
        }
        if is_complete {
            return Ok(());
        }
    }
    Err(refused_outcome(format!("the cgroup {} can't be frozen: its processes fork too fast", group.path)))
}

/// Whether the cgroup at `path` in the hierarchy of the freezer shows that no other program freezes its processes: the
/// path is the root, or that of a frozen job of pjw.
fn is_unused_by_others(path: &str) -> bool {
    path == "/" || twins::besteffort_job_path(path).is_some()
}

fn move_in(twin: &CgroupDir, pid: Pid) -> Result<()> {
    match twin.write_file("cgroup.procs", &pid.to_string()) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(errno) => Err(errno_to_outcome(twin, &format!("take process {pid}"))(errno)),
    }
}

/// Moves the process `pid` to the root cgroup of the freezer.
fn move_to_root(hierarchy: &CpusetMount, pid: Pid) -> Result<()> {
    hierarchy.v1_freezer_cgroup("/").map_or(Ok(()), |root| move_in(&root, pid))
}

fn freezer_cgroup(proc: &mut ProcDir, pid: Pid) -> Option<String> {
    proc.cgroups(pid).ok()?.v1_path(FREEZER).map(str::to_owned)
}

/// Thaws the processes in `group`, a cgroup that pjw created for a job. Does nothing if the job is not frozen. In
/// cgroup v1, the processes of a frozen job are also in a twin: a cgroup at the same path in the hierarchy with the
/// freezer controller. This function moves them from the twin to the root of that hierarchy, and removes the twin.
///
/// # Errors
/// If the kernel refuses a step.
pub(super) fn thaw(hierarchy: &CpusetMount, group: &CgroupDir) -> Result<()> {
    if group.is_unified() {
        return match group.read_file(FREEZE).as_deref() {
            Ok("0") | Err(Errno::ENOENT | Errno::ENODEV) => Ok(()),
            Ok(_) => group.write_file(FREEZE, "0").map_err(errno_to_outcome(group, "be thawed")),
            Err(errno) => Err(errno_to_outcome(group, "be thawed")(*errno)),
        };
    }
    let Some(twin) = twins::existing_twin(hierarchy.v1_freezer_cgroup(&group.path)) else { return Ok(()) };
    write_state(&twin, "THAWED")?;
    twins::remove_v1_cgroup(&twin, |pid| move_to_root(hierarchy, pid))
}

/// Thaws the processes of all jobs of the class besteffort, so that they run again. Such a job has no cores of its own.
/// While no core is free for the job, pjwd can freeze its processes, that is, stop them by the cgroup freezer. pjwd
/// calls this function when it ends, because no other program would thaw these jobs. `own_cgroups` has the names of the
/// cgroups that pjwd creates for jobs.
///
/// Returns one error message for each cgroup that can't be thawed. If the mounted cgroup hierarchies can't be read,
/// returns one message that says so. Empty if there was no error.
#[must_use]
pub fn thaw_jobs(own_cgroups: &OwnCgroupNames) -> Vec<String> {
    let mounts = match CgroupMounts::try_read() {
        Ok(mounts) => mounts,
        Err(error) => return vec![format!("the mounted cgroup hierarchies can't be read: {error}")],
    };
    let Some(hierarchy) = CpusetMount::from_mounts(&mounts) else { return Vec::new() };
    let parent_paths = own_cgroups.besteffort_parent_paths();
    let parents = parent_paths.iter().filter_map(|path| hierarchy.cgroup(path));
    let groups = parents.flat_map(|parent| parent.children());
    let refusals = groups.filter_map(|group| thaw(&hierarchy, &group).err());
    refusals
        .filter_map(|outcome| match outcome {
            CpusetOutcome::Refused { reason } => Some(reason),
            _ => None,
        })
        .collect()
}

/// Thaws each process in `processes` that was killed but has not ended. In cgroup v1, a killed process that is frozen
/// ends only after it is thawed. A batch system that kills a frozen job would otherwise wait forever for the processes
/// of the job. To thaw a process, this function moves the process to the root cgroup of the freezer. In cgroup v2, the
/// kernel ends a killed process even if it is frozen, so this function has no effect there. The processes must belong
/// to jobs that pjw has frozen. Returns the processes that were thawed.
pub fn thaw_killed_processes(processes: impl Iterator<Item = ProcessId>) -> Vec<ProcessId> {
    let killed: Vec<ProcessId> = processes.filter(|process| is_killed(process.pid)).collect();
    if killed.is_empty() {
        return killed;
    }
    let hierarchy = CpusetMount::from_mounts(&CgroupMounts::read());
    let Some((hierarchy, mut proc)) = hierarchy.zip(ProcDir::open(Path::new("/proc")).ok()) else {
        return Vec::new();
    };
    let thaw_process = |process: &ProcessId| leave_twin(&mut proc, &hierarchy, *process) == Ok(true);
    killed.into_iter().filter(thaw_process).collect()
}

/// Freezes or thaws `process` after its move to another job, so that the process is frozen exactly if that job is
/// frozen. Must be called after `process` was moved into the cgroup at `to` in the v1 hierarchy with the cpuset
/// controller. In cgroup v1, a frozen job has a twin: a cgroup at the same path in the hierarchy with the freezer
/// controller.
///
/// - If there is a twin at the path `to`, moves the process into the twin.
/// - If not, moves the process out of the twin of its earlier job ([`leave_freezer_cgroup`]).
/// - If another program has put the process into a cgroup of the freezer, the process stays there.
///
/// `cgroups` are the cgroups of the process, as read before the move.
pub(super) fn update_freezer_cgroup(
    context: &mut CpusetContext<'_>,
    process: ProcessId,
    cgroups: &ProcessCgroups,
    to: &str,
) -> Result<()> {
    let Some(twin) = twins::existing_twin(context.hierarchy.v1_freezer_cgroup(to)) else {
        return leave_freezer_cgroup(context, process, cgroups);
    };
    match moving::process_cgroup_path(context.proc, process, FREEZER) {
        Some(here) if is_unused_by_others(&here) && !is_cgroup_within(&here, &twin.path) => {
            move_in(&twin, process.pid)
        }
        _ => Ok(()),
    }
}

/// Thaws `process` if it is in the frozen cgroup of a job in the v1 hierarchy with the freezer controller: moves the
/// process to the root cgroup of this hierarchy. Has no effect if another program has put the process into a cgroup
/// of this hierarchy. `cgroups` are the cgroups of the process, as read a moment ago. They still hold, because only
/// pjwd puts a process into the frozen cgroup of a job, and pjwd makes one change at a time.
pub(super) fn leave_freezer_cgroup(
    context: &mut CpusetContext<'_>,
    process: ProcessId,
    cgroups: &ProcessCgroups,
) -> Result<()> {
    if cgroups.v1_path(FREEZER).and_then(twins::besteffort_job_path).is_none() {
        return Ok(());
    }
    leave_twin(context.proc, context.hierarchy, process).map(|_| ())
}

/// Moves `process` to the root cgroup of the freezer if it is in the frozen cgroup of a job. Returns whether it was
/// there.
fn leave_twin(proc: &mut ProcDir, hierarchy: &CpusetMount, process: ProcessId) -> Result<bool> {
    let here = moving::process_cgroup_path(proc, process, FREEZER);
    if here.is_none_or(|here| twins::besteffort_job_path(&here).is_none()) {
        return Ok(false);
    }
    move_to_root(hierarchy, process.pid).map(|()| true)
}
