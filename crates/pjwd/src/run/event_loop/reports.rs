//! The event loop and the reports of ended jobs.

use pjw_core::command::Command;
use std::collections::BTreeSet;

use pjw_core::diagnosis::verdict::{ended_job_summary, judge_ended_job};
use pjw_core::event::{Event, EventKind};
use pjw_core::job::JobId;
use pjw_core::scan::ScanRequest;
use pjw_core::usage::{JobReport, MemoryFigures};

use super::EventLoop;
use crate::view::to_wire::format_rfc3339;
use crate::warden::CycleReport;

impl EventLoop {
    /// Runs a cycle of the warden, and adds an event for each job that ended in it, with the verdict on the job. The
    /// journal of the warden has stored the reports.
    pub(super) fn run_warden(&mut self, request: ScanRequest, commands: &[Command]) -> CycleReport {
        let mut report = self.warden.run_cycle(request, commands);
        report.events.extend(report.ended_jobs.iter().map(ended_event));
        report
    }

    /// Records the measured memory of a job for its report. `since` is the time at which the job began, in the form of
    /// the status.
    pub(super) fn note_memory(&mut self, job: &JobId, since: &str, figures: &MemoryFigures) {
        let state = self.warden.state_mut();
        let is_same = state.jobs.get(job).is_some_and(|job| format_rfc3339(job.detected_at) == since);
        if is_same {
            state.usage.note_memory(job, figures);
        }
    }

    /// Removes the reports of jobs that still run. Such a report exists if an earlier daemon was killed between two
    /// steps of a release: it had stored the report, and had not yet recorded the release. A job that was released
    /// keeps its report.
    pub(super) fn remove_reports_of_running_jobs(&mut self) {
        let jobs = self.warden.state().jobs.values().filter(|job| !job.was_released);
        let running: BTreeSet<(String, String)> =
            jobs.map(|job| (job.id.to_string(), format_rfc3339(job.detected_at))).collect();
        let is_running = |id: &str, started: &str| running.contains(&(id.to_owned(), started.to_owned()));
        self.warden.journal_mut().reports.remove(|report| is_running(&report.id, &report.started));
    }
}

/// The event that reports the end of a job, with the verdict on the job.
fn ended_event(report: &JobReport) -> Event {
    let text = ended_job_summary(report, judge_ended_job(report).as_ref());
    Event::new(EventKind::Ended, text).with_job(&report.id).with_cpus(&report.cpus)
}
