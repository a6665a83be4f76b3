//! The journal of the warden: every decision is recorded before it is carried out, and rolled back if it can't be.

use pjw_core::command::Command;
use pjw_core::plan::Plan;
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::record::Record;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::snapshot::Snapshot;
use pjw_core::{cpuset::CpuSet, state::WardenState, usage::JobReport};

use super::cycle::Warden;
use super::report::{CycleReport, all_unrecorded};

/// The largest number of records for which space is reserved in the journal. For more, the state is copied.
const MAX_RESERVED_RECORDS: usize = 1000;
/// The number of records that a command has beside those of its threads: the job, its cpuset and its processes.
const OTHER_RECORDS: usize = 64;

/// The most bytes that so many records take in the journal: each has at most two sets of the machine's PUs.
fn records_size(records: usize, machine: &CpuSet) -> u64 {
    let bytes_per_record = 512 + 8 * machine.len();
    ((records + OTHER_RECORDS) * bytes_per_record) as u64
}

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Replaces the content of the journal (the records of pjwd's changes) by the records of the current state.
    /// Earlier records are dropped, so the journal becomes shorter.
    ///
    /// # Errors
    /// If the journal can't be written. The old content then stays valid.
    pub fn rewrite_journal(&mut self) -> Result<(), J::Fault> {
        self.journal.rewrite(&self.state.records())
    }

    /// Recreates the files of the journal (the records of pjwd's changes) from the current state if another program
    /// removed one of them. If the write fails, [`Warden::ongoing_failures`] has the error, and each later cycle
    /// (scan, decision and changes) tries again.
    pub fn recreate_journal_if_removed(&mut self) {
        if self.ongoing_failures.journal_error.is_none() && !self.journal.is_in_place() {
            self.ongoing_failures.journal_error = self.rewrite_journal().err().map(|fault| fault.to_string());
        }
    }

    /// Returns a mutable reference to the journal: the storage in which pjwd records each change, and the reports of
    /// ended jobs.
    pub fn journal_mut(&mut self) -> &mut J {
        &mut self.journal
    }

    /// Stores the reports of the jobs that end by a decision, and then writes its records. If the records can't be
    /// written and the decision is rolled back, removes the reports again.
    ///
    /// # Errors
    /// If the journal can't be written.
    pub(super) fn write_with_reports(
        &mut self,
        records: &[Record],
        reports: &[JobReport],
        is_rolled_back: bool,
    ) -> Result<(), J::Fault> {
        if !reports.is_empty() {
            self.journal.store_reports(reports);
        }
        let written = self.write_records(records);
        if written.is_err() && is_rolled_back && !reports.is_empty() {
            self.journal.withdraw_reports(reports);
        }
        written
    }

    /// Writes the records of a decision to the journal. If an earlier write failed or another program removed
    /// the journal, writes all records of the state instead, because earlier records are missing.
    ///
    /// # Errors
    /// If the journal can't be written.
    pub(super) fn write_records(&mut self, records: &[Record]) -> Result<(), J::Fault> {
        if self.ongoing_failures.journal_error.is_none() && self.journal.is_in_place() {
            return self.journal.append(records);
        }
        self.rewrite_journal()?;
        self.ongoing_failures.journal_error = None;
        Ok(())
    }

    /// Returns a copy of the state, for a rollback if the records of the commands can't be written. `None` if
    /// no rollback is needed: there are no commands, or the journal has enough reserved space. Space is
    /// reserved only if the commands concern few threads. A copy takes time for every process of the machine.
    pub(super) fn prepare_rollback(&mut self, commands: &[Command]) -> Option<WardenState> {
        if commands.is_empty() {
            return None;
        }
        let threads_of =
            |job| self.state.members_of(job).map(|member| 1 + member.threads.len()).sum::<usize>();
        let records = commands.iter().map(|command| match command {
            Command::Assign(assign) if assign.session.is_none() => {
                Some(assign.pids.len() + threads_of(&assign.job))
            }
            // The masks that are restored, and the masks from which children may have to be restored.
            Command::Release { job, .. } => Some(2 * threads_of(job)),
            // One record of the job.
            Command::Want { .. } => Some(1),
            // It is not known which processes these concern.
            Command::Assign(_)
            | Command::Provision(_)
            | Command::ReleaseAll { .. }
            | Command::Defrag { .. } => None,
        });
        let records = records.sum::<Option<usize>>().filter(|&records| records <= MAX_RESERVED_RECORDS);
        let size = records.map(|records| records_size(records, self.state.topology.cpus()));
        // After a failed write the whole state is written, for which no space is reserved.
        let is_reserved = self.ongoing_failures.journal_error.is_none()
            && self.journal.is_in_place()
            && size.is_some_and(|size| self.journal.reserve(size));
        (!is_reserved).then(|| self.state.clone())
    }

    /// Rolls back a decision that could not be journaled, so that no unrecorded change is made. Commands are refused
    /// and leave no trace, if there is a copy of the state before them. Without such a copy, observed facts stay in the
    /// state and the next cycle writes the journal again.
    pub(super) fn unrecorded(
        &mut self,
        fault: &J::Fault,
        before: Option<WardenState>,
        commands: &[Command],
        plan: &Plan,
        report: &mut CycleReport,
    ) -> Option<ScanRequest> {
        let fault = fault.to_string();
        if let Some(before) = before {
            self.state = before;
            self.state.full_scan_due = true;
            // The earlier state counts its next changes with the same numbers.
            self.audited_grants = None;
        } else {
            plan.mask_actions.iter().for_each(|action| self.state.record_mask_not_attempted(action));
        }
        report.replies.extend(all_unrecorded(commands, &fault));
        self.ongoing_failures.journal_error = Some(fault);
        None
    }

    /// Removes the pending claims (assignments of processes to jobs by their attributes) of the scanned processes,
    /// because the state contains these claims now.
    pub(super) fn drop_applied_claims(&mut self, snapshot: &Snapshot) {
        match &snapshot.scope {
            ScanScope::Full => self.pending_claims.clear(),
            ScanScope::Partial(_) => {
                self.pending_claims.retain(|id, _| !snapshot.processes.contains_key(&id.pid));
            }
        }
    }
}
