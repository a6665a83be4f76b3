//! The life cycle of jobs: grants of schedulers and of pjw, release and end.

pub(crate) mod waiting;

use crate::allocate::offer::{allocate_for_groups, allocate_shared};
use crate::basics::{CpuSet, Nanos, Pid, cpus_text, cpus_with_is_are, prelude::*};
use crate::machine::Topology;
use crate::phases::{draft::CycleDraft, usage};
use crate::state::{PuOffer, WardenState};
use crate::terms::{
    Cgroup, CpuRequest, EndCondition, Event, EventKind, ExhaustionPolicy, Grant, GrantedBy, Job, JobId,
    JobRequest, Observed, Ownership, Policy, Record, Refusal,
};

/// Removes the jobs that have ended from the state. A later step of the same cycle can already grant their PUs (logical
/// CPUs) to other jobs. Also stores for each other job since when the job has had no process.
pub(crate) fn end_finished_jobs(draft: &mut CycleDraft<'_>) {
    let now = draft.now.since_boot;
    let by_cgroup = draft.seen.cgroups.keys().flat_map(|path| draft.state.jobs.jobs_of_cgroup(path));
    let may_end = by_cgroup.chain(draft.state.jobs.jobs_without_processes()).map(|job| job.id.clone());
    let ids: BTreeSet<JobId> = may_end.chain(draft.jobs_to_plan()).collect();
    for id in ids {
        let alive = draft.state.members_of(&id).next().is_some();
        let Some(job) = draft.state.jobs.get(&id) else { continue };
        let before = job.empty_since;
        let empty_since = if alive { None } else { before.or(Some(now)) };
        match end_reason(job, empty_since, draft) {
            Some(why) => remove_job(draft, &id, why),
            // Hundreds of jobs may have no process, or wait for cores, and nearly all of them stay as they are.
            None if empty_since == before => {}
            None => draft.change_job(&id, |job| job.empty_since = empty_since),
        }
    }
}

