//! New jobs that the kernel refuses to keep on their cores. Each is released in the cycle that made it.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::command::{Caller, Command, Reply};
use pjw_core::command_scan::command_scan_request;
use pjw_core::plan::MaskOutcome;
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::{job::JobId, refusal::Refusal};

use super::cycle::{MAX_ROUNDS, Warden};
use super::report::CycleReport;

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Releases each new job for which the kernel refused all affinity masks, and refuses the commands that made the
    /// job or changed it. `commands` are the commands of the cycle, and `report` has their replies. `existing_jobs` are
    /// the jobs that existed before the cycle and were not released: these stay.
    pub(super) fn release_unenforceable_jobs(
        &mut self,
        commands: &[Command],
        existing_jobs: &BTreeSet<JobId>,
        report: &mut CycleReport,
    ) {
        let unenforceable = self.find_unenforceable_jobs(commands, existing_jobs, report);
        if unenforceable.is_empty() {
            return;
        }
        for reply in &mut report.replies {
            let Ok(Reply::Assigned(job) | Reply::Wanted(job)) = &*reply else { continue };
            if let Some((_, why)) = unenforceable.get(&job.id) {
                let refusal = Refusal::Unenforceable { job: job.id.clone(), why: why.clone() };
                *reply = Err(refusal);
            }
        }
        let undo_commands: Vec<Command> = unenforceable
            .into_iter()
            .map(|(job, (caller, why))| Command::Undo { job, caller, why })
            .collect();
        let mut release_report = CycleReport::default();
        let mut next = Some(command_scan_request(&mut self.state, &undo_commands));
        let mut round_commands: &[Command] = &undo_commands;
        for _ in 0..MAX_ROUNDS {
            let Some(request) = next.take() else { break };
            next = self.run_round(&request, round_commands, &mut release_report);
            round_commands = &[];
        }
        report.add_release(release_report);
        report.has_unfinished_work |= next.is_some();
    }

    /// Returns the new jobs for which the kernel refused all masks. Each has the user who assigned processes to the
    /// job, and an error of the kernel. A job is new if it is not in `existing_jobs`. `commands` are the
    /// commands of the cycle, and `report` has their replies.
    fn find_unenforceable_jobs(
        &self,
        commands: &[Command],
        existing_jobs: &BTreeSet<JobId>,
        report: &CycleReport,
    ) -> BTreeMap<JobId, (Caller, String)> {
        let mut found = BTreeMap::new();
        for (command, reply) in commands.iter().zip(&report.replies) {
            let (Command::Assign(assign), Ok(_)) = (command, reply) else { continue };
            let id = &assign.job;
            if assign.pids.is_empty() || existing_jobs.contains(id) || !self.state.jobs.contains_key(id) {
                continue;
            }
            if let Some(why) = error_of_all_masks(report, id) {
                found.insert(id.clone(), (assign.caller, why));
            }
        }
        found
    }
}

/// Returns an error of the kernel if the kernel refused every change of an affinity mask for the job `job`. `None` if a
/// change was made, or if no change was tried.
fn error_of_all_masks(report: &CycleReport, job: &JobId) -> Option<String> {
    let mut error = None;
    for (_, outcome) in report.mask_outcomes.iter().filter(|(action, _)| action.job == *job) {
        match outcome {
            MaskOutcome::Done { .. } => return None,
            MaskOutcome::Gone => {}
            MaskOutcome::Refused { reason, .. } => error = error.or_else(|| Some(reason.clone())),
        }
    }
    error
}
