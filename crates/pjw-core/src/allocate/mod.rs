//! Which cores a job gets: best fit on the topology tree.
//!
//! Terms: a core is *available* to a job if every online PU of it is free or the job's own. A *hole* is what
//! is available in one domain. The smallest domain that holds the request wins; among those the one with the
//! smallest hole, at its own level and then at the levels around it, so that large holes stay whole; where
//! none holds it, the fewest domains: the largest hole first and a best fit for the rest. Where that touches
//! more domains than need be, an exact search finds the fewest (`fewest.rs`). A job that is resized keeps what
//! it has. On machines with several kinds of cores one kind comes before one domain.
//!
//! Properties, each with a test: grants are disjoint and exact in size, never housekeeping, never a split
//! core unless the policy says so, in one domain whenever one holds the request, on the fewest packages, then
//! NUMA nodes, then L3s that what is free allows (where nodes hold packages, or L3s nodes, the larger ones
//! come first), and the same for the same history. No combination of domains is tried exhaustively.

mod choose;
mod fewest;
mod tree;
mod words;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

use crate::command::Refusal;
use crate::cpuset::CpuSet;
use crate::explain::{are, named, were};
use crate::job::{Amount, JobId, Placement, Request};
use crate::policy::Policy;
use crate::pool::{Holder, Pool};
use crate::topology::fittings::Device;
use crate::topology::{Level, Topology};
use choose::Chooser;
use tree::Unit;

/// Cores that a job could have. Nothing is taken until [`Pool::commit`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The PUs.
    pub cpus: CpuSet,
    /// Why these: one sentence a line.
    pub because: Vec<String>,
    /// The second-best choice, in words; empty if there was no other.
    pub runner_up: String,
    /// The pool's version this offer was made for.
    pub version: u64,
}

/// Chooses cores for a request of `job`, whose present cores count as free and are kept where possible.
///
/// # Errors
/// If the request can't be served: what was asked, what is free, what would fit.
pub fn allocate(
    job: &JobId,
    request: &Request,
    pool: &Pool,
    topology: &Topology,
    policy: &Policy,
) -> Result<Offer, Refusal> {
    let present = pool.of(job);
    let mut available = pool.free().union(&present).intersection(&pool.online());
    if !policy.share_smt {
        available = available.difference(&half_held(job, pool, topology));
    }
    let anywhere = offer(request, &present, &available, pool, topology, policy)?;
    let Some(device) = request.near.as_deref().and_then(|name| topology.device(name)) else {
        return Ok(anywhere);
    };
    let near = available.intersection(&device.cpus).union(&available.intersection(&present));
    Ok(near_device(device, anywhere, offer(request, &present, &near, pool, topology, policy).ok()))
}

/// Cores near a device if those hold the whole request; else the best there are, and why not near.
fn near_device(device: &Device, anywhere: Offer, near: Option<Offer>) -> Offer {
    let name = device.names.first().unwrap_or(&device.address);
    let local = named(&device.cpus);
    match near {
        Some(mut offer) => {
            offer.because.push(format!("{name} was asked to be near, and is near {local}"));
            offer
        }
        None => {
            let mut offer = anywhere;
            offer
                .because
                .push(format!("{name} was asked to be near, but {local} have not enough free cores"));
            offer
        }
    }
}

/// Chooses cores for a request that nothing free can serve, as if no job held any: the grants overlap. What
/// is free, or the job's own, comes first, and then what the fewest of the `others`' grants have.
///
/// # Errors
/// If the request can't be served by the whole machine.
pub fn share<'a>(
    job: &JobId,
    request: &Request,
    pool: &Pool,
    others: impl IntoIterator<Item = &'a CpuSet>,
    topology: &Topology,
    policy: &Policy,
) -> Result<Offer, Refusal> {
    let free = pool.free().union(&pool.of(job)).intersection(&pool.online());
    let everything = pool.online().difference(&pool.housekeeping());
    let offer_of = |available: &CpuSet| offer(request, &free, available, pool, topology, policy);
    let crowds = crowds(others);
    let least_shared = crowds.iter().find_map(|crowd| offer_of(&everything.difference(crowd)).ok());
    let mut offer = least_shared.map_or_else(|| offer_of(&everything), Ok)?;
    let others = offer.cpus.difference(&free);
    if !others.is_empty() {
        offer.because = vec![format!("{} other jobs' too, as on_exhausted = \"share\" allows", are(&others))];
        let own = offer.cpus.intersection(&free);
        if !own.is_empty() {
            offer.because.push(format!("{} still free, and first", were(&own)));
        }
        offer.runner_up.clear();
    }
    Ok(offer)
}