/// Returns the reason why `job` has ended, as text for users. `None` if the job has not ended. `empty_since` is the
/// time, in ns since boot, since which the job has had no process. It is `None` if the job has a process. Such a job
/// has ended only if this scan found that the batch system has removed the job's cgroup. A job without a process has
/// ended in each of these cases (docs/adr/0005):
///
/// - This scan found the cgroup of the job removed or empty.
/// - The job ends with its last process ([`EndCondition::LastProcessExit`]).
/// - The job is a reservation (it was made before it had processes). It has had no process for longer than the setting
///   `reservation_timeout`, or a command has released it.
fn end_reason(job: &Job, empty_since: Option<Nanos>, draft: &CycleDraft<'_>) -> Option<&'static str> {
    let cgroup = job.cgroup.as_ref().and_then(|path| draft.seen.cgroups.get(path));
    let empty_ns = empty_since.map(|since| draft.now.since_boot.0.saturating_sub(since.0));
    let timeout_ns = draft.policy.reservation_timeout.as_nanos();
    match (cgroup, empty_ns, job.end_condition) {
        (Some(Observed::Gone), _, _) => Some("its scheduler's cgroup is gone"),
        (Some(Observed::Present(Cgroup { populated: false, .. })), Some(_), _) => {
            Some("its scheduler's cgroup is empty")
        }
        (_, Some(_), EndCondition::LastProcessExit) => Some("its last process has exited"),
        // A released job holds no cores. It was kept only for its processes.
        (_, Some(_), EndCondition::Timeout) if job.was_released => Some("its last process has exited"),
        (_, Some(empty_ns), EndCondition::Timeout) if u128::from(empty_ns) > timeout_ns => {
            Some("it was reserved and no process came within reservation_timeout")
        }
        _ => None,
    }
}

/// Releases the job `id` because of a command: its cores become free, and its threads get their original affinity masks
/// back. If the job belongs to a batch system and still has processes, the job stays in the list of jobs, marked as
/// released, so that pjw does not discover the job again. Such a job keeps a grant that the batch system chose. `why`
/// is the reason, as text for users. Does nothing if the job stays in the list and was released before.
pub(crate) fn release_job(draft: &mut CycleDraft<'_>, id: &JobId, why: &str) {
    let still_runs = id.source().is_batch_system() && draft.state.members_of(id).next().is_some();
    let Some(job) = draft.state.jobs.get(id).cloned().filter(|_| still_runs) else {
        remove_job(draft, id, why);
        return;
    };
    if job.was_released {
        return;
    }
    // The report is for the epilog that releases the job.
    usage::report_ended_job(draft, &job);
    let grant = job.grant_chosen_by(GrantedBy::Scheduler).cloned();
    let cpus = if grant.is_some() { CpuSet::new() } else { release_pus(draft, id) };
    report_released(draft, id, why, &cpus);
    keep_released_masks(draft, id);
    draft.store_job(Job { grant, was_released: true, ..job });
}

/// Removes the job `id` from the state: its cores become free, and its threads get their original affinity masks back.
/// Adds an event, and the report about the job's resource use, unless the job was reported when it was released. `why`
/// is the reason, as text for users.
pub(crate) fn remove_job(draft: &mut CycleDraft<'_>, id: &JobId, why: &str) {
    let pids: Vec<Pid> = draft.state.members_of(id).map(|member| member.id.pid).collect();
    pids.into_iter().for_each(|pid| draft.attribute_start_masks_to_pjw(pid, |_| true));
    keep_released_masks(draft, id);
    let Some(job) = draft.state.jobs.get(id).cloned() else { return };
    if job.was_released {
        // The job was reported when it was released.
        drop(draft.state.usage.take_job_usage(id));
    } else {
        usage::report_ended_job(draft, &job);
    }
    draft.state.jobs.remove(id);
    draft.recheck_processes_of_job(&job);
    draft.recheck.extend(draft.state.members_of(id).map(|member| member.id.pid));
    draft.state.dirty.add_job(id);
    if let Some(path) = job.cgroup.filter(|path| draft.state.cpusets.cpuset_at(path).is_none()) {
        draft.state.cgroups.remove(&path);
    }
    let cpus = release_pus(draft, id);
    draft.state.move_to_restoring(id);
    draft.out.records.push(Record::Ended(id.clone()));
    report_released(draft, id, why, &cpus);
}

/// Takes from the job `id` all PUs (logical CPUs) that it holds or borrows. Returns the PUs that it held. The borrowed
/// PUs of other jobs are recorded, so that another job can borrow them in this cycle.
fn release_pus(draft: &mut CycleDraft<'_>, id: &JobId) -> CpuSet {
    let (pool, lending) = (&mut draft.state.pool, &mut draft.state.lending);
    for pu in pool.borrowed_by(id).iter() {
        if let Some(owner) = pool.holder(pu).and_then(|holder| holder.job()) {
            lending.add_pu_left_by_borrower(owner, pu);
        }
    }
    pool.release(id)
}

/// Writes the masks of the job `id` to the journal (the file with which a restarted daemon restores its state). Must be
/// called before processes of the job are released, as children that no scan has found may keep these masks.
pub(crate) fn keep_released_masks(draft: &mut CycleDraft<'_>, id: &JobId) {
    if let Some(released) = draft.state.masks_of_released_job(id, draft.now.since_boot) {
        draft.out.records.push(Record::ReleasedMasks(released.clone()));
        draft.state.released_masks.insert(id.clone(), released);
    }
}

/// Adds the event that the job was released. `why` is the reason, and `cpus` are the PUs that are free now.
fn report_released(draft: &mut CycleDraft<'_>, id: &JobId, why: &str, cpus: &CpuSet) {
    let text =
        if cpus.is_empty() { why.to_owned() } else { format!("{why}; {} free again", cpus_text(cpus)) };
    draft.out.events.push(Event::new(EventKind::Released, text).with_job(id).with_cpus(cpus));
}

/// Grants to each job the PUs (logical CPUs) that its batch scheduler gave to the job by a cpuset. pjw never adds other
/// PUs to such a grant. Other jobs that hold some of these PUs by a grant of pjw lose all their cores, and wait for
/// other cores.
pub(crate) fn apply_scheduler_cpusets(draft: &mut CycleDraft<'_>) {
    let jobs = draft.seen.cgroups.keys().flat_map(|path| draft.state.jobs.jobs_of_cgroup(path));
    let ids: Vec<JobId> = jobs.map(|job| job.id.clone()).collect();
    for id in ids {
        let Some(cpus) = draft.state.jobs.get(&id).and_then(|job| new_scheduler_cpus(draft, job)) else {
            continue;
        };
        revoke_for_scheduler(draft, &id, &cpus);
        let also_held = draft.state.pool.grant_available(&id, &cpus);
        let mut reasons = vec![format!("{} gave it {} by a cpuset", id.source(), cpus_text(&cpus))];
        if !also_held.is_empty() {
            reasons.push(format!(
                "of these, {} another job's or housekeeping too",
                cpus_with_is_are(&also_held)
            ));
        }
        let grant = Grant {
            cpus,
            granted_by: GrantedBy::Scheduler,
            is_shared: !also_held.is_empty(),
            may_split_cores: true,
            granted_at: draft.now.since_boot,
            reasons,
            second_best: String::new(),
            ownership: Ownership::Owned,
        };
        set_grant(draft, &id, grant);
    }
}

/// Returns the PUs (logical CPUs) that the batch system grants to `job` by the cpuset of the job's cgroup. `None` if
/// this scan has found no new grant:
///
/// - This scan did not read the cgroup, or found no cpuset that limits it.
/// - A grant of the batch system with exactly these PUs is known.
/// - The cpuset has no PU, all PUs of the machine, or all online PUs.
/// - This daemon wrote the cpuset. If an earlier run of it or another pjwd wrote the cpuset, the PUs count as a grant
///   only if the batch system has granted other PUs before.
fn new_scheduler_cpus(draft: &CycleDraft<'_>, job: &Job) -> Option<CpuSet> {
    let cgroup = draft.seen.cgroups.get(job.cgroup.as_ref()?)?.present()?;
    let (path, cpusets) = (&cgroup.id.path, &draft.state.cpusets);
    let managed = cpusets.cpuset_at(path);
    let cpuset = cgroup.cpuset.as_ref();
    let is_from_pjw = managed.zip(cpuset).is_some_and(|(managed, cpuset)| managed.has_cpus_from_pjw(cpuset));
    let granted = job.grant_chosen_by(GrantedBy::Scheduler);
    // A cpuset that an earlier daemon or another daemon wrote is no grant. But if the batch system has granted PUs
    // since, the cpuset is from the batch system.
    let leftover = cpuset.and_then(|cpuset| cpusets.leftover_for_scheduler(path, cpuset));
    let is_leftover = leftover.is_some() && granted.is_none();
    let machine = draft.state.topology.cpus();
    let cpus = cgroup.restricted_cpus.as_ref()?.intersection(machine);
    // A cpuset with all PUs is not a grant, also if some of its PUs are offline or in a partition at the moment.
    let has_all = machine.is_subset(&cpus)
        || cpuset.is_some_and(|cpuset| draft.state.pool.online_cpus().is_subset(&cpuset.cpus));
    let is_known = granted.is_some_and(|grant| grant.cpus == cpus);
    let is_new_grant = !is_from_pjw && !is_leftover && !is_known && !has_all && !cpus.is_empty();
    is_new_grant.then_some(cpus)
}

/// Takes the cores back from other jobs that hold some of `cpus`. A batch system has granted `cpus` to the job
/// `winner`. Such a job loses all its cores, and can get other ones in this cycle. It keeps them if a batch system
/// chose them, or if it shares its cores with other jobs. Adds an event for each job that loses its cores.
fn revoke_for_scheduler(draft: &mut CycleDraft<'_>, winner: &JobId, cpus: &CpuSet) {
    let loses = |job: &&Job| {
        let grant = job.grant_chosen_by(GrantedBy::Warden).filter(|_| job.id != *winner);
        grant.is_some_and(|grant| !grant.is_shared && grant.cpus.intersects(cpus))
    };
    let holders = cpus.iter().filter_map(|pu| draft.state.pool.holder(pu)?.job());
    let holders: BTreeSet<&JobId> = holders.collect();
    let losers = holders.into_iter().filter_map(|id| draft.state.jobs.get(id)).filter(loses);
    let losers: Vec<JobId> = losers.map(|job| job.id.clone()).collect();
    for loser in losers {
        let held = draft.state.pool.release(&loser);
        let (given, taken) = (cpus_text(cpus), cpus_text(&held));
        let text = format!("{winner} was given {given} by its scheduler; {taken} had to be taken back");
        draft.out.events.push(Event::new(EventKind::Revoked, text).with_job(&loser).with_cpus(&held));
        draft.change_job(&loser, |job| job.grant = None);
    }
}

/// Whether the provision `job` (a job whose cores are promised to a service) holds cores that it shares with no job. It
/// does not give up these cores for shared ones, even for more of them. False if the job holds no cores, only borrows
/// cores, or shares its cores with other jobs.
pub(crate) fn prefers_own_cores(job: &Job) -> bool {
    job.owned_grant().is_some_and(|grant| !grant.is_shared)
}

/// Whether `job` holds fewer cores or PUs (logical CPUs) than it requested. False for a job that shares its PUs with
/// other jobs.
pub(crate) fn has_fewer_than_requested(topology: &Topology, job: &Job) -> bool {
    let grant = job.owned_grant().filter(|grant| !grant.is_shared);
    let Some((grant, request)) = grant.zip(job.request.as_ref()) else { return false };
    match &request.cpu_request {
        CpuRequest::Cores(cores) => topology.overlapping_core_count(&grant.cpus) < *cores,
        CpuRequest::Pus(pus) => u32::try_from(grant.cpus.len()).unwrap_or(u32::MAX) < *pus,
        CpuRequest::Exactly(cpus) => grant.cpus != *cpus,
    }
}

/// Returns the PUs (logical CPUs) that the allocator offers for `request` of the job `id`, and true if other jobs may
/// also hold some of these PUs. PUs of other jobs are offered only if the free PUs do not suffice and the policy allows
/// sharing. Returns the reason for the refusal if the request can't be served.
pub(crate) fn find_offer(
    state: &WardenState,
    policy: &Policy,
    id: &JobId,
    request: &JobRequest,
) -> Result<(PuOffer, bool), Refusal> {
    // Groups matter only for a job that keeps some of its PUs.
    let holds_pus = !state.pool.pus_of(id).is_empty();
    let groups = if holds_pus { state.cpus_of_undivided_groups(id) } else { Vec::new() };
    match allocate_for_groups(id, request, &state.pool, &state.topology, policy, &groups) {
        Err(Refusal::NotEnoughCores { .. } | Refusal::HeldByOtherJob { .. })
            if policy.exhaustion_policy == ExhaustionPolicy::Share =>
        {
            let mut others = state.jobs.owned_grants_per_pu().clone();
            state.grant_of(id).into_iter().for_each(|own| others.remove(&own.cpus));
            allocate_shared(id, request, &state.pool, &others, &state.topology, policy)
                .map(|offer| (offer, true))
        }
        offer => offer.map(|offer| (offer, false)),
    }
}

/// Grants the PUs (logical CPUs) in `offer` to the job `id`. `shared` is true if other jobs may also hold some of these
/// PUs. The pool stores one holder for each PU. So if `shared` is true, the pool stores this job as the holder only of
/// the PUs that no other job holds. Does nothing if `shared` is false and some of the PUs are not free any more.
pub(crate) fn grant_offer(draft: &mut CycleDraft<'_>, id: &JobId, offer: &PuOffer, shared: bool) {
    if shared {
        draft.state.pool.grant_available(id, &offer.cpus);
    } else if draft.state.pool.commit(id, offer).is_err() {
        // The pool changed after the offer was made. The job is served after the next scan of all processes.
        return;
    }
    let PuOffer { cpus, reasons, second_best, .. } = offer.clone();
    let grant = Grant {
        cpus,
        granted_by: GrantedBy::Warden,
        is_shared: shared,
        may_split_cores: draft.policy.share_smt,
        granted_at: draft.now.since_boot,
        reasons,
        second_best,
        ownership: Ownership::Owned,
    };
    set_grant(draft, id, grant);
}

/// Stores `grant` (the PUs that a job holds) as the grant of the job `id`. Adds an event if the PUs of the job have
/// changed. Does nothing if the job does not exist.
fn set_grant(draft: &mut CycleDraft<'_>, id: &JobId, grant: Grant) {
    let Some(job) = draft.state.jobs.get(id) else { return };
    let event = match &job.grant {
        Some(before) if before.cpus == grant.cpus => None,
        Some(before) => Some((EventKind::Resized, resize_text(before, &grant))),
        None => Some((EventKind::Assigned, grant.reasons.first().cloned().unwrap_or_default())),
    };
    if let Some((kind, text)) = event {
        draft.out.events.push(Event::new(kind, text).with_job(id).with_cpus(&grant.cpus));
    }
    draft.change_job(id, |job| job.grant = Some(grant));
}

/// Returns the text of the event for a changed grant. If the number of PUs is unchanged, the text gives the
/// reason for the change.
fn resize_text(before: &Grant, now: &Grant) -> String {
    let text = format!("{} instead of {}", cpus_text(&now.cpus), cpus_text(&before.cpus));
    match now.reasons.first() {
        Some(why) if now.cpus.len() == before.cpus.len() => format!("{text}: {why}"),
        _ => text,
    }
}
