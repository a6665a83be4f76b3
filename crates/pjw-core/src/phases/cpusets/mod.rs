//! The cpusets of jobs: which job gets which cpuset, and how the cpusets are removed that are no longer needed.
//!
//! If a scheduler grants the cores of a job by a cpuset, the job needs no other cpuset. In a scheduler's own cgroup
//! pjw narrows the cpuset if the source allows it. It creates no cgroup below, because then the scheduler's rmdir(2)
//! would fail. The processes of a job that no scheduler tracks are moved to a cgroup of their own. A job that can
//! have no cpuset is kept on its grant by affinity masks, with a warning.
//!
//! This phase comes before the masks. Masks are written to the journal before a cpuset changes, because the kernel may
//! cut or forget them. They are planned after the cpuset was changed: `masks.rs`. While a change for a job is delayed,
//! masks keep the job on its grant, except if the cpuset is an isolated partition.

pub(crate) mod moves;
mod origins;
mod placement;
pub(crate) mod planned;
mod removal;
mod unrecorded;
mod warnings;

pub use unrecorded::needs_record;

use alloc::sync::Arc;

use crate::basics::{ProcessId, Uid, cpus_text, prelude::*};
use crate::phases::cpusets::moves::{
    has_members, members_forked_inside, members_in_other_cpusets, members_to_move_in, processes_that_left,
    why_unmovable,
};
use crate::phases::cpusets::origins::OriginSearch;
use crate::phases::cpusets::placement::{CpusetPlacement, placement_of};
use crate::phases::cpusets::planned::{
    PendingCpusetChanges, journal_requested_masks, plan_move_back, push_cpuset_change,
};
use crate::phases::cpusets::removal::plan_cpuset_removal;
use crate::phases::{draft::CycleDraft, observe::add_missing_mask_entries};
use crate::state::{Member, WardenState};
use crate::terms::{
    CgroupCreator, Cpuset, CpusetChange, CpusetRecord, CpusetSpec, DaemonMode, EnforcementMethod, GrantedBy,
    Job, JobCpuset, JobId, Observed, Policy,
};

/// Plans changes of cpusets, so that the cpuset of each job contains exactly the PUs (logical CPUs) that the job holds.
/// Also plans the removal of the cpusets that no job needs. Adds warnings about jobs that can't have the cpuset that
/// was requested for them. The cpusets of jobs that need no planning in this cycle stay as they are.
pub(crate) fn plan_cpusets(draft: &mut CycleDraft<'_>) -> PendingCpusetChanges {
    if draft.full {
        retry_failed_changes(draft.state);
    }
    let mut changes = PendingCpusetChanges::default();
    let mut wanted: BTreeSet<String> = BTreeSet::new();
    // Borrowers come first: they leave a core before its owner gets it.
    let is_borrower = |id: &JobId| draft.state.jobs.get(id).is_some_and(Job::is_borrower);
    let (borrowers, others): (Vec<JobId>, Vec<JobId>) =
        draft.jobs_to_plan().into_iter().partition(is_borrower);
    for id in borrowers.into_iter().chain(others) {
        // The journal must get the masks before the cpuset changes, and has only those of threads with a mask entry.
        add_missing_mask_entries(draft, &id);
        match placement_of(draft.state, draft.policy, &id) {
            CpusetPlacement::At(job_cpuset) => {
                wanted.insert(job_cpuset.path.clone());
                let left = processes_that_left(draft.state, &job_cpuset);
                if !draft.state.cpusets.delayed_changes.has_change_for(&id) {
                    plan_cpuset(draft, &job_cpuset, &mut changes);
                    return_processes_that_left(draft, &job_cpuset, &left, &mut changes);
                }
                warnings::report_unmovable_members(draft, &id);
                warnings::report_processes_not_moved_back(draft, &job_cpuset, &left);
                warnings::report_missing_partition(draft, &id);
            }
            CpusetPlacement::Unknown => {
                changes.waiting_jobs.insert(id);
            }
            CpusetPlacement::Unneeded => return_members_from_other_cpusets(draft, &id, &mut changes),
            CpusetPlacement::Impossible(why) => {
                wanted.extend(cpuset_in_effect(draft.state, draft.policy, &id));
                warnings::report_no_cpuset(draft, &id, &why);
            }
        }
    }
    for path in paths_to_plan(draft.state).into_iter().filter(|path| !wanted.contains(path)) {
        plan_cpuset_removal(draft, &path, &mut changes);
    }
    draft.out.warnings.extend(draft.state.cpusets.removal_warnings().map(Arc::new));
    changes
}

