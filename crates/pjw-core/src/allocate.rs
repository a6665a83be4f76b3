//! Which cores a job gets.

use crate::command::Refusal;
use crate::cpuset::CpuSet;
use crate::job::{JobId, Request};
use crate::policy::Policy;
use crate::pool::Pool;
use crate::topology::Topology;

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
    _job: &JobId,
    _request: &Request,
    _pool: &Pool,
    _topology: &Topology,
    _policy: &Policy,
) -> Result<Offer, Refusal> {
    todo!()
}

/// Chooses cores for a request that nothing free can serve, as if no job held any: the grants overlap.
///
/// # Errors
/// If the request can't be served by the whole machine.
pub fn share(
    _job: &JobId,
    _request: &Request,
    _pool: &Pool,
    _topology: &Topology,
    _policy: &Policy,
) -> Result<Offer, Refusal> {
    todo!()
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

/// What still fits where.
#[must_use]
pub fn fits(_pool: &Pool, _topology: &Topology) -> Fits {
    todo!()
}
