//! The confinement of forked processes with a mask outside of their job's cores. It is quick, so it comes before each
//! scan.

use std::collections::BTreeMap;
use std::time::Instant;

use pjw_core::fork_fastpath::{
    FirstMaskWrites, defer_scans_if_masks_match, expected_fork_masks, expected_masks_of_unverified_forks,
    forked_with_unexplained_masks, plan_first_mask_writes, snapshot_of_mismatches,
};
use pjw_core::ids::Pid;
use pjw_core::plan::MaskOutcome;
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::reconcile::reconcile_forks;
use pjw_core::snapshot::{ExpectedMask, MaskProbeResult};

use super::cycle::Warden;
use super::report::{ConfinedNewProcess, CycleReport, FirstMaskWrite};

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Reads the affinity masks of the processes that processes of jobs forked since the last scan. Decides for each
    /// new process whether its scan is urgent. The scan can wait for a few milliseconds if the affinity mask is the set
    /// of online PUs (logical CPUs) that the job holds. The scan can also wait if the process was forked into the
    /// cpuset of the job. Otherwise, the scan is urgent. Must be called after process events were read, unless a cycle
    /// follows at once.
    ///
    /// If `may_confine` is true, also corrects the wrong masks that it finds. The report of the next cycle contains
    /// these corrections. If it is false, the next cycle corrects the masks.
    pub fn check_masks_of_new_forks(&mut self, may_confine: bool) {
        if self.state.lineage.scan_queue.immediate_pids().is_empty() {
            return;
        }
        let expected = expected_masks_of_unverified_forks(&self.state);
        if expected.is_empty() {
            return defer_scans_if_masks_match(&mut self.state, &expected, &[]);
        }
        let probe = self.node.probe_masks(&expected);
        let may_confine = may_confine && self.ongoing_failures.journal_error.is_none();
        if may_confine && !probe.mismatches.is_empty() {
            let mut report = std::mem::take(&mut self.fork_report);
            let mismatches = probe.mismatches.clone();
            self.confine_probed_forks(&expected, probe, &mut report);
            self.fork_report = report;
            // The next cycle writes the records of the whole state.
            self.state.full_scan_due |= self.ongoing_failures.journal_error.is_some();
            return defer_scans_if_masks_match(&mut self.state, &expected, &mismatches);
        }
        defer_scans_if_masks_match(&mut self.state, &expected, &probe.mismatches);
    }

    /// Confines processes that were forked outside of their job's cores, before the scan of the cycle, which takes
    /// longer. Adds the results to `report`. Does nothing if an earlier write of the journal has failed. Returns the
    /// error if the journal can't be written now, `None` otherwise.
    pub(super) fn confine_forks(&mut self, report: &mut CycleReport) -> Option<String> {
        let expected = expected_fork_masks(&self.state);
        if expected.is_empty() || self.ongoing_failures.journal_error.is_some() {
            return None;
        }
        let probe = self.node.probe_masks(&expected);
        self.confine_probed_forks(&expected, probe, report);
        self.ongoing_failures.journal_error.clone()
    }

    /// Corrects the masks of the processes in `probe`, which are not the ones in `expected`. Adds the results to
    /// `report`. Does nothing for a process whose mask can't be explained before a scan has read the process.
    fn confine_probed_forks(
        &mut self,
        expected: &BTreeMap<Pid, ExpectedMask>,
        probe: MaskProbeResult,
        report: &mut CycleReport,
    ) {
        self.first_mask_writes = self.make_first_mask_writes(expected, &probe);
        let unknown = forked_with_unexplained_masks(&self.state, expected, &probe);
        let cpuset_paths =
            if unknown.is_empty() { BTreeMap::new() } else { self.node.read_cpuset_paths(&unknown) };
        let snapshot = snapshot_of_mismatches(&self.state, probe, &cpuset_paths);
        if snapshot.processes.is_empty() {
            self.first_mask_writes.clear();
            return;
        }
        self.policy.may_grant = true;
        let decision = reconcile_forks(&mut self.state, &snapshot, &self.policy);
        report.plan_warnings.clone_from(&decision.warnings);
        let earlier_outcomes = report.mask_outcomes.len();
        let _ = self.carry_out(decision, &snapshot, &[], None, report);
        let written = std::mem::take(&mut self.first_mask_writes);
        let decided_at = Instant::now();
        let is_done = |outcome: &MaskOutcome| matches!(outcome, MaskOutcome::Done { .. });
        let outcomes = report.mask_outcomes[earlier_outcomes..].iter();
        for (action, _) in outcomes.filter(|(_, outcome)| is_done(outcome)) {
            self.state.record_mask_applied_during_fork(action);
            let pid = action.thread.process.pid;
            let forked_at = self.state.lineage.descendant(pid).and_then(|node| node.forked_at);
            let confined_at = written.get(&pid).map_or(decided_at, |write| write.made_at);
            report.confined_new_processes.extend(forked_at.map(|forked_at| ConfinedNewProcess {
                pid,
                forked_at,
                confined_at,
            }));
        }
    }

    /// Sets the masks of the processes in `probe` that are certain before the decision about these processes, and
    /// returns when each mask was set. Sets none if the records of these changes can't be written to the journal, or if
    /// the audit forbids changes: the decision that follows meets the same failure, and reports it.
    fn make_first_mask_writes(
        &mut self,
        expected: &BTreeMap<Pid, ExpectedMask>,
        probe: &MaskProbeResult,
    ) -> BTreeMap<Pid, FirstMaskWrite> {
        let FirstMaskWrites { records, actions } =
            plan_first_mask_writes(&self.state, &self.policy, expected, probe);
        // Whether the file was removed is checked for the records of the decision, right after these.
        let may_write = self.ongoing_failures.audit_violations.is_empty() && !actions.is_empty();
        if !may_write || self.journal.append(&records).is_err() {
            return BTreeMap::new();
        }
        let mut writes = BTreeMap::new();
        for action in actions {
            if let MaskOutcome::Done { effective } = self.node.change_mask(&action) {
                let (requested, made_at) = (action.requested_mask, Instant::now());
                writes.insert(action.thread.process.pid, FirstMaskWrite { requested, effective, made_at });
            }
        }
        writes
    }
}
