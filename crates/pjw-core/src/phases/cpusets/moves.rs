//! The cgroups of processes: which process may be moved into a job's cpuset, and to which cgroup it returns.

use crate::basics::{CpuSet, Pid, ProcessId, cgroup_and_ancestor_paths, is_cgroup_within, prelude::*};
use crate::phases::cpusets::{origins::OriginSearch, planned::allows_every_pu};
use crate::phases::draft::CycleDraft;
use crate::state::{KnownProcess, Member, WardenState};
use crate::terms::{
    CgroupCreator, CpusetHierarchy, JobCpuset, JobId, JobIdAttribute, JobReference, MembershipEvidence,
    Policy,
};

/// The prefixes of the names of scopes that contain processes which users started: logins, systemd-run(1), terminals
/// and desktops.
const USER_SCOPES: [&str; 5] = ["session-", "run-", "app-", "tmux-spawn-", "vte-spawn-"];

/// Returns whether the cgroup of `job_cpuset` contains at least one process of the job to which this cpuset belongs.
pub(super) fn has_members(state: &WardenState, job_cpuset: &JobCpuset) -> bool {
    let mut members = state.members_of(&job_cpuset.job).filter_map(|member| state.process(member.id.pid));
    members.any(|process| process.is_in_cgroup(&job_cpuset.path))
}

/// Returns those of `members` (processes of a job) that must still be moved into the cgroup of `job_cpuset`, each with
/// the path of its present cgroup. Leaves out processes that can't be moved, and processes that pjw is still moving for
/// another job.
pub(super) fn members_to_move_in(
    draft: &CycleDraft<'_>,
    job_cpuset: &JobCpuset,
    members: &[&Member],
) -> Vec<(ProcessId, String)> {
    let state = &*draft.state;
    let to_move = |member: &&Member| {
        let cgroup = state.process(member.id.pid)?.cgroup.as_deref()?;
        let is_outside = !is_cgroup_within(cgroup, &job_cpuset.path);
        let is_free = !state.cpusets.delayed_changes.is_moving(member.id);
        (is_outside && is_free && why_unmovable(state, draft.policy, member).is_none())
            .then(|| (member.id, cgroup.to_owned()))
    };
    members.iter().filter_map(to_move).collect()
}

/// Returns the reason why pjw can't move the process `member` out of its cgroup, as a text for users. `None` if pjw can
/// move the process. For example, pjw moves no process out of the cgroup of a scheduler, a service manager or a
/// container runtime, because such programs may use the cgroup to account or kill the process.
pub(crate) fn why_unmovable(state: &WardenState, policy: &Policy, member: &Member) -> Option<String> {
    if let Some(why) = state.cpusets.move_error(member.id) {
        return Some(why.to_owned());
    }
    let pid = member.id.pid;
    let known = state.processes.get(&pid)?;
    let cgroup = known.process.cgroup.as_deref()?;
    let job = state.jobs.get(&member.job)?;
    if let Some(reference) = tracking_cgroup(known, member, policy) {
        return Some(format!("process {pid} is in a cgroup by which {} tracks it", reference.job.source()));
    }
    // An adopted process was not started for the job: it may be a user's service manager.
    let was_launched = job.started_by_pjwctl_run && member.evidence != MembershipEvidence::Adopted;
    (!was_launched && !is_free_to_leave(cgroup, policy))
        .then(|| format!("process {pid} stays in {cgroup}, by which a service or a container tracks it"))
}

/// Returns the job whose batch system tracks the process `known` by its cgroup, so that pjw must not move the process
/// to another cpuset. `member` is the same process as a member of its job. `None` if no batch system tracks the process
/// by its cgroup. In cgroup v1, also `None` if only the batch system of its own job does: it uses another hierarchy
/// than that of the cpusets.
fn tracking_cgroup<'a>(
    known: &'a KnownProcess,
    member: &Member,
    policy: &Policy,
) -> Option<&'a JobReference> {
    let is_legacy = policy.cpuset_support.hierarchy == CpusetHierarchy::Legacy;
    known.batch_identity.job_references.iter().find(|reference| {
        matches!(reference.kind, JobIdAttribute::Cgroup(_)) && (reference.job != member.job || !is_legacy)
    })
}

