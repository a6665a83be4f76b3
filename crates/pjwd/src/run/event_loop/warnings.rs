//! All warnings of the daemon: those of the last decision, and those of the event loop and of other threads.

use std::sync::Arc;

use pjw_core::job::JobId;
use pjw_core::plan::Warning;

use super::EventLoop;

impl EventLoop {
    /// Returns `plan_warnings`, the warnings of a decision, together with the warnings of the event loop and of other
    /// threads of pjwd. These concern the files of pjwd and of jobs, the configuration, the memory of jobs, borrowed
    /// cores, frozen jobs, and the thread that changes cpusets. If there are no such warnings, returns the same list
    /// without a copy.
    ///
    /// A warning of the start, of a reload or of another thread is left out if it is about a job that has ended.
    pub(super) fn with_event_loop_warnings(
        &mut self,
        plan_warnings: Arc<[Arc<Warning>]>,
    ) -> Arc<[Arc<Warning>]> {
        let cpuset_problem = self.warden.machine_interface_mut().cpuset_thread_problem();
        let exists = |job: &JobId| self.warden.state().jobs.contains_key(job);
        let sent = self.sent_warnings.values().flatten();
        let mut own: Vec<Warning> = sent
            .filter(|warning| warning.job.as_ref().is_none_or(exists))
            .chain(&self.provision_warnings)
            .chain(self.borrower_records.warnings())
            .chain(self.job_files.warnings())
            .cloned()
            .collect();
        own.extend(self.excessive_provisions_warning());
        own.extend(self.warden.thaw_watcher_warning().filter(|_| self.has_frozen_job()));
        own.extend(
            cpuset_problem.map(|problem| Warning::new("cpuset-thread", problem.text(), problem.remedy())),
        );
        if own.is_empty() {
            return plan_warnings;
        }
        plan_warnings.iter().cloned().chain(own.into_iter().map(Arc::new)).collect()
    }
}
