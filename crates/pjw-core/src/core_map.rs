//! The core map of a job: the CPUs that the job has, as pjwd publishes them to the programs in the job.

use crate::basics::{CpuSet, Nanos, Pu, prelude::*};
use crate::state::WardenState;
use crate::terms::{DaemonMode, Job, Ownership, Policy};

/// The core map of a job: the PUs (logical CPUs) that the job owns, and the PUs that the job borrows. It also says
/// which of the borrowed PUs pjw will soon take back, and which of the owned PUs another job borrows. pjwd publishes
/// the core map to the programs in the job, in files below `/run/pjwd/jobs/ID`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CoreMap {
    /// The online PUs that the job owns. They include the PUs in `lent`.
    pub own: CpuSet,
    /// The PUs that the job does not own and may run on at present, until pjw takes them back. Each of these PUs is
    /// free, or belongs to another job that leaves the PU idle, or is a housekeeping PU (a PU that is reserved for the
    /// system).
    pub borrowed: CpuSet,
    /// Those PUs in `borrowed` that pjw takes from the job at the time `leaving_at`, or later.
    pub leaving: CpuSet,
    /// Those PUs in `own` that another job has borrowed. This job may nevertheless run on them at any time,
    /// and has priority.
    pub lent: CpuSet,
    /// The time at which pjw takes the PUs in `leaving` from the job, in ns since boot. If pjw takes them at
    /// different times, the earliest of these times. `None` if `leaving` is empty.
    pub leaving_at: Option<Nanos>,
    /// The number of physical cores that have at least one PU in `own` or `borrowed`.
    pub core_count: u32,
}

impl CoreMap {
    /// Returns all PUs (logical CPUs) on which the job may run at present: the PUs that the job owns (field `own`) and
    /// the PUs that the job borrows (field `borrowed`).
    #[must_use]
    pub fn cpus(&self) -> CpuSet {
        self.own.union(&self.borrowed)
    }
}

/// Returns the core map of a job: the PUs (logical CPUs) that pjwd publishes to the programs in the job, in files below
/// `/run/pjwd/jobs/ID`. Returns `None` if pjw does not restrict the job to PUs, for one of these reasons:
///
/// - The job holds no PUs, because it waits for cores or because its number of cores is unknown to pjw.
/// - A command such as `pjwctl release` has released the job: pjw no longer controls on which PUs the job runs.
/// - The mode in `policy` is [`DaemonMode::Observe`]: pjw changes no affinity mask and no cpuset.
///
/// If the processes of the job are frozen, the core map is empty: the job has no PU on which it may run.
#[must_use]
pub fn core_map(state: &WardenState, policy: &Policy, job: &Job) -> Option<CoreMap> {
    let grant = job.active_grant().filter(|_| policy.mode == DaemonMode::Enforce)?;
    let online = grant.cpus.intersection(&state.pool.online_cpus());
    let core_count = state.topology.overlapping_core_count(&online);
    match grant.ownership {
        Ownership::Owned => {
            let lent = state.pool.lent_cpus().intersection(&online);
            Some(CoreMap { own: online, lent, core_count, ..CoreMap::default() })
        }
        Ownership::Borrowed | Ownership::Squeezed => {
            let deadlines = online.iter().filter_map(|pu| Some((pu, state.lending.grace_period_end(pu)?)));
            let deadlines: Vec<(Pu, Nanos)> = deadlines.collect();
            let leaving = deadlines.iter().map(|(pu, _)| *pu).collect();
            let leaving_at = deadlines.iter().map(|(_, at)| *at).min();
            Some(CoreMap { borrowed: online, leaving, leaving_at, core_count, ..CoreMap::default() })
        }
        Ownership::Frozen => Some(CoreMap::default()),
    }
}