/// Forgets which changes of cpusets were refused, and marks the jobs that these changes concern: they are planned again
/// in this cycle. Must be called after a scan of all processes.
fn retry_failed_changes(state: &mut WardenState) {
    let mut jobs: BTreeSet<JobId> = state.cpusets.jobs_with_refused_cpusets().into_iter().collect();
    // A process that has left its job may still be in the cpuset, because a move was refused.
    let left_inside = state.processes_to_restore.values().filter(|member| state.is_in_job_cpuset(member));
    jobs.extend(left_inside.map(|member| member.job.clone()));
    // A process that is named in a warning may have ended.
    jobs.extend(state.jobs_with_warning(warnings::NOT_MOVED_BACK));
    jobs.iter().for_each(|id| state.dirty.add_job(id));
    state.cpusets.reset_failures();
}

/// Returns the cgroup paths of the cpusets that may be no longer needed: those of jobs that changed or ended, and those
/// whose removal is pending. Returns the paths of all cpusets if everything must be planned again.
fn paths_to_plan(state: &WardenState) -> Vec<String> {
    if state.dirty.contains_everything() {
        return state.cpusets.paths().map(str::to_owned).collect();
    }
    let dirty = state.dirty.listed_jobs().filter_map(|(id, _)| state.cpusets.cpuset_of(id));
    let dirty = dirty.map(|managed| managed.job_cpuset.path.as_str());
    dirty.chain(state.cpusets.paths_to_remove()).map(str::to_owned).collect()
}

/// Returns the cgroup path of the present cpuset of the job `id`, if this cpuset keeps the job on its grant. Such a
/// cpuset is not removed, although pjw can't change it now because systemd does not respond or a scan failed. `None` in
/// each of these cases:
///
/// - The job holds no online PU, or has no cpuset that a scan has read.
/// - The cpuset allows PUs that the job does not hold.
/// - The configuration demands masks instead of cpusets.
fn cpuset_in_effect(state: &WardenState, policy: &Policy, id: &JobId) -> Option<String> {
    let grant = state.jobs.get(id)?.online_granted_cpus(&state.pool.online_cpus())?;
    let path = &state.cpusets.cpuset_of(id)?.job_cpuset.path;
    let cpuset = state.cgroups.get(path)?.present()?.cpuset.as_ref()?;
    let is_inside = !cpuset.effective_cpus.is_empty() && cpuset.effective_cpus.is_subset(&grant);
    (is_inside && policy.enforcement != EnforcementMethod::Affinity).then(|| path.clone())
}

/// The mechanism that restricts the processes of a job to the job's cores: a cpuset, affinity masks, or no mechanism.
/// There is no mechanism if pjw does not restrict the job (`Nothing`). There is also none while a change of the job's
/// isolated partition (a cpuset with `cpuset.cpus.partition`) is not complete (`NotYet`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EffectiveEnforcement {
    /// A cpuset restricts all processes of the job, or will restrict its first process.
    Cpuset {
        /// The path of the cpuset's cgroup, below the mount point of the cgroup hierarchy. `None` if the
        /// batch scheduler made the cpuset and its path is unknown.
        path: Option<String>,
    },
    /// Affinity masks restrict at least one process of the job, because no cpuset restricts all processes of
    /// the job. Either the job has no cpuset, or the cpuset does not have the right settings, or a process of
    /// the job is outside the cpuset. The processes inside the cpuset are restricted by the cpuset.
    Affinity {
        /// The reason why no cpuset restricts all processes of the job, as text for users.
        why: String,
    },
    /// No mechanism yet: the kernel or systemd has not completed a change of the job's isolated partition (a cpuset
    /// with `cpuset.cpus.partition`). Until then, some processes of the job may be outside of the partition, or the
    /// partition may have other PUs (logical CPUs) than the job. pjw can't use affinity masks meanwhile: the kernel
    /// refuses a mask with PUs of a partition for a thread outside of the partition.
    NotYet {
        /// What is not complete, as text for users.
        why: String,
    },
    /// No mechanism: the job holds no cores, a command released the job, or pjw runs in the mode `observe`,
    /// in which it changes no mask and no cpuset.
    Nothing,
}

