//! An independent check of every plan, in release builds too.
//!
//! The audit shares no code with the phases that it checks: it reads the state and the plan only. A violation is a
//! bug of pjw, never of a job. The cycle then drops the actions of the job, leaves all its masks unchanged, and
//! reports the violation in `status` and in the log. See docs/adr/0004-audit-in-release.md.

mod cpusets;
mod violation;

pub use violation::{ActionProblem, Violation};

use crate::basics::{CpuSet, Pid, Pu, ThreadId, prelude::*};
use crate::state::{Holder, MaskEntry, Member, WardenState};
use crate::terms::{ActionKind, GrantedBy, JobId, MaskAction, Plan, Policy};

/// Checks a plan, and the state from which it was made, against the invariants of pjw (such as: no PU has two
/// holders). Returns every violation, or an empty list. The audit shares no code with the planner, so it finds the
/// planner's errors.
#[must_use]
pub fn audit(state: &WardenState, plan: &Plan, policy: &Policy) -> Vec<Violation> {
    let mut found = audit_grants(state, policy);
    found.extend(audit_actions(state, plan, policy));
    found
}

/// Checks the holders of all PUs and the grants of all jobs against the invariants of pjw, and returns every
/// violation. The result stays the same until a job or the pool changes
/// ([`crate::state::jobs::Jobs::change_count`], [`crate::state::pool::Pool::change_count`]).
#[must_use]
pub fn audit_grants(state: &WardenState, policy: &Policy) -> Vec<Violation> {
    let machine = machine(state);
    let mut found = check_pool(state, &machine);
    found.extend(check_grants(state, &machine, policy));
    found.extend(check_owners(state));
    found
}

/// Checks the planned changes of affinity masks and cpusets against the invariants of pjw (such as: a job's thread
/// gets only PUs of the job), and returns every violation.
#[must_use]
pub fn audit_actions(state: &WardenState, plan: &Plan, policy: &Policy) -> Vec<Violation> {
    let mut found = cpusets::check_cpusets(state, plan, policy);
    let mut changed = BTreeSet::new();
    for action in &plan.actions {
        let MaskAction { kind, job, thread, .. } = action;
        let mut problems = Vec::new();
        problems.extend((!changed.insert(*thread)).then_some(ActionProblem::ChangedTwice));
        let pid = thread.process.pid;
        let is_kernel_thread = state.process(pid).is_some_and(|process| process.kernel);
        if is_kernel_thread || pid == Pid(1) || policy.own_pid == Some(pid) {
            problems.push(ActionProblem::SystemProcess);
        }
        match kind {
            ActionKind::Restore => problems.extend(check_restore(state, action)),
            ActionKind::KeepOff => problems.extend(check_keep_off(state, action)),
            ActionKind::Confine
            | ActionKind::Repair
            | ActionKind::Pin
            | ActionKind::Float
            | ActionKind::Unbind => {
                problems.extend(check_confine(state, action));
            }
        }
        let violation =
            |problem| Violation::Action { job: job.clone(), kind: kind.name(), thread: *thread, problem };
        found.extend(problems.into_iter().map(violation));
    }
    found
}

/// The violations of the pool: each PU of the machine has one entry, and each holder exists.
fn check_pool(state: &WardenState, machine: &CpuSet) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut entries = CpuSet::new();
    for (pu, holder) in state.pool.holders() {
        entries.insert(pu);
        if let Holder::Job(job) = holder
            && !state.jobs.contains_key(job)
        {
            found.push(Violation::UnknownHolder { pu, job: job.clone() });
        }
    }
    let cpus = entries.difference(machine).union(&machine.difference(&entries));
    if !cpus.is_empty() {
        found.push(Violation::PoolDiffersFromMachine { cpus });
    }
    found
}

fn machine(state: &WardenState) -> CpuSet {
    state.topology.cores().iter().flat_map(|core| core.pus.iter()).collect()
}

