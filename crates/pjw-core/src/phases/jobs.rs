//! The life cycle of jobs: grants of schedulers, waiting for cores, release and end.

use crate::allocate::offer::{allocate, share};
use crate::basics::prelude::*;
use crate::basics::{CpuSet, cpus_text};
use crate::phases::draft::{Draft, warn};
use crate::state::{Offer, WardenState};
use crate::terms::{
    Amount, Cgroup, Event, EventKind, Grant, GrantedBy, Job, JobId, Lifetime, Observed, OnExhausted, Policy,
    Record, Refusal, Request,
};

/// Ends the jobs that are over. Their PUs are free within the same cycle.
pub(crate) fn end(draft: &mut Draft<'_>) {
    let now = draft.now.since_boot;
    let ids: Vec<JobId> = draft.state.jobs.keys().cloned().collect();
    for id in ids {
        let alive = draft.state.members_of(&id).next().is_some();
        let Some(job) = draft.state.jobs.get(&id).cloned() else { continue };
        let empty_since = if alive { None } else { job.empty_since.or(Some(now)) };
        let job = Job { empty_since, ..job };
        match end_reason(&job, draft) {
            Some(why) => release(draft, &id, why),
            None => draft.put_job(job),
        }
    }
}

/// Returns the reason why the job has ended, or `None` if it goes on. A job goes on while it has processes,
/// even if all of them were moved out of its cgroup. It ends when the scheduler removes the cgroup
/// (docs/adr/0005).
fn end_reason(job: &Job, draft: &Draft<'_>) -> Option<&'static str> {
    let cgroup = job.cgroup.as_ref().and_then(|path| draft.seen.cgroups.get(path));
    let empty_ns = job.empty_since.map(|since| draft.now.since_boot.0.saturating_sub(since.0));
    let timeout_ns = draft.policy.reservation_timeout.as_nanos();
    match (cgroup, empty_ns, job.lifetime) {
        (Some(Observed::Gone), _, _) => Some("its scheduler's cgroup is gone"),
        (Some(Observed::Present(Cgroup { populated: false, .. })), Some(_), _) => {
            Some("its scheduler's cgroup is empty")
        }
        (_, Some(_), Lifetime::Members) => Some("its last process has exited"),
        // A released job holds no cores. It was kept only for its processes.
        (_, Some(_), Lifetime::Reservation) if job.released => Some("its last process has exited"),
        (_, Some(empty_ns), Lifetime::Reservation) if u128::from(empty_ns) > timeout_ns => {
            Some("it was reserved and no process came within reservation_timeout")
        }
        _ => None,
    }
}

/// Releases a job by command. A job that its scheduler still runs would be discovered again at once; so the
/// job is kept without cores until its scheduler ends it, and its threads are left alone.
pub(crate) fn release_job(draft: &mut Draft<'_>, id: &JobId, why: &str) {
    let lives_on = id.source().is_scheduler() && draft.state.members_of(id).next().is_some();
    let Some(job) = draft.state.jobs.get(id).cloned().filter(|_| lives_on) else {
        release(draft, id, why);
        return;
    };
    if job.released {
        return;
    }
    let scheduler_grant = job.grant.clone().filter(|grant| grant.granted_by == GrantedBy::Scheduler);
    let cpus = if scheduler_grant.is_some() { CpuSet::new() } else { draft.state.pool.release(id) };
    report_released(draft, id, why, &cpus);
    draft.put_job(Job { grant: scheduler_grant, released: true, ..job });
}

/// Removes a job: its cores become free, and the masks of its threads are restored.
pub(crate) fn release(draft: &mut Draft<'_>, id: &JobId, why: &str) {
    if draft.state.jobs.remove(id).is_none() {
        return;
    }
    draft.jobs_changed = true;
    let cpus = draft.state.pool.release(id);
    draft.state.move_to_restoring(id);
    draft.out.record(Record::Ended(id.clone()));
    report_released(draft, id, why, &cpus);
}

fn report_released(draft: &mut Draft<'_>, id: &JobId, why: &str, cpus: &CpuSet) {
    let text =
        if cpus.is_empty() { why.to_owned() } else { format!("{why}; {} free again", cpus_text(cpus)) };
    draft.out.event(Event::new(EventKind::Released, text).with_job(id).with_cpus(cpus));
}

/// Makes the cpuset that a scheduler wrote the grant of the job. The warden never widens such a grant.
pub(crate) fn apply_scheduler_cpusets(draft: &mut Draft<'_>) {
    let ids: Vec<JobId> = draft.state.jobs.keys().cloned().collect();
    for id in ids {
        let Some(job) = draft.state.jobs.get(&id) else { continue };
        let cgroup =
            job.cgroup.as_ref().and_then(|path| draft.seen.cgroups.get(path)).and_then(Observed::present);
        let Some(cpus) = cgroup
            .filter(|cgroup| !is_written_by_warden(draft, cgroup))
            .and_then(|cgroup| cgroup.cpus.clone())
        else {
            continue;
        };
        let machine = draft.state.topology.cpus();
        let narrowed = cpus.intersection(machine);
        let present = job.grant.as_ref();
        // A cpuset with all PUs is not a grant, also if some of its PUs are offline or in a partition at the
        // moment.
        let online = draft.state.pool.online();
        let whole = cgroup
            .and_then(|cgroup| cgroup.cpuset.as_ref())
            .is_some_and(|cpuset| online.is_subset(&cpuset.cpus));
        let known =
            present.is_some_and(|grant| grant.granted_by == GrantedBy::Scheduler && grant.cpus == narrowed);
        if known || whole || narrowed.is_empty() || machine.is_subset(&narrowed) {
            continue;
        }
        revoke_for_scheduler(draft, &id, &narrowed);
        let elsewhere = draft.state.pool.claim(&id, &narrowed);
        let mut because = vec![format!("{} gave it {narrowed} by a cpuset", id.source())];
        if !elsewhere.is_empty() {
            because.push(format!("{elsewhere} of these are another job's or housekeeping too"));
        }
        let (cpus, shared) = (narrowed, !elsewhere.is_empty());
        let granted_by = GrantedBy::Scheduler;
        let since = draft.now.since_boot;
        let grant =
            Grant { cpus, granted_by, shared, smt_shared: true, since, because, runner_up: String::new() };
        set_grant(draft, &id, grant);
    }
}

/// Whether the warden wrote the cpuset of this scheduler's cgroup. Such a cpuset is not a grant of the
/// scheduler.
fn is_written_by_warden(draft: &Draft<'_>, cgroup: &Cgroup) -> bool {
    let job_cpuset = draft.state.cpusets.at(&cgroup.id.path);
    job_cpuset.zip(cgroup.cpuset.as_ref()).is_some_and(|(managed, cpuset)| managed.wrote(cpuset))
}

/// Takes PUs that a scheduler granted to `winner` from jobs that got them from the warden. These jobs get
/// other cores or wait.
fn revoke_for_scheduler(draft: &mut Draft<'_>, winner: &JobId, cpus: &CpuSet) {
    let losers: Vec<JobId> = draft
        .state
        .jobs
        .values()
        .filter(|job| job.id != *winner)
        .filter(|job| {
            job.grant.as_ref().is_some_and(|grant| {
                grant.granted_by == GrantedBy::Warden && !grant.shared && grant.cpus.intersects(cpus)
            })
        })
        .map(|job| job.id.clone())
        .collect();
    for loser in losers {
        let held = draft.state.pool.release(&loser);
        let text = format!("{winner} was given {cpus} by its scheduler; {held} had to be taken back");
        draft.out.event(Event::new(EventKind::Revoked, text).with_job(&loser).with_cpus(&held));
        if let Some(job) = draft.state.jobs.get(&loser).cloned() {
            draft.put_job(Job { grant: None, ..job });
        }
    }
}

/// Serves the jobs that wait for cores, oldest job first. Adds a warning for each job that can't be served.
pub(crate) fn serve_waiting(draft: &mut Draft<'_>) {
    set_missing_requests(draft);
    let mut waiting: Vec<Job> =
        draft.state.jobs.values().filter(|job| job.grant.is_none() && !job.released).cloned().collect();
    waiting.sort_by(|a, b| (a.since, &a.id).cmp(&(b.since, &b.id)));
    for job in waiting {
        let Some(request) = job.request.clone() else {
            warn(
                draft,
                &job.id,
                "unknown-count",
                format!(
                    "{} does not say how many cores {} has: it is watched, not confined",
                    job.id.source(),
                    job.id
                ),
                format!(
                    "pjwctl assign {} --cores N, or set cores under [sources.{}]",
                    job.id,
                    job.id.source()
                ),
            );
            continue;
        };
        if let Err(refusal) = try_serve(draft, &job.id, &request) {
            let why = &refusal;
            let runs = draft.state.members_of(&job.id).next().is_some();
            let situation = if runs {
                format!("{} runs unconfined: {why}", job.id)
            } else {
                format!("{} waits for cores: {why}", job.id)
            };
            let remedy = match refusal {
                Refusal::NotEnough { .. } | Refusal::HeldByOtherJob { .. } => {
                    "it is served by itself as soon as enough cores come free".to_owned()
                }
                _ => {
                    format!("no job's end helps: pjwctl assign {} --cores N asks for something else", job.id)
                }
            };
            warn(draft, &job.id, "unserved", situation, remedy);
        }
    }
}

fn try_serve(draft: &mut Draft<'_>, id: &JobId, request: &Request) -> Result<(), Refusal> {
    match find_offer(draft.state, draft.policy, id, request)? {
        (offer, false) => grant_offer(draft, id, &offer),
        (offer, true) => grant_shared_offer(draft, id, &offer),
    }
    Ok(())
}

/// Returns the offer for a waiting job, and whether its cores may overlap with other grants.
pub(crate) fn find_offer(
    state: &WardenState,
    policy: &Policy,
    id: &JobId,
    request: &Request,
) -> Result<(Offer, bool), Refusal> {
    match allocate(id, request, &state.pool, &state.topology, policy) {
        Err(_) if policy.on_exhausted == OnExhausted::Share => {
            let others = grants_of_others(state, id);
            share(id, request, &state.pool, others, &state.topology, policy).map(|offer| (offer, true))
        }
        offer => offer.map(|offer| (offer, false)),
    }
}

/// Iterates over the grants of all jobs except `id`.
pub(crate) fn grants_of_others<'a>(
    state: &'a WardenState,
    id: &'a JobId,
) -> impl Iterator<Item = &'a CpuSet> {
    let others = state.jobs.values().filter(move |job| job.id != *id);
    others.filter_map(|job| job.grant.as_ref()).map(|grant| &grant.cpus)
}

