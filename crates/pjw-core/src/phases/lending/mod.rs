//! Lending: which cores the jobs of the class besteffort borrow, of the free cores and of those that their owners leave
//! idle.
//!
//! The rule, with its numbers in [`crate::terms::LendingPolicy`], is in docs/adr/0023-lending.md. `decide_loans` is
//! the decision: it reads the state and changes nothing. `update_loans` carries it out: it changes the grants of the
//! borrowers and the entries of borrowers in the pool, and reports each change.

mod borrowed_grant;
mod borrower;
mod cores;
mod events;
mod exchange;
mod permission;
pub(crate) mod squeeze;

use crate::basics::{CpuSet, Nanos, Pu, prelude::*};
use crate::phases::cpusets::moves::why_unmovable;
use crate::phases::draft::CycleDraft;
use crate::phases::lending::borrowed_grant::{set_borrowed_grant, starved_grant};
use crate::phases::lending::borrower::{Borrower, borrower_with_fewest_cores};
use crate::phases::lending::cores::{Core, is_announced, lendable_grant, whole_cores};
use crate::phases::lending::exchange::{exchange_lent_cores, running_exchanges, undo_exchanges};
use crate::state::lending::OwnerLendingState;
use crate::state::{Member, WardenState};
use crate::terms::{
    CpusetHierarchy, DaemonMode, EnforcementMethod, IdlePrioritySupport, Job, JobId, Ownership, Policy,
    PriorityClass,
};

/// The decision about all borrowers (jobs of the class besteffort, which run on free cores and on lent cores).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct LoanDecision {
    /// The PUs that each borrower is to have. A borrower that gets none has an empty set.
    shares: BTreeMap<JobId, CpuSet>,
    /// The PUs in `shares` that their borrower must return later, each with the end of its grace period, in ns since
    /// boot.
    leaving: BTreeMap<Pu, Nanos>,
    /// The lent PUs that go back to their owners although the owners do not need them, because no borrower can use
    /// them.
    unwanted: CpuSet,
    /// The lent PUs that go back to their owners, or are in `leaving`, because their borrower has a free core instead.
    /// A PU in `leaving` that its owner needs meanwhile is not among them.
    exchanged: CpuSet,
}

/// An owner (a job of the class guaranteed, whose idle cores pjw may lend), with the result of the decision about its
/// cores.
struct Owner {
    /// The number of its cores that could be lent at all: whole cores that it shares with no other job.
    core_count: u32,
    /// The cores that may stay lent, and those that the decision lends in addition.
    lent: Vec<Core>,
    /// The cores that may be lent in addition, best first.
    lendable: Vec<Core>,
}

/// Returns whether a decision at the time `now` (in ns since boot) would change the loans of cores: which job borrows
/// which core, or which borrowed PUs (logical CPUs) are in the grace period before pjw takes them back. Only jobs of
/// the class besteffort borrow cores. They borrow cores that are free or that other jobs leave idle. False while
/// `policy` has the mode `observe`: the loans then stay as they are.
///
/// The daemon calls this function after it has measured how many cores each job uses. If the result is true, the daemon
/// makes the decision ([`crate::reconcile::reconcile`]).
#[must_use]
pub fn would_change_loans(state: &WardenState, policy: &Policy, now: Nanos) -> bool {
    if !state.jobs.has_borrowers() || policy.mode != DaemonMode::Enforce {
        return false;
    }
    let decision = decide_loans(state, policy, now);
    let borrowed = state.pool.borrowed_pus().map(|(pu, _)| pu);
    let leaving: BTreeSet<Pu> = borrowed.filter(|pu| state.lending.is_return_announced(*pu)).collect();
    !decision.leaving.keys().eq(&leaving)
        || decision.shares.iter().any(|(job, cpus)| state.pool.borrowed_by(job) != *cpus)
}

