//! Changes of cpuset cgroups: of the cgroups that pjwd creates, of scopes of systemd, and of cgroups of a
//! scheduler.
//!
//! Each change can be repeated, and its result is read back. A failed change is undone. Only the cpuset's own
//! cgroup and its twins (the cgroups at the same path in the v1 hierarchies of other controllers) are written, and
//! above them the files that enable controllers and give idle priority. No process is ever killed.

mod context;
mod freezer;
mod idle;
mod leftovers;
mod marks;
mod moving;
mod own;
mod scope;
mod twins;
mod unrelated_threads;
mod writing;

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CgroupCreator, CpusetChange, CpusetOutcome, CpusetSpec, JobCpuset};
use pjw_core::ids::{ProcessId, Uid};

use context::{Result, changed_cpuset, refused_outcome};
use writing::KnownCpusets;

pub(crate) use context::CpusetContext;
pub use freezer::{thaw_jobs, thaw_killed_processes};
pub use idle::has_lost_idle_priority;
pub(crate) use leftovers::list_job_cpusets;
pub(crate) use unrelated_threads::UnrelatedThreads;

use crate::cgroup::{CgroupDir, CpusetConfig};

/// Makes the cpuset change `change`, and returns its outcome. On a kernel before Linux 6.2, the change can reset the
/// affinity masks of threads in other cgroups. So `unrelated_threads` reads these masks before the change, and
/// restores them afterwards.
pub(crate) fn apply_change(
    context: &mut CpusetContext<'_>,
    unrelated_threads: &mut UnrelatedThreads,
    change: &CpusetChange,
) -> CpusetOutcome {
    let recorded = unrelated_threads.find_affected_threads(context, change);
    let outcome = try_change(context, change);
    unrelated_threads.record_outcome(change, &outcome);
    if let Some(job_cpuset) = changed_cpuset(change) {
        unrelated_threads.restore_reset_masks(context, recorded, core::slice::from_ref(&job_cpuset.path));
    }
    outcome
}

/// Makes the cpuset change `change`, and returns its outcome. Unlike [`apply_change`], does not restore affinity masks
/// that the change resets in other cgroups.
fn try_change(context: &mut CpusetContext<'_>, change: &CpusetChange) -> CpusetOutcome {
    let changed = match change {
        CpusetChange::Create { job_cpuset, owner, initial_processes } => {
            create_or_update_cpuset(context, job_cpuset, *owner, initial_processes).map(Some)
        }
        CpusetChange::MoveIn { process, from, to } => move_in(context, *process, from, to).map(|()| None),
        CpusetChange::MoveBack { process, from, to } => move_back(context, *process, from, to).map(|()| None),
        CpusetChange::RemoveLimits { job_cpuset } => remove_cpuset_limits(context, job_cpuset).map(Some),
        CpusetChange::Remove { job_cpuset } => remove_cpuset(context, job_cpuset).map(|()| None),
    };
    match changed {
        Ok(effective) => CpusetOutcome::Done { effective },
        Err(outcome) => outcome,
    }
}

/// Moves `process` into the cgroup at `to`, which is the cpuset of a job. Before, the process must be in the cgroup
/// at `from` or in a cgroup below it. In cgroup v1, also moves the process in the hierarchies with the cpu and the
/// freezer controller:
///
/// - If the job has idle priority, the process gets it first, before it can use the PUs (logical CPUs) of the job. If
///   the move to `to` then fails, the process loses the idle priority again.
/// - After the move, the process is frozen exactly if the job is frozen.
/// - If the job does not have idle priority, the process loses that of its earlier job.
///
/// Before the moves, records `from` in an extended attribute of the cgroup at `to`, as the origin of its processes.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the process has ended or is in another cgroup. [`CpusetOutcome::Refused`] if the kernel
/// refuses a step. If a step after the move to `to` fails, the process stays there.
fn move_in(context: &mut CpusetContext<'_>, process: ProcessId, from: &str, to: &str) -> Result<()> {
    // pjwd may be killed just after the move, and the next pjwd reads the attribute.
    marks::record_origin(&context.cgroup(to)?, &context.cgroup(from)?);
    let has_entered = idle::enter_idle_cgroup(context, process, to)?;
    let cgroups = moving::process_cgroups(context.proc, process).ok_or(CpusetOutcome::Gone);
    let moved = cgroups.and_then(|cgroups| {
        moving::move_between(context, process, &cgroups, from, to)?;
        Ok(cgroups)
    });
    if moved.is_err() && has_entered {
        idle::leave_idle_cgroup(context, process)?;
    }
    let cgroups = moved?;
    freezer::update_freezer_cgroup(context, process, &cgroups, to)?;
    idle::leave_outdated_idle_cgroup(context, process, &cgroups, to)
}

