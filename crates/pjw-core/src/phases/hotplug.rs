//! Handles PUs that go offline while a job holds them: the job gets other cores, or continues with fewer.
//!
//! A core is lost when all its PUs that the job holds are offline. While one of them is online, the job keeps
//! the core; so switching SMT off and on changes no grant. Lost PUs go back to the pool, and are free when
//! they come online. Grants of schedulers are not changed.

use crate::allocate::offer::allocate;
use crate::basics::{CpuSet, Pu, cpus_text, prelude::*};
use crate::machine::Topology;
use crate::phases::draft::{CycleDraft, warn};
use crate::phases::jobs;
use crate::terms::{Event, EventKind, Grant, Job, JobId};

/// Grants other cores to the jobs whose cores went offline, near their remaining cores if possible. If no cores are
/// free, a job keeps its remaining cores, or waits for cores if it has none.
pub(crate) fn replace_lost_cores(draft: &mut CycleDraft<'_>) {
    let online = draft.state.pool.online_cpus();
    let lost_by = |job: &Job| {
        let lost = lost_cpus(&draft.state.topology, job.owned_grant()?, &online);
        (!lost.is_empty()).then(|| (job.id.clone(), lost))
    };
    let planned = draft.jobs_to_plan();
    let planned = planned.iter().filter_map(|id| draft.state.jobs.get(id));
    let losses: Vec<(JobId, CpuSet)> = planned.filter_map(lost_by).collect();
    for (id, lost) in losses {
        replace_lost_cores_of_job(draft, &id, &lost);
    }
}

/// Returns the offline PUs of `grant` that the job has lost. A PU is not lost while another PU of its core is in the
/// grant and online. If the grant may have parts of cores, every offline PU is lost.
fn lost_cpus(topology: &Topology, grant: &Grant, online: &CpuSet) -> CpuSet {
    let offline = grant.cpus.difference(online);
    if grant.may_split_cores {
        return offline;
    }
    let still_runs = |pu: &Pu| topology.core_cpus(*pu).intersection(&grant.cpus).intersects(online);
    offline.iter().filter(|pu| !still_runs(pu)).collect()
}

/// Gives the job `id` other cores for its offline PUs `lost`, and adds an event. The job keeps its remaining cores. If
/// no other cores are free, it goes on with the remaining cores, or waits for cores if none remain. A job that shares
/// its cores with other jobs gets no other cores.
fn replace_lost_cores_of_job(draft: &mut CycleDraft<'_>, id: &JobId, lost: &CpuSet) {
    let Some(job) = draft.state.jobs.get(id).cloned() else { return };
    let Some(grant) = job.grant.clone() else { return };
    let kept = grant.cpus.difference(lost);
    draft.state.pool.grant_available(id, &kept);
    let request = job.request.as_ref().filter(|_| !grant.is_shared);
    let offer = request.and_then(|request| {
        let (pool, topology) = (&draft.state.pool, &draft.state.topology);
        allocate(id, request, pool, topology, draft.policy).ok()
    });
    match offer.filter(|offer| kept.is_subset(&offer.cpus)) {
        Some(offer) => {
            let replacements = offer.cpus.difference(&kept);
            report_offline_pus(draft, id, lost, &format!("{} in their place", cpus_text(&replacements)));
            jobs::grant_offer(draft, id, &offer, false);
        }
        None if kept.is_empty() => {
            let what = "nothing is left of its cores and no others are free: it waits for some";
            report_offline_pus(draft, id, lost, what);
            draft.store_job(Job { grant: None, ..job });
        }
        None => {
            let what = format!("no others are free: it goes on with {}", cpus_text(&kept));
            report_offline_pus(draft, id, lost, &what);
            let reasons = vec![format!("{} went offline, and no others were free", cpus_text(lost))];
            let granted_at = draft.now.since_boot;
            draft.store_job(Job { grant: Some(Grant { cpus: kept, reasons, granted_at, ..grant }), ..job });
        }
    }
}

fn report_offline_pus(draft: &mut CycleDraft<'_>, id: &JobId, lost: &CpuSet, what: &str) {
    let text = format!("{} went offline under the job; {what}", cpus_text(lost));
    draft.out.events.push(Event::new(EventKind::Hotplug, text).with_job(id).with_cpus(lost));
}

/// Adds a warning for each job that holds fewer cores or PUs (logical CPUs) than it requested. A provision (a job whose
/// cores are promised to a service) waits for the missing cores: its warning has the reason why pjw can't grant them
/// yet, if the reason is known.
pub(crate) fn warn_incomplete_grants(draft: &mut CycleDraft<'_>) {
    let planned = draft.jobs_to_plan();
    let planned = planned.iter().filter_map(|id| draft.state.jobs.get(id));
    let short = planned.filter(|job| jobs::has_fewer_than_requested(&draft.state.topology, job));
    let facts =
        |job: &Job| Some((job.id.clone(), cpus_text(&job.grant.as_ref()?.cpus), job.provision.is_some()));
    let short: Vec<(JobId, String, bool)> = short.filter_map(facts).collect();
    for (id, cpus, is_provision) in short {
        let refused = draft.state.refused_requests.get(&id);
        let reason = refused.map(|refused| format!(": {}", refused.refusal)).unwrap_or_default();
        let (why, remedy) = if is_provision {
            let why = format!("{id} has {cpus} and waits for more cores{reason}");
            (why, "it gets them by itself as soon as enough cores come free".to_owned())
        } else {
            let why = format!("{id} has fewer cores than it asked for since some went offline: {cpus}");
            (why, format!("pjwctl assign {id} with its count gives it others, once there are any"))
        };
        warn(draft, &id, "short", why, remedy);
    }
}