/// Returns the reason why pjw does not lend the idle cores of a job to other jobs on this machine. The reason is a
/// text for users. Returns `None` if pjw lends idle cores. `policy` has the settings of lending, and says which
/// cpuset features the machine has.
#[must_use]
pub fn reason_not_to_lend(policy: &Policy) -> Option<String> {
    if !policy.lending.enabled {
        return Some("the configuration says lending.enabled = false".to_owned());
    }
    if policy.mode == DaemonMode::Observe {
        return Some("the configuration says mode = \"observe\"".to_owned());
    }
    if policy.enforcement == EnforcementMethod::Affinity {
        return Some(
            "idle priority needs a cgroup, and the configuration says enforcement = \"affinity\"".to_owned(),
        );
    }
    if let CpusetHierarchy::Unavailable { why } = &policy.cpuset_support.hierarchy {
        return Some(why.clone());
    }
    match &policy.cpuset_support.idle_priority {
        IdlePrioritySupport::Available => None,
        IdlePrioritySupport::Unavailable { why } => Some(why.clone()),
    }
}

/// Returns the reason why no job of the class besteffort would take one more core of another job now: none has a
/// process, each would slow down the owner of the core, or each has as many cores as it wants. The reason is a text for
/// users. Returns `None` if a job would take one.
pub(crate) fn reason_not_to_borrow(state: &WardenState, policy: &Policy) -> Option<&'static str> {
    let mut borrowers = present_borrowers(state, policy);
    borrowers.retain(|borrower| borrower.max_count > 0);
    if borrowers.is_empty() {
        return Some("no job of the class besteffort has a process");
    }
    if giver_of_free_core(state, &borrowers).is_some() {
        return None;
    }
    borrowers.retain(|borrower| !borrower.would_slow_owners);
    if borrowers.is_empty() {
        return Some("each job of the class besteffort would slow it down (pjwctl explain JOB says why)");
    }
    let is_satisfied = |borrower: &Borrower<'_>| !borrower.can_use_more();
    borrowers.iter().all(is_satisfied).then_some("each job of the class besteffort has as many as it wants")
}

/// Returns whether the processes of the new job `job` (of the class besteffort) would be frozen if the job were made at
/// the time `now` (in ns since boot): it could borrow no core then. `job` has no grant, and is not yet in `state`. Does
/// not check whether pjw can move the processes into the cpuset of the job. Only processes in this cpuset are frozen.
pub(crate) fn would_freeze_new_job(state: &WardenState, policy: &Policy, job: &Job, now: Nanos) -> bool {
    let is_frozen = starved_grant(state, policy, job).is_some_and(|grant| grant.0 == Ownership::Frozen);
    if !is_frozen {
        return false;
    }
    let mut borrowers = present_borrowers(state, policy);
    // Of two borrowers without a core, the one with the lower id is served first.
    let index = borrowers.partition_point(|borrower| *borrower.id < job.id);
    borrowers.insert(index, Borrower::of_new_job(&state.topology, job));
    let decision = decide_loans_to(borrowers, state, policy, now);
    decision.shares.get(&job.id).is_none_or(CpuSet::is_empty)
}

/// Decides which cores each borrower (a job of the class besteffort) gets, and changes the grants of the borrowers. The
/// cores are free cores, and cores that guaranteed jobs leave idle. A second call in the same cycle changes nothing.
/// The grants of the borrowers stay unchanged if the mode is not `enforce`. They change also while pjwd can't write its
/// journal, because a loan needs no record ([`crate::phases::cpusets::needs_record`]).
pub(crate) fn update_loans(draft: &mut CycleDraft<'_>) {
    let state = &mut *draft.state;
    // An owner without cores is not sampled, so what it used before says nothing about its use of the next ones.
    let is_owner =
        |job: &Job| job.has_priority_class(PriorityClass::Guaranteed) && job.active_grant().is_some();
    state.lending.retain_owners(|id| state.jobs.get(id).is_some_and(is_owner));
    if !state.jobs.has_borrowers() || reason_not_to_lend(draft.policy).is_some() {
        state.lending.clear_core_use();
    }
    if !state.jobs.has_borrowers() || draft.policy.mode != DaemonMode::Enforce {
        // The borrower may have ended in a grace period.
        state.lending.set_pus_to_return(BTreeMap::new(), &CpuSet::new());
        drop(state.lending.take_pus_left_by_borrowers());
        return;
    }
    let now = draft.now.since_boot;
    let unfit = unfit_borrowers(draft.state, draft.policy);
    draft.state.lending.set_unfit_borrowers(unfit);
    let LoanDecision { shares, leaving, unwanted, exchanged } = decide_loans(draft.state, draft.policy, now);
    let lost_to_others = events::report_loan_changes(draft, &shares, &leaving, &unwanted, &exchanged);
    // A PU may pass from one borrower to another: all leave before any gets one.
    for id in shares.keys() {
        let kept = draft.state.pool.borrowed_by(id).intersection(&shares[id]);
        draft.state.pool.set_borrowed(id, &kept);
    }
    for (id, cpus) in &shares {
        draft.state.pool.set_borrowed(id, cpus);
        set_borrowed_grant(draft, id, cpus, &lost_to_others);
    }
    draft.state.lending.set_pus_to_return(leaving, &exchanged);
}

