//! The journal of the warden: every decision is recorded before it is carried out, and rolled back if it can't be.

use pjw_core::command::Command;
use pjw_core::cpuset_group::CpusetAction;
use pjw_core::cpusets::needs_record;
use pjw_core::plan::{MaskAction, MaskActionKind, Plan};
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::record::Record;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::snapshot::Snapshot;
use pjw_core::{cpuset::CpuSet, state::WardenState, usage::JobReport};

use super::cycle::Warden;
use super::report::{CycleReport, is_release, only_releases, refuse_unrecorded_commands};

/// The largest number of records for which space is reserved in the journal. For more, the state is copied.
const MAX_RESERVED_RECORDS: usize = 1000;
/// The number of records that a command has beside those of its threads: the job, its cpuset and its processes.
const OTHER_RECORDS: usize = 64;

/// Returns the largest number of bytes that `records` records take in the journal. Each record has at most two sets of
/// the machine's PUs.
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
        let written = self.journal.rewrite(&self.state.records());
        if written.is_ok() {
            self.unrecorded_masks.clear();
        } else if !self.journal.is_in_place() {
            // Another program removed the journal.
            self.unrecorded_masks.extend(self.state.journaled_masks().map(|(thread, _)| thread));
        }
        written
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

    /// Stores `reports`, the reports of the jobs that end by a decision. Then writes `records`, the records of the
    /// decision, to the journal. `is_rolled_back` says whether the caller undoes the decision if the write fails. The
    /// function then removes the reports again, because the jobs have not ended.
    ///
    /// # Errors
    /// If the journal can't be written.
    pub(super) fn write_records_and_reports(
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

    /// Writes `records`, the records of a decision, to the journal. If an earlier write has failed or another program
    /// has removed the journal, writes the records of the whole state instead, because earlier records are missing in
    /// the file.
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

    /// Returns a copy of the state before the `commands` are executed. If the records of the commands can't be
    /// written, the caller puts this copy in the place of the state. `None` if no copy is needed, in these cases:
    ///
    /// - There are no commands of clients.
    /// - All commands release jobs, and an earlier write has failed: the freed cores have no new owner then.
    /// - The journal has reserved enough disk space for the records of the commands, so that the write can't fail for
    ///   lack of space. Space is reserved only if the commands concern few threads.
    pub(super) fn prepare_rollback(&mut self, commands: &[Command]) -> Option<WardenState> {
        // An undone job ends in any case, because the client learns that the job was not made.
        if commands.iter().all(|command| matches!(command, Command::Undo { .. })) {
            return None;
        }
        if only_releases(commands) && !self.policy.may_grant {
            return None;
        }
        let threads_of =
            |job| self.state.members_of(job).map(|member| 1 + member.threads.len()).sum::<usize>();
        let records = commands.iter().map(|command| match command {
            Command::Assign(assign) if assign.session.is_none() => {
                Some(assign.pids.len() + threads_of(&assign.job))
            }
            // The masks that are restored, and the masks from which children may have to be restored.
            Command::Release { job, .. } | Command::Undo { job, .. } => Some(2 * threads_of(job)),
            // One record of the job.
            Command::Want { .. } => Some(1),
            // It is not known which processes these commands concern.
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

    /// Notes the threads whose affinity masks are in `records`, the records of a decision that could not be written to
    /// the journal. The next successful write has the whole state, and so all these masks.
    pub(super) fn note_unrecorded_masks(&mut self, records: &[Record]) {
        let threads = records.iter().filter_map(|record| match record {
            Record::MaskSet { thread, .. } => Some(*thread),
            _ => None,
        });
        self.unrecorded_masks.extend(threads);
    }

    /// Returns those actions of `plan` that need no record: they put back masks and processes, or change loans
    /// ([`needs_record`]). Used after the records of a decision could not be written to the journal for the reason
    /// `fault`. The other actions are left out, and are planned again by a later cycle.
    pub(super) fn without_unrecorded_actions(&mut self, plan: Plan, fault: &J::Fault) -> Plan {
        let Plan { cpuset_actions, mask_actions } = plan;
        let is_allowed =
            |action: &CpusetAction| !needs_record(&self.state, &self.policy, action, &self.unrecorded_masks);
        let (cpuset_actions, dropped): (Vec<CpusetAction>, Vec<CpusetAction>) =
            cpuset_actions.into_iter().partition(is_allowed);
        dropped.iter().for_each(|action| self.state.cpusets.record_not_attempted(action));
        let is_restore = |action: &MaskAction| action.kind == MaskActionKind::Restore;
        let (mask_actions, dropped): (Vec<MaskAction>, Vec<MaskAction>) =
            mask_actions.into_iter().partition(is_restore);
        dropped.iter().for_each(|action| self.state.record_mask_not_attempted(action));
        self.state.full_scan_due = true;
        self.ongoing_failures.journal_error = Some(fault.to_string());
        Plan { cpuset_actions, mask_actions }
    }

    /// Leaves out the changes of a decision, because its records could not be written to the journal for the reason
    /// `fault`. The changes in `plan` are not made, and `report` gets a refusal for each of the `commands`. The next
    /// cycle writes the whole state to the journal.
    pub(super) fn undo_unrecorded_decision(
        &mut self,
        fault: &J::Fault,
        commands: &[Command],
        plan: &Plan,
        report: &mut CycleReport,
    ) {
        let fault = fault.to_string();
        // The masks that were set before the decision have a record.
        let is_set = |action: &&MaskAction| self.first_mask_writes.contains_key(&action.thread.process.pid);
        let not_set = plan.mask_actions.iter().filter(|action| !is_set(action));
        not_set.for_each(|action| self.state.record_mask_not_attempted(action));
        plan.cpuset_actions.iter().for_each(|action| self.state.cpusets.record_not_attempted(action));
        report.replies.extend(refuse_unrecorded_commands(commands, &fault));
        self.ongoing_failures.journal_error = Some(fault);
    }

    /// Decides again from `snapshot`, because the records of a decision could not be written to the journal for the
    /// reason `fault`. First replaces the present state by `before`, the state before the decision. Then carries out
    /// only those of the `commands` that release jobs. Only borrowers can get the freed cores. `report` gets a refusal
    /// for each other command. Returns the next scan if there is more to do.
    pub(super) fn decide_on_releases(
        &mut self,
        fault: &J::Fault,
        before: WardenState,
        snapshot: &Snapshot,
        commands: &[Command],
        report: &mut CycleReport,
    ) -> Option<ScanRequest> {
        let fault = fault.to_string();
        self.state = before;
        self.state.full_scan_due = true;
        // The next changes of the earlier state get the same numbers as the changes that were undone.
        self.audited_grants = None;
        let refusals = refuse_unrecorded_commands(commands, &fault);
        self.ongoing_failures.journal_error = Some(fault);
        let releases: Vec<Command> = commands.iter().filter(|command| is_release(command)).cloned().collect();
        if releases.is_empty() {
            report.replies.extend(refusals);
            return None;
        }
        let earlier_replies = std::mem::take(&mut report.replies);
        let next_scan = self.decide_and_apply(snapshot, &releases, report);
        let mut release_replies = std::mem::replace(&mut report.replies, earlier_replies).into_iter();
        let replies = commands.iter().zip(refusals).map(|(command, refusal)| {
            if is_release(command) { release_replies.next().unwrap_or(refusal) } else { refusal }
        });
        report.replies.extend(replies);
        next_scan
    }

    /// Removes the pending batch identities of the processes in `snapshot`, because the state contains them now. A
    /// batch identity names the jobs to which a process may belong by its attributes, such as its environment.
    pub(super) fn drop_applied_identities(&mut self, snapshot: &Snapshot) {
        match &snapshot.scope {
            ScanScope::Full => self.pending_identities.clear(),
            ScanScope::Partial(_) => {
                self.pending_identities.retain(|id, _| !snapshot.processes.contains_key(&id.pid));
            }
        }
    }
}
