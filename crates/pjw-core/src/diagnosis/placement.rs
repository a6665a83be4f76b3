//! Findings about the placement of jobs: core counts, split cores, NUMA nodes, the scheduler's cgroup and its
//! cpuset.

use crate::basics::{CpuSet, Pu, cpus_text, prelude::*};
use crate::diagnosis::examination::{
    DiagnosisInput, Finding, JobBinding, ObservedJob, Severity, push_limited,
};
use crate::diagnosis::words::{counted_noun, join_names};
use crate::machine::TopologyLevel;
use crate::terms::{CpusetHierarchy, GrantedBy, JobId};

/// The short name of the finding that processes of a job are outside of the cgroup that the batch scheduler made for
/// the job.
pub(super) const OUTSIDE_CGROUP_CODE: &str = "outside-cgroup";

/// Adds to `findings` what the diagnosis (`pjwctl doctor`) finds about the placement of each job: its cores and NUMA
/// nodes, its cgroup and its cpuset.
pub(super) fn add_findings(input: &DiagnosisInput, findings: &mut Vec<Finding>) {
    findings.extend(jobs_with_unknown_core_count(input));
    push_limited(input.jobs.iter().filter_map(processes_outside_cgroup).collect(), findings);
    findings.extend(jobs_without_cpuset(input));
    findings.extend(jobs_kept_by_masks(input));
    let placements = JobPlacements::new(input);
    let jobs = || placements.restricted_jobs.iter();
    let with_half_cores = jobs().filter_map(|(job, own)| half_cores(input, &placements, job, own));
    push_limited(with_half_cores.collect(), findings);
    let on_several_nodes = jobs().filter_map(|(job, own)| job_on_several_nodes(&placements, job, own));
    push_limited(on_several_nodes.collect(), findings);
}

/// The PUs of each job and the jobs on each PU. Computed once, because a node may have thousands of jobs and
/// PUs.
struct JobPlacements<'a> {
    /// The jobs that may run on some PUs only, each with these PUs.
    restricted_jobs: Vec<(&'a ObservedJob, CpuSet)>,
    jobs_by_pu: BTreeMap<Pu, BTreeSet<&'a JobId>>,
    /// The PUs of each NUMA node that has PUs, by node number.
    nodes: Vec<(u32, CpuSet)>,
    /// The PUs of all jobs in `restricted_jobs`.
    used: CpuSet,
}

impl<'a> JobPlacements<'a> {
    /// Collects the PUs of each job that is restricted to some PUs. Also collects the jobs on each of these PUs, and
    /// the online PUs of each NUMA node.
    fn new(input: &'a DiagnosisInput) -> Self {
        let restricted_jobs: Vec<_> =
            input.jobs.iter().filter_map(|job| Some((job, restricting_cpus(input, job)?))).collect();
        let mut jobs_by_pu: BTreeMap<Pu, BTreeSet<&JobId>> = BTreeMap::new();
        for (job, cpus) in &restricted_jobs {
            for pu in cpus.iter() {
                jobs_by_pu.entry(pu).or_default().insert(&job.id);
            }
        }
        let used = jobs_by_pu.keys().copied().collect();
        let nodes = input
            .topology
            .domains(TopologyLevel::NumaNode)
            .map(|node| (node.number, input.topology.cpus_belonging_to(node).intersection(&input.online)))
            .filter(|(_, cpus)| !cpus.is_empty())
            .collect();
        Self { restricted_jobs, jobs_by_pu, nodes, used }
    }
}

/// Returns the PUs to which pjw, or else the affinity masks and cpusets of its threads, restrict the job. `None` if the
/// job can run on all online PUs.
fn restricting_cpus(input: &DiagnosisInput, job: &ObservedJob) -> Option<CpuSet> {
    job.held_cpus(&input.online).or_else(|| {
        let allowed = job.allowed_cpus(&input.online);
        (!allowed.is_empty() && !input.online.is_subset(&allowed)).then_some(allowed)
    })
}

