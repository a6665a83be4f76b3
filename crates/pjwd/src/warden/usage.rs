//! What the jobs used, as far as it must be read together with a scan.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::ids::Pid;
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::snapshot::{ProcessTimes, Snapshot};
use pjw_core::usage_times::{cgroups_of_ending_jobs, parents_to_read_again, pids_to_read_cpu_times_of};

use super::cycle::Warden;

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Adds the CPU times of processes to a snapshot, and notes the peak of the memory of each job that ends.
    pub(super) fn read_usage(&mut self, snapshot: &mut Snapshot) {
        snapshot.cpu_times = self.read_cpu_times(&pids_to_read_cpu_times_of(&self.state, snapshot));
        for (job, path) in cgroups_of_ending_jobs(&self.state, snapshot) {
            self.state.usage.note_memory_peak(&job, self.node.read_memory_peak(&path));
        }
    }

    fn read_cpu_times(&mut self, pids: &BTreeSet<Pid>) -> BTreeMap<Pid, ProcessTimes> {
        let mut times = self.node.read_cpu_times(pids);
        let parents = parents_to_read_again(&self.state, pids, &times);
        if !parents.is_empty() {
            times.extend(self.node.read_cpu_times(&parents));
        }
        times
    }
}
