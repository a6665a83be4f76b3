//! The warnings about jobs, and the waiting jobs that are to end: both are kept from one decision to the next.

use alloc::sync::Arc;

use super::WardenState;
use crate::basics::prelude::*;
use crate::state::jobs::waits_for_cores;
use crate::terms::{JobId, Warning};

impl WardenState {
    /// Replaces the warnings about jobs by `new`, the warnings of this decision. A job in `planned` has only these. For
    /// any other job, a new warning replaces the earlier one with the same code, and the job keeps the others. Must be
    /// called while [`WardenState::dirty`] still names the jobs that this decision removed.
    pub(crate) fn update_job_warnings(
        &mut self,
        planned: &BTreeSet<JobId>,
        new: BTreeMap<JobId, Vec<Warning>>,
    ) {
        if self.dirty.contains_everything() {
            self.warnings.clear();
        }
        for id in planned.iter().chain(self.dirty.dirty_jobs().map(|(id, _)| id)) {
            self.warnings.remove(id);
        }
        for (id, new) in new {
            // A command of the same decision may have removed the job after the warning was made.
            if !self.jobs.contains_key(&id) {
                continue;
            }
            let kept = self.warnings.remove(&id).unwrap_or_default();
            let is_other = |known: &Arc<Warning>| new.iter().all(|warning| warning.code != known.code);
            let others: Vec<Arc<Warning>> = kept.into_iter().filter(is_other).collect();
            self.warnings.insert(id, new.into_iter().map(Arc::new).chain(others).collect());
        }
    }

    /// Marks those jobs in `changed` that wait for cores and have no process now: the next decision ends such a job.
    /// The present one may have moved its last process to another job after it looked for jobs that have ended.
    pub(crate) fn mark_waiting_jobs_without_processes(&mut self, changed: &BTreeSet<JobId>) {
        for id in changed.iter().filter(|id| self.members.members_of_job(id).next().is_none()) {
            if self.jobs.get(id).is_some_and(waits_for_cores) {
                self.dirty.add_active(id);
            }
        }
    }
}
