//! PUs that are switched off under a job: other cores take their place, or the job has fewer.
//!
//! A core is lost once every PU of it that the job holds is off; while one runs, the job keeps the core and gets the
//! others back with it, so that switching SMT off moves nobody. What is lost goes back to the pool and is free
//! when it is switched on again. A scheduler's grant is the scheduler's to change.

use crate::allocate::allocate;
use crate::cpuset::{CpuSet, Pu};
use crate::event::{Event, EventKind};
use crate::explain::named;
use crate::job::{Amount, Grant, GrantedBy, Job, JobId};
use crate::jobs;
use crate::reconcile::Draft;
use crate::topology::Topology;

/// Gives the jobs that lost cores others, near those they still have, where there are any.
pub(crate) fn replace_lost(draft: &mut Draft<'_>) {
    let online = draft.state.pool.online();
    let lost_by = |job: &Job| {
        let grant = job.grant.as_ref().filter(|grant| grant.granted_by == GrantedBy::Warden)?;
        let lost = lost(&draft.state.topology, grant, &online);
        (!lost.is_empty()).then(|| (job.id.clone(), lost))
    };
    let losers: Vec<(JobId, CpuSet)> = draft.state.jobs.values().filter_map(lost_by).collect();
    for (id, lost) in losers {
        replace(draft, &id, &lost);
    }
}

/// The PUs of a grant that are off for good, as far as anyone can tell.
fn lost(topology: &Topology, grant: &Grant, online: &CpuSet) -> CpuSet {
    let dark = grant.cpus.difference(online);
    if grant.by_pus {
        return dark;
    }
    let still_runs = |pu: &Pu| topology.core_of(*pu).intersection(&grant.cpus).intersects(online);
    dark.iter().filter(|pu| !still_runs(pu)).collect()
}

fn replace(draft: &mut Draft<'_>, id: &JobId, lost: &CpuSet) {
    let Some(job) = draft.state.jobs.get(id).cloned() else { return };
    let Some(grant) = job.grant.clone() else { return };
    let kept = grant.cpus.difference(lost);
    draft.state.pool.claim(id, &kept);
    let request = job.request.as_ref().filter(|_| !grant.shared);
    let offer = request.and_then(|request| {
        let (pool, topology) = (&draft.state.pool, &draft.state.topology);
        allocate(id, request, pool, topology, draft.policy).ok()
    });
    match offer.filter(|offer| kept.is_subset(&offer.cpus)) {
        Some(offer) => {
            let instead = offer.cpus.difference(&kept);
            tell(draft, id, lost, &format!("{} in their place", named(&instead)));
            jobs::take(draft, id, &offer);
        }
        None if kept.is_empty() => {
            tell(draft, id, lost, "nothing is left of its cores and no others are free: it waits for some");
            draft.put_job(Job { grant: None, ..job });
        }
        None => {
            tell(draft, id, lost, &format!("no others are free: it goes on with {}", named(&kept)));
            let because = vec![format!("{} went offline, and no others were free", named(lost))];
            let since = draft.now.since_boot;
            draft.put_job(Job { grant: Some(Grant { cpus: kept, because, since, ..grant }), ..job });
        }
    }
}

fn tell(draft: &mut Draft<'_>, id: &JobId, lost: &CpuSet, what: &str) {
    let text = format!("{} went offline under the job; {what}", named(lost));
    draft.events.push(Event::new(EventKind::Hotplug, text).of(id).with_cpus(lost));
}

/// Whether a job holds less than it asked for.
pub(crate) fn is_short(topology: &Topology, job: &Job) -> bool {
    let (Some(grant), Some(request)) = (&job.grant, &job.request) else { return false };
    if grant.granted_by == GrantedBy::Scheduler || grant.shared {
        return false;
    }
    match &request.amount {
        Amount::Cores(cores) => topology.cores_touched_by(&grant.cpus) < *cores,
        Amount::Pus(pus) => u32::try_from(grant.cpus.len()).unwrap_or(u32::MAX) < *pus,
        Amount::Exactly(cpus) => grant.cpus != *cpus,
    }
}

/// Says which jobs go on with less than they asked for.
pub(crate) fn report_short(draft: &mut Draft<'_>) {
    let short = draft.state.jobs.values().filter(|job| is_short(&draft.state.topology, job));
    let held = |job: &Job| Some((job.id.clone(), named(&job.grant.as_ref()?.cpus)));
    let short: Vec<(JobId, String)> = short.filter_map(held).collect();
    for (id, cpus) in short {
        let why = format!("{id} has fewer cores than it asked for since some went offline: {cpus}");
        let remedy = format!("pjwctl assign {id} with its count gives it others, once there are any");
        jobs::abstain(draft, &id, "short", why, remedy);
    }
}
