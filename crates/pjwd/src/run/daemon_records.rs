//! What the daemon stores: the journal, and the reports of ended jobs.

use pjw_core::diagnosis::verdict::judge_ended_job;
use pjw_core::ports::Journal;
use pjw_core::record::Record;
use pjw_core::usage::JobReport;
use pjw_ipc::report::Report;

use crate::store::journal::{FileJournal, JournalError};
use crate::store::reports::ReportStore;
use crate::view::report::report_to_wire;

/// The journal (the files in which pjwd records its changes) and the store of the reports of ended jobs. Both are in
/// the state directory of pjwd.
#[derive(Debug)]
pub struct JournalAndReports {
    /// The journal: the records from which a restarted daemon restores its state.
    pub journal: FileJournal,
    /// The reports of the jobs that ended.
    pub reports: ReportStore,
}

impl Journal for JournalAndReports {
    type Fault = JournalError;

    fn append(&mut self, records: &[Record]) -> Result<(), JournalError> {
        self.journal.append(records)
    }

    fn store_reports(&mut self, reports: &[JobReport]) {
        reports.iter().map(report_with_verdict).for_each(|report| self.reports.add(report));
    }

    fn withdraw_reports(&mut self, reports: &[JobReport]) {
        let withdrawn: Vec<Report> = reports.iter().map(report_with_verdict).collect();
        self.reports.remove(|report| withdrawn.contains(report));
    }

    fn is_in_place(&self) -> bool {
        self.journal.is_in_place()
    }

    fn reserve(&mut self, bytes: u64) -> bool {
        self.journal.reserve(bytes)
    }

    fn rewrite(&mut self, records: &[Record]) -> Result<(), JournalError> {
        self.journal.rewrite(records)
    }
}

/// Returns `report` with the verdict on the job, in the form for clients.
fn report_with_verdict(report: &JobReport) -> Report {
    report_to_wire(report, judge_ended_job(report).as_ref())
}
