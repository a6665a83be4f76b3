//! The masks of released jobs.
//!
//! A process may be born while the masks of its parent are being restored, and be found only after its ancestors have
//! ended. So the masks of a released job are kept, also in the journal, until a full scan finds no process that may
//! still have one of them.

use crate::basics::{BirthTime, CpuSet, Nanos, Pid, ThreadId, Uid, prelude::*};
use crate::state::masks::entry::MaskEntry;
use crate::state::masks::request::effective_mask;
use crate::state::masks::request::{MaskRequest, MaskWriter};
use crate::state::members::Member;
use crate::state::warden::WardenState;
use crate::terms::{
    JobId, JobMembership, JobSource, MembershipEvidence, Process, ReleasedJobMask, ReleasedJobMasks,
};

impl WardenState {
    /// Changes the original masks of the process `pid` if it is an instance of `pjwctl spawn`, so that the release of
    /// its job gives it the mask with which the job began, and not the part of the job's cores on which it was started.
    /// Leaves out threads whose program has requested another mask since. Changes nothing in the job of a batch system,
    /// which may have set such a mask itself. Looks only at the threads for which `is_included` is true. Returns the
    /// threads with a changed original mask.
    pub(crate) fn attribute_start_masks_to_pjw(
        &mut self,
        pid: Pid,
        is_included: impl Fn(&ThreadId) -> bool,
    ) -> Vec<ThreadId> {
        let start_cpus = self.processes.get(&pid).and_then(|known| known.batch_identity.start_cpus.clone());
        let member = self.tracked_process(pid).filter(|member| member.job.source() == JobSource::Manual);
        let Some((start_cpus, member)) = start_cpus.zip(member) else { return Vec::new() };
        let start = (&start_cpus, member.id.start.latest_time());
        let machine = self.topology.cpus().clone();
        let original_mask = self.mask_before_job(member).clone();
        let mut threads: Vec<(ThreadId, CpuSet)> =
            member.living_threads().map(|(id, thread)| (id, thread.effective_mask.clone())).collect();
        threads.retain(|(id, seen_mask)| {
            let entry = self.mask_mut(id).filter(|_| is_included(id));
            entry.is_some_and(|entry| {
                entry.attribute_start_mask_to_pjw(start, seen_mask, (&machine, &original_mask))
            })
        });
        threads.into_iter().map(|(id, _)| id).collect()
    }

    /// Returns the mask with which the job of `member` began. Every PU of the machine if this mask is unknown, or if it
    /// had every online PU.
    pub(crate) fn mask_before_job<'a>(&'a self, member: &'a Member) -> &'a CpuSet {
        let online = self.pool.online_cpus();
        let known = member.inherited_mask.as_ref().filter(|mask| !online.is_subset(mask));
        known.unwrap_or(self.topology.cpus())
    }

    /// Returns the affinity masks that pjw set for processes of the job `job`. The job is released at the time `now`
    /// (in ns since boot). Includes the masks of an earlier release of the job, if processes may still have them.
    /// `None` if there are no such masks.
    pub(crate) fn masks_of_released_job(&self, job: &JobId, now: Nanos) -> Option<ReleasedJobMasks> {
        let earlier = self.released_masks.get(job).cloned();
        let new = || ReleasedJobMasks::new(job.clone(), now);
        let mut released = ReleasedJobMasks {
            released_at: now,
            last_pending_restore_at: Some(now),
            ..earlier.unwrap_or_else(new)
        };
        for member in self.tracked_processes_of(job) {
            let scanned = member.threads.values().filter_map(|thread| thread.mask_entry.as_ref());
            let entries = scanned.chain(self.recorded_masks_of(member.id).map(|(_, entry)| entry));
            let cpuset = self.cpusets.cpuset_of(job).filter(|_| self.is_in_job_cpuset(member));
            let cpuset = cpuset.map(|managed| &managed.job_cpuset.spec.cpus);
            for request in entries.flat_map(MaskEntry::known_requests) {
                released.extend(masks_because_of_pjw(request, cpuset));
                if request.writer == MaskWriter::Warden {
                    released.first_used_at = released.first_used_at.min(request.requested_at);
                }
            }
            released.user_ids.extend(self.process(member.id.pid).map(|process| process.uid));
        }
        let job = self.jobs.get(job);
        released.user_ids.extend(job.map(|job| job.owner));
        let granted_since = job.and_then(|job| job.grant.as_ref()).map(|grant| grant.granted_at);
        released.first_used_at =
            granted_since.map_or(released.first_used_at, |since| since.min(released.first_used_at));
        (!released.masks.is_empty()).then_some(released)
    }