/// The PUs that each job holds in the pool, and the housekeeping PUs.
fn by_holder(state: &WardenState) -> (BTreeMap<&JobId, CpuSet>, CpuSet) {
    let mut held: BTreeMap<&JobId, CpuSet> = BTreeMap::new();
    let mut housekeeping = CpuSet::new();
    for (pu, holder) in state.pool.holders() {
        match holder {
            Holder::Job(job) => {
                held.entry(job).or_default().insert(pu);
            }
            Holder::Housekeeping => {
                housekeeping.insert(pu);
            }
            Holder::Free => {}
        }
    }
    (held, housekeeping)
}

/// The violations of single grants.
fn check_grants(state: &WardenState, machine: &CpuSet, policy: &Policy) -> Vec<Violation> {
    let (held, housekeeping) = by_holder(state);
    let core_of = core_by_pu(state);
    let mut found = Vec::new();
    for job in state.jobs.values() {
        let id = &job.id;
        let held = held.get(id).cloned().unwrap_or_default();
        let Some(grant) = &job.grant else {
            if !held.is_empty() {
                found.push(Violation::GrantDiffersFromPool { job: id.clone(), granted: CpuSet::new(), held });
            }
            continue;
        };
        if grant.cpus.is_empty() {
            found.push(Violation::EmptyGrant { job: id.clone() });
        }
        // PUs that were offline when the daemon was restarted are not in the topology, and still belong to the job.
        let granted = grant.cpus.intersection(machine);
        if granted.is_empty() {
            found.push(Violation::OutsideTheMachine { job: id.clone(), cpus: grant.cpus.clone() });
        }
        if granted != held && !grant.shared {
            found.push(Violation::GrantDiffersFromPool { job: id.clone(), granted, held });
        }
        if grant.granted_by == GrantedBy::Scheduler {
            continue;
        }
        let kept = grant.cpus.intersection(&housekeeping);
        if !kept.is_empty() {
            found.push(Violation::OnHousekeeping { job: id.clone(), cpus: kept });
        }
        if !grant.smt_shared && !policy.share_smt && !grant.shared {
            found.extend(split_core(state, &core_of, id, &grant.cpus));
        }
    }
    found
}

/// The PUs of the core of each PU, by the number of the PU. So the check of a grant visits only the cores of the grant.
fn core_by_pu(state: &WardenState) -> Vec<Option<&CpuSet>> {
    let mut core_of = Vec::new();
    for core in state.topology.cores() {
        for pu in core.pus.iter() {
            let number = pu.0 as usize;
            core_of.resize(core_of.len().max(number + 1), None);
            core_of[number] = Some(&core.pus);
        }
    }
    core_of
}

/// A core of which the job holds some PUs, and the pool gave the other PUs to another job. Except cores that a
/// scheduler split, and PUs that were offline when the grant was made: no job holds them.
fn split_core(
    state: &WardenState,
    core_of: &[Option<&CpuSet>],
    job: &JobId,
    cpus: &CpuSet,
) -> Option<Violation> {
    cpus.iter().find_map(|pu| {
        let core = *core_of.get(pu.0 as usize)?.as_ref()?;
        let others = core.difference(cpus);
        let by_warden = |holder: &JobId| {
            let grant = state.jobs.get(holder).and_then(|job| job.grant_by(GrantedBy::Warden));
            grant.is_some_and(|grant| !grant.shared && !grant.smt_shared)
        };
        let of_another =
            |pu: Pu| matches!(state.pool.holder(pu), Some(Holder::Job(holder)) if holder != job && by_warden(holder));
        let is_split = others.iter().any(of_another);
        is_split.then(|| Violation::SplitCore { job: job.clone(), cpus: core.intersection(cpus) })
    })
}

/// The PUs that several jobs own without sharing them.
fn check_owners(state: &WardenState) -> Vec<Violation> {
    let mut owner: BTreeMap<Pu, &JobId> = BTreeMap::new();
    let mut both: BTreeMap<(&JobId, &JobId), CpuSet> = BTreeMap::new();
    for job in state.jobs.values() {
        let id = &job.id;
        for pu in job.grant.iter().filter(|grant| !grant.shared).flat_map(|grant| grant.cpus.iter()) {
            if let Some(other) = owner.insert(pu, id) {
                both.entry((id, other)).or_default().insert(pu);
            }
        }
    }
    both.into_iter()
        .map(|((job, other), cpus)| Violation::TwoOwners { job: job.clone(), other: other.clone(), cpus })
        .collect()
}

