//! The children of released processes. A child that was born before the mask of its parent was restored has the mask
//! that pjw set for the parent. It is tracked until its original mask is restored.

use crate::basics::{BirthTime, Pid, ProcessId, prelude::*};
use crate::phases::draft::CycleDraft;
use crate::phases::membership::{is_orphan_of_unknown_descent, processes_to_check, update_threads_of};
use crate::state::{KnownProcess, MaskEntry, MaskRequest, Member, WardenState};
use crate::terms::{JobId, JobSource, MembershipEvidence, Record};

/// Finds the children of released processes (processes that have left their job) that inherited an affinity mask of
/// pjw, and the descendants of these children. From now on, pjw keeps track of these processes, in order to restore
/// their original masks.
pub(crate) fn track_released_children(draft: &mut CycleDraft<'_>) {
    loop {
        let state = &*draft.state;
        let persists = draft.policy.cpuset_support.affinity_persists;
        let child = |known: &KnownProcess| {
            // A process that earlier scans have read is no new child of a tracked process.
            let is_untracked = known.was_read_once && state.tracked_process(known.process.id.pid).is_none();
            let (job, mut requests) = is_untracked.then(|| inherited_requests(state, known)).flatten()?;
            let (id, mask) = (known.process.id, known.process.first_thread_mask.as_ref()?);
            // The parent may be an instance of `pjwctl spawn` that forked before its original mask was changed.
            let start_cpus = known.batch_identity.start_cpus.as_ref();
            if let Some(start_cpus) = start_cpus.filter(|_| job.source() == JobSource::Manual) {
                let parent = state.tracked_process(known.process.parent);
                let before = parent.map_or(state.topology.cpus(), |parent| state.mask_before_job(parent));
                requests.iter_mut().for_each(|request| {
                    request.attribute_start_mask_to_pjw(start_cpus, before, id.start.latest_time());
                });
            }
            let birth = BirthTime::from_start_time(id.start, Some(known.first_seen));
            let mut entry = MaskEntry::from_inherited(requests.clone(), birth)?;
            let limits =
                state.birth_limits(id.pid, state.lineage.descendant(id.pid), birth.earliest, persists);
            entry.record_reading(mask, &limits, draft.now.since_boot);
            let child = released_member(id, job, known);
            entry.needs_restore().then_some((child, requests))
        };
        let children: Vec<(Member, Vec<MaskRequest>)> = processes_to_check(draft).filter_map(child).collect();
        if children.is_empty() {
            break;
        }
        for (child, requests) in children {
            let pid = child.id.pid;
            draft.state.lineage.set_inherited_requests(&child, requests);
            draft.out.records.push(Record::Left(child.membership()));
            draft.state.processes_to_restore.insert(pid, child);
            update_threads_of(draft, pid);
        }
    }
}

/// Plans a provision (a job whose cores are promised to a service) again, if a new process in its cpuset does not
/// belong to it. The parent of such a process had left the provision. It forked the process before pjw moved the parent
/// out of the cpuset. This cycle then plans to move the process out too. Otherwise, the process would run on the cores
/// of the provision until the next scan of all processes.
pub(crate) fn mark_provisions_with_left_children(draft: &mut CycleDraft<'_>) {
    let state = &*draft.state;
    let left_job = |known: &KnownProcess| {
        let process = &known.process;
        let is_new_without_job = known.was_read_once && !state.members.contains_key(&process.id.pid);
        let cgroup = process.cgroup.as_deref().filter(|_| is_new_without_job)?;
        let job = &state.cpusets.enclosing_cpuset(cgroup)?.job_cpuset.job;
        state.has_left_provision(process, job).then(|| (job.clone(), process.id.pid))
    };
    let left: Vec<(JobId, Pid)> = processes_to_check(draft).filter_map(left_job).collect();
    left.into_iter().for_each(|(job, pid)| draft.state.dirty.add_process(&job, pid));
}

