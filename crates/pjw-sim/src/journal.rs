//! A journal in memory, with the reports of ended jobs. Both survive a restart of the simulated daemon. The disk of the
//! journal can be full.

use std::cell::RefCell;
use std::rc::Rc;

use pjw_core::{ports::Journal, record::Record, usage::JobReport};
use thiserror::Error;

use crate::faults::Faults;

/// Error: the records were not written to the simulated journal, because its disk is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("No space left on device (simulated)")]
pub struct DiskFull;

/// The simulated journal of the daemon pjwd: the records from which a restarted daemon restores its state. Also stores
/// the reports of ended jobs. The real journal is a file. The simulated journal keeps its content in memory. All clones
/// of a value share the same content.
#[derive(Debug, Clone)]
pub struct SimJournal {
    records: Rc<RefCell<Vec<Record>>>,
    /// The reports of ended jobs, in the order in which they were stored.
    reports: Rc<RefCell<Vec<JobReport>>>,
    /// Whether the disk has space for the next append of records. If false, the append may fail.
    is_reserved: bool,
    faults: Faults,
}

impl SimJournal {
    /// Makes an empty journal. `faults` decides at random which writes to the journal fail, and whether the
    /// daemon is killed just before or after it appends records.
    #[must_use]
    pub fn new(faults: Faults) -> Self {
        Self { records: Rc::default(), reports: Rc::default(), is_reserved: false, faults }
    }

    /// Returns all records of the journal, from the first written to the last written.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.records.borrow().clone()
    }

    /// Returns the stored reports of ended jobs, from the first stored to the last stored. If the daemon was killed
    /// after it stored the report of a job, the restarted daemon can store a second report of the same job.
    #[must_use]
    pub fn reports(&self) -> Vec<JobReport> {
        self.reports.borrow().clone()
    }
}

impl Journal for SimJournal {
    type Fault = DiskFull;

    fn append(&mut self, records: &[Record]) -> Result<(), DiskFull> {
        self.faults.maybe_kill_daemon();
        let is_reserved = std::mem::take(&mut self.is_reserved);
        if !records.is_empty()
            && !is_reserved
            && self.faults.occurs(self.faults.failed_journal_write_permille)
        {
            return Err(DiskFull);
        }
        self.records.borrow_mut().extend_from_slice(records);
        self.faults.maybe_kill_daemon();
        Ok(())
    }

    fn store_reports(&mut self, reports: &[JobReport]) {
        self.reports.borrow_mut().extend_from_slice(reports);
    }

    fn withdraw_reports(&mut self, reports: &[JobReport]) {
        self.reports.borrow_mut().retain(|stored| !reports.contains(stored));
    }

    fn reserve(&mut self, _: u64) -> bool {
        // Some file systems can't reserve space.
        self.is_reserved = self.faults.occurs(500);
        self.is_reserved
    }

    fn rewrite(&mut self, records: &[Record]) -> Result<(), DiskFull> {
        if self.faults.occurs(self.faults.failed_journal_write_permille) {
            return Err(DiskFull);
        }
        *self.records.borrow_mut() = records.to_vec();
        Ok(())
    }
}
