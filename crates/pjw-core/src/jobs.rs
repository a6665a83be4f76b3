//! The life of a job: when it ends, what its scheduler granted it, when it is served.

use crate::allocate::{Offer, allocate, share};
use crate::command::Refusal;
use crate::cpuset::CpuSet;
use crate::event::{Event, EventKind};
use crate::explain::named;
use crate::job::{Amount, Grant, GrantedBy, Job, JobId, Lifetime, Request};
use crate::plan::Abstained;
use crate::policy::{OnExhausted, Policy};
use crate::reconcile::Draft;
use crate::record::Record;
use crate::snapshot::{Cgroup, Seen, Snapshot};
use crate::state::WardenState;

/// Ends the jobs whose time has come: their PUs are free in this same cycle.
pub(crate) fn end(draft: &mut Draft<'_>, snapshot: &Snapshot) {
    let now = draft.now.since_boot;
    let ids: Vec<JobId> = draft.state.jobs.keys().cloned().collect();
    for id in ids {
        let alive = draft.state.members_of(&id).next().is_some();
        let Some(job) = draft.state.jobs.get(&id).cloned() else { continue };
        let empty_since = if alive { None } else { job.empty_since.or(Some(now)) };
        let job = Job { empty_since, ..job };
        match why_ended(&job, snapshot, draft) {
            Some(why) => release(draft, &id, why),
            None => draft.put_job(job),
        }
    }
}

