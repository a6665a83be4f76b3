//! The cores that can be borrowed: which of them are whole, which their owners may lend, and which are about to be
//! returned.

use crate::basics::{CpuSet, Nanos, prelude::*};
use crate::machine::Topology;
use crate::state::WardenState;
use crate::terms::{Grant, GrantedBy, Job, JobId, Policy, PriorityClass};

/// A core of an owner or a free core, as the set of its online PUs.
pub(super) type Core = CpuSet;

/// Returns the cores of which all online PUs are in `cpus`, each as the set of its online PUs. `online` has the online
/// PUs of the machine.
pub(super) fn whole_cores(topology: &Topology, cpus: &CpuSet, online: &CpuSet) -> Vec<Core> {
    let usable = cpus.intersection(online);
    let is_whole = |core: &Core| {
        let pus = core.first().map(|pu| topology.core_cpus(pu).intersection(online));
        pus.as_ref() == Some(core)
    };
    topology.split_by_core(&usable).filter(is_whole).collect()
}

/// Whether the core belongs to a job whose cores may be lent.
pub(super) fn is_lent_by_owner(state: &WardenState, core: &Core) -> bool {
    let holders = core.iter().filter_map(|pu| state.pool.holder(pu)?.job());
    holders.filter_map(|id| state.jobs.get(id)).any(|job| lendable_grant(job).is_some())
}

/// Whether the return of the core is announced to its borrower: a grace period runs.
pub(super) fn is_announced(state: &WardenState, core: &Core) -> bool {
    core.iter().any(|pu| state.lending.is_return_announced(pu))
}

/// Returns the job that owns the core. `None` if no job does.
pub(super) fn owner_of_core<'a>(state: &'a WardenState, core: &Core) -> Option<&'a JobId> {
    core.iter().find_map(|pu| state.pool.holder(pu)?.job())
}

/// Whether an earlier run of the daemon lent the core, and this run has not sampled the owner of the core yet. The
/// earlier run may have announced the return of the core: announcements are not in the journal.
pub(super) fn was_lent_before_restart(state: &WardenState, core: &Core) -> bool {
    owner_of_core(state, core).is_some_and(|owner| state.lending.owner_state(owner).is_none())
}

/// Returns the grant of a job whose cores may be lent. Such a job is of the class guaranteed. pjw chose its cores,
/// which it shares with no other job and which are no isolated partition. `None` for any other job.
pub(super) fn lendable_grant(job: &Job) -> Option<&Grant> {
    let is_partition = job.request.as_ref().is_some_and(|request| request.isolated);
    let grant =
        job.active_grant().filter(|grant| grant.granted_by == GrantedBy::Warden && !grant.is_shared)?;
    (!is_partition && job.has_priority_class(PriorityClass::Guaranteed)).then_some(grant)
}

/// Returns the end of a grace period that begins at the time `begin`. Both are in ns since boot.
pub(super) fn end_of_grace_period(policy: &Policy, begin: Nanos) -> Nanos {
    let grace_ns = u64::try_from(policy.lending.revocation_grace.as_nanos()).unwrap_or(u64::MAX);
    Nanos(begin.0.saturating_add(grace_ns))
}
