//! An independent check of every plan, in release builds too.
//!
//! The audit shares no code with the phases that it checks: it reads the state and the plan only. A violation is a
//! bug of pjw, never of a job. The cycle then drops the actions of the job, leaves all its masks unchanged, and
//! reports the violation in `status` and in the log. See docs/adr/0004-audit-in-release.md.

mod cpusets;
mod violation;

pub use violation::Violation;

use crate::basics::prelude::*;
use crate::basics::{CpuSet, Pid, Pu};
use crate::state::{Holder, MaskEntry, WardenState};
use crate::terms::{Action, ActionKind, GrantedBy, JobId, Plan, Policy};

/// Checks the state and the plan that was made from it.
#[must_use]
pub fn audit(state: &WardenState, plan: &Plan, policy: &Policy) -> Vec<Violation> {
    let mut found = ledger(state);
    found.extend(grants(state, policy));
    found.extend(owners(state));
    found.extend(cpusets::check_cpusets(state, plan, policy));
    let mut seen = BTreeSet::new();
    for action in &plan.actions {
        if !seen.insert(action.thread) {
            found.push(Violation::ChangedTwice { job: action.job.clone(), thread: action.thread });
        }
        found.extend(on_the_system(state, policy, action));
        found.extend(match action.kind {
            ActionKind::Restore => restore(state, action),
            ActionKind::KeepOff => keeping_off(state, action),
            ActionKind::Confine | ActionKind::Repair | ActionKind::Pin | ActionKind::Float => {
                confining(state, action)
            }
        });
    }
    found
}

fn ledger(state: &WardenState) -> Vec<Violation> {
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
    let machine = machine(state);
    let cpus = entries.difference(&machine).union(&machine.difference(&entries));
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

fn grants(state: &WardenState, policy: &Policy) -> Vec<Violation> {
    let (held, housekeeping) = by_holder(state);
    let machine = machine(state);
    let mut found = Vec::new();
    for (id, job) in &state.jobs {
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
        let granted = grant.cpus.intersection(&machine);
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
            found.extend(split_core(state, id, &grant.cpus));
        }
    }
    found
}

/// A core of which the job holds some PUs, and the pool gave the other PUs to another job. Except cores that a
/// scheduler split, and PUs that were offline when the grant was made: no job holds them.
fn split_core(state: &WardenState, job: &JobId, cpus: &CpuSet) -> Option<Violation> {
    state.topology.cores().iter().find_map(|core| {
        let mine = core.pus.intersection(cpus);
        let others = core.pus.difference(cpus);
        let by_warden = |holder: &JobId| {
            let grant = state.jobs.get(holder).and_then(|job| job.grant.as_ref());
            grant.is_some_and(|grant| grant.granted_by == GrantedBy::Warden && !grant.shared && !grant.smt_shared)
        };
        let of_another =
            |pu: Pu| matches!(state.pool.holder(pu), Some(Holder::Job(holder)) if holder != job && by_warden(holder));
        let split = !mine.is_empty() && others.iter().any(of_another);
        split.then(|| Violation::SplitCore { job: job.clone(), cpus: mine })
    })
}

fn owners(state: &WardenState) -> Vec<Violation> {
    let mut owner: BTreeMap<Pu, &JobId> = BTreeMap::new();
    let mut both: BTreeMap<(&JobId, &JobId), CpuSet> = BTreeMap::new();
    for (id, job) in &state.jobs {
        for pu in job.grant.iter().filter(|grant| !grant.shared).flat_map(|grant| grant.cpus.iter()) {
            if let Some(other) = owner.insert(pu, id) {
                both.entry((id, other)).or_default().insert(pu);
            }
        }
    }
    let two = |((job, other), cpus): ((&JobId, &JobId), CpuSet)| Violation::TwoOwners {
        job: job.clone(),
        other: other.clone(),
        cpus,
    };
    both.into_iter().map(two).collect()
}

