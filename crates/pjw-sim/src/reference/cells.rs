//! Cells: the units that a policy allocates.

use pjw_core::cpuset::{CpuSet, Pu};

use crate::locality::{Locality, Location, Unit};

/// A unit that a policy allocates: a whole core, or a PU if the log counts PUs.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    pub(super) location: Location,
    pub(super) pus: CpuSet,
}

/// The free cells, in the machine's order.
pub(super) fn cells(unit: Unit, free: &CpuSet, locality: &Locality) -> Vec<Cell> {
    let cores = locality.cores();
    match unit {
        Unit::Core => cores
            .filter(|(_, pus)| pus.is_subset(free))
            .map(|(location, pus)| Cell { location, pus: pus.clone() })
            .collect(),
        Unit::Pu => {
            let open = |pus: &CpuSet| {
                pus.iter().filter(|&pu| free.contains(pu)).map(CpuSet::from).collect::<Vec<_>>()
            };
            cores
                .flat_map(|(location, pus)| open(pus).into_iter().map(move |pus| Cell { location, pus }))
                .collect()
        }
    }
}

/// All cells of the machine, free or not.
pub(super) fn all_cells(unit: Unit, locality: &Locality) -> Vec<Cell> {
    let all: CpuSet = locality.cores().flat_map(|(_, pus)| pus.iter().collect::<Vec<Pu>>()).collect();
    cells(unit, &all, locality)
}