/// Decides which cores each borrower (a job of the class besteffort) gets, and which lent cores it must return to their
/// owners. Changes nothing. `now` is the present time, in ns since boot. The rules, in this order:
///
/// 1. A borrower keeps the cores that are still free, or that their owner may still lend. A core that the owner needs
///    stays with the borrower until the end of a grace period. If the borrower can use fewer cores than it has, it
///    keeps free cores first.
/// 2. The other free cores are given to the borrowers one by one. Each goes to the borrower that has the fewest cores
///    and can use one more.
/// 3. If free cores are left over, because no borrower can use more cores, they replace lent cores of the borrowers.
///    The replaced lent cores go back to their owners ([`exchange::exchange_lent_cores`]). If another borrower can use
///    such a free core before the grace period ends, it gets the core, and the lent core stays lent.
/// 4. The cores that owners can lend in addition are given to the borrowers one by one, as in rule 2. A borrower that
///    would slow down the owners gets a free core of another one instead, and the other one gets the lent core
///    ([`lend_cores`]).
/// 5. Cores are moved from borrowers with many cores to borrowers with few. A borrower that would slow down the owners
///    gets free cores only ([`balance_cores`]).
fn decide_loans(state: &WardenState, policy: &Policy, now: Nanos) -> LoanDecision {
    decide_loans_to(present_borrowers(state, policy), state, policy, now)
}

/// Returns the borrowers with the cores that they have now, in ascending order of their ids.
fn present_borrowers<'a>(state: &'a WardenState, policy: &Policy) -> Vec<Borrower<'a>> {
    let jobs = state.jobs.borrowers().filter(|job| !job.was_released);
    jobs.map(|job| Borrower::new(state, policy, job)).collect()
}

/// Decides which cores each of `borrowers` gets, by the rules of [`decide_loans`].
fn decide_loans_to(
    mut borrowers: Vec<Borrower<'_>>,
    state: &WardenState,
    policy: &Policy,
    now: Nanos,
) -> LoanDecision {
    let online = state.pool.online_cpus();
    let mut spare = whole_cores(&state.topology, &state.pool.free_cpus(), &online);
    let owners = state.jobs.guaranteed_jobs().filter_map(|job| lending_owner(state, policy, job, now));
    let mut owners: Vec<Owner> = owners.collect();
    let mut leaving = BTreeMap::new();
    for borrower in &mut borrowers {
        let lent = owners.iter().filter(|_| !borrower.would_slow_owners).flat_map(|owner| &owner.lent);
        let keepable: BTreeSet<&Core> = spare.iter().chain(lent).collect();
        leaving.extend(borrower.keep_cores(state, policy, &keepable, now));
    }
    let taken: BTreeSet<&Core> = borrowers.iter().flat_map(|borrower| &borrower.cores).collect();
    spare.retain(|core| !taken.contains(core));
    let unused = offer_unused_cores(&mut owners, &borrowers);
    // The borrower with the fewest cores is served first, with free cores before cores of owners.
    while !spare.is_empty()
        && let Some(receiver) = borrower_with_fewest_cores(&borrowers, |_| true)
    {
        borrowers[receiver].cores.push(spare.remove(0));
    }
    let still_lent: BTreeSet<&Core> = owners.iter().flat_map(|owner| &owner.lent).collect();
    undo_exchanges(state, &still_lent, &mut borrowers, &mut leaving);
    let running = running_exchanges(state, &still_lent, &borrowers);
    let begun = exchange_lent_cores(state, policy, now, &mut borrowers, spare, &mut leaving);
    let exchanged = running.union(&begun);
    lend_cores(state, &mut owners, &mut borrowers);
    balance_cores(state, &mut borrowers);
    let shares = borrowers.into_iter().map(|borrower| {
        let cores = borrower.cores.iter().chain(&borrower.leaving);
        (borrower.id.clone(), cores.fold(CpuSet::new(), |all, core| all.union(core)))
    });
    let shares: BTreeMap<JobId, CpuSet> = shares.collect();
    let unneeded = unused.union(&exchanged);
    let unwanted = shares.values().fold(unneeded, |unwanted, cpus| unwanted.difference(cpus));
    LoanDecision { shares, leaving, unwanted, exchanged }
}

