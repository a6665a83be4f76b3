//! Carries out a decision: the audit, the journal, the changes of cpusets, and then those of masks.

use pjw_core::command::Command;
use pjw_core::plan::{MaskAction, MaskActionKind, MaskOutcome, Plan};
use pjw_core::policy::DaemonMode;
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::reconcile::Decision;
use pjw_core::record::Record;
use pjw_core::report::{cpuset_events, mask_events};
use pjw_core::scan::ScanRequest;
use pjw_core::snapshot::Snapshot;
use pjw_core::state::WardenState;

use super::cycle::Warden;
use super::report::{CycleReport, RefusedMask, only_releases};

/// The errno of sched_setaffinity(2) for a mask that has no CPU in common with the thread's cpuset.
const EINVAL: i32 = nix::libc::EINVAL;

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Carries out `decision`, which was made from `snapshot` and `commands`: writes its records to the journal, and
    /// makes the decided changes. Adds the results to `report`. Returns the next scan if there is more to do.
    ///
    /// `rollback_state` is the state before the decision. If the records can't be written, the function decides again
    /// from that state. If it is `None`, at most the changes that need no record are made then: none at all, unless the
    /// `commands` only release jobs, or an earlier write has failed and there are no commands.
    pub(super) fn carry_out(
        &mut self,
        decision: Decision,
        snapshot: &Snapshot,
        commands: &[Command],
        rollback_state: Option<WardenState>,
        report: &mut CycleReport,
    ) -> Option<ScanRequest> {
        let Decision { mut records, plan, events, replies, next_scan, reports, .. } = decision;
        let mut is_recorded = true;
        let mut plan = self.without_unsound_actions(plan);
        if self.policy.mode == DaemonMode::Observe {
            records.retain(|record| {
                !matches!(record, Record::MaskSet { .. } | Record::MaskReleased(_) | Record::Cpuset(_))
            });
            plan.mask_actions.iter().for_each(|action| self.state.record_mask_not_attempted(action));
        }
        if let Err(fault) = self.write_records_and_reports(&records, &reports, rollback_state.is_some()) {
            if let Some(rollback_state) = rollback_state {
                return self.decide_on_releases(&fault, rollback_state, snapshot, commands, report);
            }
            self.note_unrecorded_masks(&records);
            let grants_nothing = commands.is_empty() && !self.policy.may_grant;
            if !grants_nothing && !only_releases(commands) {
                self.drop_applied_identities(snapshot);
                // The ended jobs are gone from the state, so their reports are needed.
                report.ended_jobs.extend(reports);
                self.undo_unrecorded_decision(&fault, commands, &plan, report);
                return next_scan.filter(|_| commands.is_empty());
            }
            plan = self.without_unrecorded_actions(plan, &fault);
            is_recorded = false;
        }
        self.drop_applied_identities(snapshot);
        report.add_events(events);
        report.ended_jobs.extend(reports);
        report.replies.extend(replies);
        if self.policy.mode == DaemonMode::Observe {
            let is_empty = plan.mask_actions.is_empty() && plan.cpuset_actions.is_empty();
            return next_scan.filter(|_| is_empty && is_recorded);
        }
        let Plan { cpuset_actions, mask_actions } = plan;
        // If nothing was recorded and no action is left, the next scan would be about actions that are not made.
        let next_scan =
            next_scan.filter(|_| is_recorded || !(cpuset_actions.is_empty() && mask_actions.is_empty()));
        let cpusets = self.apply_cpuset_changes(cpuset_actions);
        let outcomes = self.apply_mask_actions(mask_actions);
        let events = [cpuset_events(&cpusets), mask_events(&self.state, &outcomes)].concat();
        self.state.usage.count_violations_and_repairs(&events);
        report.events.extend(events);
        let has_mask_progress = outcomes.is_empty() || report.count_mask_changes(&outcomes);
        // After a refused cpuset change, masks keep the job on its cores. The next round decides on these masks.
        let has_progress = has_mask_progress || !cpusets.is_empty();
        report.mask_outcomes.extend(outcomes);
        report.cpuset_outcomes.extend(cpusets);
        next_scan.filter(|_| has_progress)
    }

    /// Makes the changes of affinity masks in `actions`, and records their outcomes in the state. Returns the outcomes.
    fn apply_mask_actions(&mut self, actions: Vec<MaskAction>) -> Vec<(MaskAction, MaskOutcome)> {
        let mut outcomes = Vec::with_capacity(actions.len());
        for action in actions {
            let first_write = self.first_mask_writes.get(&action.thread.process.pid);
            let outcome = match first_write.filter(|write| write.requested == action.requested_mask) {
                Some(write) => MaskOutcome::Done { effective: write.effective.clone() },
                None => self.node.change_mask(&action),
            };
            match &outcome {
                MaskOutcome::Done { effective } => {
                    self.state.record_mask_applied(&action, &action.requested_mask, effective);
                    self.ongoing_failures.refused_masks.remove(&action.thread);
                }
                MaskOutcome::Gone => {}
                MaskOutcome::Refused { errno: EINVAL, .. } if action.kind == MaskActionKind::Restore => {
                    self.state.record_restore_refused(&action);
                }
                MaskOutcome::Refused { reason, .. } => {
                    self.state.record_mask_refused(&action);
                    let refused = RefusedMask { job: action.job.clone(), reason: reason.clone() };
                    self.ongoing_failures.refused_masks.insert(action.thread, refused);
                }
            }
            outcomes.push((action, outcome));
        }
        outcomes
    }
}
