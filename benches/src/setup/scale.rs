//! The size of an experiment on this machine: the cores that this program may use, and each job's share of them.

use anyhow::{Context, bail};
use nix::unistd::getpid;
use pjw_core::{cpuset::CpuSet, ids::Tid};
use pjw_linux::sys::affinity;
use pjw_linux::topology::{TopologySource, load};

/// What the experiment is done on, and how large it is.
#[derive(Debug, Clone)]
pub struct Scale {
    /// Cores that this program may use.
    pub core_count: usize,
    /// Cores that B asks for, and its workers.
    pub b_cores: usize,
    /// Cores that A asks for.
    pub a_cores: usize,
    /// Workers that A starts.
    pub a_workers: usize,
    /// The PUs of each core that this program may use.
    pub usable_cores: Vec<CpuSet>,
    /// Their PUs.
    pub usable_pus: CpuSet,
    /// The machine's PUs that this program may not use.
    pub unusable_pus: CpuSet,
}

impl Scale {
    /// As large as this machine is.
    ///
    /// # Errors
    /// If the machine's topology can't be read, or has one core only.
    pub fn from_this_machine() -> anyhow::Result<Self> {
        let topology = load(TopologySource::Live)?;
        let usable_pus = affinity::get_mask(Tid(getpid().as_raw().unsigned_abs()))
            .context("can't read this program's mask")?;
        let unusable_pus = topology.cpus().difference(&usable_pus);
        let usable_pus = topology.cpus().intersection(&usable_pus);
        let usable_cores = topology.pus_by_core().map(|pus| pus.iter().copied().collect::<CpuSet>());
        let usable_cores: Vec<CpuSet> = usable_cores.filter(|core| core.is_subset(&usable_pus)).collect();
        let core_count = usable_cores.len();
        if core_count < 2 {
            bail!(
                "there is nothing to show on {core_count} core: two jobs can't be kept apart there. Run the demo on a \
                 machine with two cores or more"
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
