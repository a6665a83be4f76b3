//! The size of an experiment on this machine: the cores that this program may use, and the share of each job.

use anyhow::{Context, bail};
use nix::unistd::getpid;
use pjw_core::{cpuset::CpuSet, ids::Tid};
use pjw_linux::sys::affinity;
use pjw_linux::topology::{TopologySource, load_topology};

/// The cores of this machine, and the size of the two jobs of the demo.
#[derive(Debug, Clone)]
pub struct Scale {
    /// The number of cores that this program may use.
    pub core_count: usize,
    /// The number of cores that job B requests. It is also the number of workers of job B.
    pub b_cores: usize,
    /// The number of cores that job A requests.
    pub a_cores: usize,
    /// The number of workers of job A: four for each core.
    pub a_workers: usize,
    /// The PUs of each core of which this program may use all PUs.
    pub usable_cores: Vec<CpuSet>,
    /// The PUs that this program may use.
    pub usable_pus: CpuSet,
    /// The other PUs of the machine, which this program may not use.
    pub unusable_pus: CpuSet,
}

/// Returns the union of the PUs of `cores`.
#[must_use]
pub fn pus_of(cores: &[CpuSet]) -> CpuSet {
    cores.iter().fold(CpuSet::new(), |all, core| all.union(core))
}

impl Scale {
    /// Computes the sizes from the topology of this machine and the affinity mask of this program.
    ///
    /// # Errors
    /// If the topology or the mask can't be read, or there are fewer than two usable cores.
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
