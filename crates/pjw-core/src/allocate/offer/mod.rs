//! Makes offers: which cores a job gets for its request, by best fit on the topology.
//!
//! A core is *available* to a job if every online PU of the core is free or held by the job. A *hole* is the
//! set of available cores in one domain. The smallest domain that holds the request is chosen; among several,
//! the one with the smallest hole, then the smallest holes around it, so that large holes stay whole. If no
//! domain holds the request, the largest holes are taken first; an exact search (`fewest.rs`) corrects the
//! choice if fewer domains suffice. A resized job keeps its cores. On machines with several kinds of cores,
//! cores of one kind are more important than cores in one domain.
//!
//! Tests check these properties: grants are disjoint, have the exact size, contain no housekeeping PUs and
//! split no core (unless the policy allows it); they lie in one domain if one holds the request, else on the
//! fewest packages, then NUMA nodes, then L3s; the same history gives the same grants.

use crate::allocate::{choose::Allocator, reasons, tree::AllocationUnit};
use crate::basics::{CpuSet, cpus_text, cpus_with_is_are, cpus_with_was_were, prelude::*};
use crate::machine::{Device, Topology, TopologyLevel};
use crate::state::jobs::grant_counts::GrantCounts;
use crate::state::{PuHolder, PuOffer, PuPool};
use crate::terms::{CpuRequest, CpuUnit, JobId, JobRequest, Placement, Policy, Refusal};

#[cfg(test)]
mod properties;

#[cfg(test)]
mod tests;

/// Chooses the PUs (logical CPUs) for `request`, a request of the job `job`, and returns these PUs as an offer. Only
/// free PUs and the PUs that the job already holds are chosen. The PUs that the job already holds are preferred. Does
/// not change `pool` (the list of all PUs with their holders): the caller passes the offer to [`PuPool::commit`].
///
/// An earlier run of pjwd may have bound processes outside of jobs to some free PUs. If pjw can't find out whether it
/// did, these PUs are chosen only if the other PUs do not suffice
/// ([`MasksOfUnknownOrigin`](crate::state::unknown_masks::MasksOfUnknownOrigin)).
///
/// # Errors
/// If the request can't be served. The [`Refusal`] gives the reason, such as the requested and the free number of
/// cores.
pub fn allocate(
    job: &JobId,
    request: &JobRequest,
    pool: &PuPool,
    topology: &Topology,
    policy: &Policy,
) -> Result<PuOffer, Refusal> {
    allocate_for_groups(job, request, pool, topology, policy, &[])
}

/// Chooses the PUs (logical CPUs) for `request` as [`allocate`] does. If the request is for fewer PUs than the job
/// holds, `groups` determines which PUs the job keeps.
///
/// `groups` lists sets of PUs that the job holds. The PUs of one set lie in one L3 cache or one NUMA node, and threads
/// with a common address space run on them. The job keeps the PUs of whole sets first, beginning with the largest set
/// that fits into the request. If no whole set fits, the job keeps a part of the largest set.
///
/// # Errors
/// If the request can't be served, for the same reasons as in [`allocate`].
pub fn allocate_for_groups(
    job: &JobId,
    request: &JobRequest,
    pool: &PuPool,
    topology: &Topology,
    policy: &Policy,
    groups: &[CpuSet],
) -> Result<PuOffer, Refusal> {
    let present = pool.pus_of(job);
    let available = available_to(job, pool, topology, policy);
    let avoided = pool.avoided_cpus().difference(&present);
    let offer_among = |candidates: &CpuSet| {
        make_offer_for_groups(request, (&present, groups), candidates, pool, topology, policy)
    };
    let offer_with_avoided_last = |candidates: &CpuSet| {
        let preferred = candidates.difference(&avoided);
        if preferred != *candidates
            && let Ok(mut offer) = offer_among(&preferred)
        {
            let last = cpus_text(&candidates.intersection(&avoided));
            offer
                .reasons
                .push(format!("{last} would be last: processes with masks of unknown origin are there"));
            return Ok(offer);
        }
        offer_among(candidates)
    };
    let anywhere = offer_with_avoided_last(&available)?;
    let Some(device) = request.near_device.as_deref().and_then(|name| topology.device_by_name(name)) else {
        return Ok(anywhere);
    };
    let mut near = available.intersection(&device.local_cpus).union(&available.intersection(&present));
    if !anywhere.cpus.intersects(&avoided) {
        near = near.difference(&avoided);
    }
    Ok(prefer_offer_near_device(device, anywhere, offer_with_avoided_last(&near).ok()))
}

