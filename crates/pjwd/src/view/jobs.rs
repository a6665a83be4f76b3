//! The descriptions of the jobs in the status, and the warnings about single jobs. Only those of changed jobs are
//! computed again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pjw_core::cpusets::{EffectiveEnforcement, effective_enforcement_of_members};
use pjw_core::job::{Job, JobId};
use pjw_core::state::dirty::DirtySet;
use pjw_core::{cpuset::CpuSet, ids::Uid, policy::Policy, state::WardenState};
use pjw_ipc::wire;

use super::counts::{CpuDemand, JobCounts};
use super::to_wire::{job_to_wire, saturating_u32};
use super::warnings::{job_warnings, rule_warnings};

/// The descriptions of all jobs that the daemon reports in its status (`pjwctl status`), and the warnings that concern
/// a single job. They are kept from one cycle to the next. An update computes only the descriptions and warnings of the
/// changed jobs again.
#[derive(Debug, Default)]
pub(super) struct JobViews {
    counts: JobCounts,
    views: BTreeMap<JobId, JobView>,
    /// The warnings about each job that has some.
    warnings: BTreeMap<JobId, Vec<Arc<wire::Warning>>>,
    /// The PUs that several jobs may hold.
    shared: CpuSet,
    /// The number of unassigned processes of each user.
    unassigned: BTreeMap<Uid, usize>,
}

/// What the status shows of one job.
#[derive(Debug)]
struct JobView {
    job: Arc<wire::Job>,
    demand: CpuDemand,
}

/// The result of [`JobViews::update`]: whether descriptions of jobs were computed again, and which warnings about
/// single jobs have begun or ended.
#[derive(Debug, Default)]
pub(super) struct ViewChanges {
    /// Whether anything was computed again.
    pub(super) is_any: bool,
    /// The warnings about single jobs that begin.
    pub(super) begun: Vec<Arc<wire::Warning>>,
    /// The warnings about single jobs that ended.
    pub(super) ended: Vec<Arc<wire::Warning>>,
}

impl JobViews {
    /// Computes the descriptions and warnings of the jobs in `dirty` again, because these jobs may have changed.
    /// `state` has the jobs, and `policy` the configured rules. Returns which warnings have begun or ended. Jobs that
    /// the change of another job concerns are computed again too:
    ///
    /// - all provisions (jobs whose cores are promised to a service), if a provision has changed,
    /// - the jobs of a user whose number of unassigned processes has changed,
    /// - all jobs, if the set of PUs that several jobs hold has changed.
    pub(super) fn update(&mut self, state: &WardenState, policy: &Policy, dirty: &DirtySet) -> ViewChanges {
        self.counts.update(state, dirty);
        let shared = state.jobs.shared_cpus();
        let unassigned: BTreeMap<Uid, usize> =
            state.unassigned_pids_by_user.iter().map(|(&user, pids)| (user, pids.len())).collect();
        let is_all = dirty.contains_everything() || shared != self.shared;
        let mut changed: BTreeSet<&JobId> = dirty.listed_jobs().map(|(id, _)| id).collect();
        let described: Vec<JobId> = if is_all { self.views.keys().cloned().collect() } else { Vec::new() };
        if is_all {
            changed.extend(state.jobs.keys().chain(&described));
        }
        // A rule can concern the processes of another provision.
        let concerns_provisions = |id: &&JobId| {
            let has_ended_or_is_provision = state.jobs.get(id).is_none_or(|job| job.provision.is_some());
            has_ended_or_is_provision || self.views.get(*id).is_some_and(|view| view.job.provision.is_some())
        };
        if changed.iter().any(concerns_provisions) {
            changed.extend(state.jobs.provisions().map(|job| &job.id));
        }
        let users = unassigned.keys().chain(self.unassigned.keys());
        for &user in users.filter(|user| unassigned.get(user) != self.unassigned.get(user)) {
            changed.extend(state.jobs.jobs_of_owner(user).map(|job| &job.id));
        }
        (self.shared, self.unassigned) = (shared, unassigned);
        let mut changes = ViewChanges { is_any: is_all || !changed.is_empty(), ..ViewChanges::default() };
        for id in changed {
            let warnings = match state.jobs.get(id) {
                Some(job) => {
                    let (view, warnings) = self.describe_job(state, policy, job);
                    self.views.insert(id.clone(), view);
                    warnings
                }
                None => {
                    self.views.remove(id);
                    Vec::new()
                }
            };
            self.replace_warnings(id, warnings, &mut changes);
        }
        changes
    }

    /// Replaces the warnings about the job `id` by `warnings`. Adds the warnings that begin and end to `changes`.
    fn replace_warnings(&mut self, id: &JobId, warnings: Vec<Arc<wire::Warning>>, changes: &mut ViewChanges) {
        let before = self.warnings.remove(id).unwrap_or_default();
        let has_code =
            |warnings: &[Arc<wire::Warning>], code: &str| warnings.iter().any(|warning| warning.code == code);
        changes.begun.extend(warnings.iter().filter(|warning| !has_code(&before, &warning.code)).cloned());
        changes.ended.extend(before.iter().filter(|warning| !has_code(&warnings, &warning.code)).cloned());
        if !warnings.is_empty() {
            self.warnings.insert(id.clone(), warnings);
        }
    }

    /// Returns the description of `job` for the status, and the warnings about the job.
    fn describe_job(
        &self,
        state: &WardenState,
        policy: &Policy,
        job: &Job,
    ) -> (JobView, Vec<Arc<wire::Warning>>) {
        let mut counts = self.counts.counts_of(&job.id);
        counts.strays += saturating_u32(self.unassigned.get(&job.owner).copied().unwrap_or(0));
        // If all processes are in the cpuset, they need no check, and there may be many.
        let checked_members = Some(state.members_of(&job.id)).filter(|_| counts.outside_cpuset > 0);
        let enforcement =
            match effective_enforcement_of_members(state, policy, job, checked_members.into_iter().flatten())
            {
                EffectiveEnforcement::Cpuset { .. } => "cpuset",
                EffectiveEnforcement::Affinity { .. } => "affinity",
                EffectiveEnforcement::NotYet { .. } | EffectiveEnforcement::Nothing => "none",
            };
        let mut wire_job = job_to_wire(job, counts, state, enforcement);
        wire_job.shared |= job.grant.as_ref().is_some_and(|grant| grant.cpus.intersects(&self.shared));
        let warnings = job_warnings(job, policy, counts).into_iter().chain(rule_warnings(state, policy, job));
        let view = JobView { job: Arc::new(wire_job), demand: counts.demand };
        (view, warnings.map(Arc::new).collect())
    }

    /// Returns the descriptions of all jobs for the status, sorted by job id.
    pub(super) fn jobs(&self) -> Vec<Arc<wire::Job>> {
        self.views.values().map(|view| Arc::clone(&view.job)).collect()
    }

    /// Returns the CPU demand of each job, sorted by job id.
    pub(super) fn demands(&self) -> Vec<CpuDemand> {
        self.views.values().map(|view| view.demand).collect()
    }

    /// Returns all warnings that concern a single job, for the status.
    pub(super) fn warnings(&self) -> impl Iterator<Item = &Arc<wire::Warning>> {
        self.warnings.values().flatten()
    }

    /// Returns the number of processes that belong to no job although their user has a job on this machine.
    pub(super) fn unassigned_count(&self) -> usize {
        self.unassigned.values().sum()
    }
}
