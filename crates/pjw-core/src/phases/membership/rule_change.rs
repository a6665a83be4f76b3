//! The rule of a provision changes: the members that only the former rule recognised leave the job. The job keeps its
//! cores and its other members. The processes that left get their original masks and cgroups back, as after a release.

use crate::basics::{Pid, prelude::*};
use crate::phases::draft::CycleDraft;
use crate::phases::jobs::keep_released_masks;
use crate::phases::membership::{matches_rule, parent_member};
use crate::state::{Member, WardenState};
use crate::terms::{JobId, MembershipEvidence, Policy, Process, ProvisionRule, Record};

/// Applies the new rule `rule` of the provision `job` (a promise of cores to a service). A rule recognises the
/// processes of the service. `None` means that there is no rule.
///
/// - Removes the members that `former_rule` recognised and that do not belong to the job any more
///   ([`leaving_members`]).
/// - The processes that `rule` recognises are checked again in this cycle.
///
/// Must be called before the job is stored with its new rule. If the daemon is then killed between the two records, the
/// next daemon finds the former rule in the journal, and applies the new rule again.
pub(crate) fn apply_rule(
    draft: &mut CycleDraft<'_>,
    job: &JobId,
    former_rule: Option<&ProvisionRule>,
    rule: Option<&ProvisionRule>,
) {
    let (state, policy) = (&*draft.state, draft.policy);
    let changed = former_rule.filter(|former_rule| Some(*former_rule) != rule);
    let leaving =
        changed.map(|former_rule| leaving_members(state, policy, job, former_rule, rule)).unwrap_or_default();
    let processes = state.processes.values().map(|known| &known.process);
    let is_recognised =
        |process: &&Process| rule.is_some_and(|rule| matches_rule(state, policy, rule, process));
    let matching: Vec<Pid> = processes.filter(is_recognised).map(|process| process.id.pid).collect();
    draft.recheck.extend(matching);
    remove_members(draft, job, &leaving);
}

/// Returns the members that leave the provision `job` (a promise of cores to a service) because `rule` replaces
/// `former_rule`. A member stays in each of these cases:
///
/// - `rule` recognises the member.
/// - A command, a session or a batch system made the process a member.
/// - The process is a child of a member that stays.
/// - No rule made the process a member, its parent is no member, and `former_rule` does not recognise the process. Its
///   ancestors have ended, and it is unknown why they were members.
/// - The process itself is unknown: no scan has read it.
fn leaving_members(
    state: &WardenState,
    policy: &Policy,
    job: &JobId,
    former_rule: &ProvisionRule,
    rule: Option<&ProvisionRule>,
) -> BTreeSet<Pid> {
    let stays_by_itself = |member: &Member| {
        let Some(process) = state.process(member.id.pid) else { return true };
        let matches = |rule: &ProvisionRule| matches_rule(state, policy, rule, process);
        let has_other_evidence = match member.evidence {
            MembershipEvidence::Provision => false,
            MembershipEvidence::Adopted | MembershipEvidence::Parent | MembershipEvidence::JobCpuset => {
                !has_parent_in(state, process, job) && !matches(former_rule)
            }
            MembershipEvidence::Environment
            | MembershipEvidence::Session
            | MembershipEvidence::Cgroup
            | MembershipEvidence::Registered => true,
        };
        has_other_evidence || rule.is_some_and(matches)
    };
    let mut leaving: BTreeSet<Pid> = state.members_of(job).map(|member| member.id.pid).collect();
    let staying = state.members_of(job).filter(|member| stays_by_itself(member));
    let mut pending: Vec<Pid> = staying.map(|member| member.id.pid).collect();
    while let Some(pid) = pending.pop() {
        if leaving.remove(&pid) {
            let children = state.processes.children_of(pid).filter_map(|child| state.process(child));
            let children = children.filter(|child| has_parent_in(state, child, job));
            pending.extend(children.map(|child| child.id.pid));
        }
    }
    leaving
}

/// Whether the parent of `process` is a member of `job`.
fn has_parent_in(state: &WardenState, process: &Process, job: &JobId) -> bool {
    parent_member(state, process).is_some_and(|parent| parent.job == *job)
}

/// Removes the members `leaving` from the job `job`, which goes on. Their original masks are restored from now on.
fn remove_members(draft: &mut CycleDraft<'_>, job: &JobId, leaving: &BTreeSet<Pid>) {
    if leaving.is_empty() {
        return;
    }
    keep_released_masks(draft, job);
    draft.state.lineage.record_left_processes(job, leaving);
    for &pid in leaving {
        let Some(member) = draft.state.members.remove(pid) else { continue };
        draft.out.records.push(Record::Left(member.membership()));
        draft.state.dirty.add_process(job, pid);
        draft.state.processes_to_restore.insert(pid, member);
    }
    // The removed processes may belong to another job.
    draft.recheck.extend(leaving.iter().copied());
}
