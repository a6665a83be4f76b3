//! Idle priority (`cpu.idle`) for the jobs of the class besteffort.
//!
//! Idle priority counts only among cgroups with the same parent. So the cgroup with this priority lies directly below
//! the root, and contains only cgroups of such jobs: a directory of pjwd, or a slice of systemd. In v1, a twin of the
//! job's cpuset contains the same processes: a cgroup at the same path in the hierarchy of the cpu controller. Extended
//! attributes of the twin say from which cgroups its processes came.

use std::time::Instant;

use nix::errno::Errno;
use pjw_core::cpuset_group::CpusetOutcome;
use pjw_core::ids::{Pid, ProcessId, StartTime, Tid, is_cgroup_within};
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_core::process_cgroups::ProcessCgroups;

use super::context::{CpusetContext, Result, SYSTEMD_POLL_INTERVAL, SYSTEMD_TIMEOUT, refused_outcome};
use super::own::{self, CPU};
use super::writing::errno_to_outcome;
use super::{marks, moving, twins};
use crate::cgroup::{CgroupDir, CgroupMounts, CpusetMount};
use crate::proc::procfs::ProcDir;
use crate::systemd::{IDLE_WEIGHT, MIN_WEIGHT, SystemdError};

/// The name of the file in the directory of a cgroup that gives the cgroup idle priority: the processes then run only
/// when no process of its sibling cgroups runs. The file exists on Linux 5.15 and later.
const CPU_IDLE_FILE: &str = "cpu.idle";
/// The extended attribute of a twin for the processes that came from another cgroup than the first process: a line
/// "PID START PATH" for each of them.
const ORIGINS: &str = "pjw.origins";

/// Gives the cgroup `group` idle priority among its sibling cgroups: writes 1 to its file `cpu.idle`.
///
/// # Errors
/// If the file does not exist, the kernel refuses the write, or the file does not contain 1 afterwards.
fn set_idle(group: &CgroupDir) -> Result<()> {
    let now = group.read_file(CPU_IDLE_FILE).map_err(|errno| idle_error_to_outcome(group, errno))?;
    if now == "1" {
        return Ok(());
    }
    group.write_file(CPU_IDLE_FILE, "1").map_err(errno_to_outcome(group, "get idle priority"))?;
    match group.read_file(CPU_IDLE_FILE) {
        Ok(now) if now == "1" => Ok(()),
        Ok(now) => Err(refused_outcome(format!(
            "the cgroup {} can't get idle priority: {CPU_IDLE_FILE} stays {now}",
            group.path
        ))),
        Err(errno) => Err(idle_error_to_outcome(group, errno)),
    }
}

/// Converts `errno`, the error of the file `cpu.idle` of the cgroup `group`, to the outcome of the whole change. If
/// the cgroup exists without this file, the outcome says what is missing.
fn idle_error_to_outcome(group: &CgroupDir, errno: Errno) -> CpusetOutcome {
    if errno == Errno::ENOENT && group.exists() {
        refused_outcome(format!(
            "the cgroup {} can't get idle priority: it has no {CPU_IDLE_FILE}, which needs Linux 5.15 and the cpu controller",
            group.path
        ))
    } else {
        errno_to_outcome(group, "be read")(errno)
    }
}

/// Gives idle priority to a job of the class `besteffort`: its processes run only when no process of a sibling cgroup
/// runs. `group` is the cgroup of the job, and must exist.
///
/// - In cgroup v2, the parent of `group` gets idle priority.
/// - In cgroup v1, this function creates a twin: a cgroup at the same path in the hierarchy with the cpu controller.
///   The parent of the twin gets idle priority.
///
/// # Errors
/// If pjwd gives no idle priority at this path, if there is no hierarchy with the cpu controller, or if the kernel
/// refuses a step.
pub(super) fn ensure_idle_priority(hierarchy: &CpusetMount, group: &CgroupDir) -> Result<()> {
    if twins::besteffort_job_path(&group.path).as_ref() != Some(&group.path) {
        return Err(refused_outcome(format!(
            "the cgroup {} is not in a place for idle priority",
            group.path
        )));
    }
    if hierarchy.is_unified {
        let parent = group.parent();
        own::enable_controller(&hierarchy.root(), CPU, Some(&parent))?;
        return set_idle(&parent);
    }
    let twin = hierarchy.v1_cpu_cgroup(&group.path).ok_or_else(|| {
        refused_outcome(
            "no v1 hierarchy with the cpu controller and without cpusets is mounted, so there is no idle priority: \
             mount one, or boot with cgroup v2"
                .to_owned(),
        )
    })?;
    twins::create_v1_cgroup(&twin, set_idle)
}

