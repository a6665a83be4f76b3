//! The events of lending, and the times at which owners lent and took back cores.

use crate::basics::{CpuSet, Nanos, Pu, cpus_text, prelude::*};
use crate::phases::draft::CycleDraft;
use crate::phases::lending::permission::may_borrow;
use crate::state::WardenState;
use crate::terms::{Event, EventKind, Grant, Job, JobId, Ownership};

/// Adds the events about the loans that change: PUs that are lent, that go back to their owners, that another job gets,
/// or whose return is announced or cancelled. Also records when each owner (a job that lends cores) lent cores and took
/// cores back. Must be called before the pool has the new loans, and before the borrowers (jobs that borrow cores) have
/// the new grants. Returns the PUs that borrowers lose to other jobs, except to the owners that lent these PUs. The
/// parameters are the decision about the loans:
///
/// - `shares` has the PUs that each borrower is to have.
/// - `leaving` has those of these PUs that come back later, each with the end of its grace period.
/// - `unwanted` has the PUs that come back although their owner does not need them.
/// - `exchanged` has the PUs in `unwanted` or `leaving` for which their borrower has free ones.
pub(super) fn report_loan_changes(
    draft: &mut CycleDraft<'_>,
    shares: &BTreeMap<JobId, CpuSet>,
    leaving: &BTreeMap<Pu, Nanos>,
    unwanted: &CpuSet,
    exchanged: &CpuSet,
) -> CpuSet {
    let left_by_borrowers = draft.state.lending.take_pus_left_by_borrowers();
    let still_held = |(owner, cpus): (&JobId, &CpuSet)| cpus.intersection(&draft.state.pool.pus_of(owner));
    let lent_before = draft.state.pool.lent_cpus().union(&union(left_by_borrowers.iter().map(still_held)));
    let lent_after = lent_cpus(draft.state, shares);
    let lending = &draft.state.lending;
    let kept = lent_after.iter().filter(|pu| lending.is_return_announced(*pu) && !leaving.contains_key(pu));
    let kept: CpuSet = kept.collect();
    let unexchanged = kept.intersection(draft.state.lending.exchanged_pus());
    let (lent, returned) = (lent_after.difference(&lent_before), lent_before.difference(&lent_after));
    let moves = CoreMoves {
        taken: returned.difference(unwanted),
        unwanted: returned.intersection(unwanted),
        kept: kept.difference(&unexchanged),
        unexchanged,
        exchanged: exchanged.clone(),
        lent,
    };
    let mut lost_to_others = CpuSet::new();
    for (id, cpus) in shares {
        let before = draft.state.pool.borrowed_by(id);
        for (owner, gained) in by_owner(draft.state, &cpus.difference(&before)) {
            let text = format!("{owner} leaves {} idle: lent to {id}", cpus_text(&gained));
            draft.out.events.push(Event::new(EventKind::Lent, text).with_job(id).with_cpus(&gained));
            draft.state.dirty.add_active(&owner);
        }
        if may_borrow(draft.state, draft.policy, id) {
            report_kept_pus(draft, id, &before.intersection(cpus), &moves);
            lost_to_others = lost_to_others.union(&report_pus_of_other_jobs(draft, id, shares));
            let lending = &draft.state.lending;
            let is_new = |pu: &Pu| cpus.contains(*pu) && !lending.is_return_announced(*pu);
            let announced = leaving.keys().copied().filter(is_new);
            report_lost_pus(draft, id, &announced.collect(), &before.difference(cpus), &moves);
        }
    }
    record_loan_times(draft, &moves, &lent_after);
    lost_to_others
}

