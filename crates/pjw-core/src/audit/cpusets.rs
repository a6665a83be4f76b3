//! Audits the planned changes of job cpusets. A cpuset belongs to one job and has no PUs outside the job's
//! grant. Only members of the job are moved into the cpuset. Processes of the system are never moved.

use crate::audit::violation::Violation;
use crate::basics::{CpuSet, Pid, ProcessId, prelude::*};
use crate::state::WardenState;
use crate::terms::{
    CgroupCreator, CpusetAction, CpusetChange, GrantedBy, Job, JobCpuset, JobId, Plan, Policy,
};

/// Checks the planned changes of cpusets. Returns a violation for each change that pjw must not make:
///
/// - A change gives a job no PUs (logical CPUs), or PUs outside its grant (the PUs that the job holds).
/// - A change moves a process that is not a member of the job, or a process of the system.
/// - A change concerns a cpuset that is not registered for the job, or creates a cpuset twice.
/// - A change removes a cpuset that the job still needs.
pub(super) fn check_cpusets(state: &WardenState, plan: &Plan, policy: &Policy) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut created: BTreeSet<&str> = BTreeSet::new();
    for action in &plan.cpuset_actions {
        let job = &action.job;
        match &action.change {
            CpusetChange::Create { job_cpuset, initial_processes, .. } => {
                found.extend(check_creation(state, policy, job, job_cpuset));
                if !created.insert(&job_cpuset.path) {
                    found.push(not_the_jobs_cpuset(job, &job_cpuset.path));
                }
                let check = |&process| check_process_is_movable(state, policy, action, process);
                found.extend(initial_processes.iter().filter_map(check));
                found.extend(check_moved_are_members(state, job, action));
            }
            CpusetChange::MoveIn { process, to, .. } => {
                found.extend(check_process_is_movable(state, policy, action, *process));
                found.extend(check_moved_are_members(state, job, action));
                if !is_registered_for(state, job, to) {
                    found.push(not_the_jobs_cpuset(job, to));
                }
            }
            CpusetChange::MoveBack { process, from, .. } => {
                found.extend(check_process_is_movable(state, policy, action, *process));
                if !is_registered_for(state, job, from) {
                    found.push(not_the_jobs_cpuset(job, from));
                }
            }
            CpusetChange::RemoveLimits { job_cpuset } | CpusetChange::Remove { job_cpuset } => {
                let may_be_removed =
                    state.cpusets.cpuset_at(&job_cpuset.path).is_some_and(|managed| managed.must_be_removed);
                if !may_be_removed || job_cpuset.job != *job {
                    found.push(not_the_jobs_cpuset(job, &job_cpuset.path));
                }
            }
        }
    }
    found
}

/// Checks the planned creation of the cpuset `job_cpuset` for the job `job`. Returns one violation if the cpuset has
/// no PUs, or has PUs outside the job's grant (the PUs that the job holds). Returns another violation if the cpuset
/// is not registered for the job, or if pjw does not create cpusets of such jobs at this path.
fn check_creation(
    state: &WardenState,
    policy: &Policy,
    job: &JobId,
    job_cpuset: &JobCpuset,
) -> Vec<Violation> {
    let mut found = Vec::new();
    let owner = state.jobs.get(job);
    let grant = owner.and_then(|job| job.grant_chosen_by(GrantedBy::Warden));
    let granted = grant.map(|grant| grant.cpus.clone()).unwrap_or_default();
    let cpus: &CpuSet = &job_cpuset.spec.cpus;
    if cpus.is_empty() || !cpus.is_subset(&granted) {
        let (job, path, cpus) = (job.clone(), job_cpuset.path.clone(), cpus.clone());
        found.push(Violation::CpusetExceedsGrant { job, path, cpus, granted });
    }
    let scheduler_cgroup = owner.and_then(|job| job.cgroup.as_deref());
    let is_cgroup_of_scheduler = scheduler_cgroup == Some(job_cpuset.path.as_str());
    let names = &policy.own_cgroups;
    let (parent, slice) = (names.default_parent_path(), names.slice_name());
    let usual_prefixes = [format!("{parent}/"), format!("{parent}-"), format!("/{slice}/")];
    let borrower_prefixes = names.besteffort_parent_paths().map(|parent| format!("{parent}/"));
    // Only borrowers run at idle priority, and all of them do.
    let prefixes =
        if owner.is_some_and(Job::is_borrower) { &borrower_prefixes[..] } else { &usual_prefixes[..] };
    let is_in_own_cgroup = prefixes.iter().any(|prefix| job_cpuset.path.starts_with(prefix));
    let has_parent_component = job_cpuset.path.split('/').any(|part| part == "..");
    let is_by_scheduler = job_cpuset.creator == CgroupCreator::Scheduler;
    let is_allowed_path = if is_by_scheduler { is_cgroup_of_scheduler } else { is_in_own_cgroup };
    if !is_allowed_path
        || has_parent_component
        || job_cpuset.job != *job
        || !is_registered_for(state, job, &job_cpuset.path)
    {
        found.push(not_the_jobs_cpuset(job, &job_cpuset.path));
    }
    found
}

/// Whether the cpuset is registered for the job. A change of any other cgroup could not be undone.
fn is_registered_for(state: &WardenState, job: &JobId, path: &str) -> bool {
    state.cpusets.cpuset_at(path).is_some_and(|managed| managed.job_cpuset.job == *job)
}

/// Returns the violation that the cpuset at `path` does not belong to the job `job`.
fn not_the_jobs_cpuset(job: &JobId, path: &str) -> Violation {
    Violation::NotTheJobsCpuset { job: job.clone(), path: path.to_owned() }
}

/// Returns a violation if `process` is a kernel thread, process 1 or a process of the daemon. pjw must not move such a
/// process.
fn check_process_is_movable(
    state: &WardenState,
    policy: &Policy,
    action: &CpusetAction,
    process: ProcessId,
) -> Option<Violation> {
    let kernel = state.process(process.pid).is_some_and(|process| process.is_kernel_thread);
    let is_system_process = kernel || process.pid == Pid(1) || policy.is_daemon_process(process.pid);
    is_system_process.then(|| Violation::ProcessNotMovable { job: action.job.clone(), process })
}

/// Returns a violation for each process that `action` moves into a cpuset and that is not a member of its job.
/// `action` is a change of a cpuset of the job `job`.
fn check_moved_are_members(state: &WardenState, job: &JobId, action: &CpusetAction) -> Vec<Violation> {
    let processes = match &action.change {
        CpusetChange::Create { initial_processes, .. } => initial_processes.clone(),
        CpusetChange::MoveIn { process, .. } => vec![*process],
        _ => Vec::new(),
    };
    let is_no_member = |process: &ProcessId| {
        !state.members.get(&process.pid).is_some_and(|member| member.id == *process && member.job == *job)
    };
    let unassigned = processes.into_iter().filter(is_no_member);
    unassigned.map(|process| Violation::ProcessNotMovable { job: job.clone(), process }).collect()
}