/// Returns the mechanism that restricts the processes of `job` to the job's cores. The first case that applies decides:
///
/// - The job holds no cores, or a command such as `pjwctl release` has released the job:
///   [`EffectiveEnforcement::Nothing`].
/// - A batch system chose the cores: [`EffectiveEnforcement::Cpuset`], because the batch system made the cpuset.
/// - pjw runs in the mode `observe`, in which it changes no mask and no cpuset: [`EffectiveEnforcement::Nothing`].
/// - The job can have a cpuset, and has no process yet: [`EffectiveEnforcement::Cpuset`], because the cpuset will
///   restrict the first process.
/// - The last scans found all processes of the job in the job's cpuset, and the right settings in the cpuset:
///   [`EffectiveEnforcement::Cpuset`].
/// - The kernel or systemd has begun a change of the job's isolated partition (a cpuset with `cpuset.cpus.partition`),
///   and has not completed the change: [`EffectiveEnforcement::NotYet`].
/// - Otherwise: [`EffectiveEnforcement::Affinity`].
#[must_use]
pub fn effective_enforcement(state: &WardenState, policy: &Policy, job: &Job) -> EffectiveEnforcement {
    effective_enforcement_of_members(state, policy, job, state.members_of(&job.id))
}

/// Returns the mechanism that restricts `members` (some processes of `job`) to the job's cores. The first case that
/// applies decides:
///
/// - The job holds no cores, or a command such as `pjwctl release` has released the job:
///   [`EffectiveEnforcement::Nothing`].
/// - A batch system chose the cores: [`EffectiveEnforcement::Cpuset`], because the batch system made the cpuset.
/// - pjw runs in the mode `observe`, in which it changes no mask and no cpuset: [`EffectiveEnforcement::Nothing`].
/// - The job can have a cpuset, and has no process yet: [`EffectiveEnforcement::Cpuset`], because the cpuset will
///   restrict the first process.
/// - The last scans found all of `members` in the job's cpuset, and the right settings in the cpuset:
///   [`EffectiveEnforcement::Cpuset`].
/// - The kernel or systemd has begun a change of the job's isolated partition (a cpuset with `cpuset.cpus.partition`),
///   and has not completed the change: [`EffectiveEnforcement::NotYet`].
/// - Otherwise: [`EffectiveEnforcement::Affinity`].
pub fn effective_enforcement_of_members<'a>(
    state: &WardenState,
    policy: &Policy,
    job: &Job,
    members: impl Iterator<Item = &'a Member>,
) -> EffectiveEnforcement {
    let Some(grant) = job.active_grant() else { return EffectiveEnforcement::Nothing };
    if grant.granted_by == GrantedBy::Scheduler {
        return EffectiveEnforcement::Cpuset { path: job.cgroup.clone() };
    }
    if policy.mode == DaemonMode::Observe {
        return EffectiveEnforcement::Nothing;
    }
    match common_cpuset_path(state, policy, job, members) {
        Ok(path) => EffectiveEnforcement::Cpuset { path: Some(path) },
        Err(why) if state.cpusets.is_partition_delayed(&job.id) => EffectiveEnforcement::NotYet { why },
        Err(why) => EffectiveEnforcement::Affinity { why },
    }
}

