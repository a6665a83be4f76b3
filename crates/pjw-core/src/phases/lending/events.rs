//! The events of lending, and the times at which owners lent and took back cores.

use crate::basics::{CpuSet, Nanos, Pu, cpus_text, prelude::*};
use crate::phases::draft::CycleDraft;
use crate::phases::lending::permission::may_borrow;
use crate::state::WardenState;
use crate::terms::{Event, EventKind, Grant, Job, JobId, Ownership};

/// Reports what changes for the owners and the borrowers, and remembers when each owner lent and took back.
pub(super) fn record_moves(
    draft: &mut CycleDraft<'_>,
    shares: &BTreeMap<JobId, CpuSet>,
    leaving: &BTreeMap<Pu, Nanos>,
) {
    let (mut lenders, mut takers, mut keepers) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for (id, cpus) in shares {
        let before = draft.state.pool.borrowed_by(id);
        if !may_borrow(draft.state, draft.policy, id) {
            // The end of a process is no demand of the owner.
            by_owner(draft.state, &before).keys().for_each(|owner| draft.state.dirty.add_active(owner));
            continue;
        }
        for (owner, gained) in by_owner(draft.state, &cpus.difference(&before)) {
            let text = format!("{owner} leaves {} idle: lent to {id}", cpus_text(&gained));
            draft.out.events.push(Event::new(EventKind::Lent, text).with_job(id).with_cpus(&gained));
            lenders.insert(owner);
        }
        let is_leaving = |pu: &Pu| draft.state.lending.grace_period_end(*pu).is_some();
        let leaves: CpuSet =
            leaving.keys().copied().filter(|pu| cpus.contains(*pu) && !is_leaving(pu)).collect();
        let stays: CpuSet = before
            .iter()
            .filter(|&pu| cpus.contains(pu) && is_leaving(&pu) && !leaving.contains_key(&pu))
            .collect();
        for (owner, cpus) in by_owner(draft.state, &stays) {
            let text = format!("{owner} leaves {} idle again: not taken back from {id}", cpus_text(&cpus));
            draft.out.events.push(Event::new(EventKind::Lent, text).with_job(id).with_cpus(&cpus));
            // A demand that comes and goes is damped, also if no core moves: this is a return and a new loan.
            takers.insert(owner.clone());
            keepers.insert(owner);
        }
        let lost = before.difference(cpus);
        let unannounced: CpuSet = lost.iter().filter(|pu| !is_leaving(pu)).collect();
        let grace = draft.policy.lending.revocation_grace;
        for (cpus, when) in [(&leaves, format!(" in {grace:?}")), (&unannounced, String::new())] {
            for (owner, cpus) in by_owner(draft.state, cpus) {
                let text = format!("{owner} needs {}: taken back{when}", cpus_text(&cpus));
                draft.out.events.push(Event::new(EventKind::Revoked, text).with_job(id).with_cpus(&cpus));
            }
        }
        for (owner, lost) in by_owner(draft.state, &lost) {
            let text = format!("{} back from {id}", cpus_text(&lost));
            draft.out.events.push(Event::new(EventKind::Returned, text).with_job(&owner).with_cpus(&lost));
            takers.insert(owner);
        }
    }
    let (now, lend_after) = (draft.now.since_boot, draft.policy.lending.lend_after);
    for owner in lenders.union(&takers) {
        // Where one core was exchanged for another, the owner needs no more cores than before.
        if !lenders.contains(owner) {
            draft.state.lending.record_return(owner, lend_after, now);
        }
        if lenders.contains(owner) || keepers.contains(owner) {
            draft.state.lending.record_loan(owner, now);
        }
        draft.state.dirty.add_active(owner);
    }
}

/// These PUs by the job that owns them. Free PUs are left out.
fn by_owner(state: &WardenState, cpus: &CpuSet) -> BTreeMap<JobId, CpuSet> {
    let mut owners: BTreeMap<JobId, CpuSet> = BTreeMap::new();
    for pu in cpus.iter() {
        if let Some(owner) = state.pool.holder(pu).and_then(|holder| holder.job()) {
            owners.entry(owner.clone()).or_default().insert(pu);
        }
    }
    owners
}

/// The event for a new grant of a borrower. `None` if only cores of owners came or went: these have events of their
/// own.
pub(super) fn grant_event(
    state: &WardenState,
    job: &Job,
    ownership: Ownership,
    cpus: &CpuSet,
    reason: &str,
) -> Option<Event> {
    let event = |kind, text: String| Some(Event::new(kind, text).with_job(&job.id).with_cpus(cpus));
    let Some(before) = &job.grant else { return event(EventKind::Assigned, reason.to_owned()) };
    let changed = before.cpus.difference(cpus).union(&cpus.difference(&before.cpus));
    let is_of_owners =
        changed.iter().all(|pu| state.pool.holder(pu).is_some_and(|holder| holder.job().is_some()));
    if before.ownership == ownership && is_of_owners {
        return None;
    }
    let text = format!("{} instead of {}: {reason}", cpus_text(cpus), cpus_text(&before.cpus));
    event(EventKind::Resized, text)
}

/// The event for a borrower that has no process any more, and had this grant.
pub(super) fn no_process_event(id: &JobId, before: &Grant) -> Event {
    let returned = match before.ownership {
        Ownership::Borrowed => format!("it gives back {}, and ", cpus_text(&before.cpus)),
        _ => "it ".to_owned(),
    };
    let text = format!("it has no process: {returned}borrows cores again once it has one");
    Event::new(EventKind::Resized, text).with_job(id)
}
