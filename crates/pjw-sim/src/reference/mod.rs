//! Policies of others, to be compared with on the same stream of jobs: they choose among free cores and nothing
//! else. None shares code with the allocator.

mod kubelet;

use pjw_core::cpuset::{CpuSet, Pu};

use crate::places::{Place, Places};
use crate::replay::Unit;

/// A policy that isn't ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reference {
    /// The first free cores in the machine's order.
    FirstFit,
    /// Kubernetes' static CPU manager with `full-pcpus-only`.
    Kubelet,
    /// The same with `prefer-align-cpus-by-uncorecache`.
    KubeletL3,
}

impl Reference {
    /// All of them.
    pub const ALL: [Reference; 3] = [Reference::FirstFit, Reference::Kubelet, Reference::KubeletL3];

    /// Its name on the command line and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reference::FirstFit => "first-fit",
            Reference::Kubelet => "kubelet",
            Reference::KubeletL3 => "kubelet-l3",
        }
    }

    /// The PUs it gives to a request for `n` units, if so many are free.
    #[must_use]
    pub fn choose(self, n: u32, unit: Unit, free: &CpuSet, places: &Places) -> Option<CpuSet> {
        let cells = cells(unit, free, places);
        if n == 0 || cells.len() < n as usize {
            return None;
        }
        let chosen = match self {
            Reference::FirstFit => cells.into_iter().take(n as usize).collect(),
            Reference::Kubelet => kubelet::take(n, unit, cells, places, false),
            Reference::KubeletL3 => kubelet::take(n, unit, cells, places, true),
        };
        Some(chosen.iter().flat_map(|cell| cell.pus.iter()).collect())
    }
}

/// What is given out as one: a whole core, or a PU where those are counted.
#[derive(Debug, Clone)]
struct Cell {
    place: Place,
    pus: CpuSet,
}

/// The free ones in the machine's order.
fn cells(unit: Unit, free: &CpuSet, places: &Places) -> Vec<Cell> {
    let cores = places.cores();
    match unit {
        Unit::Core => cores
            .filter(|(_, pus)| pus.is_subset(free))
            .map(|(place, pus)| Cell { place, pus: pus.clone() })
            .collect(),
        Unit::Pu => {
            let open = |pus: &CpuSet| {
                pus.iter().filter(|&pu| free.contains(pu)).map(CpuSet::from).collect::<Vec<_>>()
            };
            cores.flat_map(|(place, pus)| open(pus).into_iter().map(move |pus| Cell { place, pus })).collect()
        }
    }
}

/// Every cell of the machine, free or not.
fn all_cells(unit: Unit, places: &Places) -> Vec<Cell> {
    let all: CpuSet = places.cores().flat_map(|(_, pus)| pus.iter().collect::<Vec<Pu>>()).collect();
    cells(unit, &all, places)
}

#[cfg(test)]
mod tests;