/// Adds the events about those PUs in `cpus` that were about to be taken back from the borrower `id`, and stay lent.
/// `moves` says why they stay.
fn report_kept_pus(draft: &mut CycleDraft<'_>, id: &JobId, cpus: &CpuSet, moves: &CoreMoves) {
    let mut report = |cpus: &CpuSet, text| {
        draft.out.events.push(Event::new(EventKind::Lent, text).with_job(id).with_cpus(cpus));
    };
    for (owner, cpus) in by_owner(draft.state, &cpus.intersection(&moves.kept)) {
        let text = format!("{owner} leaves {} idle again: not taken back from {id}", cpus_text(&cpus));
        report(&cpus, text);
    }
    for (owner, cpus) in by_owner(draft.state, &cpus.intersection(&moves.unexchanged)) {
        report(&cpus, format!("{id} can use {} of {owner} again: not given back", cpus_text(&cpus)));
    }
}

/// Adds the events about the PUs that the borrower `id` (a job that borrows idle cores) loses to other jobs, except to
/// the owners that lent these PUs. Such a PU was free and now belongs to a job, or another borrower gets the PU.
/// `shares` has the PUs that each borrower is to have. Returns the PUs that the events are about.
fn report_pus_of_other_jobs(
    draft: &mut CycleDraft<'_>,
    id: &JobId,
    shares: &BTreeMap<JobId, CpuSet>,
) -> CpuSet {
    let borrowed = draft.state.pool.borrowed_by(id);
    let grant = draft.state.jobs.get(id).and_then(|job| job.grant.as_ref());
    let grant = grant.filter(|grant| grant.ownership == Ownership::Borrowed);
    let held = grant.map_or_else(|| borrowed.clone(), |grant| grant.cpus.union(&borrowed));
    let lost = held.difference(&shares[id]);
    let mut reported = CpuSet::new();
    if lost.is_empty() {
        return reported;
    }
    let mut report = |cpus: &CpuSet, text: String| {
        draft.out.events.push(Event::new(EventKind::Revoked, text).with_job(id).with_cpus(cpus));
    };
    // The pool ends the borrowing of a free PU when it grants the PU. The grant of the borrower still has the PU.
    let granted: CpuSet = lost.iter().filter(|pu| draft.state.pool.borrower(*pu).is_none()).collect();
    for (other, cpus) in by_owner(draft.state, &granted) {
        let cores = union(cpus.iter().map(|pu| draft.state.topology.core_cpus(pu)));
        // A borrower has whole cores only. So it also loses the other PUs of a core of which the job gets a part.
        let siblings = cores.intersection(&lost).intersection(&draft.state.pool.free_cpus());
        let all = cpus.union(&siblings.difference(&reported));
        let why = if all == cpus { "" } else { ", and only whole cores can be borrowed" };
        let text = format!("{other} gets {}{why}: {} taken from {id}", cpus_text(&cpus), cpus_text(&all));
        report(&all, text);
        reported = reported.union(&all);
    }
    for (other, share) in shares.iter().filter(|(other, _)| *other != id) {
        let cpus = lost.intersection(share).difference(&reported);
        if !cpus.is_empty() {
            report(&cpus, format!("{other} borrows {} now", cpus_text(&cpus)));
            reported = reported.union(&cpus);
        }
    }
    reported
}

