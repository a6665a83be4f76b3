//! Where an instance runs.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pjw_core::cpuset::CpuSet;

/// Where an instance runs from its first instruction. The default is where the caller runs.
#[derive(Debug, Clone, Default)]
pub struct Placement {
    /// The PUs of the affinity mask. `None` for the mask of the caller.
    pub cpus: Option<CpuSet>,
    /// The NUMA node that the memory of the instance prefers: `MPOL_PREFERRED`, set_mempolicy(2). `None` for the memory
    /// policy of the caller.
    pub memory_node: Option<u32>,
    /// The directory of a cgroup v2 in which the instance is born, opened with `O_DIRECTORY`. `None` for the cgroup of
    /// the caller.
    pub cgroup: Option<Arc<OwnedFd>>,
}

impl Placement {
    /// Returns the placement on these PUs, with the cgroup and the memory policy of the caller.
    #[must_use]
    pub fn on(cpus: CpuSet) -> Self {
        Self { cpus: Some(cpus), ..Self::default() }
    }
}
