//! The core map of a job: the CPUs that the job has, as pjwd publishes them to the programs in the job.

use crate::basics::{CpuSet, Nanos};
use crate::state::WardenState;
use crate::terms::{Job, Mode, Policy};

/// The core map of a job: the PUs (CPUs) that the job has, as pjwd publishes them to the programs in the job
/// in the files below `/run/pjwd/jobs/ID`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CoreMap {
    /// The PUs that the job owns and that are online. They include the PUs in `lent`.
    pub own: CpuSet,
    /// The PUs that other jobs own and on which this job may run until their owner takes them back.
    pub borrowed: CpuSet,
    /// Those PUs in `own` and `borrowed` that are to be taken from the job at the time `leaving_at`.
    pub leaving: CpuSet,
    /// Those PUs in `own` that another job has borrowed. This job may use them at any time nevertheless.
    pub lent: CpuSet,
    /// The time at which the PUs in `leaving` are taken from the job, in ns since boot. `None` if `leaving`
    /// is empty.
    pub leaving_at: Option<Nanos>,
    /// The number of physical cores that have at least one PU in `own` or `borrowed`.
    pub core_count: u32,
}

impl CoreMap {
    /// Returns the PUs on which the job may run: those in `own` or `borrowed`.
    #[must_use]
    pub fn cpus(&self) -> CpuSet {
        self.own.union(&self.borrowed)
    }
}

/// Returns the core map of a job: the PUs that pjwd publishes to the programs in the job. It has the online
/// PUs of the job's grant in `own`. The sets `borrowed`, `leaving` and `lent` are empty. `None` if pjw does
/// not keep the job on PUs. This is so if the job has no grant (it waits for cores or is only observed), a
/// command released the job, or `policy` does not enforce grants (its mode is not [`Mode::Enforce`]).
#[must_use]
pub fn core_map(state: &WardenState, policy: &Policy, job: &Job) -> Option<CoreMap> {
    let grant = job.active_grant().filter(|_| policy.mode == Mode::Enforce)?;
    let own = grant.cpus.intersection(&state.pool.online_cpus());
    let core_count = state.topology.overlapping_core_count(&own);
    Some(CoreMap { own, core_count, ..CoreMap::default() })
}
