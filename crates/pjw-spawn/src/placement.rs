//! Where an instance runs: on which CPUs, with the memory of which NUMA node, and in which cgroup.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pjw_core::cpuset::CpuSet;

/// Where a started process runs: its affinity mask, its memory policy and its cgroup. The process has these
/// properties from its first instruction. In the default value, all three are those of the caller.
#[derive(Debug, Clone, Default)]
pub struct Placement {
    /// The PUs in the affinity mask of the instance. `None` for the affinity mask of the caller.
    pub cpus: Option<CpuSet>,
    /// The NUMA node from which the kernel prefers to allocate memory for the instance: `MPOL_PREFERRED`,
    /// set_mempolicy(2). `None` for the memory policy of the caller.
    pub preferred_numa_node: Option<u32>,
    /// The cgroup v2 in which the kernel creates the instance, as its directory opened with `O_DIRECTORY`.
    /// `None` for the cgroup of the caller.
    pub cgroup: Option<Arc<OwnedFd>>,
}

impl Placement {
    /// Returns a placement for a process with the affinity mask `cpus`, and with the memory policy and the cgroup of
    /// the caller.
    #[must_use]
    pub fn on_cpus(cpus: CpuSet) -> Self {
        Self { cpus: Some(cpus), ..Self::default() }
    }
}
