//! Which cores a job gets: best fit on the topology tree.
//!
//! Terms: a core is *available* to a job if every online PU of it is free or the job's own. A *hole* is what is
//! available in one domain. The smallest domain that holds the request wins; among those the one with the
//! smallest hole, at its own level and then at the levels above, so that large holes stay whole; where none
//! holds it, the fewest domains, the largest hole first and a best fit for the rest.
//!
//! Properties, each with a test of that name: grants are disjoint and exact in size, never housekeeping, never
//! a split core unless the policy says so, in one domain whenever one holds the request, and the same for the
//! same history. No combination of domains is tried exhaustively: one decision sorts the cores a few times.

mod choose;
mod words;

#[cfg(test)]
mod tests;

use crate::command::Refusal;
use crate::cpuset::CpuSet;
use crate::job::{Amount, JobId, Placement, Request};
use crate::policy::Policy;
use crate::pool::{Holder, Pool};
use crate::topology::{Level, Topology};
use choose::Chooser;

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
    let available = pool.free().union(&present).intersection(&pool.online());
    offer(request, &present, &available, pool, topology, policy)
}

/// Chooses cores for a request that nothing free can serve, as if no job held any: the grants overlap.
///
/// # Errors
/// If the request can't be served by the whole machine.
pub fn share(
    job: &JobId,
    request: &Request,
    pool: &Pool,
    topology: &Topology,
    policy: &Policy,
) -> Result<Offer, Refusal> {
    let free = pool.free().union(&pool.of(job));
    let everything = pool.online().difference(&pool.housekeeping());
    let mut offer = offer(request, &free.intersection(&everything), &everything, pool, topology, policy)?;
    offer.because.push(format!("{} of these belong to other jobs too", offer.cpus.difference(&free)));
    Ok(offer)
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
    if let Amount::Exactly(cpus) = &request.amount {
        check_explicit(cpus, available, pool, topology, policy)?;
        let because = vec![format!("{cpus} were asked for by number")];
        return Ok(Offer { cpus: cpus.clone(), because, runner_up: String::new(), version });
    }
    let chooser = Chooser::new(topology, available, &pool.online());
    let spread = request.placement == Placement::Spread;
    let usable = Chooser::new(topology, &pool.online().difference(&pool.housekeeping()), &pool.online());
    let cpus = match request.amount {
        Amount::Pus(0) | Amount::Cores(0) => return Err(Refusal::ZeroCores),
        Amount::Pus(n) if policy.share_smt => chooser
            .pus(n, present)
            .ok_or_else(|| not_enough(n.div_ceil(usable.pus_per_core()), &usable, &chooser))?,
        Amount::Pus(n) => {
            let cores = chooser.cores_for_pus(n);
            let cores =
                cores.ok_or_else(|| not_enough(n.div_ceil(usable.pus_per_core()), &usable, &chooser))?;
            chooser.cores(cores, present, spread).ok_or_else(|| not_enough(cores, &usable, &chooser))?
        }
        Amount::Cores(n) => {
            chooser.cores(n, present, spread).ok_or_else(|| not_enough(n, &usable, &chooser))?
        }
        Amount::Exactly(_) => return Err(Refusal::EmptyList),
    };
    let (because, runner_up) = words::reasons(topology, &chooser, &cpus, present, spread);
    Ok(Offer { cpus, because, runner_up, version })
}

fn not_enough(asked: u32, usable: &Chooser<'_>, chooser: &Chooser<'_>) -> Refusal {
    let most = usable.count();
    if asked > most {
        return Refusal::MoreThanMachine { asked, usable: most };
    }
    Refusal::NotEnough {
        asked,
        free: chooser.count(),
        free_cpus: chooser.all(),
        largest_l3: chooser.largest(Level::L3),
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
    for core in topology.cores().iter().filter(|_| !policy.share_smt) {
        let siblings = core.pus.intersection(&pool.online()).difference(cpus);
        if let Some(pu) = core.pus.intersection(cpus).first()
            && !siblings.is_empty()
        {
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

/// What still fits where. A machine that has no domain of a level is one domain.
#[must_use]
pub fn fits(pool: &Pool, topology: &Topology) -> Fits {
    let chooser = Chooser::new(topology, &pool.free(), &pool.online());
    Fits {
        l3: chooser.largest(Level::L3),
        numa_node: chooser.largest(Level::NumaNode),
        package: chooser.largest(Level::Package),
        machine: chooser.count(),
    }
}
