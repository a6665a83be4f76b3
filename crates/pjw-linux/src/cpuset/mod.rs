//! Changes of cpuset cgroups: of the warden's own cgroups, of scopes of systemd, and of cgroups of a
//! scheduler.
//!
//! Each change can be repeated, and its result is read back. A failed change is undone. Only the cpuset's own
//! cgroup is written, and above it the files that enable the controller. No process is ever killed.

mod bounds;
mod context;
mod marks;
mod moving;
mod own;
mod scope;
mod unrelated_threads;

use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CgroupCreator, CpusetChange, CpusetOutcome, JobCpuset};
use pjw_core::ids::{ProcessId, Uid};

use context::{Result, changed_cpuset, done, refused};

pub(crate) use context::CpusetContext;
pub(crate) use marks::list_job_cpusets;
pub(crate) use unrelated_threads::{REMOVAL_DELAY, UnrelatedThreads};

use crate::cgroup::CgroupDir;

const MAX_ATTEMPTS: usize = 3;

/// Executes one cpuset change, and restores the masks of threads outside the cpuset that the kernel reset.
pub(crate) fn apply_change(
    context: &mut CpusetContext<'_>,
    unrelated_threads: &mut UnrelatedThreads,
    change: &CpusetChange,
) -> CpusetOutcome {
    let bound = unrelated_threads.record_bound(context, change);
    let outcome = try_change(context, change);
    if let Some(job_cpuset) = changed_cpuset(change) {
        unrelated_threads.restore(context, bound, &job_cpuset.path);
    }
    outcome
}

fn try_change(context: &mut CpusetContext<'_>, change: &CpusetChange) -> CpusetOutcome {
    let result = match change {
        CpusetChange::Create { job_cpuset, owner, initial_processes } => {
            create(context, job_cpuset, *owner, initial_processes).map(done)
        }
        CpusetChange::MoveIn { process, from, to } => {
            note_origin(context, from, to).and_then(|()| moving::move_between(context, *process, from, to))
        }
        CpusetChange::MoveBack { process, from, to } => moving::move_between(context, *process, from, to),
        CpusetChange::Widen { job_cpuset } => widen(context, job_cpuset).map(done),
        CpusetChange::Remove { job_cpuset } => {
            remove(context, job_cpuset).map(|()| CpusetOutcome::Done { effective: None })
        }
    };
    result.unwrap_or_else(|outcome| outcome)
}

/// Comes before the move: the attribute must be there if the warden is killed after the move.
fn note_origin(context: &CpusetContext<'_>, from: &str, to: &str) -> Result<()> {
    let (from, to) = (context.cgroup(from)?, context.cgroup(to)?);
    if to.exists() {
        marks::note_origin(&to, &from);
    }
    Ok(())
}

fn create(
    context: &mut CpusetContext<'_>,
    job_cpuset: &JobCpuset,
    owner: Uid,
    initial_processes: &[ProcessId],
) -> Result<CpuSet> {
    let group = context.job_cgroup(job_cpuset)?;
    let before = group.exists().then(|| group.read_cpuset());
    let created = match job_cpuset.creator {
        CgroupCreator::Scheduler if before.is_none() => return Err(CpusetOutcome::Gone),
        CgroupCreator::Scheduler => bounds::apply(&group, &job_cpuset.spec, true),
        CgroupCreator::Warden => create_own(context, &group, job_cpuset),
        CgroupCreator::Systemd => {
            return scope::create(context, job_cpuset, owner, &group, initial_processes);
        }
    };
    if created.is_ok() && job_cpuset.creator == CgroupCreator::Warden {
        marks::write_owner(&group, owner);
    }
    if created.is_err() {
        match before {
            Some(Ok(files)) => bounds::restore(&group, &files),
            // The cgroup could not be read, so nothing was written.
            Some(Err(_)) => {}
            None => {
                let _ = group.remove();
                if let Some(base) = own::directory_of(context.hierarchy, &group) {
                    own::clean_up(context.hierarchy, &base);
                }
            }
        }
    }
    created
}

/// Another warden that removes its last cpuset, as in a test, also removes the parent directory. Then the
/// creation is repeated.
fn create_own(context: &CpusetContext<'_>, group: &CgroupDir, job_cpuset: &JobCpuset) -> Result<CpuSet> {
    let once =
        || own::create(context.hierarchy, group).and_then(|()| bounds::apply(group, &job_cpuset.spec, false));
    match (0..MAX_ATTEMPTS).map(|_| once()).find(|result| *result != Err(CpusetOutcome::Gone)) {
        Some(result) => result,
        None => Err(refused(format!(
            "the cgroup {} can't be created: its parent is removed again and again",
            group.path
        ))),
    }
}

fn widen(context: &mut CpusetContext<'_>, job_cpuset: &JobCpuset) -> Result<CpuSet> {
    let group = context.job_cgroup(job_cpuset)?;
    if !group.exists() {
        return Err(CpusetOutcome::Gone);
    }
    if job_cpuset.creator != CgroupCreator::Scheduler {
        marks::remove_owner(&group);
    }
    if job_cpuset.creator == CgroupCreator::Systemd {
        return scope::remove_limits(context, &group);
    }
    own::repair_parent(context.hierarchy, &group);
    bounds::remove_limits(
        &group,
        job_cpuset.creator == CgroupCreator::Scheduler && job_cpuset.spec.mems.is_none(),
    )
}

fn remove(context: &mut CpusetContext<'_>, job_cpuset: &JobCpuset) -> Result<()> {
    let group = context.job_cgroup(job_cpuset)?;
    match job_cpuset.creator {
        CgroupCreator::Scheduler => Ok(()),
        CgroupCreator::Systemd => scope::remove(context, &group),
        CgroupCreator::Warden => {
            let Some(base) = own::directory_of(context.hierarchy, &group) else {
                return Err(refused(format!(
                    "the cgroup {} does not belong to pjwd and is not removed",
                    group.path
                )));
            };
            let removed = group.remove();
            own::clean_up(context.hierarchy, &base);
            removed.map_err(|errno| match errno {
                nix::errno::Errno::EBUSY => {
                    refused(format!("the cgroup {} can't be removed: processes are still in it", group.path))
                }
                other => bounds::refusal(&group, "be removed")(other),
            })
        }
    }
}

#[cfg(test)]
mod tests;
