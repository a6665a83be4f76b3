//! The target mask: what the original mask of a thread becomes inside the grant of its job.

use crate::basics::CpuSet;
use crate::machine::topology::Topology;

/// Returns the affinity mask that a thread of a job should have.
///
/// - `topology` has all PUs (logical CPUs) of the machine.
/// - `granted_cpus` is the set of PUs that the job holds.
/// - `original_mask` is the mask that the thread had before pjw changed it.
/// - `inherited_mask` is the mask that the first processes of the job inherited from outside the job. `None` if
///   unknown.
///
/// The first rule that applies gives the result:
///
/// 1. The result is `granted_cpus` if `original_mask` equals `inherited_mask`, contains all of `granted_cpus`, or
///    contains every PU of the machine.
/// 2. The result is `original_mask` if it is not empty and contains only PUs of `granted_cpus`.
/// 3. The result is `granted_cpus` if `granted_cpus` or `original_mask` contains no PU of the machine.
/// 4. Otherwise, each PU of `original_mask` is replaced by a PU of `granted_cpus`. The PUs of the machine and the
///    granted PUs are both numbered in hwloc's logical order. The k-th PU of the machine is replaced by the k-th
///    granted PU. If there are fewer than k granted PUs, the numbering continues at the first granted PU.
#[must_use]
pub fn target_mask(
    topology: &Topology,
    granted_cpus: &CpuSet,
    original_mask: &CpuSet,
    inherited_mask: Option<&CpuSet>,
) -> CpuSet {
    if is_unbound(topology, granted_cpus, original_mask, inherited_mask) {
        return granted_cpus.clone();
    }
    if original_mask.is_subset(granted_cpus) && !original_mask.is_empty() {
        return original_mask.clone();
    }
    translate(topology, granted_cpus, original_mask)
}

/// Returns whether a thread with the affinity mask `original_mask` is not bound to certain PUs (logical CPUs), so that
/// it may run on all PUs of its job. This is rule 1 of [`target_mask`], which has the same parameters.
pub(crate) fn is_unbound(
    topology: &Topology,
    granted_cpus: &CpuSet,
    original_mask: &CpuSet,
    inherited_mask: Option<&CpuSet>,
) -> bool {
    inherited_mask == Some(original_mask)
        || granted_cpus.is_subset(original_mask)
        || topology.cpus().is_subset(original_mask)
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