/// Returns whether the jobs of the class besteffort (jobs without cores of their own) have lost their idle priority. A
/// process with idle priority runs only while no other process uses the PU (logical CPU). The cgroups of these jobs
/// have a common parent cgroup, whose file `cpu.idle` contains 1. When another program writes 0 to this file, the jobs
/// lose their idle priority. Returns false if the parent cgroup does not exist, or if the file can't be read.
/// `own_cgroups` has the names of the cgroups that pjwd creates for jobs.
#[must_use]
pub fn has_lost_idle_priority(own_cgroups: &OwnCgroupNames) -> bool {
    let Some(hierarchy) = CpusetMount::from_mounts(&CgroupMounts::read()) else { return false };
    let cgroup_at = |path: &String| {
        if hierarchy.is_unified { hierarchy.cgroup(path) } else { hierarchy.v1_cpu_cgroup(path) }
    };
    let paths = own_cgroups.besteffort_parent_paths();
    paths.iter().filter_map(cgroup_at).any(|group| group.read_file(CPU_IDLE_FILE).is_ok_and(|now| now != "1"))
}

/// Starts `slice`, a systemd slice, and gives its cgroup idle priority. The slice contains the scopes (systemd units
/// with a cgroup) of jobs of the class `besteffort`. Has no effect if the cgroup already has idle priority.
///
/// # Errors
/// If systemd can't start the slice, or if the kernel refuses idle priority.
pub(super) fn ensure_slice(context: &mut CpusetContext<'_>, slice: &str) -> Result<()> {
    let group = context.cgroup(&format!("/{slice}"))?;
    if group.read_file(CPU_IDLE_FILE).is_ok_and(|now| now == "1") {
        return Ok(());
    }
    let started = match start_slice(context, slice, IDLE_WEIGHT) {
        // Before version 252 systemd knows no idle weight. It then enables the controller for the least weight.
        Err(SystemdError::Refused { .. }) => start_slice(context, slice, MIN_WEIGHT),
        other => other,
    };
    started
        .map_err(|fault| refused_outcome(format!("the slice {slice} can't get idle priority: {fault}")))?;
    let deadline = Instant::now() + SYSTEMD_TIMEOUT;
    while group.read_file(CPU_IDLE_FILE).is_err() && Instant::now() < deadline {
        std::thread::sleep(SYSTEMD_POLL_INTERVAL);
    }
    // An older systemd leaves the file alone: while it is 1, the kernel takes no weight.
    set_idle(&group)
}

fn start_slice(context: &mut CpusetContext<'_>, slice: &str, weight: u64) -> Result<(), SystemdError> {
    match context.systemd.start_slice(slice, "Best-effort jobs, managed by pjwd", weight) {
        Err(SystemdError::UnitExists) => context.systemd.set_cpu_weight(slice, weight),
        started => started,
    }
}

/// Stops `slice`, the systemd slice that contains the scopes of besteffort jobs, if it contains no scope. An error of
/// systemd is only logged.
pub(super) fn stop_empty_slice(context: &mut CpusetContext<'_>, slice: &str) {
    let Ok(group) = context.cgroup(&format!("/{slice}")) else { return };
    if group.exists() && group.child_count() == 0 && !group.is_populated() {
        // An empty slice that stays does no harm.
        if let Err(fault) = context.systemd.stop_unit(slice) {
            tracing::debug!(%fault, "the empty {slice} could not be stopped");
        }
    }
}

