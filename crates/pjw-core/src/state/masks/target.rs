//! The target mask: what the original mask of a thread becomes inside the grant of its job.

use crate::basics::CpuSet;
use crate::machine::topology::Topology;

/// Returns the affinity mask that a thread of a job should have.
///
/// - `grant` is the set of PUs that the job holds.
/// - `original` is the mask that the thread had before pjw changed it.
/// - `inherited` is the mask that the first processes of the job inherited from outside the job. `None` if
///   unknown.
///
/// The first rule that applies gives the result:
///
/// 1. The result is `grant` if `original` equals `inherited`, contains every PU of the grant, or contains
///    every PU of `topology`.
/// 2. The result is `original` if `original` is not empty and contains only PUs of the grant.
/// 3. The result is `grant` if the grant or `original` contains no PU of `topology`.
/// 4. Otherwise, each PU of `original` is replaced by a PU of the grant. The PUs of the machine and the PUs
///    of the grant are both numbered in hwloc's logical order. The k-th PU of the machine is replaced by the
///    k-th PU of the grant. If the grant has fewer than k PUs, the numbering of its PUs continues at its
///    first PU.
#[must_use]
pub fn target_mask(
    topology: &Topology,
    grant: &CpuSet,
    original: &CpuSet,
    inherited: Option<&CpuSet>,
) -> CpuSet {
    let is_unbound =
        inherited == Some(original) || grant.is_subset(original) || topology.cpus().is_subset(original);
    if is_unbound {
        return grant.clone();
    }
    if original.is_subset(grant) && !original.is_empty() {
        return original.clone();
    }
    translate(topology, grant, original)
}

/// The grant's part of the original mask, PU by PU: the k-th PU of the machine becomes the k-th PU of the grant. Both
/// are in the order of the topology, and the grant starts again at its end. So ranks that are bound to the PUs 0, 1,
/// 2, … do not share one core.
fn translate(topology: &Topology, grant: &CpuSet, original: &CpuSet) -> CpuSet {
    let pus = topology.sort_in_logical_order(grant);
    let ranks = topology.pus_in_logical_order().iter().enumerate().filter(|(_, pu)| original.contains(**pu));
    let translated: CpuSet =
        ranks.filter_map(|(rank, _)| pus.get(rank % pus.len().max(1))).copied().collect();
    if translated.is_empty() { grant.clone() } else { translated }
}