/// Adds the events about the PUs that go back from the borrower `id` (a job that borrows idle cores) to their owners
/// (jobs that lend cores). `lost` has the PUs that the borrower loses now, and `announced` those that it loses after
/// the grace period. Also adds an event for each owner that gets PUs back. `moves` says for these PUs why they go back.
/// PUs in `lost` that do not go back are left out.
fn report_lost_pus(
    draft: &mut CycleDraft<'_>,
    id: &JobId,
    announced: &CpuSet,
    lost: &CpuSet,
    moves: &CoreMoves,
) {
    let mut report = |kind, job: &JobId, cpus: &CpuSet, text| {
        draft.out.events.push(Event::new(kind, text).with_job(job).with_cpus(cpus));
    };
    let returned = lost.intersection(&moves.taken.union(&moves.unwanted));
    if draft.state.lending.would_slow_owners(id) {
        for (owner, cpus) in by_owner(draft.state, &lost.intersection(&moves.unwanted)) {
            let text = format!("{id} would slow down {owner}: {} taken back", cpus_text(&cpus));
            report(EventKind::Revoked, id, &cpus, text);
        }
    }
    let lending = &draft.state.lending;
    let revoked = lost.intersection(&moves.taken.union(&moves.exchanged));
    let unannounced: CpuSet = revoked.iter().filter(|pu| !lending.is_return_announced(*pu)).collect();
    let grace = draft.policy.lending.revocation_grace;
    for (cpus, when) in [(announced, format!(" in {grace:?}")), (&unannounced, String::new())] {
        for (owner, cpus) in by_owner(draft.state, &cpus.intersection(&moves.exchanged)) {
            let free = if cpus.len() == 1 { "a free CPU" } else { "free CPUs" };
            let text =
                format!("{id} has {free} instead of {} of {owner}: given back{when}", cpus_text(&cpus));
            report(EventKind::Revoked, id, &cpus, text);
        }
        for (owner, cpus) in by_owner(draft.state, &cpus.difference(&moves.exchanged)) {
            // Each program counts as the use of an owner of all PUs.
            let has_all = draft.state.pool.online_cpus().is_subset(&draft.state.pool.pus_of(&owner));
            let who = if has_all { ", or another program," } else { "" };
            let text = format!("{owner}{who} needs {}: taken back{when}", cpus_text(&cpus));
            report(EventKind::Revoked, id, &cpus, text);
        }
    }
    for (owner, cpus) in by_owner(draft.state, &returned) {
        report(EventKind::Returned, &owner, &cpus, format!("{} back from {id}", cpus_text(&cpus)));
    }
}

/// The PUs whose loan begins, ends, is about to end, or was about to end, in one set for each of these cases. Each PU
/// belongs to an owner: a job that lends cores. A PU that goes from one borrower to another is in none of these sets.
struct CoreMoves {
    /// The PUs that are lent now and were not lent before.
    lent: CpuSet,
    /// The PUs that were taken back, because their owner needs them.
    taken: CpuSet,
    /// The PUs that came back although their owner does not need them.
    unwanted: CpuSet,
    /// The PUs that were about to be taken back because their owner needed them, and stay lent.
    kept: CpuSet,
    /// The PUs that were about to be taken back because their borrower had free ones instead, and stay lent.
    unexchanged: CpuSet,
    /// The PUs that come back, now or after the grace period, because their borrower has free ones instead.
    exchanged: CpuSet,
}

/// Returns the PUs that are lent if each borrower has its PUs in `shares`. Free PUs are borrowed but not lent.
fn lent_cpus(state: &WardenState, shares: &BTreeMap<JobId, CpuSet>) -> CpuSet {
    let borrowed = union(shares.values().cloned());
    union(by_owner(state, &borrowed).into_values())
}

fn union(sets: impl Iterator<Item = CpuSet>) -> CpuSet {
    sets.fold(CpuSet::new(), |all, cpus| all.union(&cpus))
}