/// Whether processes may be moved out of the cgroup at the path `cgroup` without an effect on another program. True for
/// these cgroups:
///
/// - The root, and the cpusets of pjw.
/// - The scopes of logins, and of programs that users started in terminals, on desktops or by systemd-run(1).
/// - On cgroup v2 without systemd, each cgroup that is not in a service or a scope.
fn is_free_to_leave(cgroup: &str, policy: &Policy) -> bool {
    let is_own = policy.own_cgroups.is_own_path(cgroup);
    let scope = cgroup.rsplit('/').next().and_then(|name| name.strip_suffix(".scope"));
    let is_users = |name: &str| USER_SCOPES.iter().any(|start| name.starts_with(start));
    let is_unmanaged = policy.cpuset_support.hierarchy == CpusetHierarchy::Unified
        && !cgroup.contains(".service")
        && !cgroup.contains(".scope");
    cgroup == "/" || is_own || scope.is_some_and(is_users) || is_unmanaged
}

/// Returns those of `members` (processes of a job) that were forked in the cgroup of `job_cpuset`, each with its
/// original cgroup. This is the cgroup from which pjw moved the nearest ancestor into the cpuset (see
/// [`OriginSearch::original_cgroup`]). Leaves out the processes whose original cgroup is unknown or already recorded.
pub(super) fn members_forked_inside(
    draft: &CycleDraft<'_>,
    job_cpuset: &JobCpuset,
    members: &[&Member],
) -> Vec<(ProcessId, String)> {
    let state = &*draft.state;
    let mut search = OriginSearch::new(state, &job_cpuset.path);
    let with_origin = |member: &&Member| {
        let is_inside = state.process(member.id.pid)?.is_in_cgroup(&job_cpuset.path);
        if !is_inside || state.cpusets.was_moved_into_cpuset_at(member.id, &job_cpuset.path) {
            return None;
        }
        Some((member.id, search.original_cgroup(member.id)?.to_owned()))
    };
    members.iter().filter_map(with_origin).collect()
}

/// Returns the processes in the cpuset at `path`, each with its original cgroup (the cgroup to which pjw moves the
/// process back). The cgroup is `None` in the same cases as the result of [`OriginSearch::cgroup_to_return_to`].
pub(super) fn processes_with_origin(state: &WardenState, path: &str) -> Vec<(ProcessId, Option<String>)> {
    let inside = state.processes.processes_in_cgroup(path).map(|known| &known.process);
    let inside = inside.filter(|process| process.id.pid != Pid(1));
    let mut search = OriginSearch::new(state, path);
    inside.map(|process| (process.id, search.cgroup_to_return_to(process.id))).collect()
}

/// Returns the processes in the cpuset `job_cpuset` that have left its job, each with its original cgroup, to which it
/// is moved back. The cgroup is `None` in the same cases as the result of [`OriginSearch::cgroup_to_return_to`].
/// Processes can leave only a provision (a job whose cores are promised to a service), so the result is empty for any
/// other job.
pub(super) fn processes_that_left(
    state: &WardenState,
    job_cpuset: &JobCpuset,
) -> Vec<(ProcessId, Option<String>)> {
    let job = &job_cpuset.job;
    // The state has the masks of the job as long as a child of a process that has left can be in the cpuset.
    let may_any_have_left = || {
        state.released_masks.contains_key(job)
            || state.processes_to_restore.values().any(|member| member.job == *job)
    };
    let is_provision = state.jobs.get(job).is_some_and(|job| job.provision.is_some());
    if !is_provision || !may_any_have_left() {
        return Vec::new();
    }
    let has_left = |pid: Pid| {
        let process = state.process(pid).filter(|_| !state.members.contains_key(&pid));
        process.is_some_and(|process| state.has_left_provision(process, job))
    };
    let inside = processes_with_origin(state, &job_cpuset.path).into_iter();
    inside.filter(|(process, _)| has_left(process.pid)).collect()
}

/// Returns the processes of the job `id` that are in the cpuset of another job, and must leave it because the job `id`
/// holds no cores. Each item is the process, this cpuset, and the path of the original cgroup, to which the process can
/// be moved back. The path is `None` in the same cases as the result of [`OriginSearch::cgroup_to_return_to`]. Leaves
/// out these processes:
///
/// - A process in the cgroup of a batch system: see [`members_in_scheduler_cgroups`].
/// - A process whose threads were not read yet, except in the cpuset of a borrower: a kernel before Linux 6.2 replaces
///   their masks at a move.
///
/// A process in a cgroup of pjw is moved back also if a batch system tracks it by its cgroup. The cgroup of the batch
/// system is then in another hierarchy than the cpusets, and the process stays in it.
pub(super) fn members_in_other_cpusets(
    state: &WardenState,
    id: &JobId,
) -> Vec<(ProcessId, JobCpuset, Option<String>)> {
    let mut searches: BTreeMap<&str, OriginSearch<'_>> = BTreeMap::new();
    let to_leave = |member: &Member| {
        let cgroup = state.process(member.id.pid)?.cgroup.as_deref()?;
        let job_cpuset = &state.cpusets.enclosing_cpuset(cgroup)?.job_cpuset;
        let may_leave = job_cpuset.creator != CgroupCreator::Scheduler
            && (job_cpuset.spec.idle || !member.threads.is_empty());
        if job_cpuset.job == *id || !may_leave {
            return None;
        }
        let path = job_cpuset.path.as_str();
        let search = searches.entry(path).or_insert_with(|| OriginSearch::new(state, path));
        Some((member.id, job_cpuset.clone(), search.cgroup_to_return_to(member.id)))
    };
    state.members_of(id).filter_map(to_leave).collect()
}