/// Moves `process` out of a cpuset: from the cgroup at `from`, or from a cgroup below it, to the cgroup at `to`.
/// Thaws the process before the move. So a process that has left the cpuset is never frozen, even if pjwd crashes
/// between the steps. After the move, takes the idle priority of the job from the process.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the process has ended or is in another cgroup. [`CpusetOutcome::Refused`] if the kernel
/// refuses a step.
fn move_back(context: &mut CpusetContext<'_>, process: ProcessId, from: &str, to: &str) -> Result<()> {
    let cgroups = moving::process_cgroups(context.proc, process).ok_or(CpusetOutcome::Gone)?;
    freezer::leave_freezer_cgroup(context, process, &cgroups)?;
    moving::move_between(context, process, &cgroups, from, to)?;
    idle::leave_outdated_idle_cgroup(context, process, &cgroups, to)
}

/// Creates the cpuset `job_cpuset`, or gives an existing one the settings of `job_cpuset`. Returns the PUs (logical
/// CPUs) that the kernel grants. `owner` is the user of the job.
///
/// - If systemd creates a scope (a unit with a cgroup) for the job, systemd moves `initial_processes` into the scope.
///   In all other cases, `initial_processes` is ignored.
/// - The cgroup of a batch system is never created.
/// - If a step fails, removes a new cgroup, and restores the settings of an existing one. If they could not be read
///   before, they stay as they are.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the cgroup of a batch system does not exist, or if all initial processes of a new scope
/// have ended. [`CpusetOutcome::Refused`] if the kernel or systemd refuses a step.
fn create_or_update_cpuset(
    context: &mut CpusetContext<'_>,
    job_cpuset: &JobCpuset,
    owner: Uid,
    initial_processes: &[ProcessId],
) -> Result<CpuSet> {
    let group = context.job_cgroup(job_cpuset)?;
    match job_cpuset.creator {
        CgroupCreator::Scheduler => write_scheduler_cpuset(context, &group, job_cpuset),
        CgroupCreator::Warden => create_or_update_own_cpuset(context, &group, &job_cpuset.spec, owner),
        CgroupCreator::Systemd => {
            scope::create_or_update_scope(context, job_cpuset, owner, &group, initial_processes)
        }
    }
}

/// Writes the settings of `job_cpuset` to the cgroup `group` of a batch system, as [`create_or_update_cpuset`] does.
fn write_scheduler_cpuset(
    context: &CpusetContext<'_>,
    group: &CgroupDir,
    job_cpuset: &JobCpuset,
) -> Result<CpuSet> {
    let spec = &job_cpuset.spec;
    if spec.idle || spec.frozen {
        return Err(refused_outcome(format!(
            "the cgroup {} belongs to the batch system: it gets no idle priority and is not frozen",
            group.path
        )));
    }
    let before = writing::read_cpuset(group)?;
    // The attribute comes first: without it, a cpuset of a killed daemon would count as the scheduler's.
    let attribute_before = marks::write_scheduler_cpuset(group, job_cpuset, context.own_cgroups);
    let written = writing::write_cpuset(group, spec, true, KnownCpusets::default());
    if written.is_err() {
        writing::restore_cpuset(group, &before);
        // If the cgroup still has the PUs of the job, pjw wrote them, as the attribute says.
        if group.read_cpuset().is_ok_and(|now| now.cpus != spec.cpus) {
            marks::restore_scheduler_cpuset(group, attribute_before.as_deref());
        }
    }
    written
}

/// Creates the cgroup `group` for a job of the user `owner`, or changes an existing one, and writes the settings `spec`
/// to it, as [`create_or_update_cpuset`] does.
fn create_or_update_own_cpuset(
    context: &mut CpusetContext<'_>,
    group: &CgroupDir,
    spec: &CpusetSpec,
    owner: Uid,
) -> Result<CpuSet> {
    let hierarchy = context.hierarchy;
    let before = group.exists().then(|| group.read_cpuset());
    let created = own::retry_while_parent_disappears(group, || {
        let known = own::create_job_cgroup(hierarchy, group)?;
        if spec.idle {
            idle::ensure_idle_priority(hierarchy, group)?;
        }
        writing::write_cpuset(group, spec, false, known)
    })
    .and_then(|effective| freezer::set_frozen(context, group, spec.frozen).map(|()| effective));
    match before {
        _ if created.is_ok() => marks::write_owner(group, owner),
        Some(Ok(before)) => writing::restore_cpuset(group, &before),
        // In v2, the controller was off until now. A cgroup without the controller has no limits.
        Some(Err(Errno::ENOENT)) => writing::restore_cpuset(group, &CpusetConfig::default()),
        // The earlier settings are unknown, so they can't be restored.
        Some(Err(_)) => {}
        None => {
            let _ = undo_twins(context, group);
            let _ = group.remove();
            if let Some(base) = own::find_top_cgroup(hierarchy, group) {
                own::remove_unused_directory(hierarchy, &base);
            }
        }
    }
    created
}

