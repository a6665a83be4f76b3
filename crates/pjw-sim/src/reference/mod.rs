//! Reference policies, to compare the allocator with on the same log: they choose among free cores and do nothing
//! else. They share no code with the allocator.

mod cells;
mod kubelet;

use pjw_core::cpuset::CpuSet;

use crate::locality::{Locality, Unit};
use cells::cells;

/// A reference policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reference {
    /// The first free cores in the machine's order.
    FirstFit,
    /// Kubernetes' static CPU manager with `full-pcpus-only`.
    Kubelet,
    /// Kubernetes' static CPU manager with `full-pcpus-only` and `prefer-align-cpus-by-uncorecache`.
    KubeletL3,
}

impl Reference {
    /// All reference policies.
    pub const ALL: [Reference; 3] = [Reference::FirstFit, Reference::Kubelet, Reference::KubeletL3];

    /// The name of the policy on the command line and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reference::FirstFit => "first-fit",
            Reference::Kubelet => "kubelet",
            Reference::KubeletL3 => "kubelet-l3",
        }
    }

    /// The PUs that the policy gives to a request for `n` units. `None` if fewer than `n` units are free.
    #[must_use]
    pub fn choose(self, n: u32, unit: Unit, free: &CpuSet, locality: &Locality) -> Option<CpuSet> {
        let cells = cells(unit, free, locality);
        if n == 0 || cells.len() < n as usize {
            return None;
        }
        let chosen = match self {
            Reference::FirstFit => cells.into_iter().take(n as usize).collect(),
            Reference::Kubelet => kubelet::take(n, unit, cells, locality, false),
            Reference::KubeletL3 => kubelet::take(n, unit, cells, locality, true),
        };
        Some(chosen.iter().flat_map(|cell| cell.pus.iter()).collect())
    }
}

#[cfg(test)]
mod tests;
