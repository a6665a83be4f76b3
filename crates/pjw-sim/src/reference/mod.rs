//! Reference policies, to compare the allocator with on the same log: they choose among free cores and do nothing
//! else. They share no code with the allocator.

mod cells;
mod kubelet;

use pjw_core::cpuset::CpuSet;

use crate::locality::{ProcessorUnit, PuLocations};
use cells::cells;

/// A policy by which another system chooses cores for a job. pjw's allocator is compared with this policy on
/// the same job log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum ReferencePolicy {
    /// The first free cores in the machine's order.
    FirstFit,
    /// Kubernetes' static CPU manager with `full-pcpus-only`.
    Kubelet,
    /// Kubernetes' static CPU manager with `full-pcpus-only` and `prefer-align-cpus-by-uncorecache`.
    KubeletL3,
}

impl ReferencePolicy {
    /// All reference policies.
    pub const ALL: [ReferencePolicy; 3] =
        [ReferencePolicy::FirstFit, ReferencePolicy::Kubelet, ReferencePolicy::KubeletL3];

    /// Returns the name of the policy in the option `--reference` of `pjwctl simulate` and in its output.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Chooses `n` cores or PUs (as `unit` says) among the `free` PUs, and returns the chosen PUs. `None` if
    /// too few are free, or if `n` is 0.
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
