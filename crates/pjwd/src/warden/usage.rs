//! What the jobs used, as far as it must be read together with a scan.

use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::snapshot::Snapshot;
use pjw_core::usage_times::{cgroups_of_ending_jobs, read_cpu_times};

use super::cycle::Warden;

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Adds the CPU times of processes of jobs to `snapshot`. Also records the peak memory use of each job that ends,
    /// for the report on the job.
    pub(super) fn read_usage(&mut self, snapshot: &mut Snapshot) {
        read_cpu_times(&self.state, snapshot, |pids| self.node.read_cpu_times(pids));
        for (job, path) in cgroups_of_ending_jobs(&self.state, snapshot) {
            self.state.usage.note_memory_peak(&job, self.node.read_memory_peak(&path));
        }
    }
}