/// Returns the cgroup path of the cpuset that limits all processes in `members` to the PUs of `job`. If the job has no
/// process, returns the path of the cpuset into which its first process will be moved. The error is the reason why
/// there is no such cpuset, as text for users: the job can have no cpuset, the last scan did not find the right
/// settings in the cpuset, or a process is outside the cpuset.
fn common_cpuset_path<'a>(
    state: &WardenState,
    policy: &Policy,
    job: &Job,
    members: impl Iterator<Item = &'a Member>,
) -> Result<String, String> {
    let JobCpuset { path, spec, .. } = match placement_of(state, policy, &job.id) {
        CpusetPlacement::At(job_cpuset) => job_cpuset,
        CpusetPlacement::Impossible(why) => return Err(why),
        _ => return Err("its scheduler's cgroup was not read yet".to_owned()),
    };
    if state.members_of(&job.id).next().is_none() {
        return Ok(path);
    }
    let outside: Vec<&Member> = members.filter(|member| !state.is_in_job_cpuset(member)).collect();
    if let Some(why) = outside.iter().find_map(|member| why_unmovable(state, policy, member)) {
        return Err(why);
    }
    let cgroup = state.cgroups.get(&path).and_then(Observed::present);
    if !cgroup.and_then(|cgroup| cgroup.cpuset.as_ref()).is_some_and(|cpuset| matches_spec(&spec, cpuset)) {
        return Err(format!("{path} is not set up yet"));
    }
    match outside.first() {
        None => Ok(path),
        Some(member) => Err(format!("process {} is not in {path} yet", member.id.pid)),
    }
}

/// Whether a cpuset has the PUs, the NUMA nodes and the partition type that `spec` says. The effective PUs may be
/// fewer, because the kernel leaves out offline PUs. The other settings in `spec` are not compared, because a scan does
/// not read them.
fn matches_spec(spec: &CpusetSpec, cpuset: &Cpuset) -> bool {
    cpuset.cpus == spec.cpus
        && cpuset.effective_cpus.is_subset(&spec.cpus)
        && spec.mems.as_ref().is_none_or(|mems| *mems == cpuset.mems)
        && cpuset.isolated == spec.isolated
}