/// Grants an offer to a job.
pub(crate) fn grant_offer(draft: &mut Draft<'_>, id: &JobId, offer: &Offer) {
    // The offer was made for the present pool. If the offer is stale nevertheless, the job is served in the
    // next cycle.
    if draft.state.pool.commit(id, offer).is_ok() {
        set_grant(draft, id, grant_of(draft, offer, false));
    }
}

/// Grants an offer whose cores other jobs may hold too. In the pool the job gets only the PUs that no other
/// job holds.
pub(crate) fn grant_shared_offer(draft: &mut Draft<'_>, id: &JobId, offer: &Offer) {
    draft.state.pool.claim(id, &offer.cpus);
    set_grant(draft, id, grant_of(draft, offer, true));
}

fn grant_of(draft: &Draft<'_>, offer: &Offer, shared: bool) -> Grant {
    Grant {
        smt_shared: draft.policy.share_smt,
        since: draft.now.since_boot,
        cpus: offer.cpus.clone(),
        granted_by: GrantedBy::Warden,
        shared,
        because: offer.because.clone(),
        runner_up: offer.runner_up.clone(),
    }
}

fn set_grant(draft: &mut Draft<'_>, id: &JobId, grant: Grant) {
    let Some(job) = draft.state.jobs.get(id).cloned() else { return };
    if job.grant.as_ref() == Some(&grant) {
        return;
    }
    let event = match &job.grant {
        Some(before) if before.cpus == grant.cpus => None,
        Some(before) => Some((EventKind::Resized, resize_text(before, &grant))),
        None => Some((EventKind::Assigned, grant.because.first().cloned().unwrap_or_default())),
    };
    if let Some((kind, text)) = event {
        draft.out.event(Event::new(kind, text).with_job(id).with_cpus(&grant.cpus));
    }
    draft.put_job(Job { grant: Some(grant), ..job });
}