/// A job lives on where its processes live, even if all of them were swept out of its cgroup: only when the
/// scheduler removes the directory is it over (docs/adr/0005).
fn why_ended(job: &Job, snapshot: &Snapshot, draft: &Draft<'_>) -> Option<&'static str> {
    let place = job.cgroup.as_ref().and_then(|path| snapshot.cgroups.get(path));
    let empty_ns = job.empty_since.map(|since| draft.now.since_boot.0.saturating_sub(since.0));
    let timeout_ns = draft.policy.reservation_timeout.as_nanos();
    match (place, empty_ns, job.lifetime) {
        (Some(Seen::Gone), _, _) => Some("its scheduler's cgroup is gone"),
        (Some(Seen::Here(Cgroup { populated: false, .. })), Some(_), _) => {
            Some("its scheduler's cgroup is empty")
        }
        (_, Some(_), Lifetime::Members) => Some("its last process has exited"),
        // It holds nothing any more: only its processes were left to keep it listed.
        (_, Some(_), Lifetime::Reservation) if job.let_go => Some("its last process has exited"),
        (_, Some(empty_ns), Lifetime::Reservation) if u128::from(empty_ns) > timeout_ns => {
            Some("it was reserved and no process came within reservation_timeout")
        }
        _ => None,
    }
}

/// Lets a job go on somebody's order. One that its scheduler still runs would be found again at once: it stays
/// known, without cores of the warden's and with its threads left alone, until its scheduler ends it.
pub(crate) fn let_go(draft: &mut Draft<'_>, id: &JobId, why: &str) {
    let lives_on = id.source().is_scheduler() && draft.state.members_of(id).next().is_some();
    let Some(job) = draft.state.jobs.get(id).cloned().filter(|_| lives_on) else {
        release(draft, id, why);
        return;
    };
    if job.let_go {
        return;
    }
    let law = job.grant.clone().filter(|grant| grant.granted_by == GrantedBy::Scheduler);
    let cpus = if law.is_some() { CpuSet::new() } else { draft.state.pool.release(id) };
    tell_released(draft, id, why, &cpus);
    draft.put_job(Job { grant: law, let_go: true, ..job });
}

/// Lets a job go: its cores are free, its threads get their own masks back.
pub(crate) fn release(draft: &mut Draft<'_>, id: &JobId, why: &str) {
    if draft.state.jobs.remove(id).is_none() {
        return;
    }
    draft.jobs_changed = true;
    let cpus = draft.state.pool.release(id);
    draft.state.let_go(id);
    draft.records.push(Record::Ended(id.clone()));
    tell_released(draft, id, why, &cpus);
}

fn tell_released(draft: &mut Draft<'_>, id: &JobId, why: &str, cpus: &CpuSet) {
    let text = if cpus.is_empty() { why.to_owned() } else { format!("{why}; {} free again", named(cpus)) };
    draft.events.push(Event::new(EventKind::Released, text).of(id).with_cpus(cpus));
}

/// Makes a scheduler's own cpuset the job's grant: it is law, and never widened.
pub(crate) fn heed_schedulers(draft: &mut Draft<'_>, snapshot: &Snapshot) {
    let ids: Vec<JobId> = draft.state.jobs.keys().cloned().collect();
    for id in ids {
        let Some(job) = draft.state.jobs.get(&id) else { continue };
        let place = job.cgroup.as_ref().and_then(|path| snapshot.cgroups.get(path)).and_then(Seen::here);
        let Some(cpus) = place.filter(|place| !is_wardens(draft, place)).and_then(|place| place.cpus.clone())
        else {
            continue;
        };
        let machine = draft.state.topology.cpus();
        let narrowed = cpus.intersection(machine);
        let present = job.grant.as_ref();
        // A cpuset of everything grants nothing, though some of it may be off or in somebody's partition just now.
        let online = draft.state.pool.online();
        let whole = place
            .and_then(|place| place.cpuset.as_ref())
            .is_some_and(|cpuset| online.is_subset(&cpuset.cpus));
        let known =
            present.is_some_and(|grant| grant.granted_by == GrantedBy::Scheduler && grant.cpus == narrowed);
        if known || whole || narrowed.is_empty() || machine.is_subset(&narrowed) {
            continue;
        }
        yield_to_scheduler(draft, &id, &narrowed);
        let elsewhere = draft.state.pool.claim(&id, &narrowed);
        let mut because = vec![format!("{} gave it {narrowed} by a cpuset", id.source())];
        if !elsewhere.is_empty() {
            because.push(format!("{elsewhere} of these are another job's or housekeeping too"));
        }
        let (cpus, shared) = (narrowed, !elsewhere.is_empty());
        let granted_by = GrantedBy::Scheduler;
        let since = draft.now.since_boot;
        let grant =
            Grant { cpus, granted_by, shared, by_pus: true, since, because, runner_up: String::new() };
        settle(draft, &id, grant);
    }
}

/// Whether the warden itself narrowed a scheduler's directory: its scheduler granted nothing by that.
fn is_wardens(draft: &Draft<'_>, place: &Cgroup) -> bool {
    let wall = draft.state.walls.at(&place.id.path);
    wall.zip(place.cpuset.as_ref()).is_some_and(|(built, cpuset)| built.wrote(cpuset))
}

/// Takes PUs that a scheduler gave away back from the warden's own jobs: they look for others, or wait.
fn yield_to_scheduler(draft: &mut Draft<'_>, winner: &JobId, cpus: &CpuSet) {
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
        draft.events.push(Event::new(EventKind::Revoked, text).of(&loser).with_cpus(&held));
        if let Some(job) = draft.state.jobs.get(&loser).cloned() {
            draft.put_job(Job { grant: None, ..job });
        }
    }
}

/// Serves the jobs that wait for cores, oldest first, and says of those that can't be served why.
pub(crate) fn serve_waiting(draft: &mut Draft<'_>) {
    learn_requests(draft);
    let mut waiting: Vec<Job> =
        draft.state.jobs.values().filter(|job| job.grant.is_none() && !job.let_go).cloned().collect();
    waiting.sort_by(|a, b| (a.since, &a.id).cmp(&(b.since, &b.id)));
    for job in waiting {
        let Some(request) = job.request.clone() else {
            abstain(
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
            let what = if runs {
                format!("{} runs unconfined: {why}", job.id)
            } else {
                format!("{} waits for cores: {why}", job.id)
            };
            let remedy = match refusal {
                Refusal::NotEnough { .. } | Refusal::Held { .. } => {
                    "it is served by itself as soon as enough cores come free".to_owned()
                }
                _ => {
                    format!("no job's end helps: pjwctl assign {} --cores N asks for something else", job.id)
                }
            };
            abstain(draft, &job.id, "unserved", what, remedy);
        }
    }
}

fn try_serve(draft: &mut Draft<'_>, id: &JobId, request: &Request) -> Result<(), Refusal> {
    match what_there_is(draft.state, draft.policy, id, request)? {
        (offer, false) => take(draft, id, &offer),
        (offer, true) => take_shared(draft, id, &offer),
    }
    Ok(())
}

/// What a job that waits can be given now, and whether others hold that too.
pub(crate) fn what_there_is(
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

/// What other jobs than this one hold.
pub(crate) fn grants_of_others<'a>(
    state: &'a WardenState,
    id: &'a JobId,
) -> impl Iterator<Item = &'a CpuSet> {
    let others = state.jobs.values().filter(move |job| job.id != *id);
    others.filter_map(|job| job.grant.as_ref()).map(|grant| &grant.cpus)
}

