//! A snapshot that contains processes and nothing else.

use super::{Observed, Process, Snapshot};
use crate::basics::{CpuSet, Moment, Pid, prelude::*};
use crate::terms::scan::ScanScope;

impl Snapshot {
    /// Makes a snapshot that contains only `processes`, with the scope `scope`. The scan began at the time `taken_at`,
    /// and `online` has the PUs (logical CPUs) that were online. It read no cgroups, affinity requests, CPU times or
    /// shared address spaces, and it was complete.
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