/// Records for each owner of PUs in `moves` that cores were lent or taken back now. `lent_after` has all PUs that are
/// lent after the decision. The active processes of these owners are planned again. Special cases:
///
/// - If cores that their owner needed were about to be taken back and stay lent, a return and a loan are recorded.
/// - If cores that their owner did not need were about to be taken back and stay lent, only a loan is recorded.
/// - If cores were both lent and taken back, only the loan is recorded.
/// - If cores came back only because no borrower can use them, and no core of the owner is lent any more, the time of
///   the last loan is forgotten. The cores can then be lent again at once.
fn record_loan_times(draft: &mut CycleDraft<'_>, moves: &CoreMoves, lent_after: &CpuSet) {
    let (now, lend_after) = (draft.now.since_boot, draft.policy.lending.lend_after);
    let owners = |cpus: &CpuSet| by_owner(draft.state, cpus).into_keys().collect::<BTreeSet<JobId>>();
    let owners_of_lent = owners(&moves.lent);
    let owners_of_taken = owners(&moves.taken);
    let owners_of_kept = owners(&moves.kept);
    let owners_of_unwanted = owners(&moves.unwanted);
    let owners_of_unexchanged = owners(&moves.unexchanged);
    let lending_owners = owners(lent_after);
    let all =
        [&owners_of_lent, &owners_of_taken, &owners_of_kept, &owners_of_unwanted, &owners_of_unexchanged];
    let all: BTreeSet<&JobId> = all.into_iter().flatten().collect();
    for owner in all {
        let lending = &mut draft.state.lending;
        if owners_of_lent.contains(owner) {
            // Where one core was exchanged for another, the owner needs no more cores than before.
            lending.record_loan(owner, now);
        } else if owners_of_kept.contains(owner) {
            // A demand that comes and goes is damped, also if no core moves: this is a return and a new loan.
            lending.record_return(owner, lend_after, now);
            lending.record_loan(owner, now);
        } else if owners_of_taken.contains(owner) {
            lending.record_return(owner, lend_after, now);
        } else if owners_of_unexchanged.contains(owner) {
            // The next exchange follows after `lend_after`. The owner's demand has not changed.
            lending.record_loan(owner, now);
        } else if !lending_owners.contains(owner) {
            lending.record_end_of_borrower(owner);
        }
        draft.state.dirty.add_active(owner);
    }
}

/// Returns the PUs in `cpus` by the job that holds them. Leaves out the PUs that no job holds.
fn by_owner(state: &WardenState, cpus: &CpuSet) -> BTreeMap<JobId, CpuSet> {
    let mut owners: BTreeMap<JobId, CpuSet> = BTreeMap::new();
    for pu in cpus.iter() {
        if let Some(owner) = state.pool.holder(pu).and_then(|holder| holder.job()) {
            owners.entry(owner.clone()).or_default().insert(pu);
        }
    }
    owners
}

/// Returns the event about a new grant of the borrower `job` (a job that has no cores of its own). The grant has the
/// PUs `cpus`, which the job holds as `ownership` says. A frozen job counts as a job without PUs. `reason` is a text
/// for users. `lost_to_others` has lost PUs that other events report ([`report_loan_changes`]). `None` if other events
/// report the whole change: the ownership stays the same, and each PU that the grant gains or loses belongs to another
/// job or is in `lost_to_others`.
pub(super) fn grant_event(
    state: &WardenState,
    job: &Job,
    ownership: Ownership,
    cpus: &CpuSet,
    reason: &str,
    lost_to_others: &CpuSet,
) -> Option<Event> {
    // A frozen job keeps its last PUs in the grant, and they have no effect.
    let used = |ownership, cpus: &CpuSet| {
        if ownership == Ownership::Frozen { CpuSet::new() } else { cpus.clone() }
    };
    let cpus = used(ownership, cpus);
    let event = |kind, text: String| Some(Event::new(kind, text).with_job(&job.id).with_cpus(&cpus));
    let Some(before) = &job.grant else { return event(EventKind::Assigned, reason.to_owned()) };
    let cpus_before = used(before.ownership, &before.cpus);
    let lost = cpus_before.difference(&cpus).difference(lost_to_others);
    let changed = lost.union(&cpus.difference(&cpus_before));
    let is_of_owners =
        changed.iter().all(|pu| state.pool.holder(pu).is_some_and(|holder| holder.job().is_some()));
    if before.ownership == ownership && is_of_owners {
        return None;
    }
    let text = format!("{} instead of {}: {reason}", cpus_text(&cpus), cpus_text(&cpus_before));
    event(EventKind::Resized, text)
}

/// Returns the event that the borrower `id` (a job that borrows cores) has no process any more. `before` is the grant
/// of the job until then.
pub(super) fn no_process_event(id: &JobId, before: &Grant) -> Event {
    let returned = match before.ownership {
        Ownership::Borrowed => format!("it gives back {}, and ", cpus_text(&before.cpus)),
        _ => "it ".to_owned(),
    };
    let text = format!("it has no process: {returned}borrows cores again once it has one");
    Event::new(EventKind::Resized, text).with_job(id)
}
