//! The core map of a job: what the programs in the job are told about its cores.

use crate::basics::{CpuSet, Nanos};
use crate::state::WardenState;
use crate::terms::{Job, Mode, Policy};

/// The cores that a job has, as pjwd publishes them to the programs in the job.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CoreMap {
    /// The PUs that the job owns and that are online, including those in `lent`.
    pub own: CpuSet,
    /// The PUs that other jobs own and that this job uses at present.
    pub borrowed: CpuSet,
    /// The PUs that the job has and is about to lose.
    pub leaving: CpuSet,
    /// The own PUs that another job uses at present.
    pub lent: CpuSet,
    /// The time at which the PUs in `leaving` are taken from the job, in ns since boot. `None` if no PU is leaving.
    pub leaving_at: Option<Nanos>,
    /// The number of physical cores of the own and the borrowed PUs.
    pub core_count: u32,
}

impl CoreMap {
    /// Returns the PUs on which the job may run: its own and the borrowed ones.
    #[must_use]
    pub fn cpus(&self) -> CpuSet {
        self.own.union(&self.borrowed)
    }
}

/// Returns the core map of a job. `None` if pjw does not keep the job on cores: the job waits for cores, is only
/// observed, or was released by a command, or `policy` says that pjw only watches.
#[must_use]
pub fn core_map(state: &WardenState, policy: &Policy, job: &Job) -> Option<CoreMap> {
    let grant = job.active_grant().filter(|_| policy.mode == Mode::Enforce)?;
    let own = grant.cpus.intersection(&state.pool.online_cpus());
    let core_count = state.topology.overlapping_core_count(&own);
    Some(CoreMap { own, core_count, ..CoreMap::default() })
}
