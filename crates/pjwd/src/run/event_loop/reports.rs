//! The event loop and the reports of ended jobs.

use std::collections::BTreeSet;

use pjw_core::command::Command;
use pjw_core::diagnosis::verdict::{ended_job_summary, judge_ended_job};
use pjw_core::event::{Event, EventKind};
use pjw_core::job::JobId;
use pjw_core::scan::ScanRequest;
use pjw_core::usage::{JobReport, MemoryReading};

use super::EventLoop;
use crate::view::to_wire::format_rfc3339;
use crate::warden::CycleReport;

impl EventLoop {
    /// Runs one cycle (scan, decision and changes). `request` says which processes are scanned, and `commands` are the
    /// commands that are executed. Returns the results of the cycle. For each job that ended in the cycle, the results
    /// contain an event that says how well the job used its cores.
    pub(super) fn run_reporting_cycle(&mut self, request: ScanRequest, commands: &[Command]) -> CycleReport {
        let mut report = self.warden.run_cycle(request, commands);
        report.events.extend(report.ended_jobs.iter().map(ended_event));
        report
    }

    /// Stores `figures`, measured values of the memory use of the job `job`, for the report that pjwd makes when the
    /// job ends. `since` is the start time of the measured job in the format of the status (RFC 3339). Does nothing if
    /// the job has ended, or if a later job has the same id.
    pub(super) fn store_memory_figures(&mut self, job: &JobId, since: &str, figures: &MemoryReading) {
        let state = self.warden.state_mut();
        let is_same = state.jobs.get(job).is_some_and(|job| format_rfc3339(job.detected_at) == since);
        if is_same {
            state.usage.note_memory(job, figures);
        }
    }

    /// Removes the stored reports of jobs that still run. Such a report exists if an earlier daemon was killed after it
    /// had stored the report of a job, and before it recorded the release of the job. Keeps the reports of jobs that
    /// were released.
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