/// Gives `process` idle priority in cgroup v1: moves it into the twin of the cgroup at `to`. The twin is a cgroup at
/// the same path in the hierarchy with the cpu controller. Also records the present cgroup of the process in this
/// hierarchy, so that the process can be moved back later. Returns whether the process was moved: false if there is
/// no twin, or if the process is already in the twin.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the process has ended. [`CpusetOutcome::Refused`] if the kernel refuses the move.
pub(super) fn enter_idle_cgroup(
    context: &mut CpusetContext<'_>,
    process: ProcessId,
    to: &str,
) -> Result<bool> {
    let Some(twin) = twins::existing_twin(context.hierarchy.v1_cpu_cgroup(to)) else { return Ok(false) };
    let here = moving::process_cgroup_path(context.proc, process, CPU).ok_or(CpusetOutcome::Gone)?;
    if is_cgroup_within(&here, &twin.path) {
        return Ok(false);
    }
    // The origin comes first: it must be there if pjwd is killed after the move.
    let origin = match twin_of_job_above(context.hierarchy, &here) {
        Some(other) => Origins::read(&other).origin_of(process),
        None => here,
    };
    Origins::read(&twin).add(context.proc, &twin, process, origin);
    match twin.write_file("cgroup.procs", &process.pid.to_string()) {
        Ok(()) => Ok(true),
        Err(Errno::ESRCH) => Err(CpusetOutcome::Gone),
        Err(Errno::EINVAL) => Err(refused_outcome(format!(
            "process {process} can't get idle priority: it has a real-time policy, or is bound to its cgroup (EINVAL)"
        ))),
        Err(errno) => Err(errno_to_outcome(&twin, &format!("take process {process}"))(errno)),
    }
}

/// Takes the idle priority of its earlier job from `process`, after a move to a cgroup without idle priority. Must be
/// called after `process` was moved into the cgroup at `to` in the hierarchy with the cpuset controller. In cgroup
/// v1, idle priority comes from an idle cgroup: a cgroup at the same path in the hierarchy with the cpu controller.
/// If there is no idle cgroup for `to`, moves `process` out of the idle cgroup in which it may still be.
///
/// `cgroups` are the cgroups of the process, as read before the move. They still hold, because only pjwd puts a
/// process into an idle cgroup, and pjwd makes one change at a time.
pub(super) fn leave_outdated_idle_cgroup(
    context: &mut CpusetContext<'_>,
    process: ProcessId,
    cgroups: &ProcessCgroups,
    to: &str,
) -> Result<()> {
    let was_in_twin = cgroups.v1_path(CPU).and_then(twins::besteffort_job_path).is_some();
    if !was_in_twin || twins::existing_twin(context.hierarchy.v1_cpu_cgroup(to)).is_some() {
        return Ok(());
    }
    leave_idle_cgroup(context, process)
}

/// Ends the idle priority of `process` in cgroup v1: moves the process back to its original cgroup in the hierarchy
/// with the cpu controller. Has no effect if the process is not in a cgroup of a besteffort job in this hierarchy.
pub(super) fn leave_idle_cgroup(context: &mut CpusetContext<'_>, process: ProcessId) -> Result<()> {
    let Some(here) = moving::process_cgroup_path(context.proc, process, CPU) else { return Ok(()) };
    let Some(twin) = twin_of_job_above(context.hierarchy, &here) else { return Ok(()) };
    let origin = Origins::read(&twin).origin_of(process);
    move_to_cgroup_or_above(context.hierarchy, &origin, process.pid)
}

/// Returns the twin of the besteffort job whose cgroup is at `path` or above. The twin need not exist. `None` if there
/// is no such job, or no hierarchy with the cpu controller.
fn twin_of_job_above(hierarchy: &CpusetMount, path: &str) -> Option<CgroupDir> {
    hierarchy.v1_cpu_cgroup(&twins::besteffort_job_path(path)?)
}

/// Removes the twin of the cgroup at `path`: the cgroup at the same path in the v1 hierarchy with the cpu controller.
/// First moves the processes of the twin back to their original cgroups in this hierarchy. Has no effect if there is
/// no twin.
pub(super) fn remove_v1_cpu_cgroup(context: &mut CpusetContext<'_>, path: &str) -> Result<()> {
    let Some(twin) = twins::existing_twin(context.hierarchy.v1_cpu_cgroup(path)) else { return Ok(()) };
    let origins = Origins::read(&twin);
    twins::remove_v1_cgroup(&twin, |pid| {
        let Some(process) = process_of(context.proc, pid) else { return Ok(()) };
        move_to_cgroup_or_above(context.hierarchy, &origins.origin_of(process), pid)
    })
}