/// Plans the creation or the change of the cpuset `job_cpuset` of a job, and moves the job's processes into it. Adds
/// the changes to `changes`, and writes them to the journal (the file with which a restarted daemon restores its
/// state). If the cpuset is as it should be, only the moves are planned. Special cases:
///
/// - If no scan has read the cgroup of a known cpuset or the threads of a process yet, plans nothing. The job is then
///   added to the waiting jobs, whose masks are planned after the next scan.
/// - In the cgroup of a batch system, plans no moves: the batch system moves its processes itself.
/// - Plans nothing if the cgroup does not exist, and a batch system must create it or no process would be moved into
///   it.
fn plan_cpuset(draft: &mut CycleDraft<'_>, job_cpuset: &JobCpuset, changes: &mut PendingCpusetChanges) {
    let state = &*draft.state;
    let JobCpuset { job, path, spec, creator } = job_cpuset;
    let recorded = state.cpusets.cpuset_at(path);
    let was_recorded = recorded.is_some();
    if was_recorded && !state.cgroups.contains_key(path) {
        changes.waiting_jobs.insert(job.clone());
        return;
    }
    let cgroup = state.cgroups.get(path).and_then(Observed::present).cloned();
    if *creator == CgroupCreator::Scheduler && cgroup.is_none() {
        return;
    }
    let cpuset = cgroup.as_ref().and_then(|cgroup| cgroup.cpuset.as_ref());
    let was_written = recorded.is_some_and(|managed| managed.was_last_written_with(job_cpuset));
    let is_up_to_date = was_written && cpuset.is_some_and(|cpuset| matches_spec(spec, cpuset));
    let members = if is_up_to_date {
        state.members.members_to_plan(&state.dirty, job)
    } else {
        Some(state.members_of(job).collect())
    };
    let Some(members) = members else { return };
    // Masks that were not scanned can't be written to the journal. The scan of these threads follows in the same
    // cycle.
    if members.iter().any(|member| member.threads.is_empty()) {
        changes.waiting_jobs.insert(job.clone());
        return;
    }
    // A scheduler moves its processes itself.
    let movable = if *creator == CgroupCreator::Scheduler { &[] } else { &*members };
    let outside = members_to_move_in(draft, job_cpuset, movable);
    let forked_inside = members_forked_inside(draft, job_cpuset, movable);
    if !is_up_to_date && cgroup.is_none() && outside.is_empty() && !has_members(state, job_cpuset) {
        return;
    }
    if !is_up_to_date || !outside.is_empty() {
        journal_requested_masks(draft, job, path);
    }
    // systemd moves the initial processes of a scope when it creates the scope.
    let are_moved_by_systemd = *creator == CgroupCreator::Systemd && cgroup.is_none();
    if is_up_to_date {
        draft.state.cpusets.confirm_written_settings(path);
    } else {
        let found = cgroup.as_ref().and_then(|cgroup| cgroup.cpuset.as_ref()).filter(|_| was_written);
        let why = write_reason(job_cpuset, found);
        draft.record_cpuset(CpusetRecord::Created(job_cpuset.clone()));
        let initial = outside.iter().map(|(process, _)| *process);
        let initial_processes = initial.filter(|_| are_moved_by_systemd).collect();
        let owner = draft.state.jobs.get(job).map_or(Uid::ROOT, |job| job.owner);
        let change = CpusetChange::Create { job_cpuset: job_cpuset.clone(), owner, initial_processes };
        push_cpuset_change(changes, job, change, was_written, why);
    }
    for (process, from) in forked_inside {
        draft.record_cpuset(CpusetRecord::Moved { process, from, to: path.clone() });
    }
    // The previous cgroup of the same path was removed, so no process of it is left.
    let is_made_again = was_recorded && cgroup.is_none();
    for (index, (process, from)) in outside.into_iter().enumerate() {
        let was_inside = draft.state.cpusets.has_been_inside(process, path);
        let origin = record_move(draft, process, &from, path);
        if is_made_again && index == 0 {
            draft.record_cpuset(CpusetRecord::Origin { path: path.clone(), from: origin });
        }
        if !are_moved_by_systemd {
            let why = format!("{job} is kept in {path}; process {} was in {from}", process.pid);
            let change = CpusetChange::MoveIn { process, from, to: path.clone() };
            push_cpuset_change(changes, job, change, was_inside, why);
        }
    }
}

/// Returns the reason why pjw writes the cpuset `job_cpuset`, as text for users. `found` is the present content of the
/// cpuset if another program changed it. It is `None` if pjw writes new settings.
fn write_reason(job_cpuset: &JobCpuset, found: Option<&Cpuset>) -> String {
    let JobCpuset { job, path, spec: CpusetSpec { cpus, .. }, .. } = job_cpuset;
    let cpus = cpus_text(cpus);
    match found.map(|found| &found.cpus) {
        None => format!("{job} holds {cpus}: the cpuset of {path} keeps it there"),
        Some(found) if found.is_empty() => format!("the cpuset of {path} was empty and is to be {cpus}"),
        Some(found) => format!("the cpuset of {path} was {} and is to be {cpus}", cpus_text(found)),
    }
}

/// Writes to the journal that a process is about to be moved from the cgroup `from` into the cpuset at `to`. Returns
/// the cgroup to which the process goes back later. This is usually `from`. If `from` is in another cpuset of pjw, it
/// is the cgroup from which the process came into that cpuset, if that is known.
fn record_move(draft: &mut CycleDraft<'_>, process: ProcessId, from: &str, to: &str) -> String {
    // The original cgroup of a process in another cpuset of pjw is the cgroup before that move.
    let state = &*draft.state;
    let other = state.cpusets.enclosing_cpuset(from).map(|managed| managed.job_cpuset.path.as_str());
    let origin = other.and_then(|path| OriginSearch::new(state, path).original_cgroup(process));
    let origin = origin.unwrap_or(from).to_owned();
    draft.record_cpuset(CpusetRecord::Moved { process, from: origin.clone(), to: to.to_owned() });
    origin
}

