//! The warnings that are kept from one decision to the next, and the waiting jobs that the next decision must end.

use alloc::sync::Arc;

use super::WardenState;
use crate::basics::{Uid, prelude::*};
use crate::state::jobs::waits_for_cores;
use crate::terms::{JobId, Warning};

impl WardenState {
    /// Returns all warnings: those about the unassigned processes of users, `others`, and those about jobs. If none has
    /// changed since the last call, returns the same list.
    pub(crate) fn list_warnings(&mut self, others: Vec<Arc<Warning>>) -> Arc<[Arc<Warning>]> {
        let (strays, of_jobs) = (self.stray_warnings.values(), self.warnings.values().flatten());
        self.warning_list.update(strays, others, of_jobs)
    }

    /// Returns the list of all warnings of the last decision that listed them ([`WardenState::list_warnings`]).
    pub(crate) fn last_warnings(&self) -> Arc<[Arc<Warning>]> {
        self.warning_list.last()
    }

    /// Replaces the warning about the processes of the user `user` that belong to no job. If `warning` is `None`,
    /// removes the warning.
    pub(crate) fn set_stray_warning(&mut self, user: Uid, warning: Option<Warning>) {
        if self.stray_warnings.get(&user).map(|known| &**known) == warning.as_ref() {
            return;
        }
        self.warning_list.mark_outdated();
        match warning {
            Some(warning) => drop(self.stray_warnings.insert(user, Arc::new(warning))),
            None => drop(self.stray_warnings.remove(&user)),
        }
    }

    /// Iterates over the jobs that have a warning with the code `code`.
    pub(crate) fn jobs_with_warning(&self, code: &str) -> impl Iterator<Item = JobId> {
        let has_code = move |warning: &Arc<Warning>| warning.code == code;
        self.warnings.iter().filter(move |(_, known)| known.iter().any(has_code)).map(|(id, _)| id.clone())
    }

    /// Replaces the warnings about jobs by `new`, the warnings of this decision of the daemon.
    ///
    /// - A job in `planned` (the jobs about which this decision was made) keeps no earlier warning.
    /// - For any other job, a new warning replaces the earlier one with the same code. The job keeps its other
    ///   warnings.
    ///
    /// Must be called while [`WardenState::dirty`] still has the jobs that this decision removed.
    pub(crate) fn update_job_warnings(
        &mut self,
        planned: &BTreeSet<JobId>,
        new: BTreeMap<JobId, Vec<Warning>>,
    ) {
        let mut before: BTreeMap<JobId, Vec<Arc<Warning>>> = BTreeMap::new();
        if self.dirty.contains_everything() {
            before = core::mem::take(&mut self.warnings);
        }
        for id in planned.iter().chain(self.dirty.listed_jobs().map(|(id, _)| id)) {
            before.extend(self.warnings.remove_entry(id));
        }
        let mut is_changed = false;
        for (id, new) in new {
            // A command of the same decision may have removed the job after the warning was made.
            if !self.jobs.contains_key(&id) {
                continue;
            }
            let kept = self.warnings.remove(&id).unwrap_or_default();
            let is_other = |known: &&Arc<Warning>| new.iter().all(|warning| warning.code != known.code);
            let others: Vec<Arc<Warning>> = kept.iter().filter(is_other).cloned().collect();
            if !kept.is_empty() {
                before.insert(id.clone(), kept);
            }
            is_changed |= !before.contains_key(&id);
            self.warnings.insert(id, new.into_iter().map(Arc::new).chain(others).collect());
        }
        is_changed |= before.iter().any(|(id, known)| self.warnings.get(id) != Some(known));
        if is_changed {
            self.warning_list.mark_outdated();
        }
    }

    /// Marks those jobs in `changed` that wait for cores and have no process now: the next decision ends such a job.
    /// The present decision may have moved its last process to another job after it looked for jobs that have ended.
    pub(crate) fn mark_waiting_jobs_without_processes(&mut self, changed: &BTreeSet<JobId>) {
        for id in changed.iter().filter(|id| self.members.members_of_job(id).next().is_none()) {
            if self.jobs.get(id).is_some_and(waits_for_cores) {
                self.dirty.add_active(id);
            }
        }
    }
}
