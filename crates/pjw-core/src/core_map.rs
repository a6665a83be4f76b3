//! The core map of a job: the CPUs that the job has, as pjwd publishes them to the programs in the job.

use crate::basics::{CpuSet, Nanos, Pu, prelude::*};
use crate::state::WardenState;
use crate::terms::{Job, Mode, Policy, Tenure};

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

/// Returns the core map of a job: the PUs that pjwd publishes to the programs in the job. `None` if pjw does
/// not keep the job on PUs. This is so if the job has no grant (it waits for cores or is only observed), a
/// command released the job, or `policy` does not enforce grants (its mode is not [`Mode::Enforce`]).
#[must_use]
pub fn core_map(state: &WardenState, policy: &Policy, job: &Job) -> Option<CoreMap> {
    let grant = job.active_grant().filter(|_| policy.mode == Mode::Enforce)?;
    let online = grant.cpus.intersection(&state.pool.online_cpus());
    let core_count = state.topology.overlapping_core_count(&online);
    match grant.tenure {
        Tenure::Owned => {
            let lent = state.pool.lent_cpus().intersection(&online);
            Some(CoreMap { own: online, lent, core_count, ..CoreMap::default() })
        }
        Tenure::Borrowed | Tenure::Squeezed => {
            let deadlines = online.iter().filter_map(|pu| Some((pu, state.lending.leaves_at(pu)?)));
            let deadlines: Vec<(Pu, Nanos)> = deadlines.collect();
            let leaving = deadlines.iter().map(|(pu, _)| *pu).collect();
            let leaving_at = deadlines.iter().map(|(_, at)| *at).min();
            Some(CoreMap { borrowed: online, leaving, leaving_at, core_count, ..CoreMap::default() })
        }
        Tenure::Frozen => Some(CoreMap::default()),
    }
}