/// Plans to move the processes of the job `id` out of the cpusets of other jobs, back to their original cgroups. Does
/// nothing if the job holds cores or was released. The processes leave these cpusets:
///
/// - The cpusets of borrowers (jobs that borrow cores), in which the processes were born. There, they run at idle
///   priority, and are frozen with the borrower.
/// - The cpusets of other jobs that the processes have left, because the cores belong to these jobs. Adds a warning
///   about the processes that can't be moved back. Leaves out a cpuset that is to be removed, or of which a change is
///   delayed.
///
/// Processes in cgroups that batch systems made for other jobs are not moved. Adds a warning about those that the
/// cpusets of these cgroups limit.
fn return_members_from_other_cpusets(
    draft: &mut CycleDraft<'_>,
    id: &JobId,
    changes: &mut PendingCpusetChanges,
) {
    let (state, policy) = (&*draft.state, draft.policy);
    if state.jobs.get(id).is_none_or(|job| job.grant.is_some() || job.was_released) {
        return;
    }
    let mut inside = members_in_other_cpusets(state, id);
    // Thousands of members may be in one cpuset, so each cpuset is checked once.
    let mut kept: BTreeMap<String, bool> = BTreeMap::new();
    inside.retain(|(_, job_cpuset, _)| {
        let is_kept = || keeps_unchanged_cpuset(state, policy, job_cpuset);
        job_cpuset.spec.idle || *kept.entry(job_cpuset.path.clone()).or_insert_with(is_kept)
    });
    warnings::report_members_not_moved_back(draft, id, &inside);
    warnings::report_members_in_scheduler_cgroups(draft, id);
    for (process, JobCpuset { job, path, .. }, to) in inside {
        let Some(to) = to else { continue };
        journal_requested_masks(draft, id, &path);
        let why = format!("process {} belongs to {id}, which holds no cores, and was in {path}", process.pid);
        plan_move_back(draft, changes, &job, (process, &path, to), why);
    }
}

/// Whether the job of `job_cpuset` is to keep this cpuset, and no change of it is delayed. False if the cpuset is to be
/// removed: all its processes are then moved back by the removal.
fn keeps_unchanged_cpuset(state: &WardenState, policy: &Policy, job_cpuset: &JobCpuset) -> bool {
    let placement = placement_of(state, policy, &job_cpuset.job);
    let is_kept = matches!(placement, CpusetPlacement::At(kept) if kept.path == job_cpuset.path);
    is_kept && !state.cpusets.delayed_changes.has_change_for(&job_cpuset.job)
}

/// Plans to move processes that have left the job of `job_cpuset` back to their original cgroups. Adds the moves to
/// `changes`. The job keeps its cpuset. `left` has the processes, each with its original cgroup. This is `None` if the
/// process can't be moved back: the process is then left out. Does nothing in the cgroup of a batch system, which moves
/// its processes itself.
fn return_processes_that_left(
    draft: &mut CycleDraft<'_>,
    job_cpuset: &JobCpuset,
    left: &[(ProcessId, Option<String>)],
    changes: &mut PendingCpusetChanges,
) {
    let JobCpuset { job, path, creator, .. } = job_cpuset;
    // A scheduler moves its processes itself.
    if *creator == CgroupCreator::Scheduler || draft.state.cpusets.cpuset_at(path).is_none() {
        return;
    }
    if left.iter().any(|(_, to)| to.is_some()) {
        journal_requested_masks(draft, job, path);
    }
    for (process, to) in left.iter().filter_map(|(process, to)| Some((*process, to.clone()?))) {
        let why = format!("process {} belongs to {job} no longer and came from {to}", process.pid);
        plan_move_back(draft, changes, job, (process, path, to), why);
    }
}
