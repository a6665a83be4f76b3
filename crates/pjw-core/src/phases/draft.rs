//! The data that the phases of one cycle share.

use alloc::sync::Arc;

use crate::basics::{Moment, Pid, ThreadId, prelude::*};
use crate::phases::held::add_held_core_time;
use crate::phases::usage::sample::end_sample_if_held_changes;
use crate::state::masks::request::{MaskRequest, MaskWriter};
use crate::state::{WardenState, mask_records};
use crate::terms::{
    CpusetRecord, Event, Job, JobId, JobReport, MaskAction, Observed, Policy, Record, ScanScope, Snapshot,
    Warning,
};

/// The unfinished decision of one cycle of pjwd (a scan, a decision and the decided changes): the scan, the settings,
/// the state of pjw, and the output so far. The decision is made in several phases. Each phase changes the state and
/// adds output.
pub(crate) struct CycleDraft<'a> {
    /// The state, which the phases change.
    pub(crate) state: &'a mut WardenState,
    /// The settings.
    pub(crate) policy: &'a Policy,
    /// The time at which the scan began.
    pub(crate) now: Moment,
    /// The snapshot of this cycle.
    pub(crate) seen: &'a Snapshot,
    /// Whether the snapshot lists every process of the machine.
    pub(crate) full: bool,
    /// Whether any process of the machine may belong to another job than before.
    pub(crate) recheck_all: bool,
    /// The processes that may belong to another job than before, because a job or its processes changed, even if the
    /// snapshot does not list them.
    pub(crate) recheck: BTreeSet<Pid>,
    /// Whether the CPU times that this cycle read have been added to the usage of the jobs. While this is false, a
    /// changed grant does not end the usage sample (the resource use in one interval) of its job. The CPU time of the
    /// sample would be too low, and that of the next sample too high.
    pub(crate) has_added_cpu_times: bool,
    /// The output so far.
    pub(crate) out: CycleOutput,
}

/// The output of a decision except the planned changes: journal records, events, warnings and job reports. The entries
/// of each list are in the order in which they were added.
#[derive(Default)]
pub(crate) struct CycleOutput {
    /// The records for the journal (the file with which a restarted daemon restores its state).
    pub(crate) records: Vec<Record>,
    /// The events to report.
    pub(crate) events: Vec<Event>,
    /// The warnings for users that are not stored as warnings about single jobs. Most warnings say which change pjw
    /// does not make, and why.
    pub(crate) warnings: Vec<Arc<Warning>>,
    /// The warnings for users about single jobs. A job has an entry only if this cycle has found a warning about it.
    pub(crate) job_warnings: BTreeMap<JobId, Vec<Warning>>,
    /// The reports of the jobs that ended.
    pub(crate) reports: Vec<JobReport>,
}

impl<'a> CycleDraft<'a> {
    /// Makes a draft without output. `seen` is the scan of this cycle. The jobs of all processes are determined again
    /// if the scan is full, or if everything in `state` must be planned again.
    pub(crate) fn new(state: &'a mut WardenState, seen: &'a Snapshot, policy: &'a Policy) -> Self {
        let full = seen.scope == ScanScope::Full;
        Self {
            recheck_all: full || state.dirty.contains_everything(),
            recheck: BTreeSet::new(),
            has_added_cpu_times: false,
            state,
            policy,
            now: seen.taken_at,
            seen,
            full,
            out: CycleOutput::default(),
        }
    }

    /// Returns the pids of the processes that the scan of this cycle found alive, in ascending order.
    pub(crate) fn scanned_pids(&self) -> impl Iterator<Item = Pid> + use<'a> {
        self.seen.processes.values().filter_map(Observed::present).map(|process| process.id.pid)
    }
}

