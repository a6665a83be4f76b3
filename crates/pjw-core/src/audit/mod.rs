//! An independent check of every plan, in release builds too.
//!
//! The audit shares no code with the phases that it checks: it reads the state and the plan only. A violation is a
//! bug of pjw, never of a job. The cycle then drops the actions of the job, leaves all its masks unchanged, and
//! reports the violation in `status` and in the log. See docs/adr/0004-audit-in-release.md.

mod cpusets;
mod grants;
mod violation;

pub use grants::GrantAudit;
pub use violation::{MaskActionProblem, Violation};

use crate::basics::{CpuSet, Pid, ThreadId, prelude::*};
use crate::state::{MaskEntry, Member, WardenState};
use crate::terms::{MaskAction, MaskActionKind, Ownership, Plan, Policy};

/// Checks `plan` (the planned changes of affinity masks and cpusets) and `state`, from which the changes were planned,
/// against the invariants of pjw. For example, two jobs must not own the same PU (logical CPU), unless one of them may
/// share its PUs ([`Grant::is_shared`](crate::terms::Grant::is_shared)). [`Violation`] has one variant for each
/// invariant.
///
/// Returns all violations. The list is empty if no invariant is violated. The audit shares no code with the functions
/// that make the plan, so it can find errors of these functions.
#[must_use]
pub fn audit(state: &WardenState, plan: &Plan, policy: &Policy) -> Vec<Violation> {
    let mut found = audit_grants(state, policy);
    found.extend(audit_actions(state, plan, policy));
    found
}

/// Checks the PUs (logical CPUs) that jobs hold against the invariants of pjw, and returns all violations. The list is
/// empty if no invariant is violated. [`Violation`] has one variant for each invariant, for example:
///
/// - The grant of a job (the PUs that the job holds) agrees with the pool (the holder of each PU).
/// - Two jobs do not own the same PU, unless one of them may share its PUs
///   ([`Grant::is_shared`](crate::terms::Grant::is_shared)).
///
/// For repeated checks, [`GrantAudit`] is faster, because it checks only the jobs that changed.
#[must_use]
pub fn audit_grants(state: &WardenState, policy: &Policy) -> Vec<Violation> {
    GrantAudit::new(state, policy).violations().cloned().collect()
}

/// Checks the planned changes of affinity masks and cpusets in `plan` against the invariants of pjw, and returns all
/// violations. For example, the new mask of a job's thread must contain only PUs (logical CPUs) that the job holds.
#[must_use]
pub fn audit_actions(state: &WardenState, plan: &Plan, policy: &Policy) -> Vec<Violation> {
    let mut found = cpusets::check_cpusets(state, plan, policy);
    let mut changed_threads = BTreeSet::new();
    let mut granted = CpuSet::new();
    // Only a plan that keeps processes off every grant needs all grants.
    if plan.mask_actions.iter().any(|action| action.kind == MaskActionKind::KeepOff) {
        for grant in state.jobs.values().filter_map(|job| job.grant.as_ref()) {
            granted = granted.union(&grant.cpus);
        }
    }
    for action in &plan.mask_actions {
        let MaskAction { kind, job, thread, .. } = action;
        let mut problems = Vec::new();
        if !changed_threads.insert(*thread) {
            problems.push(MaskActionProblem::ChangedTwice);
        }
        let pid = thread.process.pid;
        let is_kernel_thread = state.process(pid).is_some_and(|process| process.is_kernel_thread);
        if is_kernel_thread || pid == Pid(1) || policy.is_daemon_process(pid) {
            problems.push(MaskActionProblem::SystemProcess);
        }
        match kind {
            MaskActionKind::Restore => problems.extend(check_restore(state, action)),
            MaskActionKind::KeepOff => problems.extend(check_keep_off(state, &granted, action)),
            MaskActionKind::Confine
            | MaskActionKind::Repair
            | MaskActionKind::Pin
            | MaskActionKind::Float
            | MaskActionKind::Unbind
            | MaskActionKind::Override
            | MaskActionKind::Rebind => {
                problems.extend(check_limit_to_grant(state, action));
            }
        }
        let violation = |problem| Violation::InvalidMaskAction {
            job: job.clone(),
            kind: kind.name(),
            thread: *thread,
            problem,
        };
        found.extend(problems.into_iter().map(violation));
    }
    found
}