/// Returns the text of the event for a changed grant. If the number of PUs is unchanged, the text gives the
/// reason for the change.
fn resize_text(before: &Grant, now: &Grant) -> String {
    let text = format!("{} instead of {}", cpus_text(&now.cpus), cpus_text(&before.cpus));
    let why = now.because.first().filter(|_| now.cpus.len() == before.cpus.len());
    why.map_or(text.clone(), |why| format!("{text}: {why}"))
}

/// Sets the request of discovered jobs: the number of cores that the scheduler's variables give, else the
/// number configured for the source.
fn set_missing_requests(draft: &mut Draft<'_>) {
    let unknown: Vec<Job> = draft.state.jobs.values().filter(|job| job.request.is_none()).cloned().collect();
    for job in unknown {
        let claimed = draft.state.members_of(&job.id).find_map(|member| {
            let claims = &draft.state.processes.get(&member.id.pid)?.claims.claims;
            claims.iter().filter(|claim| claim.job == job.id).find_map(|claim| claim.amount.clone())
        });
        let default = draft.policy.source_cores.get(&job.id.source()).map(|&cores| Amount::Cores(cores));
        if let Some(amount) = claimed.or(default) {
            draft.put_job(Job { request: Some(Request { amount, ..Request::cores(1) }), ..job });
        }
    }
}