impl CycleDraft<'_> {
    /// Returns the ids of the jobs that this cycle plans: jobs that have changed, and jobs that hold no cores and do
    /// not wait for any. Returns all jobs if everything must be planned again. Hundreds of jobs may wait, and there is
    /// nothing to plan for a waiting job until it changes: only the search for its cores looks at it when other cores
    /// become free.
    pub(crate) fn jobs_to_plan(&self) -> BTreeSet<JobId> {
        let state = &*self.state;
        if state.dirty.contains_everything() {
            return state.jobs.keys().cloned().collect();
        }
        let dirty = state.dirty.listed_jobs().map(|(id, _)| id).filter(|id| state.jobs.contains_key(id));
        dirty.chain(state.jobs.jobs_without_cores_that_do_not_wait().map(|job| &job.id)).cloned().collect()
    }

    /// Applies `record` to the list of cpusets in the state, and adds `record` to the records for the journal (pjwd's
    /// files).
    pub(crate) fn record_cpuset(&mut self, record: CpusetRecord) {
        let state = &mut *self.state;
        state.cpusets.apply_record(&record, state.topology.cpus(), self.now.since_boot);
        self.out.records.push(Record::Cpuset(record));
    }

    /// Applies `change` to the job `id` in the state, and adds the changed job to the records for the journal (the file
    /// with which a restarted daemon restores its state). Does nothing if the job does not exist.
    pub(crate) fn change_job(&mut self, id: &JobId, change: impl FnOnce(&mut Job)) {
        if let Some(mut job) = self.state.jobs.get(id).cloned() {
            change(&mut job);
            self.store_job(job);
        }
    }

    /// Stores a new or changed job in the state, and adds the job to the records for the journal (the file with which a
    /// restarted daemon restores its state). The job is planned again in this cycle. If the job is new, the jobs of the
    /// processes that may belong to the job are determined again. If the job is new or was released before, the record
    /// of its resource use begins now. Does nothing if the state already contains the same job without a change.
    ///
    /// If the job begins or ceases to hold cores, its usage sample (its resource use in one interval) ends now
    /// ([`end_sample_if_held_changes`]). Exception: the sample goes on if the CPU times of this cycle are not yet part
    /// of the usage (`has_added_cpu_times`).
    pub(crate) fn store_job(&mut self, job: Job) {
        let before = self.state.jobs.get(&job.id);
        if before == Some(&job) {
            return;
        }
        let is_new = before.is_none();
        let begins = before.is_none_or(|before| before.was_released && !job.was_released);
        let changes_grant = before.is_some_and(|before| before.grant != job.grant);
        self.state.dirty.add_job(&job.id);
        if changes_grant {
            if self.has_added_cpu_times {
                let next = job.grant.as_ref().map(|grant| grant.ownership);
                end_sample_if_held_changes(self.state, self.seen, &job.id, next);
            }
            add_held_core_time(self.state, &job.id, self.now.since_boot);
        }
        if is_new {
            self.recheck_processes_of_job(&job);
        }
        if begins {
            self.state.usage.begin_recording(&job.id, self.now.since_boot);
        }
        self.out.records.push(Record::Job(job.clone()));
        self.state.jobs.insert(job);
    }

    /// Marks the processes whose job must be determined again because `job` begins or ends: all processes whose
    /// attributes (such as the environment) name the job. Also marks all processes of the owner if the policy lets jobs
    /// adopt processes, or if the owner has no other job.
    pub(crate) fn recheck_processes_of_job(&mut self, job: &Job) {
        self.recheck.extend(self.state.processes.pids_naming_job(&job.id));
        let has_owner_no_job = self.state.jobs.jobs_of_owner(job.owner).next().is_none();
        if self.policy.adopt_unassigned_processes || has_owner_no_job {
            let of_owner = self.state.processes.processes_of_user(job.owner);
            self.recheck.extend(of_owner.map(|known| known.process.id.pid));
        }
    }

    /// Writes to the journal (the file with which a restarted daemon restores its state) the affinity masks that
    /// `actions` are about to request. For each thread, also writes the original mask, which the thread gets back when
    /// its job is released.
    pub(crate) fn journal_mask_requests(&mut self, actions: &[MaskAction]) {
        let now = self.now.since_boot;
        for MaskAction { thread, requested_mask, .. } in actions {
            let Some(entry) = self.state.mask_mut(thread) else { continue };
            let original = entry.original_mask().clone();
            entry.add_intended_request(requested_mask.clone(), original, now);
            // The journal does not have the requests of a kernel before 6.2 yet.
            let is_new =
                |request: &MaskRequest| request.requested_at == now || request.writer == MaskWriter::Kernel;
            self.out.records.extend(mask_records(*thread, entry, is_new));
        }
    }

    /// Writes the requested affinity mask and the original mask (the mask before pjw changed it) of a thread to the
    /// journal (the file with which a restarted daemon restores its state). Must be called before the cpuset of the
    /// thread changes: kernels before Linux 6.2 forget the requested mask at this change, so a restarted daemon could
    /// not read the mask. Does nothing if the journal already contains both masks.
    pub(crate) fn start_journaling(&mut self, thread: ThreadId) {
        let now = self.now.since_boot;
        if self.state.mask_mut(&thread).is_some_and(|entry| entry.mark_journaled(now)) {
            self.journal_mask(thread);
        }
    }

    /// Changes the original masks of an instance of `pjwctl spawn` (see
    /// [`WardenState::attribute_start_masks_to_pjw`]), and writes them to the journal (the file with which a restarted
    /// daemon restores its state).
    pub(crate) fn attribute_start_masks_to_pjw(&mut self, pid: Pid, is_included: impl Fn(&ThreadId) -> bool) {
        let changed = self.state.attribute_start_masks_to_pjw(pid, is_included);
        changed.into_iter().for_each(|thread| self.start_journaling(thread));
    }

    /// Writes the affinity masks that were requested for a thread to the journal (the file with which a restarted
    /// daemon restores its state). Does nothing if the journal need not contain the masks of the thread, because pjw
    /// has not changed its mask.
    pub(crate) fn journal_mask(&mut self, thread: ThreadId) {
        if let Some(entry) = self.state.mask_entry(&thread).filter(|entry| entry.journaled_since().is_some())
        {
            self.out.records.extend(mask_records(thread, entry, |_| true));
        }
    }

    /// Writes to the journal (the file with which a restarted daemon restores its state) that a thread has the mask
    /// that its program requested. A restarted pjwd then need not restore the mask of the thread. Does nothing if the
    /// journal has no mask of the thread. Also does nothing while a cpuset may hide the mask from a restarted daemon.
    pub(crate) fn stop_journaling(&mut self, thread: ThreadId) {
        let pid = thread.process.pid;
        let member = self.state.tracked_process(pid);
        let Some(known) = member.and_then(|member| member.threads.get(&thread.tid)) else { return };
        let is_journaled = known.mask_entry.as_ref().is_some_and(|entry| entry.journaled_since().is_some());
        if !is_journaled || self.state.may_cpuset_hide_mask(pid, known) {
            return;
        }
        if let Some(entry) = self.state.mask_mut(&thread) {
            entry.mark_not_journaled();
            self.out.records.push(Record::MaskReleased(thread));
        }
    }
}

/// Adds a warning for users about `job`. `code` is the short name of the warning. `why` says what pjw does not do for
/// the job and why. `remedy` says what the user can do.
pub(crate) fn warn(
    draft: &mut CycleDraft<'_>,
    job: &JobId,
    code: &'static str,
    why: String,
    remedy: impl Into<String>,
) {
    let warning = Warning { job: Some(job.clone()), ..Warning::new(code, why, remedy) };
    draft.out.job_warnings.entry(job.clone()).or_default().push(warning);
}