/// Removes the recorded affinity masks of each released job (a job that ended or that a command released) that no
/// process can have any more. Does nothing after a scan of some processes only. Also does nothing if fork events were
/// lost, because a process that was forked during the scan may be unknown: a later scan decides.
pub(crate) fn forget_unused_masks(draft: &mut CycleDraft<'_>) {
    if !draft.full || draft.state.lineage.take_event_loss() {
        return;
    }
    for job in draft.state.released_jobs_without_masks(draft.now.since_boot) {
        draft.state.released_masks.remove(&job);
        draft.state.lineage.forget_released_descendants(&job);
        draft.out.records.push(Record::ReleaseSettled(job));
    }
}

/// Makes the record of the process `known`, still without threads. The process is a child of a process of the released
/// job `job`.
fn released_member(id: ProcessId, job: &JobId, known: &KnownProcess) -> Member {
    let (job, evidence, first_seen) = (job.clone(), MembershipEvidence::Parent, Some(known.first_seen));
    Member {
        id,
        job,
        evidence,
        inherited_mask: None,
        first_seen,
        was_new_at_join: known.was_read_once,
        numa_node: None,
        threads: BTreeMap::new(),
    }
}

/// Returns the mask requests (calls of sched_setaffinity(2)) of a released job of which one may have set the mask that
/// the process `known` inherited. The result is the released job, and its requests in this order:
///
/// - The request by which pjw had set exactly the present mask of the process in this job, if there is one.
/// - The requests that the fork event of the process names. If there are none, those of its parent.
///
/// `None` if the process can't have inherited a mask of a released job.
fn inherited_requests<'a>(
    state: &'a WardenState,
    known: &'a KnownProcess,
) -> Option<(&'a JobId, Vec<MaskRequest>)> {
    let process = &known.process;
    let birth = BirthTime::from_start_time(process.id.start, Some(known.first_seen));
    let parent =
        state.processes_to_restore.get(&process.parent).filter(|parent| parent.id.start <= process.id.start);
    let descendant = state.lineage.descendant(process.id.pid);
    let by_event = descendant.map(|descendant| (&descendant.job, descendant.inherited_mask_requests.clone()));
    let by_parent = || {
        let parent = parent?;
        let own = state
            .lineage
            .descendant(parent.id.pid)
            .into_iter()
            .flat_map(|known| &known.inherited_mask_requests);
        Some((&parent.job, parent.requests_at_birth(birth).chain(own).cloned().collect()))
    };
    let has_requests = |(_, requests): &(&JobId, Vec<MaskRequest>)| !requests.is_empty();
    let by_relative = by_event.filter(has_requests).or_else(by_parent);
    // The process that adopted an orphan may also be its true parent.
    let has_mask_of_parent = || {
        state
            .process(process.parent)
            .is_some_and(|parent| parent.first_thread_mask == process.first_thread_mask)
    };
    let is_orphan = || is_orphan_of_unknown_descent(state, known) && !has_mask_of_parent();
    // A scan may find a process just before its fork event arrives.
    let job_of_parent_descent = || state.lineage.descendant(process.parent).map(|parent| &parent.job);
    let known_job = descendant
        .map(|descendant| &descendant.job)
        .or_else(|| parent.map(|parent| &parent.job))
        .or_else(job_of_parent_descent)
        .or_else(|| known.batch_identity.job_of_cgroup());
    // Except an orphan of unknown descent, a process can inherit the masks of one job only.
    let may_inherit = known_job.is_some() || is_orphan();
    let by_mask = may_inherit.then(|| state.inherited_from_released_job(process, known_job)).flatten();
    match (by_relative, by_mask) {
        // The newest request decides where several are possible.
        (Some((job, requests)), Some((_, request))) => {
            Some((job, [request].into_iter().chain(requests).collect()))
        }
        (by_relative, by_mask) => by_relative.or_else(|| by_mask.map(|(job, request)| (job, vec![request]))),
    }
}
