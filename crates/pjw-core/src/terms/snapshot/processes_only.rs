//! A snapshot that contains processes and nothing else.

use super::{Observed, Process, Snapshot};
use crate::basics::{CpuSet, Moment, Pid, prelude::*};
use crate::terms::scan::ScanScope;

impl Snapshot {
    /// Makes the snapshot of a scan that read the processes in `scope`, and nothing else. The snapshot has no cgroups,
    /// affinity requests, CPU times or shared address spaces. It is not marked as incomplete.
    ///
    /// - `taken_at` is the time at which the scan began.
    /// - `online` is the set of the PUs (logical CPUs) that were online.
    /// - `processes` has what the scan found about each process, by pid.
    #[must_use]
    pub fn of_processes(
        scope: ScanScope,
        taken_at: Moment,
        online: CpuSet,
        processes: BTreeMap<Pid, Observed<Process>>,
    ) -> Self {
        Self {
            scope,
            taken_at,
            online,
            processes,
            cgroups: BTreeMap::new(),
            affinity_requests: Vec::new(),
            incomplete_reason: None,
            ended_idle_until: BTreeMap::new(),
            cpu_times: BTreeMap::new(),
            cpu_times_read_until: None,
            reaped: BTreeSet::new(),
            address_spaces: None,
        }
    }
}