/// The problems of an action that restricts a thread of a member to the grant.
fn check_confine(state: &WardenState, action: &MaskAction) -> Vec<ActionProblem> {
    let MaskAction { kind, job, thread, current, target, .. } = action;
    let mut found = Vec::new();
    let member = state.members.get(&thread.process.pid).filter(|member| member.id == thread.process);
    let is_the_jobs = member.is_some_and(|member| {
        member.job == *job && member.threads.get(&thread.tid).is_some_and(|known| known.start == thread.start)
    });
    if !is_the_jobs {
        found.push(ActionProblem::NotTheJobsThread);
    }
    let grant = state.grant_of(job).map(|grant| grant.cpus.clone()).unwrap_or_default();
    if !target.is_subset(&grant) {
        found.push(ActionProblem::MaskOutsideGrant { mask: target.clone(), grant });
    }
    if target.is_empty() || (*kind == ActionKind::Pin && target.len() != 1) {
        found.push(ActionProblem::WrongMask(target.clone()));
    }
    // In a cpuset the effective mask may hide the requested mask, so the action may change it.
    if current == target && !member.is_some_and(|member| state.is_in_job_cpuset(member)) {
        found.push(ActionProblem::NoChange);
    }
    found.extend(check_journal(state, action));
    found
}

/// The journal must contain the mask that the action requests, so that a restart can restore the original mask.
fn check_journal(state: &WardenState, action: &MaskAction) -> Option<ActionProblem> {
    let entry = state.mask_entry(&action.thread).filter(|entry| entry.journaled_since().is_some());
    let mut requests = entry.into_iter().flat_map(MaskEntry::possible_requests);
    let is_journaled = requests.any(|request| request.mask == action.requested);
    (!is_journaled).then_some(ActionProblem::NoUndo)
}

/// The problems of an action that keeps an unassigned process off the grants: the mask must lie outside every
/// grant, the process must not be a member, and the original mask must be known.
fn check_keep_off(state: &WardenState, action: &MaskAction) -> Vec<ActionProblem> {
    let MaskAction { thread: ThreadId { process, .. }, current, target, .. } = action;
    let mut found = Vec::new();
    let is_restoring = state.restoring.get(&process.pid).is_some_and(|known| known.id == *process);
    if !is_restoring || state.members.contains_key(&process.pid) {
        found.push(ActionProblem::NotTheJobsThread);
    }
    let grants = state.jobs.values().filter_map(|job| Some(&job.grant.as_ref()?.cpus));
    let outside =
        |grant: &CpuSet| ActionProblem::MaskOutsideGrant { mask: target.clone(), grant: grant.clone() };
    found.extend(grants.filter(|grant| grant.intersects(target)).map(outside));
    if target.is_empty() {
        found.push(ActionProblem::WrongMask(target.clone()));
    }
    if current == target {
        found.push(ActionProblem::NoChange);
    }
    found.extend(check_journal(state, action));
    found
}

/// The problem of an action that restores a mask: the mask must be the original one, and the process must be
/// released. The mask may equal the present effective mask: while PUs are offline, two masks that differ only in
/// these PUs have the same effective mask.
fn check_restore(state: &WardenState, action: &MaskAction) -> Option<ActionProblem> {
    let MaskAction { job, thread, target, .. } = action;
    let original = state.mask_entry(thread).map(MaskEntry::original);
    let is_it = |known: &&Member| known.id == thread.process && known.job == *job;
    let pid = thread.process.pid;
    let is_released = match state.members.get(&pid).filter(is_it) {
        Some(_) => state.jobs.get(job).is_some_and(|job| job.active_grant().is_none()),
        None => state.restoring.get(&pid).filter(is_it).is_some() && !state.members.contains_key(&pid),
    };
    (original != Some(target) || !is_released || target.is_empty())
        .then(|| ActionProblem::WrongRestore(target.clone()))
}

#[cfg(test)]
mod tests;