    /// Returns the released job from which `process` probably inherited its affinity mask. Also returns the request
    /// by which pjw had set the mask. A released job matches if pjw had set exactly this mask in the job, and the job
    /// had processes of the same user. If `job` is `Some`, only this job can match.
    ///
    /// Returns `None` if no released job matches, or if the matching requests have different original masks. Always
    /// `None` for processes of root, because daemons of root set affinity masks themselves.
    pub(crate) fn inherited_from_released_job<'a>(
        &'a self,
        process: &'a Process,
        job: Option<&'a JobId>,
    ) -> Option<(&'a JobId, MaskRequest)> {
        if process.uid == Uid::ROOT {
            return None;
        }
        let mut inherited =
            self.released_requests_of(process).filter(|(released, _)| job.is_none_or(|job| job == *released));
        let (job, request) = inherited.next()?;
        let have_same_original = inherited.all(|(_, other)| other.original_mask == request.original_mask);
        have_same_original.then_some((job, request))
    }

    /// Whether `process` may have inherited its affinity mask from a released job: pjw had set exactly this mask in a
    /// job that was released, and the job had processes of the same user. Also true for processes of root.
    pub(crate) fn has_released_mask(&self, process: &Process) -> bool {
        self.released_requests_of(process).next().is_some()
    }

    /// Iterates over the mask requests of released jobs that may have set the affinity mask of `process`. Each item
    /// is the released job and the request. A request is included if all of these conditions hold:
    ///
    /// - The request leads to exactly the mask of the first thread of the process.
    /// - The released job had processes of the same user.
    /// - pjw set masks in this job before the process started.
    ///
    /// Yields nothing if the mask contains all online PUs (logical CPUs).
    fn released_requests_of<'a>(
        &'a self,
        process: &'a Process,
    ) -> impl Iterator<Item = (&'a JobId, MaskRequest)> {
        let online = self.pool.online_cpus();
        let mask = process.first_thread_mask.as_ref().filter(|mask| !online.is_subset(mask));
        let born_by = process.id.start.latest_time();
        let of_user = self.released_masks.values().filter(move |released| {
            mask.is_some() && released.user_ids.contains(&process.uid) && released.first_used_at <= born_by
        });
        let requests = of_user.flat_map(|released| released.masks.iter().map(move |mask| (released, mask)));
        let is_shown = move |set: &CpuSet| mask.is_some_and(|mask| set.intersection(&online) == *mask);
        requests.filter(move |(_, mask)| is_shown(&mask.mask)).map(|(released, mask)| {
            let request = MaskRequest {
                mask: mask.mask.clone(),
                original_mask: mask.original_mask.clone(),
                writer: MaskWriter::Warden,
                requested_at: released.first_used_at,
            };
            (&released.job, request)
        })
    }

    /// Records which released jobs have pending restores of original masks at the time `now`, in ns since boot. Sets
    /// the time of the last pending restore to `now` for each released job whose processes pjw is still restoring.
    /// Also sets the time for a released job for which none is known.
    pub(crate) fn record_ongoing_restores(&mut self, now: Nanos) {
        for released in self.released_masks.values_mut() {
            let mut processes_to_restore = self.processes_to_restore.values();
            if released.last_pending_restore_at.is_none()
                || processes_to_restore.any(|member| member.job == released.job)
            {
                released.last_pending_restore_at = Some(now);
            }
        }
    }

    /// Returns the released jobs whose affinity masks no process can have any more. Must be called after a full scan,
    /// which began at the time `now` (in ns since boot). Returns no job if any process has unknown ancestors and was
    /// read by no scan. Otherwise, returns the jobs that fulfil all of these conditions:
    ///
    /// - pjw has restored the original masks of all processes of the job.
    /// - The last restore is so long ago that every fork(2) that was then in progress has ended.
    /// - Scans have read all descendants of the processes of the job.
    pub(crate) fn released_jobs_without_masks(&self, now: Nanos) -> Vec<JobId> {
        if self.lineage.pids_of_unknown_descent().any(|pid| !self.processes.contains_key(&pid)) {
            return Vec::new();
        }
        let is_unfinished = |job: &JobId| {
            let mut unscanned = self.lineage.unscanned_descendants();
            self.processes_to_restore.values().any(|member| member.job == *job)
                || unscanned.any(|(_, descendant)| !descendant.was_ancestor_member && descendant.job == *job)
        };
        let is_old = |released: &&ReleasedJobMasks| {
            released
                .last_pending_restore_at
                .is_some_and(|restored_at| restored_at.0 + BirthTime::MAX_FORK_TIME.0 < now.0)
        };
        let old = self.released_masks.values().filter(is_old);
        old.map(|released| &released.job).filter(|job| !is_unfinished(job)).cloned().collect()
    }

    /// Iterates over processes of released jobs whose children may still have a mask that pjw set for the job. The
    /// processes themselves have their original masks again.
    pub(crate) fn restored_potential_parents(&self) -> impl Iterator<Item = JobMembership> {
        let restored = self.lineage.descendants().filter(|(pid, descendant)| {
            self.released_masks.contains_key(&descendant.job) && self.tracked_process(*pid).is_none()
        });
        restored.filter_map(|(pid, descendant)| {
            let (process, job) = (self.process(pid)?.id, descendant.job.clone());
            Some(JobMembership {
                process,
                job,
                evidence: MembershipEvidence::Parent,
                inherited_mask: None,
                first_seen: None,
            })
        })
    }
}

/// Returns the masks that a child may have because of pjw, each with the original mask. A thread with the mask request
/// `request` forked the child. The masks are the mask that pjw requested and, if the thread is in a job's cpuset with
/// the PUs `cpuset`, the part of the request that the cpuset allows. The kernel copies this part at the beginning of a
/// fork, and does not replace it if the parent is moved to the root of the hierarchy meanwhile (kernel/cgroup/cpuset.c,
/// `cpuset_fork`).
fn masks_because_of_pjw<'a>(
    request: &'a MaskRequest,
    cpuset: Option<&'a CpuSet>,
) -> impl Iterator<Item = ReleasedJobMask> {
    let before = &request.original_mask;
    let requested = request.needs_restore().then(|| request.mask.clone());
    let shown = cpuset.map(|cpuset| effective_mask(&request.mask, cpuset)).filter(|shown| shown != before);
    requested.into_iter().chain(shown).map(|mask| ReleasedJobMask { mask, original_mask: before.clone() })
}
