//! The condition on reports: each job leaves a report, also if the daemon is killed while the job ends.

use pjw_core::job::{Job, JobId};
use pjw_core::time::UnixMillis;

use super::Run;

/// One run of a job: its id, and the time at which the job was detected or created.
type JobRun = (JobId, UnixMillis);

impl Run {
    /// Checks after every cycle that each job which an earlier cycle left in the state, and which is gone now, has a
    /// report.
    pub(super) fn check_reports(&mut self) {
        let running: Vec<JobRun> = self.warden.state().jobs.values().map(run_of).collect();
        self.known_jobs.extend(running.iter().cloned());
        let reports = self.journal.reports();
        let has_report =
            |run: &JobRun| reports.iter().any(|report| (&report.id, report.started) == (&run.0, run.1));
        let gone = self.known_jobs.iter().filter(|run| !running.contains(run));
        let unreported: Vec<&JobRun> = gone.filter(|run| !has_report(run)).collect();
        assert!(unreported.is_empty(), "{unreported:?} left no report");
    }

    /// Forgets the jobs without a record, because the journal could not be written: the next daemon does not know them.
    pub(super) fn forget_unrecorded_jobs(&mut self) {
        if self.warden.ongoing_failures().journal_error.is_some() {
            let reports = self.journal.reports();
            self.known_jobs
                .retain(|run| reports.iter().any(|report| (&report.id, report.started) == (&run.0, run.1)));
        }
    }
}

fn run_of(job: &Job) -> JobRun {
    (job.id.clone(), job.detected_at)
}
