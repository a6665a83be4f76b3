//! The grants of borrowers: the PUs that a borrower has, or what becomes of a borrower that can borrow no core.

use crate::basics::{CpuSet, cpus_text, cpus_with_is_are, prelude::*};
use crate::phases::draft::{CycleDraft, warn};
use crate::phases::lending::{events, permission::may_borrow, squeeze::reason_not_to_squeeze};
use crate::state::WardenState;
use crate::terms::{
    CpusetHierarchy, EnforcementMethod, Grant, GrantedBy, Job, JobId, Ownership, Policy, StarvedPolicy,
};

/// Gives the borrower `id` (a job of the class besteffort) a grant of the PUs `borrowed`. Adds an event unless other
/// events report the whole change. `lost_to_others` has the lost PUs that other events report. Does nothing if the job
/// already has this grant. Special cases:
///
/// - If `borrowed` is empty, the job gets the grant of [`starved_grant`]. If that is `None`, the job gets no grant, and
///   a warning is added.
/// - A borrower that may not borrow, because it has no process, gets no grant.
pub(super) fn set_borrowed_grant(
    draft: &mut CycleDraft<'_>,
    id: &JobId,
    borrowed: &CpuSet,
    lost_to_others: &CpuSet,
) {
    let Some(job) = draft.state.jobs.get(id).cloned() else { return };
    if !may_borrow(draft.state, draft.policy, id) {
        if let Some(grant) = &job.grant {
            draft.out.events.push(events::no_process_event(id, grant));
            draft.store_job(Job { grant: None, ..job });
        }
        return;
    }
    let new_grant = if borrowed.is_empty() {
        starved_grant(draft.state, draft.policy, &job)
    } else {
        Some((Ownership::Borrowed, borrowed.clone(), borrowing_reason(draft.state, borrowed)))
    };
    let Some((ownership, cpus, reason)) = new_grant else {
        let reason = reason_not_to_squeeze(draft.state, draft.policy);
        let why = format!("{id} can borrow no core and runs unconfined: {reason}, and it can't be frozen");
        let remedy = if draft.policy.housekeeping_cpus.is_empty() {
            "set housekeeping (a CPU that a job holds becomes housekeeping when the job ends or is released); the job \
             gets cores as soon as some are free or left idle"
        } else {
            "the job gets cores as soon as some are free or left idle: release a job (pjwctl jobs shows which hold the \
             cores)"
        };
        warn(draft, id, "unserved", why, remedy);
        draft.store_job(Job { grant: None, ..job });
        return;
    };
    if job.grant.as_ref().is_some_and(|grant| grant.ownership == ownership && grant.cpus == cpus) {
        return;
    }
    let event = events::grant_event(draft.state, &job, ownership, &cpus, &reason, lost_to_others);
    draft.out.events.extend(event);
    let grant = Grant {
        cpus,
        granted_by: GrantedBy::Warden,
        is_shared: false,
        may_split_cores: false,
        granted_at: draft.now.since_boot,
        reasons: vec![reason],
        second_best: String::new(),
        ownership,
    };
    draft.store_job(Job { grant: Some(grant), ..job });
}

/// Returns the reason for the grant of a borrower that has the PUs `borrowed`, as text for users: which of them are
/// free, and which are lent by their owners.
fn borrowing_reason(state: &WardenState, borrowed: &CpuSet) -> String {
    let lent = borrowed.intersection(&state.pool.lent_cpus());
    let free = borrowed.difference(&lent);
    let owners: BTreeSet<&JobId> = lent.iter().filter_map(|pu| state.pool.holder(pu)?.job()).collect();
    let by_owners = match (lent.len(), owners.len()) {
        (1, _) => "left idle by its owner",
        (_, 1) => "left idle by their owner",
        _ => "left idle by their owners",
    };
    let texts = [(&free, "free"), (&lent, by_owners)];
    let texts = texts.iter().filter(|(cpus, _)| !cpus.is_empty());
    let texts: Vec<String> = texts.map(|(cpus, what)| format!("{} {what}", cpus_with_is_are(cpus))).collect();
    format!("it borrows cores: {}", texts.join(", "))
}

/// Returns the grant of a borrower that can borrow no core: the ownership, the PUs, and the reason as text for users.
/// The policy says whether the job is frozen, or shares the housekeeping PUs (which are reserved for the system). If
/// one of the two is impossible, the other applies. `None` if both are impossible: there are no housekeeping PUs, and
/// the job can't be frozen.
pub(super) fn starved_grant(
    state: &WardenState,
    policy: &Policy,
    job: &Job,
) -> Option<(Ownership, CpuSet, String)> {
    let has_cpuset = policy.enforcement != EnforcementMethod::Affinity
        && !matches!(policy.cpuset_support.hierarchy, CpusetHierarchy::Unavailable { .. })
        && state.cpusets.cpuset_error(&job.id).is_none();
    let can_freeze = has_cpuset && policy.cpuset_support.can_freeze;
    let is_to_freeze = policy.lending.starved == StarvedPolicy::Freeze && can_freeze;
    let shared = state.pool.housekeeping_cpus().intersection(&state.pool.online_cpus());
    if !is_to_freeze && !shared.is_empty() {
        let reason = format!("no core can be borrowed: it shares the housekeeping {}", cpus_text(&shared));
        return Some((Ownership::Squeezed, shared, reason));
    }
    // The job keeps its last PUs while it is frozen: they have no effect.
    let last = job.grant.as_ref().map_or_else(|| state.pool.online_cpus(), |grant| grant.cpus.clone());
    let reason = "no core can be borrowed: it is frozen until there is one".to_owned();
    can_freeze.then_some((Ownership::Frozen, last, reason))
}