/// Thaws the processes of a job, and removes its twins: the cgroups in the v1 hierarchies of other controllers.
fn undo_twins(context: &mut CpusetContext<'_>, group: &CgroupDir) -> Result<()> {
    freezer::thaw(context.hierarchy, group)?;
    idle::remove_v1_cpu_cgroup(context, &group.path)
}

/// Removes the twins that an earlier run of pjwd left behind, for example because it was killed. A twin is a cgroup
/// in the v1 hierarchy of another controller, at the same path as the cpuset of a job. Only twins whose cpuset no
/// longer exists are removed.
pub(crate) fn remove_orphaned_twins(context: &mut CpusetContext<'_>) {
    for twin in twins::orphaned_twins(context.hierarchy, context.own_cgroups) {
        let removed = context.cgroup(&twin.path).and_then(|group| undo_twins(context, &group));
        if let Err(CpusetOutcome::Refused { reason }) = removed {
            tracing::warn!(reason, "a cgroup that an earlier pjwd left behind could not be removed");
        }
    }
    own::remove_empty_directories(context.hierarchy, context.own_cgroups);
}

/// Removes the limits of the cpuset `job_cpuset`, so that its processes can use all PUs (logical CPUs) of its parent.
/// The cgroup stays. Returns the PUs that the kernel grants afterwards. Also thaws the job. The cgroup of a batch
/// system is not thawed, because pjw freezes no job there.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the cgroup does not exist. [`CpusetOutcome::Refused`] if the kernel or systemd refuses
/// a step.
fn remove_cpuset_limits(context: &mut CpusetContext<'_>, job_cpuset: &JobCpuset) -> Result<CpuSet> {
    let group = context.job_cgroup(job_cpuset)?;
    if !group.exists() {
        return Err(CpusetOutcome::Gone);
    }
    if job_cpuset.creator == CgroupCreator::Scheduler {
        let effective = writing::remove_limits(&group, job_cpuset.spec.mems.is_none())?;
        marks::remove_scheduler_cpuset(&group);
        return Ok(effective);
    }
    freezer::thaw(context.hierarchy, &group)?;
    marks::remove_owner(&group);
    if job_cpuset.creator == CgroupCreator::Systemd {
        return scope::remove_limits(context, &group);
    }
    own::repair_parent(context.hierarchy, &group);
    writing::remove_limits(&group, false)
}

/// Thaws the processes of the cpuset `job_cpuset`, and removes the cgroup of the cpuset. In cgroup v1, also removes the
/// twins of this cgroup: the cgroups at the same path in the hierarchies of other controllers. Also removes cgroups
/// above it that pjwd created and that are empty now. Does nothing for the cgroup of a batch system, which the batch
/// system itself removes.
///
/// # Errors
/// If processes are still in the cgroup, if the cgroup is not one of pjwd, or if the kernel or systemd refuses a step.
fn remove_cpuset(context: &mut CpusetContext<'_>, job_cpuset: &JobCpuset) -> Result<()> {
    let group = context.job_cgroup(job_cpuset)?;
    match job_cpuset.creator {
        CgroupCreator::Scheduler => Ok(()),
        CgroupCreator::Systemd => {
            freezer::thaw(context.hierarchy, &group)?;
            scope::remove(context, &group)
        }
        CgroupCreator::Warden => {
            let Some(base) = own::find_top_cgroup(context.hierarchy, &group) else {
                return Err(refused_outcome(format!(
                    "the cgroup {} does not belong to pjwd and is not removed",
                    group.path
                )));
            };
            undo_twins(context, &group)?;
            let removed = writing::remove_cgroup(&group, &group.path);
            own::remove_unused_directory(context.hierarchy, &base);
            removed
        }
    }
}

#[cfg(test)]
mod tests;
