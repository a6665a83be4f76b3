//! The size of an experiment on this machine: the cores that this program may use, and the share of each job.

use anyhow::{Context, bail};
use nix::unistd::getpid;
use pjw_core::{cpuset::CpuSet, ids::Tid};
use pjw_linux::sys::affinity;
use pjw_linux::topology::{TopologySource, load_topology};

/// The cores and PUs (logical CPUs) that a bench or the demo may use on this machine, and the sizes of the two jobs of
/// the demo, A and B.
#[derive(Debug, Clone)]
pub struct Scale {
    /// The number of cores of which this program may use all PUs.
    pub core_count: usize,
    /// The number of cores that job B of the demo requests. Job B has one worker for each of these cores.
    pub b_cores: usize,
    /// The number of cores that job A of the demo requests.
    pub a_cores: usize,
    /// The number of workers of job A of the demo: four for each core that it requests.
    pub a_workers: usize,
    /// The PUs of each usable core. A core is usable if this program may use all its PUs.
    pub usable_cores: Vec<CpuSet>,
    /// The PUs in the affinity mask of this program.
    pub usable_pus: CpuSet,
    /// The PUs of the machine that are not in the affinity mask of this program.
    pub unusable_pus: CpuSet,
}

/// Returns all PUs (logical CPUs) of the cores in `cores`. Each element of `cores` contains the PUs of one core.
#[must_use]
pub fn pus_of(cores: &[CpuSet]) -> CpuSet {
    cores.iter().fold(CpuSet::new(), |all, core| all.union(core))
}

impl Scale {
    /// Finds the cores that this program may use, from the topology of this machine and the affinity mask of this
    /// program. From their number, computes the sizes of the two jobs of the demo.
    ///
    /// # Errors
    /// If the topology or the mask can't be read, or if there are fewer than two usable cores.
    pub fn from_this_machine() -> anyhow::Result<Self> {
        let topology = load_topology(TopologySource::Live)?;
        let usable_pus = affinity::get_mask(Tid(getpid().as_raw().unsigned_abs()))
            .context("can't read this program's mask")?;
        let unusable_pus = topology.cpus().difference(&usable_pus);
        let usable_pus = topology.cpus().intersection(&usable_pus);
        let usable_cores = topology.pus_by_core().map(|pus| pus.iter().copied().collect::<CpuSet>());
        let usable_cores: Vec<CpuSet> = usable_cores.filter(|core| core.is_subset(&usable_pus)).collect();
        let core_count = usable_cores.len();
        if core_count < 2 {
            bail!(
                "two jobs need two cores, and this program may use {core_count}: run it on a machine with two cores \
                 or more"
            );
        }
        let b_cores = core_count / 2;
        let a_cores = core_count - b_cores;
        Ok(Self {
            core_count,
            b_cores,
            a_cores,
            a_workers: 4 * a_cores,
            usable_cores,
            usable_pus,
            unusable_pus,
        })
    }
}