/// Offers lent cores that no borrower uses any more to other borrowers. In each owner, moves these cores from `lent` to
/// the front of `lendable`. Returns the PUs of these cores. The borrower of such a core ended, has no process, wants
/// fewer cores, or would slow down the owners.
fn offer_unused_cores(owners: &mut [Owner], borrowers: &[Borrower<'_>]) -> CpuSet {
    let mut all_unused = CpuSet::new();
    let held = borrowers.iter().flat_map(|borrower| borrower.cores.iter().chain(&borrower.leaving));
    let held: BTreeSet<&Core> = held.collect();
    for owner in owners {
        let (lent, unused): (Vec<Core>, Vec<Core>) =
            core::mem::take(&mut owner.lent).into_iter().partition(|core| held.contains(core));
        owner.lent = lent;
        all_unused = unused.iter().fold(all_unused, |all, core| all.union(core));
        owner.lendable.splice(0..0, unused);
    }
    all_unused
}

/// Returns the borrowers of which a process can't run at idle priority, so that it would slow down the owner of a lent
/// core. The cpuset of a borrower gives its processes this priority. It does not if the kernel or systemd refused the
/// cpuset, or if a process can't be moved into the cpuset. Empty if pjw lends no cores, or if there is no job whose
/// cores it could lend.
fn unfit_borrowers(state: &WardenState, policy: &Policy) -> BTreeSet<JobId> {
    if reason_not_to_lend(policy).is_some() || state.jobs.guaranteed_jobs().next().is_none() {
        return BTreeSet::new();
    }
    let stays_outside =
        |member: &Member| !state.is_in_job_cpuset(member) && why_unmovable(state, policy, member).is_some();
    let is_unfit =
        |id: &JobId| state.cpusets.cpuset_error(id).is_some() || state.members_of(id).any(stays_outside);
    state.jobs.borrowers().map(|job| job.id.clone()).filter(is_unfit).collect()
}

/// Returns the job `job` as an owner: its cores that stay lent, and those that may be lent in addition. Both lists are
/// empty if pjw lends no cores at present. `None` if the cores of this job may not be lent. `now` is the present time,
/// in ns since boot. Lent cores that the owner needs are in neither list.
fn lending_owner(state: &WardenState, policy: &Policy, job: &Job, now: Nanos) -> Option<Owner> {
    let grant = lendable_grant(job)?;
    // Threads of a job that shares a core count as the owner's use of the core, if they are bound to it. The core would
    // be lent and taken back without end.
    let own = grant.cpus.difference(&state.jobs.shared_cpus());
    let cores = whole_cores(&state.topology, &own, &state.pool.online_cpus());
    let core_count = u32::try_from(cores.len()).unwrap_or(u32::MAX);
    let was_left = |pu: Pu| state.lending.was_left_by_borrower(&job.id, pu);
    let is_lent = |core: &Core| core.iter().any(|pu| state.pool.borrower(pu).is_some() || was_left(pu));
    let (mut lent, mut idle): (Vec<Core>, Vec<Core>) = cores.into_iter().partition(is_lent);
    if reason_not_to_lend(policy).is_some() {
        return Some(Owner { core_count, lent: Vec::new(), lendable: Vec::new() });
    }
    let owner_state = state.lending.owner_state(&job.id);
    // A number that the owner gave replaces the estimate: the buffer is then a part of that number.
    let wanted = job.wanted_core_count(&state.topology);
    let buffer = if wanted.is_some() { 0 } else { policy.lending.buffer_cores };
    let may_be_lent = |used: u32| core_count.saturating_sub(used).saturating_sub(buffer) as usize;
    let used_now = wanted.or_else(|| owner_state?.used_core_count());
    let runs_on = owner_state.map(OwnerLendingState::used_lent_cpus).unwrap_or_default();
    // The cores on which the owner runs come back first, and those of borrowers that ended. Then come those whose
    // return is announced: the grace period of another core would end later.
    let comes_first = |core: &Core| core.intersects(&runs_on) || core.iter().any(was_left);
    lent.sort_by_key(|core| (comes_first(core), is_announced(state, core)));
    // After a restart, an owner that gave no number gets no lent core back before its first sample.
    if let Some(used) = used_now {
        lent.truncate(may_be_lent(used));
    }
    let lend_after = policy.lending.lend_after;
    // The number of cores that the owner has left idle for long enough. `None` if that is not known yet.
    let idle_long_enough = owner_state.and_then(|owner_state| {
        let busy = owner_state.max_busy_cores(owner_state.required_idle_time(lend_after, now), now)?;
        Some(may_be_lent(wanted.unwrap_or(busy)))
    });
    // A core whose return is announced stays lent only if it could be lent anew: the owner has left it idle for long
    // enough.
    let (mut lent, announced): (Vec<Core>, Vec<Core>) =
        lent.into_iter().partition(|core| !is_announced(state, core));
    let kept = idle_long_enough.unwrap_or(0).saturating_sub(lent.len());
    lent.extend(announced.into_iter().take(kept));
    let may_lend = owner_state.is_some_and(|owner_state| owner_state.may_lend(lend_after, now));
    let lendable = idle_long_enough.filter(|_| may_lend).unwrap_or(0);
    let more = lendable.saturating_sub(lent.len()).min(policy.lending.cores_at_once as usize);
    let displaced = lent.iter().filter(|core| may_lend && core.intersects(&runs_on)).count();
    if more + displaced > 0 {
        let pinned = pinned_pus(state, &job.id);
        idle.retain(|core| !core.intersects(&runs_on));
        idle.reverse();
        // Cores with pinned threads are lent last. If such a core is lent, its threads are pinned to other cores.
        idle.sort_by_key(|core| core.intersects(&pinned));
    }
    // The owner runs on a lent core while it leaves another one idle: the borrower gets the idle one instead.
    let exchanged = displaced.min(idle.len().saturating_sub(more));
    lent.sort_by_key(|core| core.intersects(&runs_on));
    lent.truncate(lent.len() - exchanged);
    idle.truncate(more + exchanged);
    Some(Owner { core_count, lent, lendable: idle })
}

/// Returns the PUs to which pjw has pinned threads of the job: such a thread may run on this one PU only.
fn pinned_pus(state: &WardenState, job: &JobId) -> CpuSet {
    let pins = state
        .members_of(job)
        .flat_map(|member| member.threads.keys().filter_map(move |&tid| state.pinned_pu_of(member, tid)));
    pins.collect()
}

/// Gives the cores that owners can lend in addition to the borrowers one by one. Each goes to the borrower that has the
/// fewest cores and can use one more. If this borrower would slow down the owner, it gets a free core of another
/// borrower, and the other one gets the lent core instead.
fn lend_cores(state: &WardenState, owners: &mut [Owner], borrowers: &mut [Borrower<'_>]) {
    while owners.iter().any(|owner| !owner.lendable.is_empty()) {
        let giver = giver_of_free_core(state, borrowers);
        let may_get = |borrower: &Borrower<'_>| {
            may_get_lent_core(state, borrower) || (borrower.would_slow_owners && giver.is_some())
        };
        let Some(receiver) = borrower_with_fewest_cores(borrowers, may_get) else { return };
        let Some(lent) = lend_next_core(owners) else { return };
        let gained = match giver.filter(|_| borrowers[receiver].would_slow_owners) {
            Some((giver, index)) => core::mem::replace(&mut borrowers[giver].cores[index], lent),
            None => lent,
        };
        borrowers[receiver].cores.push(gained);
    }
}

/// Returns a borrower that can have a lent core instead of a free core that it has: its index, and the index of the
/// free core in its cores. `None` if there is none, or if no borrower needs a free core: none that would slow down the
/// owners of lent cores can use more cores.
fn giver_of_free_core(state: &WardenState, borrowers: &[Borrower<'_>]) -> Option<(usize, usize)> {
    if !borrowers.iter().any(|borrower| borrower.would_slow_owners && borrower.can_use_more()) {
        return None;
    }
    let free = state.pool.free_cpus();
    let mut givers = borrowers.iter().enumerate().filter(|(_, borrower)| may_get_lent_core(state, borrower));
    givers.find_map(|(index, borrower)| Some((index, borrower.free_core_index(&free)?)))
}

/// Returns whether a borrower may get a core of an owner. All its processes must be in its cpuset, in which they run at
/// idle priority. A borrower without cores may get one, because pjw moves its processes into the cpuset when it gets
/// its first core. False if the borrower would slow down the owners.
fn may_get_lent_core(state: &WardenState, borrower: &Borrower<'_>) -> bool {
    let is_first = borrower.cores.is_empty();
    !borrower.would_slow_owners
        && (is_first || state.members_of(borrower.id).all(|member| state.is_in_job_cpuset(member)))
}

/// Chooses the next core to lend, and moves it from the lendable cores of its owner to the lent ones. The owner is that
/// of which the smallest share of cores is lent. `None` if no owner has a core to lend.
fn lend_next_core(owners: &mut [Owner]) -> Option<Core> {
    let share = |owner: &&mut Owner| (owner.lent.len() * 1000) / (owner.core_count.max(1) as usize);
    let owner = owners.iter_mut().filter(|owner| !owner.lendable.is_empty()).min_by_key(share)?;
    let core = owner.lendable.remove(0);
    owner.lent.push(core.clone());
    Some(core)
}

/// Moves cores one by one from the borrower with the most cores to a borrower with few cores, which can use more. Ends
/// when these two differ by at most one core, or if no borrower can get a core. A borrower that would slow down the
/// owners of lent cores gets free cores only, from the borrower with the most cores among those that have a free one.
fn balance_cores(state: &WardenState, borrowers: &mut [Borrower<'_>]) {
    let free = state.pool.free_cpus();
    let may_get = |borrower: &Borrower<'_>| may_get_lent_core(state, borrower);
    let last_core = |borrower: &Borrower<'_>| borrower.cores.len().checked_sub(1);
    let free_core = |borrower: &Borrower<'_>| borrower.free_core_index(&free);
    while let Some((giver, index, receiver)) = uneven_pair(borrowers, may_get, last_core)
        .or_else(|| uneven_pair(borrowers, |borrower| borrower.would_slow_owners, free_core))
    {
        let moved = borrowers[giver].cores.remove(index);
        borrowers[receiver].cores.push(moved);
    }
}

/// Returns two borrowers that differ by two cores or more: the index of the one with the most cores, the index of a
/// core that it can give up, and the index of the one with the fewest cores. The first one is among those for which
/// `core_to_give` returns such a core. The second one is among those that can use more cores and for which `may_get` is
/// true. `None` if there are no such two.
fn uneven_pair(
    borrowers: &[Borrower<'_>],
    may_get: impl Fn(&Borrower<'_>) -> bool,
    core_to_give: impl Fn(&Borrower<'_>) -> Option<usize>,
) -> Option<(usize, usize, usize)> {
    let receiver = borrower_with_fewest_cores(borrowers, may_get)?;
    let core_count = |index: usize| borrowers[index].cores.len();
    let givers = (0..borrowers.len()).filter_map(|index| Some((index, core_to_give(&borrowers[index])?)));
    let (giver, core_index) = givers.max_by_key(|&(index, _)| core_count(index))?;
    (core_count(giver) >= core_count(receiver) + 2).then_some((giver, core_index, receiver))
}