/// Returns the finding about jobs of which it is unknown how many cores they should have. Such a job has neither a
/// request nor a grant. `None` if there are no such jobs.
fn jobs_with_unknown_core_count(input: &DiagnosisInput) -> Option<Finding> {
    let jobs = input.job_ids(|job| job.requested.is_none() && job.grant.is_none());
    let first = jobs.first()?;
    let text = format!("it is unknown how many cores {} should have", join_names(&jobs));
    let source = first.source();
    let cause = if input.caller_uid.0 == 0 {
        ""
    } else {
        "look as root first: environments of others can't be read otherwise; "
    };
    let remedy = format!(
        "{cause}set cores = N under [sources.{source}] in pjwd.toml, or: pjwctl assign {first} --cores N"
    );
    Some(Finding::advice("unknown-count", text, remedy).with_jobs(jobs))
}

/// Returns the finding that processes of `job` are outside of the cgroup that the batch system made for the job. `None`
/// if there are no such processes.
fn processes_outside_cgroup(job: &ObservedJob) -> Option<Finding> {
    let first = job.pids_outside_cgroup.first()?;
    let (verb, pronoun) = if job.pids_outside_cgroup.len() == 1 { ("is", "it") } else { ("are", "them") };
    let text = format!(
        "{} of {} {verb} outside the cgroup of its scheduler, whose accounting and kill miss {pronoun}",
        counted_noun(job.pids_outside_cgroup.len(), "process"),
        job.id
    );
    let remedy = format!(
        "pjwctl explain {first}; a login may have moved {pronoun} (pam_systemd, su, systemd-run --user): use \
         pam_slurm_adopt or its like; pjwd keeps {pronoun} on the job's cores meanwhile"
    );
    let finding = Finding::problem(OUTSIDE_CGROUP_CODE, text, remedy);
    Some(finding.with_jobs([&job.id]).with_pids(job.pids_outside_cgroup.iter().copied()))
}

/// Returns the finding about jobs whose cgroup, which a batch system made, has no cpuset. The cpuset controller is
/// not enabled for such a cgroup. `None` if there are no such jobs. The finding is a problem if this batch system is
/// configured to use cpusets, else a note.
fn jobs_without_cpuset(input: &DiagnosisInput) -> Option<Finding> {
    let without_cpuset = input.job_ids(|job| job.has_cpuset_controller == Some(false));
    let first = without_cpuset.first()?;
    let promised = input.schedulers.iter().find(|scheduler| {
        scheduler.binding == JobBinding::Cpusets && scheduler.name.eq_ignore_ascii_case(first.source().name())
    });
    let text = match promised {
        Some(scheduler) => format!(
            "{} is set up to keep jobs by cpusets, but the cgroup of {} has none",
            scheduler.name,
            join_names(&without_cpuset)
        ),
        None => {
            let jobs = join_names(&without_cpuset);
            format!("the cgroup of {jobs} has no cpuset: only masks can keep it on its cores")
        }
    };
    let severity = if promised.is_some() { Severity::Problem } else { Severity::Note };
    let remedy = if input.host.has_systemd {
        "the cpuset controller is missing from cgroup.subtree_control above it: a systemctl daemon-reload drops it where no \
         unit asks; give the scheduler's unit Delegate=yes and restart it when no job runs"
    } else {
        "the cpuset controller is missing from cgroup.subtree_control above it: enable it there when no job runs"
    };
    Some(Finding::new(severity, "no-cpuset-controller", text, remedy).with_jobs(without_cpuset))
}

/// Returns the finding about jobs that pjw keeps on their cores by affinity masks, though the machine supports cpusets.
/// `None` if there are no such jobs. A job without processes needs no cpuset yet.
fn jobs_kept_by_masks(input: &DiagnosisInput) -> Option<Finding> {
    if matches!(input.cpuset_support.hierarchy, CpusetHierarchy::Unavailable { .. }) {
        return None;
    }
    let kept_by_masks = input.job_ids(|job| job.enforcement == "affinity" && job.process_count > 0);
    let first = kept_by_masks.first()?;
    let verb = if kept_by_masks.len() == 1 { "is" } else { "are" };
    let text = format!("{} {verb} kept by masks, though this node has cpusets", join_names(&kept_by_masks));
    let remedy = format!(
        "nothing, if masks will do; pjwctl explain {first} shows why it has no cpuset, enforcement = \"cpuset\" in \
         pjwd.toml warns of it"
    );
    Some(Finding::note("no-wall", text, remedy).with_jobs(kept_by_masks))
}