fn confining(state: &WardenState, action: &Action) -> Vec<Violation> {
    let Action { kind, job, thread, from, to, .. } = action;
    let (kind, job, thread, to) = (kind.name(), job.clone(), *thread, to.clone());
    let mut found = Vec::new();
    let member = state.members.get(&thread.process.pid).filter(|member| member.id == thread.process);
    let ours = member.is_some_and(|member| {
        member.job == job && member.threads.get(&thread.tid).is_some_and(|known| known.start == thread.start)
    });
    if !ours {
        found.push(Violation::NotTheJobsThread { job: job.clone(), kind, thread });
    }
    let grant = state.jobs.get(&job).and_then(|job| job.grant.as_ref());
    let grant = grant.map(|grant| grant.cpus.clone()).unwrap_or_default();
    if !to.is_subset(&grant) {
        found.push(Violation::MaskOutsideGrant { job: job.clone(), kind, thread, to: to.clone(), grant });
    }
    if to.is_empty() || (action.kind == ActionKind::Pin && to.len() != 1) {
        found.push(Violation::WrongMask { job: job.clone(), kind, thread, to: to.clone() });
    }
    // In a cpuset the effective mask may hide the requested mask, so the action may change it.
    if *from == to && !member.is_some_and(|member| state.is_in_job_cpuset(member)) {
        found.push(Violation::NoChange { job: job.clone(), kind, thread });
    }
    if !is_journaled(state, action) {
        found.push(Violation::NoUndo { job, kind, thread });
    }
    found
}

/// Whether the journal contains the mask that the action requests, so that a restart can restore the original mask.
fn is_journaled(state: &WardenState, action: &Action) -> bool {
    let entry = state.mask(&action.thread).filter(|entry| entry.kept_since().is_some());
    entry.is_some_and(|entry| entry.candidates().any(|request| request.mask == action.requested))
}

fn on_the_system(state: &WardenState, policy: &Policy, action: &Action) -> Option<Violation> {
    let Action { kind, job, thread, .. } = action;
    let pid = thread.process.pid;
    let kernel = state.processes.get(&pid).is_some_and(|known| known.process.kernel);
    (kernel || pid == Pid(1) || policy.own_pid == Some(pid)).then(|| Violation::SystemProcess {
        job: job.clone(),
        kind: kind.name(),
        thread: *thread,
    })
}

/// The violations of an action that keeps an unassigned process off the grants: the mask must lie outside every
/// grant, the process must not be a member, and the original mask must be known.
fn keeping_off(state: &WardenState, action: &Action) -> Vec<Violation> {
    let Action { kind, job, thread, from, to, .. } = action;
    let (kind, job, thread, to) = (kind.name(), job.clone(), *thread, to.clone());
    let pid = thread.process.pid;
    let mut found = Vec::new();
    if state.members.contains_key(&pid)
        || state.restoring.get(&pid).is_none_or(|left| left.id != thread.process)
    {
        found.push(Violation::NotTheJobsThread { job: job.clone(), kind, thread });
    }
    for grant in state.jobs.values().filter_map(|job| job.grant.as_ref()) {
        if grant.cpus.intersects(&to) {
            let grant = grant.cpus.clone();
            found.push(Violation::MaskOutsideGrant { job: job.clone(), kind, thread, to: to.clone(), grant });
        }
    }
    if to.is_empty() {
        found.push(Violation::WrongMask { job: job.clone(), kind, thread, to: to.clone() });
    }
    if *from == to {
        found.push(Violation::NoChange { job: job.clone(), kind, thread });
    }
    if !is_journaled(state, action) {
        found.push(Violation::NoUndo { job, kind, thread });
    }
    found
}

/// The violations of an action that restores a mask: the mask must be the original one, and the process must be
/// released. The mask may equal the present effective mask: while PUs are offline, two masks that differ only in
/// these PUs have the same effective mask.
fn restore(state: &WardenState, action: &Action) -> Vec<Violation> {
    let Action { job, thread, to, .. } = action;
    let before = state.mask(thread).map(MaskEntry::original);
    let pid = thread.process.pid;
    let left = state.restoring.get(&pid).filter(|left| left.id == thread.process && left.job == *job);
    let member = state.members.get(&pid).filter(|member| member.id == thread.process && member.job == *job);
    let unserved = |job: &crate::terms::job::Job| job.grant.is_none() || job.released;
    let released = match member {
        Some(_) => state.jobs.get(job).is_some_and(unserved),
        None => left.is_some() && !state.members.contains_key(&pid),
    };
    if before == Some(to) && released && !to.is_empty() {
        return Vec::new();
    }
    vec![Violation::WrongRestore { job: job.clone(), thread: *thread, to: to.clone() }]
}

#[cfg(test)]
mod tests;