/// Returns the processes of the job `id` that are in the cgroup that a batch system made for another job, and that the
/// cpuset of this cgroup limits. Each item is the process, the other job, and the PUs (logical CPUs) of the cpuset. pjw
/// can't move such a process, because the batch system tracks it by this cgroup.
pub(super) fn members_in_scheduler_cgroups<'a>(
    state: &'a WardenState,
    id: &'a JobId,
) -> Vec<(ProcessId, &'a JobId, &'a CpuSet)> {
    // Thousands of members may be in one cgroup, so each cgroup is looked up once.
    let mut limits: BTreeMap<&str, Option<(&JobId, &CpuSet)>> = BTreeMap::new();
    let mut limited = Vec::new();
    for member in state.members_of(id) {
        let Some(cgroup) = state.process(member.id.pid).and_then(|process| process.cgroup.as_deref()) else {
            continue;
        };
        let limit = *limits.entry(cgroup).or_insert_with(|| limit_by_scheduler_cgroup(state, id, cgroup));
        limited.extend(limit.map(|(job, cpus)| (member.id, job, cpus)));
    }
    limited
}

/// Returns the other job whose cpuset limits the process `member`, and the PUs (logical CPUs) of this cpuset. pjw or
/// systemd made the cpuset's cgroup for the other job, or a batch system did. `None` if no such cpuset limits the
/// process.
pub(crate) fn limit_by_other_job<'a>(
    state: &'a WardenState,
    member: &Member,
) -> Option<(&'a JobId, &'a CpuSet)> {
    let cgroup = state.process(member.id.pid)?.cgroup.as_deref()?;
    let job_cpuset = state.cpusets.enclosing_cpuset(cgroup).map(|managed| &managed.job_cpuset);
    match job_cpuset.filter(|job_cpuset| job_cpuset.creator != CgroupCreator::Scheduler) {
        Some(own) if own.job == member.job => None,
        Some(other) => Some((&other.job, limiting_cpus(state, &other.path)?)),
        None => limit_by_scheduler_cgroup(state, &member.job, cgroup),
    }
}

/// Returns the job for which a batch system made the cgroup at the path `cgroup` or the nearest cgroup above, and the
/// PUs (logical CPUs) of the cpuset of that cgroup. `None` if there is no such cgroup. Also `None` in each of these
/// cases:
///
/// - The job `id` has the same cgroup.
/// - The job holds no cores.
/// - The cpuset does not limit the cgroup.
fn limit_by_scheduler_cgroup<'a>(
    state: &'a WardenState,
    id: &JobId,
    cgroup: &str,
) -> Option<(&'a JobId, &'a CpuSet)> {
    let jobs = &state.jobs;
    let path = cgroup_and_ancestor_paths(cgroup).find(|path| jobs.jobs_of_cgroup(path).next().is_some())?;
    if jobs.jobs_of_cgroup(path).any(|job| job.id == *id) {
        return None;
    }
    let job = jobs.jobs_of_cgroup(path).find(|job| job.grant.is_some())?;
    Some((&job.id, limiting_cpus(state, path)?))
}

/// Returns the PUs (logical CPUs) to which the cpuset of the cgroup at the path `path` limits its processes, as the
/// last scan of the cgroup read them. `None` if the cgroup was not read, has no cpuset, or has every online PU.
fn limiting_cpus<'a>(state: &'a WardenState, path: &str) -> Option<&'a CpuSet> {
    let cgroup = state.cgroups.get(path)?.present()?;
    let cpus = cgroup.restricted_cpus.as_ref()?;
    // A cpuset with all PUs is no limit, also if some of its PUs are in an isolated partition at the moment.
    let has_all = cgroup.cpuset.is_some() && allows_every_pu(state, cgroup);
    (!has_all && !state.pool.online_cpus().is_subset(cpus)).then_some(cpus)
}
