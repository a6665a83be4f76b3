//! Cells: the units that a policy allocates.

use pjw_core::cpuset::{CpuSet, Pu};

use crate::locality::{ProcessorUnit, PuLocation, PuLocations};

/// The unit that a reference policy allocates: a whole core, or a PU if the job log counts PUs.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    pub(super) location: PuLocation,
    pub(super) pus: CpuSet,
}

/// Returns the free cells, in the order of the machine.
pub(super) fn cells(unit: ProcessorUnit, free: &CpuSet, locality: &PuLocations) -> Vec<Cell> {
    let cells_of = |(location, pus): (PuLocation, &CpuSet)| {
        let free = pus.intersection(free);
        let cells: Vec<CpuSet> = match unit {
            ProcessorUnit::Core => Some(free).filter(|free| free == pus).into_iter().collect(),
            ProcessorUnit::Pu => free.iter().map(CpuSet::from).collect(),
        };
        cells.into_iter().map(move |pus| Cell { location, pus })
    };
    locality.cores().flat_map(cells_of).collect()
}

/// All cells of the machine, free or not.
pub(super) fn all_cells(unit: ProcessorUnit, locality: &PuLocations) -> Vec<Cell> {
    let all: CpuSet = locality.cores().flat_map(|(_, pus)| pus.iter().collect::<Vec<Pu>>()).collect();
    cells(unit, &all, locality)
}