/// Chooses the PUs (logical CPUs) for `request`, a request of the job `job`, and returns these PUs as an offer. Only
/// those PUs of `cpus` are chosen that are free or that the job already holds. Does not change `pool` (the list of all
/// PUs with their holders): the caller grants the PUs of the offer.
///
/// Returns `None` if these PUs can't serve the request. For example, the request is for more cores. Or `cpus` has only
/// a part of a core, and the policy does not allow jobs to share a core.
#[must_use]
pub fn allocate_within(
    cpus: &CpuSet,
    job: &JobId,
    request: &JobRequest,
    pool: &PuPool,
    topology: &Topology,
    policy: &Policy,
) -> Option<PuOffer> {
    let available = available_to(job, pool, topology, policy).intersection(cpus);
    let offer = make_offer(request, &CpuSet::new(), &available, pool, topology, policy).ok()?;
    // A request by a list of PUs is served also if free PUs outside of `cpus` are in the list.
    offer.cpus.is_subset(&available).then_some(offer)
}

/// Returns a request for all PUs (logical CPUs) that the job `job` can have: the free PUs, and the PUs that the job
/// already holds. `unit` says whether the request counts whole cores or PUs. The number in the request is 0 if the job
/// can have no core or PU.
#[must_use]
pub fn request_for_all_available(
    job: &JobId,
    unit: CpuUnit,
    pool: &PuPool,
    topology: &Topology,
    policy: &Policy,
) -> CpuRequest {
    let available = available_to(job, pool, topology, policy);
    let amount = |unit| {
        Allocator::new(topology, unit, &available, &pool.online_cpus(), &pool.pus_of(job)).available_units()
    };
    match unit {
        CpuUnit::Core => CpuRequest::Cores(amount(AllocationUnit::Core)),
        CpuUnit::Pu if policy.share_smt => CpuRequest::Pus(amount(AllocationUnit::AnyPu)),
        CpuUnit::Pu => CpuRequest::Pus(amount(AllocationUnit::Pu)),
    }
}

/// The PUs that the job can have: those that are free, and those that it holds already.
fn available_to(job: &JobId, pool: &PuPool, topology: &Topology, policy: &Policy) -> CpuSet {
    let available = pool.free_cpus().union(&pool.pus_of(job)).intersection(&pool.online_cpus());
    if policy.share_smt {
        return available;
    }
    available.difference(&cores_with_offline_holder(job, pool, topology))
}

/// Returns the offer `near` of cores near `device`. Returns the offer `anywhere` if `near` is `None`. Adds a reason
/// to the returned offer: it says whether the cores are near the device.
fn prefer_offer_near_device(device: &Device, anywhere: PuOffer, near: Option<PuOffer>) -> PuOffer {
    let name = device.names.first().unwrap_or(&device.pci_address);
    let local = cpus_text(&device.local_cpus);
    match near {
        Some(mut offer) => {
            offer.reasons.push(format!("{name} was asked to be near, and is near {local}"));
            offer
        }
        None => {
            let mut offer = anywhere;
            offer
                .reasons
                .push(format!("{name} was asked to be near, but {local} have not enough free cores"));
            offer
        }
    }
}

