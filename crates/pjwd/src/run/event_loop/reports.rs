//! The event loop and the reports of ended jobs.

use pjw_core::command::Command;
use pjw_core::diagnosis::verdict::{ended_job_summary, judge_ended_job};
use pjw_core::event::{Event, EventKind};
use pjw_core::job::JobId;
use pjw_core::scan::ScanRequest;
use pjw_core::usage::{JobReport, SharedMemory};

use super::EventLoop;
use crate::view::report::report_to_wire;
use crate::view::to_wire::format_rfc3339;
use crate::warden::CycleReport;

impl EventLoop {
    /// Runs a cycle of the warden, and stores the reports of the jobs that ended in it.
    pub(super) fn run_warden(&mut self, request: ScanRequest, commands: &[Command]) -> CycleReport {
        let mut report = self.warden.run_cycle(request, commands);
        let ended = self.store_reports(&report.ended_jobs);
        report.events.extend(ended);
        report
    }

    /// Notes for the report of a job what a reading of its memory found. `since` is the time at which the job began, as the
    /// status shows it.
    pub(super) fn note_memory(
        &mut self,
        job: &JobId,
        since: &str,
        shared: SharedMemory,
        (pss, peak): (Option<u64>, Option<u64>),
    ) {
        let state = self.warden.state_mut();
        let is_same = state.jobs.get(job).is_some_and(|job| format_rfc3339(job.detected_at) == since);
        if is_same {
            state.usage.note_memory(job, shared, pss, peak);
        }
    }

    /// Stores the reports of the jobs that ended. Returns an event for each, with the verdict on the job.
    fn store_reports(&mut self, ended: &[JobReport]) -> Vec<Event> {
        let mut events = Vec::new();
        for report in ended {
            let verdict = judge_ended_job(report);
            self.reports.add(report_to_wire(report, verdict.as_ref()));
            let text = ended_job_summary(report, verdict.as_ref());
            events.push(Event::new(EventKind::Ended, text).with_job(&report.id).with_cpus(&report.cpus));
        }
        events
    }
}
