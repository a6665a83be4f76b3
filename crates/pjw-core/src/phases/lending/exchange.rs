//! The exchange of lent cores for free cores that no borrower can use in addition.

use crate::basics::{CpuSet, Nanos, Pu, prelude::*};
use crate::phases::lending::borrower::{Borrower, borrower_with_fewest_cores};
use crate::phases::lending::cores::{Core, end_of_grace_period, owner_of_core, was_lent_before_restart};
use crate::state::WardenState;
use crate::terms::{JobId, Policy};

/// Exchanges lent cores of the borrowers for the cores `spare`, which are free and which no borrower can use in
/// addition. Each lent core goes back to its owner at the end of a grace period, or at once if there is none. Adds the
/// PUs with a grace period to `leaving`, each with its end, in ns since boot. Returns the PUs of all exchanged lent
/// cores. `now` is the present time, in ns since boot.
///
/// No core of an owner that lent one in the last `lend_after` is exchanged. So a free core that other jobs take and
/// leave all the time does not move a lent core more often than the owner's own demand does.
pub(super) fn exchange_lent_cores(
    state: &WardenState,
    policy: &Policy,
    now: Nanos,
    borrowers: &mut [Borrower<'_>],
    spare: Vec<Core>,
    leaving: &mut BTreeMap<Pu, Nanos>,
) -> CpuSet {
    let mut exchanged = CpuSet::new();
    let may_lend = |owner: &JobId| {
        let owner_state = state.lending.owner_state(owner);
        owner_state.is_some_and(|owner_state| owner_state.may_lend(policy.lending.lend_after, now))
    };
    let is_exchangeable = |core: &Core| owner_of_core(state, core).is_some_and(may_lend);
    let mut spare = spare.into_iter();
    for Borrower { cores, leaving: still_used, .. } in borrowers {
        for core in cores.iter_mut().filter(|core| is_exchangeable(core)) {
            let Some(free) = spare.next() else { return exchanged };
            let lent = core::mem::replace(core, free);
            exchanged = exchanged.union(&lent);
            let announced_end = lent.iter().find_map(|pu| state.lending.grace_period_end(pu));
            let end = announced_end.unwrap_or_else(|| end_of_grace_period(policy, now));
            if end > now {
                leaving.extend(lent.iter().map(|pu| (pu, end)));
                still_used.push(lent);
            }
        }
    }
    exchanged
}

/// Ends exchanges for the borrowers that can use more cores: such a borrower gets a free core of another one, which
/// keeps a lent core instead. The other one would have had the lent core until the end of a grace period. A borrower
/// that would slow down the owner keeps none. `still_lent` has the cores that their owners may still lend. Removes the
/// PUs that stay lent from `leaving`, which has the end of each grace period.
pub(super) fn undo_exchanges(
    state: &WardenState,
    still_lent: &BTreeSet<&Core>,
    borrowers: &mut [Borrower<'_>],
    leaving: &mut BTreeMap<Pu, Nanos>,
) {
    if leaving.is_empty() {
        return;
    }
    let free = state.pool.free_cpus();
    while let Some(receiver) = borrower_with_fewest_cores(borrowers, |_| true) {
        let mut others = borrowers.iter_mut().filter(|borrower| !borrower.would_slow_owners);
        let freed = others.find_map(|borrower| {
            let lent_index = borrower.leaving.iter().position(|core| still_lent.contains(core))?;
            let free_index = borrower.free_core_index(&free)?;
            let kept = borrower.leaving.remove(lent_index);
            leaving.retain(|pu, _| !kept.contains(*pu));
            Some(core::mem::replace(&mut borrower.cores[free_index], kept))
        });
        let Some(freed) = freed else { return };
        borrowers[receiver].cores.push(freed);
    }
}

/// Returns the PUs of earlier exchanges that their borrowers still have until the end of a grace period, and that their
/// owners do not need. After a restart, the exchanges of the earlier run are not known: each PU that was lent before
/// the restart then counts as exchanged. `still_lent` has the cores that the owners may still lend.
pub(super) fn running_exchanges(
    state: &WardenState,
    still_lent: &BTreeSet<&Core>,
    borrowers: &[Borrower<'_>],
) -> CpuSet {
    let leaving = borrowers.iter().flat_map(|borrower| &borrower.leaving);
    let exchanged = state.lending.exchanged_pus();
    let is_exchanged = |core: &Core| core.is_subset(exchanged) || was_lent_before_restart(state, core);
    let unneeded = leaving.filter(|&core| still_lent.contains(core) && is_exchanged(core));
    unneeded.fold(CpuSet::new(), |all, core| all.union(core))
}