/// Chooses the PUs (logical CPUs) for a request that the free cores can't serve, and returns these PUs as an offer. The
/// offer may contain PUs that other jobs hold. PUs are chosen in this order:
///
/// 1. Free PUs, and PUs that the job already holds.
/// 2. PUs that the fewest other jobs hold. `other_grants` has, for each PU, the number of other jobs that hold
///    the PU.
///
/// Does not change `pool` (the list of all PUs with their holders): the caller grants the PUs of the offer.
///
/// # Errors
/// If the request can't be served even with the PUs of all other jobs. Offline PUs and housekeeping PUs (PUs
/// that are reserved for the system) are never offered. The [`Refusal`] gives the reason.
pub fn allocate_shared(
    job: &JobId,
    request: &JobRequest,
    pool: &PuPool,
    other_grants: &GrantCounts,
    topology: &Topology,
    policy: &Policy,
) -> Result<PuOffer, Refusal> {
    let free_or_own = pool.free_cpus().union(&pool.pus_of(job)).intersection(&pool.online_cpus());
    let usable = pool.online_cpus().difference(&pool.housekeeping_cpus());
    let offer_among =
        |candidates: &CpuSet| make_offer(request, &free_or_own, candidates, pool, topology, policy);
    let least_shared =
        other_grants.cpus_by_min_count().find_map(|cpus| offer_among(&usable.difference(&cpus)).ok());
    let mut offer = least_shared.map_or_else(|| offer_among(&usable), Ok)?;
    let shared = offer.cpus.difference(&free_or_own);
    if !shared.is_empty() {
        offer.reasons = vec![format!(
            "{} other jobs' too, as on_exhausted = \"share\" allows",
            cpus_with_is_are(&shared)
        )];
        let unshared = offer.cpus.intersection(&free_or_own);
        if !unshared.is_empty() {
            offer.reasons.push(format!("{} still free, and first", cpus_with_was_were(&unshared)));
        }
        offer.second_best.clear();
    }
    Ok(offer)
}

/// Chooses the PUs for `request` as [`make_offer_for_groups`] does, for a job without groups.
fn make_offer(
    request: &JobRequest,
    present: &CpuSet,
    available: &CpuSet,
    pool: &PuPool,
    topology: &Topology,
    policy: &Policy,
) -> Result<PuOffer, Refusal> {
    make_offer_for_groups(request, (present, &[]), available, pool, topology, policy)
}

/// Chooses the PUs for `request` among the PUs `available`, and returns these PUs as an offer.
///
/// - `present` has the PUs that are preferred, such as the PUs that the job holds.
/// - `groups` has sets of PUs on which threads with a common address space run. If the job gets fewer PUs than it
///   holds, it keeps these sets first.
///
/// Returns a refusal if the request is for no cores or for more cores than are available. Also returns a refusal if
/// the request lists PUs and the job can't get one of them.
fn make_offer_for_groups(
    request: &JobRequest,
    (present, groups): (&CpuSet, &[CpuSet]),
    available: &CpuSet,
    pool: &PuPool,
    topology: &Topology,
    policy: &Policy,
) -> Result<PuOffer, Refusal> {
    let pool_change_count = pool.change_count();
    let (unit, requested) = match &request.cpu_request {
        CpuRequest::Exactly(cpus) => {
            check_listed_pus(cpus, available, pool, topology, policy)?;
            let reasons = vec![format!("{} asked for by number", cpus_with_was_were(cpus))];
            return Ok(PuOffer {
                cpus: cpus.clone(),
                reasons,
                second_best: String::new(),
                pool_change_count,
            });
        }
        CpuRequest::Cores(0) | CpuRequest::Pus(0) => return Err(Refusal::ZeroCores),
        CpuRequest::Cores(n) => (AllocationUnit::Core, *n),
        CpuRequest::Pus(n) if policy.share_smt => (AllocationUnit::AnyPu, *n),
        CpuRequest::Pus(n) => (AllocationUnit::Pu, *n),
    };
    let online = pool.online_cpus();
    let allocator = Allocator::new(topology, unit, available, &online, present).with_groups(groups);
    let Some(choice) = allocator.choose(requested, request.placement == Placement::Spread) else {
        let usable =
            Allocator::new(topology, unit, &online.difference(&pool.housekeeping_cpus()), &online, present);
        let counted = if unit == AllocationUnit::AnyPu { CpuUnit::Pu } else { CpuUnit::Core };
        return Err(not_enough_refusal(counted, requested, &usable, &allocator));
    };
    let (reasons, second_best) = reasons::choice_reasons(topology, unit, requested, &choice);
    Ok(PuOffer { cpus: choice.cpus, reasons, second_best, pool_change_count })
}

/// Returns all PUs of the cores that have an offline PU of another job than `job`. pjw does not grant these PUs,
/// because the other job uses the whole core again when the offline PU comes online.
fn cores_with_offline_holder(job: &JobId, pool: &PuPool, topology: &Topology) -> CpuSet {
    let online = pool.online_cpus();
    if topology.cpus().is_subset(&online) {
        return CpuSet::new();
    }
    let is_offline_with_other_holder = |(pu, holder): &(crate::basics::cpuset::Pu, &PuHolder)| {
        !online.contains(*pu) && matches!(holder, PuHolder::Job(other) if other != job)
    };
    pool.holders()
        .filter(is_offline_with_other_holder)
        .flat_map(|(pu, _)| topology.core_cpus(pu).iter().collect::<Vec<_>>())
        .collect()
}

