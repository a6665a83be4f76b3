//! Reference policies, to compare the allocator with on the same log: they choose among free cores and do nothing
//! else. They share no code with the allocator.

mod cells;
mod kubelet;

use pjw_core::cpuset::CpuSet;

use crate::locality::{ProcessorUnit, PuLocations};
use cells::cells;

/// A rule for the choice of a job's cores that is not pjw's own rule: a simple rule, or the rule of
/// Kubernetes. A replay of a job log can use the rule instead of pjw's allocator, so that the results can be
/// compared.
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
    /// All reference policies.
    pub const ALL: [ReferencePolicy; 3] =
        [ReferencePolicy::FirstFit, ReferencePolicy::Kubelet, ReferencePolicy::KubeletL3];

    /// Returns the name of the policy, as used in the option `--reference` of `pjwctl simulate` and in its
    /// output.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Chooses `n` whole cores or `n` PUs from the free PUs in `free`, and returns the chosen PUs. `unit`
    /// says whether `n` counts whole cores or PUs. `locality` has the location of each PU. `None` if `free`
    /// has fewer than `n` whole cores or PUs, or if `n` is 0.
    #[must_use]
    pub fn choose_pus(
        self,
        n: u32,
        unit: ProcessorUnit,
        free: &CpuSet,
        locality: &PuLocations,
    ) -> Option<CpuSet> {
        let cells = cells(unit, free, locality);
        if n == 0 || cells.len() < n as usize {
            return None;
        }
        let chosen = match self {
            ReferencePolicy::FirstFit => cells.into_iter().take(n as usize).collect(),
            ReferencePolicy::Kubelet => kubelet::take(n, unit, cells, locality, false),
            ReferencePolicy::KubeletL3 => kubelet::take(n, unit, cells, locality, true),
        };
        Some(chosen.iter().flat_map(|cell| cell.pus.iter()).collect())
    }
}

#[cfg(test)]
mod tests;