/// The PUs in at least one of these sets, those in at least two, and so on.
fn crowds<'a>(sets: impl IntoIterator<Item = &'a CpuSet>) -> Vec<CpuSet> {
    let mut crowds: Vec<CpuSet> = Vec::new();
    for set in sets {
        let mut more = set.clone();
        for crowd in &mut crowds {
            let both = crowd.intersection(&more);
            *crowd = crowd.union(&more);
            more = both;
        }
        if !more.is_empty() {
            crowds.push(more);
        }
    }
    crowds
}

fn offer(
    request: &Request,
    present: &CpuSet,
    available: &CpuSet,
    pool: &Pool,
    topology: &Topology,
    policy: &Policy,
) -> Result<Offer, Refusal> {
    let version = pool.version();
    let (unit, asked) = match &request.amount {
        Amount::Exactly(cpus) => {
            check_explicit(cpus, available, pool, topology, policy)?;
            let because = vec![format!("{} asked for by number", were(cpus))];
            return Ok(Offer { cpus: cpus.clone(), because, runner_up: String::new(), version });
        }
        Amount::Cores(0) | Amount::Pus(0) => return Err(Refusal::ZeroCores),
        Amount::Cores(n) => (Unit::Core, *n),
        Amount::Pus(n) if policy.share_smt => (Unit::AnyPu, *n),
        Amount::Pus(n) => (Unit::Pu, *n),
    };
    let online = pool.online();
    let chooser = Chooser::new(topology, unit, available, &online, present);
    let Some(choice) = chooser.choose(asked, request.placement == Placement::Spread) else {
        let usable = Chooser::new(topology, unit, &online.difference(&pool.housekeeping()), &online, present);
        return Err(not_enough(asked, &usable, &chooser));
    };
    let (because, runner_up) = words::reasons(topology, unit, asked, &choice);
    Ok(Offer { cpus: choice.cpus, because, runner_up, version })
}

/// Cores of which another job holds a PU that is off now: when it comes back, the core is that job's again.
fn half_held(job: &JobId, pool: &Pool, topology: &Topology) -> CpuSet {
    let online = pool.online();
    if topology.cpus().is_subset(&online) {
        return CpuSet::new();
    }
    let others = |(pu, holder): &(crate::cpuset::Pu, &Holder)| {
        !online.contains(*pu) && matches!(holder, Holder::Job(other) if other != job)
    };
    pool.holders()
        .filter(others)
        .flat_map(|(pu, _)| topology.core_of(pu).iter().collect::<Vec<_>>())
        .collect()
}

fn not_enough(units: u32, usable: &Chooser<'_>, available: &Chooser<'_>) -> Refusal {
    let (most, asked) = (usable.cores(), usable.cores_for(units));
    if asked > most {
        return Refusal::MoreThanMachine { asked, usable: most };
    }
    Refusal::NotEnough {
        asked: available.cores_for(units),
        free: available.cores(),
        free_cpus: available.cpus(),
        largest_l3: available.largest(Level::L3),
    }
}

fn check_explicit(
    cpus: &CpuSet,
    available: &CpuSet,
    pool: &Pool,
    topology: &Topology,
    policy: &Policy,
) -> Result<(), Refusal> {
    if cpus.is_empty() {
        return Err(Refusal::EmptyList);
    }
    let absent = cpus.difference(&pool.online());
    if !absent.is_empty() {
        return Err(Refusal::NoSuchPus { cpus: absent, machine: pool.online() });
    }
    let kept = cpus.intersection(&pool.housekeeping());
    if !kept.is_empty() {
        return Err(Refusal::Housekeeping { cpus: kept });
    }
    for pu in cpus.difference(available).iter() {
        if let Some(Holder::Job(holder)) = pool.holder(pu) {
            return Err(Refusal::Held { pu, holder: holder.clone() });
        }
    }
    let online = pool.online();
    for pu in cpus.iter().filter(|_| !policy.share_smt) {
        let siblings = topology.core_of(pu).intersection(&online).difference(cpus);
        if !siblings.is_empty() {
            return Err(Refusal::SplitsCore { pu, siblings });
        }
    }
    Ok(())
}

/// The largest request, in whole free cores, that fits one domain of each level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fits {
    /// One L3.
    pub l3: u32,
    /// One NUMA node.
    pub numa_node: u32,
    /// One package.
    pub package: u32,
    /// The whole machine.
    pub machine: u32,
}

/// What still fits where. A level that the machine has not counts as the next larger one.
#[must_use]
pub fn fits(pool: &Pool, topology: &Topology) -> Fits {
    let chooser = Chooser::new(topology, Unit::Core, &pool.free(), &pool.online(), &CpuSet::new());
    Fits {
        l3: chooser.largest(Level::L3),
        numa_node: chooser.largest(Level::NumaNode),
        package: chooser.largest(Level::Package),
        machine: chooser.cores(),
    }
}
