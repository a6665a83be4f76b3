//! Which cpuset a job is to have: its path, its settings and the program that creates its cgroup.

use crate::basics::{CpuSet, Pu, prelude::*};
use crate::machine::TopologyLevel;
use crate::state::WardenState;
use crate::terms::{
    CgroupCreator, CpusetHierarchy, CpusetSpec, EnforcementMethod, GrantedBy, Job, JobCpuset, JobId,
    Observed, Ownership, Policy, own_cgroups::CgroupPlace,
};

/// The cpuset that a job is to have, or the reason why it gets none.
pub(super) enum CpusetPlacement {
    /// The job gets this cpuset.
    At(JobCpuset),
    /// Unknown, because the scheduler's cgroup was not scanned yet.
    Unknown,
    /// The job needs no cpuset from pjw: it holds no cores, or the scheduler's cpuset limits it.
    Unneeded,
    /// The job can have no cpuset, for this reason.
    Impossible(String),
}

/// Returns the cpuset that the job `id` is to have, with its path and settings, or the reason why it gets none. The
/// result is [`CpusetPlacement::Unneeded`] for a job that is unknown or was released.
pub(super) fn placement_of(state: &WardenState, policy: &Policy, id: &JobId) -> CpusetPlacement {
    let Some(job) = state.jobs.get(id).filter(|job| !job.was_released) else {
        return CpusetPlacement::Unneeded;
    };
    let Some(cpus) = job.online_granted_cpus(&state.pool.online_cpus()) else {
        return CpusetPlacement::Unneeded;
    };
    if job.grant_chosen_by(GrantedBy::Scheduler).is_some() {
        return CpusetPlacement::Unneeded;
    }
    if job.cgroup.as_ref().is_some_and(|path| !state.cgroups.contains_key(path)) {
        return CpusetPlacement::Unknown;
    }
    if policy.enforcement == EnforcementMethod::Affinity {
        return CpusetPlacement::Impossible("the configuration says enforcement = \"affinity\"".to_owned());
    }
    if let Some(why) = state.cpusets.cpuset_error(id) {
        return CpusetPlacement::Impossible(why.to_owned());
    }
    match creator_and_path(state, policy, job) {
        Ok((creator, path)) => {
            let spec = cpuset_spec(state, policy, job, creator, cpus);
            CpusetPlacement::At(JobCpuset { job: id.clone(), creator, path, spec })
        }
        Err(why) => CpusetPlacement::Impossible(why),
    }
}

/// Returns the program that creates the cgroup of the cpuset of `job` (pjw, systemd or the batch system), and the path
/// of this cgroup. The error is the reason why the job can have no cpuset, as text for users. The scheduler's cgroup of
/// the job must have been scanned.
fn creator_and_path(
    state: &WardenState,
    policy: &Policy,
    job: &Job,
) -> Result<(CgroupCreator, String), String> {
    let place = match (job.is_borrower(), gets_partition(policy, job)) {
        (true, _) => CgroupPlace::Besteffort,
        (false, true) => CgroupPlace::Partition,
        (false, false) => CgroupPlace::Usual,
    };
    let own =
        |cgroup_creator| Ok((cgroup_creator, policy.own_cgroups.job_path(&job.id, cgroup_creator, place)));
    let hierarchy = &policy.cpuset_support.hierarchy;
    let is_legacy = *hierarchy == CpusetHierarchy::Legacy;
    let source = job.id.source();
    match (hierarchy, &job.cgroup) {
        (CpusetHierarchy::Unavailable { why }, _) => Err(why.clone()),
        (CpusetHierarchy::Systemd, _) if !source.is_batch_system() => own(CgroupCreator::Systemd),
        (_, _) if !source.is_batch_system() => own(CgroupCreator::Warden),
        (_, None) if is_legacy => own(CgroupCreator::Warden),
        (_, None) => Err(format!(
            "{source} made no cgroup for {}, and its processes stay where {source} watches them",
            job.id
        )),
        (_, Some(path)) => {
            let scanned = state.cgroups.get(path).and_then(Observed::present);
            match scanned.and_then(|cgroup| cgroup.cpuset.as_ref()) {
                Some(_) if policy.sources_with_narrowable_cpusets.contains(&source) => {
                    Ok((CgroupCreator::Scheduler, path.clone()))
                }
                Some(_) => Err(format!("the cpuset of {path} is {source}'s to write")),
                // v1: the cpuset hierarchy is not the hierarchy by which the scheduler tracks its processes.
                None if is_legacy => own(CgroupCreator::Warden),
                None => Err(format!("{path} has no cpuset: {source} doesn't enable that controller")),
            }
        }
    }
}

/// Whether the cores of the job become an isolated partition (`cpuset.cpus.partition`). False if the hierarchy of
/// cgroups has no partitions: the job then gets an ordinary cpuset, with a warning.
fn gets_partition(policy: &Policy, job: &Job) -> bool {
    let is_requested = job.request.as_ref().is_some_and(|request| request.isolated);
    is_requested && policy.cpuset_support.hierarchy.has_partitions()
}

/// Returns the settings that the cpuset of `job` must have, with the PUs `cpus`. In the cgroup of a batch system, pjw
/// only changes the PUs.
fn cpuset_spec(
    state: &WardenState,
    policy: &Policy,
    job: &Job,
    creator: CgroupCreator,
    cpus: CpuSet,
) -> CpusetSpec {
    let request = job.request.as_ref().filter(|_| creator != CgroupCreator::Scheduler);
    // The kernel takes lists of nodes in the form of CPU lists, so a `CpuSet` holds the numbers of the nodes too.
    let node_numbers = || {
        let nodes = state.topology.domains(TopologyLevel::NumaNode);
        nodes.filter(|node| node.cpus.intersects(&cpus)).map(|node| Pu(node.number)).collect::<CpuSet>()
    };
    let mems = request.filter(|request| request.bind_memory).map(|_| node_numbers());
    let isolated = request.is_some() && gets_partition(policy, job);
    let idle = job.is_borrower();
    let frozen = job.grant.as_ref().is_some_and(|grant| grant.ownership == Ownership::Frozen);
    CpusetSpec { cpus, mems: mems.filter(|mems| !mems.is_empty()), isolated, idle, frozen }
}