/// Returns the problems of `action`, which restricts a thread to the grant of its job. The grant has the PUs that the
/// job holds. The rules are:
///
/// - The thread belongs to a process of the job.
/// - The new mask is not empty and lies inside the grant. It has one PU if the action pins the thread.
/// - The action changes the mask that the scan read. This is not checked for a process in the cpuset of its job. There,
///   the scan reads only the part of the requested mask that is inside the cpuset. So the action may change the
///   requested mask although the mask that the scan read stays the same.
/// - The journal (the file from which a restarted daemon restores its state) contains the new mask.
fn check_limit_to_grant(state: &WardenState, action: &MaskAction) -> Vec<MaskActionProblem> {
    let MaskAction { kind, job, thread, current_mask, target_mask, .. } = action;
    let mut found = Vec::new();
    let member = state.members.get(&thread.process.pid).filter(|member| member.id == thread.process);
    let is_the_jobs = member.is_some_and(|member| {
        member.job == *job && member.threads.get(&thread.tid).is_some_and(|known| known.start == thread.start)
    });
    if !is_the_jobs {
        found.push(MaskActionProblem::WrongThread);
    }
    let grant = state.grant_of(job).map(|grant| grant.cpus.clone()).unwrap_or_default();
    if !target_mask.is_subset(&grant) {
        found.push(MaskActionProblem::MaskOutsideGrant { mask: target_mask.clone(), grant });
    }
    if target_mask.is_empty() || (*kind == MaskActionKind::Pin && target_mask.len() != 1) {
        found.push(MaskActionProblem::InvalidMask(target_mask.clone()));
    }
    // In a cpuset the effective mask may hide the requested mask, so the action may change it.
    if current_mask == target_mask && !member.is_some_and(|member| state.is_in_job_cpuset(member)) {
        found.push(MaskActionProblem::NoChange);
    }
    found.extend(check_journal(state, action));
    found
}

/// The journal must contain the mask that the action requests, so that a restart can restore the original mask.
fn check_journal(state: &WardenState, action: &MaskAction) -> Option<MaskActionProblem> {
    let entry = state.mask_entry(&action.thread).filter(|entry| entry.journaled_since().is_some());
    let mut requests = entry.into_iter().flat_map(MaskEntry::last_request_candidates);
    let is_journaled = requests.any(|request| request.mask == action.requested_mask);
    (!is_journaled).then_some(MaskActionProblem::NotJournaled)
}

/// Returns the problems of `action`, which keeps a process that belongs to no job off the PUs in `granted`. The rules
/// are:
///
/// - The process is no member of a job, and is registered for a later restore of its masks.
/// - The new mask is not empty, and contains no PU that a job holds.
/// - The action changes the mask.
/// - The journal (the file from which a restarted daemon restores its state) contains the new mask.
fn check_keep_off(state: &WardenState, granted: &CpuSet, action: &MaskAction) -> Vec<MaskActionProblem> {
    let MaskAction { thread: ThreadId { process, .. }, current_mask, target_mask, .. } = action;
    let mut found = Vec::new();
    let is_restoring = state.processes_to_restore.get(&process.pid).is_some_and(|known| known.id == *process);
    if !is_restoring || state.members.contains_key(&process.pid) {
        found.push(MaskActionProblem::WrongThread);
    }
    if granted.intersects(target_mask) {
        let owned = state.jobs.values().filter_map(|job| job.grant.as_ref());
        let others = owned.filter(|grant| grant.ownership == Ownership::Owned).map(|grant| &grant.cpus);
        let outside = |grant: &CpuSet| MaskActionProblem::MaskOutsideGrant {
            mask: target_mask.clone(),
            grant: grant.clone(),
        };
        found.extend(others.filter(|grant| grant.intersects(target_mask)).map(outside));
    }
    if target_mask.is_empty() {
        found.push(MaskActionProblem::InvalidMask(target_mask.clone()));
    }
    if current_mask == target_mask {
        found.push(MaskActionProblem::NoChange);
    }
    found.extend(check_journal(state, action));
    found
}

/// Returns a problem if `action`, which restores the affinity mask of a thread, is wrong. The new mask must be the
/// original mask of the thread, and must not be empty. The process must be released: its job holds no cores, or the
/// process has left the job. Returns `None` if the action is right.
///
/// The new mask may equal the present effective mask. While PUs are offline, two masks that differ only in these PUs
/// have the same effective mask.
fn check_restore(state: &WardenState, action: &MaskAction) -> Option<MaskActionProblem> {
    let MaskAction { job, thread, target_mask, .. } = action;
    let original = state.mask_entry(thread).map(MaskEntry::original_mask);
    let is_of_job = |known: &&Member| known.id == thread.process && known.job == *job;
    let pid = thread.process.pid;
    let is_released = match state.members.get(&pid).filter(is_of_job) {
        Some(_) => state.jobs.get(job).is_some_and(|job| job.active_grant().is_none()),
        None => {
            let is_restoring = state.processes_to_restore.get(&pid).filter(is_of_job).is_some();
            is_restoring && !state.members.contains_key(&pid)
        }
    };
    let is_right = is_released && original == Some(target_mask) && !target_mask.is_empty();
    (!is_right).then(|| MaskActionProblem::WrongRestore(target_mask.clone()))
}

#[cfg(test)]
mod tests;
