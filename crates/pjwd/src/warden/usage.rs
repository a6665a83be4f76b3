//! The CPU times and the peak memory use of jobs that are read together with a scan.

use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::scan::ScanRequest;
use pjw_core::snapshot::Snapshot;
use pjw_core::usage_times::{cgroups_with_peaks_to_read, read_cpu_times};

use super::cycle::Warden;

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Adds the CPU times of processes of jobs to `snapshot`, which is the result of the scan `request`, and the time
    /// until which they were read. Also records the peak memory use of jobs of which a process has ended, for the
    /// reports on the jobs.
    pub(super) fn read_usage(&mut self, request: &ScanRequest, snapshot: &mut Snapshot) {
        read_cpu_times(&self.state, snapshot, |pids| self.node.read_cpu_times(pids));
        snapshot.ended_idle_until.extend(self.node.idle_until(&snapshot.reaped));
        let read_until = self.node.time_since_boot().unwrap_or(snapshot.taken_at.since_boot);
        snapshot.cpu_times_read_until = request.covers_all_job_processes().then_some(read_until);
        for (job, path) in cgroups_with_peaks_to_read(&self.state, snapshot) {
            let peak = self.node.read_memory_peak(&path);
            self.state.usage.note_memory_peak(&job, peak, snapshot.taken_at.since_boot);
        }
    }
}
