//! The jobs that wait for cores: which of them get cores in this cycle, and the warnings about the others.

use crate::allocate::offer::allocate_within;
use crate::basics::{UnixMillis, prelude::*};
use crate::phases::draft::{CycleDraft, warn};
use crate::phases::jobs::{find_offer, grant_offer, has_fewer_than_requested, prefers_own_cores};
use crate::state::jobs::waiting::{RefusedRequest, ServingConditions};
use crate::state::jobs::waits_for_cores;
use crate::state::{PuOffer, WardenState};
use crate::terms::{
    CgroupCreator, CpuRequest, CpusetSpec, Event, EventKind, ExhaustionPolicy, Job, JobCpuset, JobId,
    JobRequest, Policy, Refusal,
};

/// Grants cores to the jobs that wait for cores, the oldest job first. Provisions (jobs whose cores are promised to a
/// service) that hold fewer cores than promised wait in the same queue. Adds a warning for each job without cores whose
/// request can't be served. First sets the missing requests of discovered jobs.
///
/// Hundreds of jobs may wait, so only those are visited that may get cores now:
///
/// - The jobs in the queue that have changed. If one of them gets cores, all jobs after it are visited too.
/// - All jobs in the queue, if the [`ServingConditions`] (such as which cores are free) have changed since the last
///   cycle, or if everything must be planned again.
///
/// A request that was refused is checked again only if the request or the conditions have changed, or if everything
/// must be planned again.
pub(crate) fn serve_waiting_jobs(draft: &mut CycleDraft<'_>) {
    set_missing_requests(draft);
    // A change of the policy or of the topology makes everything dirty.
    let recheck_all = draft.state.dirty.contains_everything();
    let conditions = serving_conditions(draft.state, draft.policy);
    let mut visits_all = recheck_all || draft.state.served_under != Some(conditions);
    let mut earlier = take_refused_requests(draft.state, visits_all);
    let mut queue = queue_for_cores(draft.state, visits_all);
    while let Some(entry) = queue.pop_first() {
        serve_waiting_job(draft, &entry.1, recheck_all, &mut earlier);
        if !visits_all && serving_conditions(draft.state, draft.policy) != conditions {
            // The job got cores, so the earlier refusals of the jobs after it are not valid any more.
            visits_all = true;
            queue = queue_for_cores(draft.state, true);
            queue.retain(|later| *later > entry);
        }
    }
    // If a job got cores, the jobs before it were visited under other conditions: the next round visits all again.
    draft.state.served_under = Some(conditions);
}

/// Returns the facts that decide whether a waiting request can be served now, apart from the request itself.
fn serving_conditions(state: &WardenState, policy: &Policy) -> ServingConditions {
    let may_share = policy.exhaustion_policy == ExhaustionPolicy::Share;
    ServingConditions {
        pool_change_count: state.pool.change_count(),
        owned_grants_version: may_share.then(|| state.jobs.owned_grants_version()),
        may_grant: policy.may_grant,
    }
}

/// Removes refusals of earlier cycles from the state, and returns them. If `all` is true, these are the refusals of all
/// jobs, otherwise only those of the jobs that have changed.
fn take_refused_requests(state: &mut WardenState, all: bool) -> BTreeMap<JobId, RefusedRequest> {
    if all {
        return core::mem::take(&mut state.refused_requests);
    }
    let WardenState { dirty, refused_requests, .. } = state;
    dirty.listed_jobs().filter_map(|(id, _)| refused_requests.remove_entry(id)).collect()
}

/// Returns the jobs that wait for cores, in the order in which they are served. Includes provisions (jobs whose cores
/// are promised to a service) that hold fewer cores than promised. Each item is the time at which the job was detected,
/// and its id. If `all` is false, returns only the jobs that have changed.
fn queue_for_cores(state: &WardenState, all: bool) -> BTreeSet<(UnixMillis, JobId)> {
    let is_short = |job: &Job| job.provision.is_some() && has_fewer_than_requested(&state.topology, job);
    let entry = |job: &Job| (job.detected_at, job.id.clone());
    if all {
        let short = state.jobs.provisions().filter(|job| is_short(job)).map(entry);
        return state.jobs.waiting_jobs().cloned().chain(short).collect();
    }
    let changed = state.dirty.listed_jobs().filter_map(|(id, _)| state.jobs.get(id));
    changed.filter(|job| waits_for_cores(job) || is_short(job)).map(entry).collect()
}