/// Gives a job what it was offered.
pub(crate) fn take(draft: &mut Draft<'_>, id: &JobId, offer: &Offer) {
    // The offer was made for this very pool; should it be stale all the same, the job is served next cycle.
    if draft.state.pool.commit(id, offer).is_ok() {
        settle(draft, id, grant_of(draft, offer, false));
    }
}

/// Gives a job cores that others hold too, as far as the ledger is not concerned.
pub(crate) fn take_shared(draft: &mut Draft<'_>, id: &JobId, offer: &Offer) {
    draft.state.pool.claim(id, &offer.cpus);
    settle(draft, id, grant_of(draft, offer, true));
}

fn grant_of(draft: &Draft<'_>, offer: &Offer, shared: bool) -> Grant {
    Grant {
        by_pus: draft.policy.share_smt,
        since: draft.now.since_boot,
        cpus: offer.cpus.clone(),
        granted_by: GrantedBy::Warden,
        shared,
        because: offer.because.clone(),
        runner_up: offer.runner_up.clone(),
    }
}

fn settle(draft: &mut Draft<'_>, id: &JobId, grant: Grant) {
    let Some(job) = draft.state.jobs.get(id).cloned() else { return };
    if job.grant.as_ref() == Some(&grant) {
        return;
    }
    let event = match &job.grant {
        Some(before) if before.cpus == grant.cpus => None,
        Some(before) => Some((EventKind::Resized, resized(before, &grant))),
        None => Some((EventKind::Assigned, grant.because.first().cloned().unwrap_or_default())),
    };
    if let Some((kind, text)) = event {
        draft.events.push(Event::new(kind, text).of(id).with_cpus(&grant.cpus));
    }
    draft.put_job(Job { grant: Some(grant), ..job });
}

/// Where a job has as many PUs as before, the news is why they are others.
fn resized(before: &Grant, now: &Grant) -> String {
    let text = format!("{} instead of {}", named(&now.cpus), named(&before.cpus));
    let why = now.because.first().filter(|_| now.cpus.len() == before.cpus.len());
    why.map_or(text.clone(), |why| format!("{text}: {why}"))
}

/// Discovered jobs ask for what their scheduler's variables say, or what the configuration says for the source.
fn learn_requests(draft: &mut Draft<'_>) {
    let unknown: Vec<Job> = draft.state.jobs.values().filter(|job| job.request.is_none()).cloned().collect();
    for job in unknown {
        let told = draft.state.members_of(&job.id).find_map(|member| {
            let claims = &draft.state.processes.get(&member.id.pid)?.claims.claims;
            claims.iter().filter(|claim| claim.job == job.id).find_map(|claim| claim.amount.clone())
        });
        let default = draft.policy.source_cores.get(&job.id.source()).map(|&cores| Amount::Cores(cores));
        if let Some(amount) = told.or(default) {
            draft.put_job(Job { request: Some(Request { amount, ..Request::cores(1) }), ..job });
        }
    }
}

/// Notes what is not done for a job, and why.
pub(crate) fn abstain(draft: &mut Draft<'_>, job: &JobId, code: &'static str, why: String, remedy: String) {
    draft.abstained.push(Abstained { job: Some(job.clone()), pid: None, tid: None, code, why, remedy });
}
