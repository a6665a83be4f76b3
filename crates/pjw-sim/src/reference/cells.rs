//! Cells: the units that a policy allocates.

use pjw_core::cpuset::{CpuSet, Pu};

use crate::locality::{ProcessorUnit, PuLocation, PuLocations};

/// The unit in which a reference policy (an algorithm for comparison with pjw) allocates: a whole core, or a single PU
/// (logical CPU) if the job log counts PUs.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    pub(super) location: PuLocation,
    pub(super) pus: CpuSet,
}

/// Returns the free cells of the machine, in hwloc's logical order. `unit` says whether a cell is a core or a PU
/// (logical CPU). `free` contains the free PUs. A core is free if all its PUs are free. `locality` has the location of
/// each PU.
pub(super) fn free_cells(unit: ProcessorUnit, free: &CpuSet, locality: &PuLocations) -> Vec<Cell> {
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

/// Returns all cells of the machine, both the free cells and the used cells. `unit` says whether a cell is a core or a
/// PU (logical CPU). `locality` has the location of each PU.
pub(super) fn all_cells(unit: ProcessorUnit, locality: &PuLocations) -> Vec<Cell> {
    let all: CpuSet = locality.cores().flat_map(|(_, pus)| pus.iter().collect::<Vec<Pu>>()).collect();
    free_cells(unit, &all, locality)
}