/// Grants cores to the waiting job `id`, if its request can be served now. If not, stores the refusal in the state, and
/// adds a warning unless the job holds some cores: a provision (a job whose cores are promised to a service) also waits
/// if it holds too few. Also adds an event if the job begins to wait. If [`grant_obstacle`] returns an obstacle, an
/// earlier refusal stays, and no other is stored. None is stored if the job has no request.
///
/// `earlier` has the refusals of earlier cycles. The refusal of this job is removed from it. If this refusal is still
/// valid, the request is refused again without a search for cores. If `recheck` is true, no earlier refusal is valid.
fn serve_waiting_job(
    draft: &mut CycleDraft<'_>,
    id: &JobId,
    recheck: bool,
    earlier: &mut BTreeMap<JobId, RefusedRequest>,
) {
    let Some(job) = draft.state.jobs.get(id).cloned() else { return };
    let refused_before = earlier.remove(id).or_else(|| draft.state.refused_requests.remove(id));
    let Some(request) = &job.request else {
        let source = id.source();
        let why = format!("{source} does not say how many cores {id} has: it is watched, not confined");
        let remedy = format!("pjwctl assign {id} --cores N, or set cores under [sources.{source}]");
        warn(draft, id, "unknown-count", why, remedy);
        return;
    };
    if let Some((why, remedy)) = grant_obstacle(draft.state, draft.policy, &job) {
        if job.grant.is_none() {
            warn(draft, id, "unserved", why, remedy);
        }
        // The wait goes on after the obstacle: without the refusal, it would be reported as a new one.
        if let Some(refused) = refused_before {
            draft.state.refused_requests.insert(id.clone(), refused);
        }
        return;
    }
    if let Some(offer) = offer_of_own_cpuset(draft.state, draft.policy, id, request) {
        grant_offer(draft, id, &offer, false);
        return;
    }
    let conditions = serving_conditions(draft.state, draft.policy);
    let valid = refused_before.as_ref().filter(|refused| !recheck && refused.is_valid(conditions, request));
    let offer = match valid {
        Some(refused) => Err(refused.refusal.clone()),
        None => find_offer(draft.state, draft.policy, id, request),
    };
    match offer {
        Ok((_, true)) if prefers_own_cores(&job) => {}
        Ok((offer, shared)) => grant_offer(draft, id, &offer, shared),
        Err(refusal) => {
            if job.grant.is_none() {
                if refused_before.is_none() {
                    report_wait(draft, &job, &refusal);
                }
                warn_unserved(draft, id, &refusal);
            } else if refused_before.is_none_or(|before| before.refusal != refusal) {
                // The warning about too few cores (`hotplug.rs`) names the refusal.
                draft.state.dirty.add_job(id);
            }
            let refused = RefusedRequest { conditions, request: request.clone(), refusal };
            draft.state.refused_requests.insert(id.clone(), refused);
        }
    }
}

/// Returns the reason why the waiting job `job` can get no cores even if enough are free, and the remedy, as texts for
/// users: the journal can't record a grant, or another pjwd wrote the cpuset of the job's cgroup. `None` if there is no
/// such reason.
fn grant_obstacle(state: &WardenState, policy: &Policy, job: &Job) -> Option<(String, String)> {
    let id = &job.id;
    if !policy.may_grant {
        let why = format!("{id} waits for cores: a grant of cores can't be recorded");
        return Some((why, "free space for the journal of pjwd; it is served by itself then".to_owned()));
    }
    let (path, writer) = cpuset_of_other_daemon(state, job)?;
    let why = format!("{id} gets no cores: another pjwd, {writer}, wrote the cpuset of {path}");
    let remedy = format!(
        "stop the other pjwd, which widens the cpuset, or run pjwctl assign {id} --cores N once N cores are free"
    );
    Some((why, remedy))
}