/// Returns the finding that `job` has only some of the online PUs of a core. The job is restricted to the PUs `own`.
/// `placements` has the jobs on each PU. Returns `None` if there is no such core. Also returns `None` if a job with a
/// smaller id has other PUs of such a core, because the finding about that job already names `job`.
fn half_cores(
    input: &DiagnosisInput,
    placements: &JobPlacements<'_>,
    job: &ObservedJob,
    own: &CpuSet,
) -> Option<Finding> {
    let siblings: CpuSet = own
        .iter()
        .flat_map(|pu| input.topology.core_cpus(pu).iter().collect::<Vec<_>>())
        .filter(|&pu| !own.contains(pu) && input.online.contains(pu))
        .collect();
    if siblings.is_empty() {
        return None;
    }
    let group: BTreeSet<&JobId> =
        siblings.iter().filter_map(|pu| placements.jobs_by_pu.get(&pu)).flatten().copied().collect();
    // Each pair of jobs is reported once, for the job with the smaller id.
    if group.first().is_some_and(|other| **other < job.id) {
        return None;
    }
    let remedy = match job.grant {
        Some((_, GrantedBy::Scheduler)) => {
            "have the scheduler give whole cores (Slurm: CR_Core, or --hint=nomultithread)"
        }
        _ => "leave share_smt = false in pjwd.toml and assign by --cores, not by --cpus",
    };
    let (id, unused) = (&job.id, cpus_text(&siblings));
    let finding = if group.is_empty() {
        let text = format!("{id} has only a part of some cores: no job has {unused} next to it");
        Finding::note("half-core", text, remedy)
    } else {
        let text = format!("{id} shares cores with {}: {unused} next to its own", join_names(&group));
        Finding::advice("half-core", text, remedy)
    };
    Some(finding.with_jobs(group.into_iter().chain([id])).with_cpus(&siblings))
}

/// Returns the finding that `job` lies on several NUMA nodes though it would fit into one. The job is restricted to
/// the PUs `own`. Returns `None` if the job lies on one NUMA node, or if no NUMA node has as many PUs as `own`. The
/// finding is an advice if such a NUMA node has room for the job now. Otherwise, the finding is a note.
fn job_on_several_nodes(placements: &JobPlacements<'_>, job: &ObservedJob, own: &CpuSet) -> Option<Finding> {
    let nodes = &placements.nodes;
    let own_nodes: Vec<u32> =
        nodes.iter().filter(|(_, cpus)| cpus.intersects(own)).map(|(number, _)| *number).collect();
    let large_nodes: Vec<_> = nodes.iter().filter(|(_, cpus)| cpus.len() >= own.len()).collect();
    if own_nodes.len() < 2 || large_nodes.is_empty() {
        return None;
    }
    let shared = |pu: &Pu| placements.jobs_by_pu.get(pu).is_some_and(|jobs| jobs.len() > 1);
    let pus_of_others = placements.used.difference(own).union(&own.iter().filter(shared).collect());
    let node_with_room =
        large_nodes.iter().find(|(_, cpus)| cpus.difference(&pus_of_others).len() >= own.len());
    let room_text = match node_with_room {
        Some((number, _)) => format!("; node {number} has room"),
        None => ", but none has room now".to_owned(),
    };
    let own_nodes = join_names(&own_nodes);
    let text = format!("{} lies on NUMA nodes {own_nodes} and would fit in one{room_text}", job.id);
    let remedy = match job.grant {
        Some((_, GrantedBy::Warden)) => {
            "pjwctl plan --defrag shows which jobs would move; pjwctl defrag moves them"
        }
        Some((_, GrantedBy::Scheduler)) => {
            "ask its scheduler for one socket (Slurm: --ntasks-per-socket, --sockets-per-node=1)"
        }
        None => {
            "bind it to one node, or let pjwd choose: it takes the smallest part of the machine that fits"
        }
    };
    let severity = if node_with_room.is_some() { Severity::Advice } else { Severity::Note };
    Some(Finding::new(severity, "spread", text, remedy).with_jobs([&job.id]).with_cpus(own))
}