/// Moves the process `pid` to the cgroup at `path` in the v1 hierarchy with the cpu controller. If this cgroup does not
/// exist or the kernel refuses the move, moves the process to the nearest cgroup above that accepts it. Succeeds
/// without effect if the process has ended.
fn move_to_cgroup_or_above(hierarchy: &CpusetMount, path: &str, pid: Pid) -> Result<()> {
    let group = hierarchy.v1_cpu_cgroup(path).or_else(|| hierarchy.v1_cpu_cgroup("/"));
    let Some(mut group) = group else { return Ok(()) };
    loop {
        match group.write_file("cgroup.procs", &pid.to_string()) {
            Ok(()) | Err(Errno::ESRCH) => return Ok(()),
            Err(errno) if group.path == "/" => {
                return Err(errno_to_outcome(&group, &format!("take process {pid}"))(errno));
            }
            Err(_) => group = group.parent(),
        }
    }
}

fn process_of(proc: &mut ProcDir, pid: Pid) -> Option<ProcessId> {
    let stat = proc.thread_stat(pid, Tid(pid.0)).ok()?;
    Some(ProcessId { pid, start: stat.start })
}

/// The cgroups from which the processes of a twin came. A twin is a cgroup at the same path as the cpuset of a job, in
/// the v1 hierarchy with the cpu controller.
struct Origins {
    /// The cgroup from which the first process came. Also counts for each process that was forked in the twin.
    usual: Option<String>,
    /// The processes that came from other cgroups, each with this cgroup.
    others: Vec<(ProcessId, String)>,
}

impl Origins {
    /// Reads the origins of the processes in the cgroup `twin` from the extended attributes of the cgroup. Malformed
    /// lines are skipped.
    fn read(twin: &CgroupDir) -> Self {
        let usual = twin.read_attribute(marks::ORIGIN_ATTRIBUTE).filter(|path| path.starts_with('/'));
        let text = twin.read_attribute(ORIGINS).unwrap_or_default();
        let entry = |line: &str| {
            let mut words = line.splitn(3, ' ');
            let pid = Pid(words.next()?.parse().ok()?);
            let start = StartTime(words.next()?.parse().ok()?);
            Some((ProcessId { pid, start }, words.next()?.to_owned()))
        };
        Self { usual, others: text.lines().filter_map(entry).collect() }
    }

    fn origin_of(&self, process: ProcessId) -> String {
        let recorded = self.others.iter().find(|(other, _)| *other == process).map(|(_, path)| path);
        recorded.or(self.usual.as_ref()).cloned().unwrap_or_else(|| "/".to_owned())
    }

    /// Records that `process` comes from the cgroup `origin`. Must be called before the process is moved into the
    /// cgroup `twin`: the cgroup at the same path as the cpuset of a job, in the v1 hierarchy with the cpu controller.
    /// The records are in the extended attributes of `twin`, and `self` must have been read from them.
    ///
    /// - Writes nothing if the attributes already say so.
    /// - If a list of several origins is written, removes the entries of processes that have ended. `proc` shows which
    ///   processes exist.
    /// - If the attribute can't be written, only logs a warning. The list may be too long for an attribute.
    fn add(mut self, proc: &mut ProcDir, twin: &CgroupDir, process: ProcessId, origin: String) {
        if self.usual.is_none() {
            twin.write_attribute(marks::ORIGIN_ATTRIBUTE, &origin);
            return;
        }
        if self.origin_of(process) == origin {
            return;
        }
        self.others.retain(|(other, _)| *other != process && process_of(proc, other.pid) == Some(*other));
        self.others.push((process, origin));
        let line =
            |(process, path): &(ProcessId, String)| format!("{} {} {path}\n", process.pid.0, process.start.0);
        let text: String = self.others.iter().map(line).collect();
        if !twin.write_attribute(ORIGINS, &text) {
            tracing::warn!(cgroup = twin.path, %process, "the cgroup of the process in the cpu hierarchy can't be noted: there are too many");
        }
    }
}