/// Returns the path of the job's cgroup and the name of the other daemon that wrote the cpuset of this cgroup. `None`
/// if no other daemon wrote it, or if this daemon manages it.
fn cpuset_of_other_daemon<'a>(state: &'a WardenState, job: &Job) -> Option<(&'a str, &'a str)> {
    let cgroup = state.cgroups.get(job.cgroup.as_ref()?)?.present()?;
    let path = cgroup.id.path.as_str();
    if state.cpusets.cpuset_at(path).is_some() {
        return None;
    }
    let leftover = state.cpusets.leftover_for_scheduler(path, cgroup.cpuset.as_ref()?)?;
    Some((path, leftover.other_writer.as_deref()?))
}

/// Returns an offer of PUs (logical CPUs) from the cpuset that pjw wrote in the batch system's cgroup of the job `id`.
/// A job without cores has such a cpuset if the record of its grant was lost. The job then gets the same PUs again, or
/// some of them if `request` is for fewer. `None` in each of these cases:
///
/// - There is no such cpuset. A cpuset that an earlier run of the daemon left counts too.
/// - One of its PUs is offline or not free.
/// - Its PUs do not suffice for the request, or the policy does not allow the choice.
fn offer_of_own_cpuset(
    state: &WardenState,
    policy: &Policy,
    id: &JobId,
    request: &JobRequest,
) -> Option<PuOffer> {
    let recorded = state.cpusets.cpuset_of(id).map(|managed| &managed.job_cpuset);
    let own = recorded.or_else(|| state.cpusets.leftover_scheduler_cpuset_of(id));
    let JobCpuset { path, spec: CpusetSpec { cpus, .. }, .. } =
        own.filter(|own| own.creator == CgroupCreator::Scheduler)?;
    if !cpus.is_subset(&state.pool.free_cpus().intersection(&state.pool.online_cpus())) {
        return None;
    }
    let offer = allocate_within(cpus, id, request, &state.pool, &state.topology, policy)?;
    let reasons = vec![format!("the cpuset of {path} has these CPUs")];
    Some(PuOffer { reasons, second_best: String::new(), ..offer })
}

/// Adds the event that `job` begins to wait for cores, for the reason `refusal`. Does nothing in the first decision
/// after a restart of the daemon if the job is older: it waited before.
fn report_wait(draft: &mut CycleDraft<'_>, job: &Job, refusal: &Refusal) {
    let is_first_decision = draft.state.served_under.is_none();
    if is_first_decision && job.detected_at < draft.now.wall_clock {
        return;
    }
    let text = format!("waits for cores: {refusal}");
    draft.out.events.push(Event::new(EventKind::Queued, text).with_job(&job.id));
}

/// Adds the warning that the job `id` waits for cores, for the reason `refusal`.
fn warn_unserved(draft: &mut CycleDraft<'_>, id: &JobId, refusal: &Refusal) {
    let has_members = draft.state.members_of(id).next().is_some();
    let situation = if has_members { "runs unconfined" } else { "waits for cores" };
    let remedy = match refusal {
        Refusal::NotEnoughCores { .. } | Refusal::HeldByOtherJob { .. } => {
            "it is served by itself as soon as enough cores come free".to_owned()
        }
        _ => format!("no job's end helps: pjwctl assign {id} --cores N asks for something else"),
    };
    warn(draft, id, "unserved", format!("{id} {situation}: {refusal}"), remedy);
}

/// Sets the request of each discovered job (a job that pjw found by its processes or its cgroup) that has none. The
/// request is the number of cores that the scheduler's variables give, or else the number that the configuration gives
/// for the batch system. Does nothing for a job of which neither number is known.
fn set_missing_requests(draft: &mut CycleDraft<'_>) {
    let planned = draft.jobs_to_plan();
    let planned = planned.iter().filter_map(|id| draft.state.jobs.get(id));
    let without_request: Vec<Job> = planned.filter(|job| job.request.is_none()).cloned().collect();
    for job in without_request {
        let named = draft.state.members_of(&job.id).find_map(|member| {
            let references = &draft.state.processes.get(&member.id.pid)?.batch_identity.job_references;
            references
                .iter()
                .filter(|reference| reference.job == job.id)
                .find_map(|reference| reference.cpu_request.clone())
        });
        let default = draft.policy.source_cores.get(&job.id.source()).map(|&cores| CpuRequest::Cores(cores));
        if let Some(cpu_request) = named.or(default) {
            draft.store_job(Job {
                request: Some(JobRequest { cpu_request, ..JobRequest::with_core_count(1) }),
                ..job
            });
        }
    }
}