/// Returns the refusal of a request for `units` units (cores or PUs). The refusal says that the request is larger
/// than the machine, or larger than the number of free units. `unit` is the unit that the refusal counts. `usable` is
/// the allocator for all PUs that jobs may have. `available` is the allocator for the PUs that this job can get now.
fn not_enough_refusal(
    unit: CpuUnit,
    units: u32,
    usable: &Allocator<'_>,
    available: &Allocator<'_>,
) -> Refusal {
    let (most, requested) = (usable.available_amount(), usable.needed_amount(units));
    if requested > most {
        return Refusal::MoreThanMachine { unit, requested, usable: most };
    }
    let (free, free_cpus) = available.available_unheld();
    Refusal::NotEnoughCores {
        unit,
        requested: available.needed_amount(units),
        free,
        free_cpus,
        held: available.available_amount().saturating_sub(free),
        max_cores_in_one_l3: available.largest_in_one_domain(TopologyLevel::L3),
    }
}

/// Checks that the job can get exactly the PUs in `cpus`, which the user listed. `available` has the PUs that are
/// free or that the job holds. Returns a refusal in each of these cases:
///
/// - The list is empty.
/// - A PU is offline, or is reserved for the system.
/// - Another job holds a PU.
/// - The list has only some online PUs of a core, and the policy does not allow to divide cores (`share_smt`).
fn check_listed_pus(
    cpus: &CpuSet,
    available: &CpuSet,
    pool: &PuPool,
    topology: &Topology,
    policy: &Policy,
) -> Result<(), Refusal> {
    if cpus.is_empty() {
        return Err(Refusal::EmptyCpuList);
    }
    let absent = cpus.difference(&pool.online_cpus());
    if !absent.is_empty() {
        return Err(Refusal::NoSuchPus { cpus: absent, online_cpus: pool.online_cpus() });
    }
    let reserved = cpus.intersection(&pool.housekeeping_cpus());
    if !reserved.is_empty() {
        return Err(Refusal::HousekeepingPus { cpus: reserved });
    }
    for pu in cpus.difference(available).iter() {
        if let Some(PuHolder::Job(holder)) = pool.holder(pu) {
            return Err(Refusal::HeldByOtherJob { pu, holder: holder.clone() });
        }
    }
    let online = pool.online_cpus();
    for pu in cpus.iter().filter(|_| !policy.share_smt) {
        let siblings = topology.core_cpus(pu).intersection(&online).difference(cpus);
        if !siblings.is_empty() {
            return Err(Refusal::SplitsCore { pu, siblings });
        }
    }
    Ok(())
}

/// The numbers of whole cores in the largest requests that the free cores can serve: inside one L3, inside one
/// NUMA node, inside one package, and on the whole machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LargestRequests {
    /// The largest number of cores that a new job can get inside one L3.
    pub l3: u32,
    /// The largest number of cores that a new job can get inside one NUMA node.
    pub numa_node: u32,
    /// The largest number of cores that a new job can get inside one package.
    pub package: u32,
    /// The largest number of cores that a new job can get on the whole machine.
    pub machine: u32,
}

/// Returns the numbers of whole cores in the largest requests that the free cores can serve: inside one L3,
/// inside one NUMA node, inside one package, and on the whole machine.
///
/// If the machine has no L3s, the value for the L3 equals the value for the NUMA node. If it has no NUMA nodes,
/// the value for the NUMA node equals the value for the package. If it has no packages, the value for the
/// package equals the value for the whole machine.
#[must_use]
pub fn largest_requests(pool: &PuPool, topology: &Topology) -> LargestRequests {
    let allocator = Allocator::new(
        topology,
        AllocationUnit::Core,
        &pool.free_cpus(),
        &pool.online_cpus(),
        &CpuSet::new(),
    );
    LargestRequests {
        l3: allocator.largest_in_one_domain(TopologyLevel::L3),
        numa_node: allocator.largest_in_one_domain(TopologyLevel::NumaNode),
        package: allocator.largest_in_one_domain(TopologyLevel::Package),
        machine: allocator.available_amount(),
    }
}
