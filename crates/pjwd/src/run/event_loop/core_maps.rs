//! The event loop and the files of jobs. After a cycle (scan, decision and changes) the loop writes into
//! these files which CPUs each job has. A number of cores that a program writes into the file `want` of its
//! job becomes a command.

use std::collections::BTreeSet;
use std::time::Instant;

use pjw_core::command::{Caller, Command};
use pjw_core::core_map::core_map;
use pjw_core::job::JobId;
use pjw_core::state::dirty::DirtySet;
use tracing::info;

use super::EventLoop;
use crate::job_files::{JobFilesContent, WantedCoresUpdate};

impl EventLoop {
    /// Writes the core maps (the CPUs) of the jobs in `dirty` (the jobs that may have changed) into the files of
    /// these jobs, for the programs of the jobs. Also tries again to write or remove the files for which pjwd had no
    /// free file descriptor. Removes the files of a job that has no core map any more. If `is_rescan` is true, also
    /// schedules the reading of those files whose changes the kernel does not report. Must be called after each cycle
    /// (scan, decision and changes).
    pub(super) fn publish_core_maps(&mut self, dirty: &DirtySet, is_rescan: bool) {
        if self.warden.ongoing_failures().journal_error.is_some() {
            self.job_files.give_back_space_of_want_files();
        }
        let (state, policy) = (self.warden.state(), self.warden.policy());
        let content = |id: &JobId| {
            let job = state.jobs.get(id)?;
            let core_map = core_map(state, policy, job)?;
            let wanted = job.wanted_cores.map(|wanted| wanted.count);
            Some(JobFilesContent { owner: job.owner, core_map, wanted })
        };
        while let Some(id) = self.job_files.first_job_without_descriptor().cloned() {
            self.job_files.publish(&id, content(&id));
            // The other jobs get no descriptor either. To try hundreds of them would make each cycle long.
            if self.job_files.first_job_without_descriptor() == Some(&id) {
                break;
            }
        }
        let published: Vec<JobId>;
        let mut changed: BTreeSet<&JobId> = dirty.listed_jobs().map(|(id, _)| id).collect();
        if dirty.contains_everything() {
            published = self.job_files.job_ids().cloned().collect();
            changed.extend(state.jobs.keys().chain(&published));
        }
        for id in changed {
            self.job_files.publish(id, content(id));
        }
        if is_rescan {
            self.job_files.schedule_reading_of_unwatched_files(Instant::now());
        }
    }

    /// Reads the numbers of wanted cores that programs have written into the files `want` of their jobs. Turns each new
    /// number into a command of the user who owns the job, for the next cycle (scan, decision and changes).
    /// `is_readable` says whether the kernel has reported changed files since the last call. Does nothing before the
    /// time [`crate::job_files::JobFiles::next_read_at`]. `now` is the current time.
    pub(super) fn read_wanted_cores(&mut self, is_readable: bool, now: Instant) {
        if is_readable {
            self.job_files.schedule_reading_of_changed_files(now);
        }
        for WantedCoresUpdate { job, owner, cores } in self.job_files.take_wanted_cores_updates(now) {
            let state = self.warden.state();
            let existing = state.jobs.get(&job);
            let limit = existing.and_then(|job| job.max_wanted_cores(&state.topology));
            let before = existing.and_then(|job| job.wanted_cores).map_or(0, |wanted| wanted.count);
            if let (Some(cores), Some(limit)) = (cores, limit)
                && cores > limit
                && before <= limit
            {
                info!(job = %job, "{job} wants {cores} cores in its file want and may have {limit}: {limit} count");
            }
            let caller = Caller { uid: owner, is_admin: false };
            self.own_commands.push(Command::Want { job, cores, caller });
        }
    }
}
