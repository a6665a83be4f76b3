//! Reference policies, to compare the allocator with on the same log: they choose among free cores and do nothing
//! else. They share no code with the allocator.

mod cells;
mod kubelet;

use pjw_core::cpuset::CpuSet;

use crate::locality::{ProcessorUnit, PuLocations};
use cells::free_cells;

/// A rule by which a replay of a job log chooses the cores of a job, for comparison with pjw's allocator. The rules
/// are first fit, and two variants of the static policy of Kubernetes' CPU manager (in the kubelet).
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum ReferencePolicy {
    /// Chooses the first free cores in hwloc's logical order.
    FirstFit,
    /// Chooses like Kubernetes' static CPU manager with the option `full-pcpus-only`.
    Kubelet,
    /// Chooses like Kubernetes' static CPU manager with the options `full-pcpus-only` and
    /// `prefer-align-cpus-by-uncorecache`.
    KubeletL3,
}

impl ReferencePolicy {
    /// All reference policies. A reference policy is a rule by which a replay of a job log chooses the cores of
    /// a job, for comparison with the rule of pjw's allocator.
    pub const ALL: [ReferencePolicy; 3] =
        [ReferencePolicy::FirstFit, ReferencePolicy::Kubelet, ReferencePolicy::KubeletL3];

    /// Returns the name of this reference policy, such as `first-fit`. The option `--reference` of `pjwctl
    /// simulate` accepts this name, and the output of the command contains it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Chooses `count` whole cores or single PUs (logical CPUs) from `free`, the set of free PUs, by the rule of
    /// this policy. `unit` says whether cores or PUs are counted. `locality` has the location of each PU.
    /// Returns the PUs of the chosen cores, or the chosen PUs. `None` if `count` is 0, or if `free` has fewer
    /// whole cores or PUs.
    #[must_use]
    pub fn choose_pus(
        self,
        count: u32,
        unit: ProcessorUnit,
        free: &CpuSet,
        locality: &PuLocations,
    ) -> Option<CpuSet> {
        let cells = free_cells(unit, free, locality);
        if count == 0 || cells.len() < count as usize {
            return None;
        }
        let chosen = match self {
            ReferencePolicy::FirstFit => cells.into_iter().take(count as usize).collect(),
            ReferencePolicy::Kubelet => kubelet::choose_cells(count, unit, cells, locality, false),
            ReferencePolicy::KubeletL3 => kubelet::choose_cells(count, unit, cells, locality, true),
        };
        Some(chosen.iter().flat_map(|cell| cell.pus.iter()).collect())
    }
}

#[cfg(test)]
mod tests;
