//! The target mask: what the original mask of a thread becomes inside the grant of its job.

use crate::basics::CpuSet;
use crate::machine::topology::Topology;

/// Returns the affinity mask that a thread should have inside `grant`, the PUs that its job holds. `original`
/// is the mask that the thread had before pjw changed it. `inherited` is the mask that the processes of the
/// job inherited from outside the job. If `original` equals `inherited`, or contains the whole grant, the
/// result is the grant. If `original` lies inside the grant, the result is `original`. Otherwise the result
/// is the translation of `original`: the k-th PU of the machine becomes the k-th PU of the grant.
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
    let pus = topology.sorted_pus(grant);
    let ranks = topology.pus_in_order().iter().enumerate().filter(|(_, pu)| original.contains(**pu));
    let translated: CpuSet =
        ranks.filter_map(|(rank, _)| pus.get(rank % pus.len().max(1))).copied().collect();
    if translated.is_empty() { grant.clone() } else { translated }
}
