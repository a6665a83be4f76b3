//! The cpusets of jobs: which job gets which cpuset, and how the cpusets are removed that are no longer needed.
//!
//! If a scheduler grants the cores of a job by a cpuset, the job needs no other cpuset. In a scheduler's own cgroup
//! pjw narrows the cpuset if the source allows it. It creates no cgroup below, because then the scheduler's rmdir(2)
//! would fail. The processes of a job that no scheduler tracks are moved to a cgroup of their own. A job that can
//! have no cpuset is kept on its grant by affinity masks, with a warning.
//!
//! This phase comes before the masks. Masks are written to the journal before a cpuset changes, because the kernel
//! may cut or forget them. They are planned after the cpuset was changed: `masks.rs`.

mod moves;
mod warnings;

use crate::basics::prelude::*;
use crate::basics::{CpuSet, ProcessId, Pu, ThreadId};
use crate::machine::Level;
use crate::phases::cpusets::moves::{
    born_inside, is_inhabited, original_cgroup, outside, returns, why_unmovable,
};
use crate::phases::draft::Draft;
use crate::state::{Member, MemberThread, WardenState};
use crate::terms::{
    Cgroup, CgroupOwner, Cpuset, CpusetAction, CpusetChange, CpusetHierarchy, CpusetRecord, CpusetSpec,
    Enforcement, GrantedBy, Job, JobCpuset, JobId, Mode, Observed, Policy, Record, Request, own_path,
    usable_grant,
};

/// The planned changes of cpusets, and the jobs in `busy`: their masks are planned after the next scan of their
/// cpusets.
#[derive(Default)]
pub(crate) struct PendingCpusetChanges {
    pub(crate) actions: Vec<CpusetAction>,
    pub(crate) busy: BTreeSet<JobId>,
}

/// The place of a job's cpuset.
enum CpusetPlacement {
    /// The job gets this cpuset.
    At(JobCpuset),
    /// Unknown, because the scheduler's cgroup was not scanned yet.
    Unknown,
    /// The job needs no cpuset from pjw: it holds no cores, or the scheduler's cpuset limits it.
    Unneeded,
    /// The job can have no cpuset, for this reason.
    Impossible(String),
}

/// Plans the changes of cpusets.
pub(crate) fn plan(draft: &mut Draft<'_>) -> PendingCpusetChanges {
    if draft.full {
        draft.state.cpusets.reset_failures();
    }
    let mut changes = PendingCpusetChanges::default();
    let mut wanted: BTreeSet<String> = BTreeSet::new();
    let ids: Vec<JobId> = draft.state.jobs.keys().cloned().collect();
    for id in ids {
        match placement_of(draft.state, draft.policy, &id) {
            CpusetPlacement::At(job_cpuset) => {
                wanted.insert(job_cpuset.path.clone());
                create_cpuset(draft, &job_cpuset, &mut changes);
                warnings::report_left_outside(draft, &id);
            }
            CpusetPlacement::Unknown => drop(changes.busy.insert(id)),
            CpusetPlacement::Unneeded => {}
            CpusetPlacement::Impossible(why) => {
                wanted.extend(standing(draft.state, draft.policy, &id));
                warnings::report_no_cpuset(draft, &id, &why);
            }
        }
    }
    let paths: Vec<String> = draft.state.cpusets.paths().map(str::to_owned).collect();
    for path in paths.into_iter().filter(|path| !wanted.contains(path)) {
        remove_cpuset(draft, &path, &mut changes);
    }
    let removal_warnings: Vec<_> = draft.state.cpusets.removal_warnings().collect();
    removal_warnings.into_iter().for_each(|trouble| draft.out.warn(trouble));
    changes
}

/// The cgroup of a cpuset that keeps its job on the grant although it can't be changed now, because systemd does not
/// respond or a scan failed. Such a cpuset is not removed.
fn standing(state: &WardenState, policy: &Policy, id: &JobId) -> Option<String> {
    let grant = usable_grant(state.jobs.get(id)?, &state.pool.online())?;
    let path = &state.cpusets.of(id)?.job_cpuset.path;
    let cpuset = state.cgroups.get(path)?.present()?.cpuset.as_ref()?;
    let holds = !cpuset.effective.is_empty() && cpuset.effective.is_subset(&grant);
    (holds && policy.enforcement != Enforcement::Affinity).then(|| path.clone())
}

/// The mechanism that keeps the processes of a job on its grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EffectiveEnforcement {
    /// One cpuset limits all processes.
    Cpuset {
        /// The cgroup of the cpuset. `None` if it is the scheduler's and its path is unknown.
        path: Option<String>,
    },
    /// Affinity masks limit all processes, or those that no cpuset limits.
    Affinity {
        /// Why there is no cpuset for all processes.
        why: String,
    },
    /// Nothing: the job has no cores of its own, or pjw only observes.
    Nothing,
}

/// The mechanism that keeps the processes of a job on its grant, as the last scans showed it.
#[must_use]
pub fn effective_enforcement(state: &WardenState, policy: &Policy, job: &Job) -> EffectiveEnforcement {
    effective_enforcement_of(state, policy, job, state.members_of(&job.id))
}

/// The mechanism that keeps the processes in `members` on the grant of `job`.
pub fn effective_enforcement_of<'a>(
    state: &WardenState,
    policy: &Policy,
    job: &Job,
    members: impl Iterator<Item = &'a Member>,
) -> EffectiveEnforcement {
    let Some(grant) = job.grant.as_ref().filter(|_| !job.released) else {
        return EffectiveEnforcement::Nothing;
    };
    if grant.granted_by == GrantedBy::Scheduler {
        return EffectiveEnforcement::Cpuset { path: job.cgroup.clone() };
    }
    if policy.mode == Mode::Observe {
        return EffectiveEnforcement::Nothing;
    }
    let job_cpuset = match placement_of(state, policy, &job.id) {
        CpusetPlacement::At(job_cpuset) => job_cpuset,
        CpusetPlacement::Impossible(why) => return EffectiveEnforcement::Affinity { why },
        CpusetPlacement::Unknown | CpusetPlacement::Unneeded => {
            return EffectiveEnforcement::Affinity {
                why: "its scheduler's cgroup was not seen yet".to_owned(),
            };
        }
    };
    let outside: Vec<&Member> = members.filter(|member| !state.is_in_job_cpuset(member)).collect();
    if let Some(why) = outside.iter().find_map(|member| why_unmovable(state, policy, member)) {
        return EffectiveEnforcement::Affinity { why };
    }
    let place = state.cgroups.get(&job_cpuset.path).and_then(Observed::present);
    if !place.and_then(|place| place.cpuset.as_ref()).is_some_and(|cpuset| fits(&job_cpuset.spec, cpuset)) {
        return EffectiveEnforcement::Affinity { why: format!("{} is not built yet", job_cpuset.path) };
    }
    match outside.first() {
        None => EffectiveEnforcement::Cpuset { path: Some(job_cpuset.path) },
        Some(member) => EffectiveEnforcement::Affinity {
            why: format!("process {} is not in {} yet", member.id.pid, job_cpuset.path),
        },
    }
}

fn placement_of(state: &WardenState, policy: &Policy, id: &JobId) -> CpusetPlacement {
    let Some(job) = state.jobs.get(id).filter(|job| !job.released) else { return CpusetPlacement::Unneeded };
    let Some(grant) = usable_grant(job, &state.pool.online()) else { return CpusetPlacement::Unneeded };
    if job.grant.as_ref().is_some_and(|grant| grant.granted_by == GrantedBy::Scheduler) {
        return CpusetPlacement::Unneeded;
    }
    if policy.enforcement == Enforcement::Affinity {
        return CpusetPlacement::Impossible("the configuration says enforcement = \"affinity\"".to_owned());
    }
    if let Some(why) = state.cpusets.refusal(id) {
        return CpusetPlacement::Impossible(why.to_owned());
    }
    let (cgroup_owner, path) = match owner_and_path(state, policy, job) {
        Ok(Some(owner_and_path)) => owner_and_path,
        Ok(None) => return CpusetPlacement::Unknown,
        Err(why) => return CpusetPlacement::Impossible(why),
    };
    CpusetPlacement::At(JobCpuset {
        job: id.clone(),
        cgroup_owner,
        path,
        spec: spec(state, job, cgroup_owner, grant),
    })
}

/// The owner that is to create the cgroup of a job's cpuset, and the path. `None` before the scheduler's cgroup was
/// scanned.
fn owner_and_path(
    state: &WardenState,
    policy: &Policy,
    job: &Job,
) -> Result<Option<(CgroupOwner, String)>, String> {
    let isolated = job.request.as_ref().is_some_and(|request| request.isolated);
    let own = |cgroup_owner| Ok(Some((cgroup_owner, own_path(&job.id, cgroup_owner, isolated))));
    let hierarchy = &policy.cpuset_support.hierarchy;
    let source = job.id.source();
    match (hierarchy, source.is_scheduler()) {
        (CpusetHierarchy::Unavailable { why }, _) => Err(why.clone()),
        (CpusetHierarchy::Systemd, false) => own(CgroupOwner::Systemd),
        (CpusetHierarchy::Unified, false) => own(CgroupOwner::Warden),
        (CpusetHierarchy::Legacy, false) => own(CgroupOwner::Warden),
        (_, true) => {
            let Some(path) = &job.cgroup else {
                return if *hierarchy == CpusetHierarchy::Legacy {
                    own(CgroupOwner::Warden)
                } else {
                    Err(format!(
                        "{source} made no cgroup for {}, and its processes stay where {source} watches them",
                        job.id
                    ))
                };
            };
            let Some(seen) = state.cgroups.get(path) else { return Ok(None) };
            match seen.present().and_then(|place| place.cpuset.as_ref()) {
                Some(_) if policy.narrowable.contains(&source) => {
                    Ok(Some((CgroupOwner::Scheduler, path.clone())))
                }
                Some(_) => Err(format!("the cpuset of {path} is {source}'s to write")),
                // v1: the cpuset hierarchy is not the hierarchy by which the scheduler tracks its processes.
                None if *hierarchy == CpusetHierarchy::Legacy => own(CgroupOwner::Warden),
                None => Err(format!("{path} has no cpuset: {source} doesn't enable that controller")),
            }
        }
    }
}

fn spec(state: &WardenState, job: &Job, cgroup_owner: CgroupOwner, cpus: CpuSet) -> CpusetSpec {
    let asked = |wish: fn(&Request) -> bool| {
        cgroup_owner != CgroupOwner::Scheduler && job.request.as_ref().is_some_and(wish)
    };
    let nodes = state.topology.domains(Level::NumaNode).filter(|node| node.cpus.intersects(&cpus));
    let mems = asked(|request| request.bind_memory)
        .then(|| nodes.map(|node| Pu(node.number)).collect::<CpuSet>())
        .filter(|nodes| !nodes.is_empty());
    CpusetSpec { cpus, mems, isolated: asked(|request| request.isolated) }
}

/// Whether a cpuset has the specified PUs, NUMA nodes and partition type. The effective PUs may be fewer, because the
/// kernel leaves out offline PUs.
fn fits(spec: &CpusetSpec, cpuset: &Cpuset) -> bool {
    cpuset.cpus == spec.cpus
        && cpuset.effective.is_subset(&spec.cpus)
        && spec.mems.as_ref().is_none_or(|mems| *mems == cpuset.mems)
        && cpuset.isolated == spec.isolated
}

fn create_cpuset(draft: &mut Draft<'_>, job_cpuset: &JobCpuset, changes: &mut PendingCpusetChanges) {
    let state = &*draft.state;
    let known = state.cpusets.at(&job_cpuset.path).cloned();
    let place = state.cgroups.get(&job_cpuset.path);
    if known.is_some() && place.is_none() {
        changes.busy.insert(job_cpuset.job.clone());
        return;
    }
    let place = place.and_then(Observed::present).cloned();
    if job_cpuset.cgroup_owner == CgroupOwner::Scheduler && place.is_none() {
        return;
    }
    let cpuset = place.as_ref().and_then(|place| place.cpuset.as_ref());
    let was_there = known.is_some();
    let as_known = known.as_ref().is_some_and(|known| known.job_cpuset == *job_cpuset && !known.unwanted);
    let stands = cpuset.is_some_and(|cpuset| fits(&job_cpuset.spec, cpuset)) && as_known;
    let concerned = if stands { state.members.concerned(&state.dirty, &job_cpuset.job) } else { None };
    let concerned = concerned.or_else(|| (!stands).then(|| state.members_of(&job_cpuset.job).collect()));
    let Some(concerned) = concerned else { return };
    // Masks that were not scanned can't be written to the journal. The scan of these threads follows in the same
    // cycle.
    if concerned.iter().any(|member| member.threads.is_empty()) {
        changes.busy.insert(job_cpuset.job.clone());
        return;
    }
    let outside = if job_cpuset.cgroup_owner == CgroupOwner::Scheduler {
        Vec::new()
    } else {
        outside(draft, job_cpuset, &concerned)
    };
    let born = born_inside(draft, job_cpuset, &concerned);
    if !stands {
        if place.is_none() && outside.is_empty() && !is_inhabited(state, job_cpuset) {
            return;
        }
        keep_masks(draft, &job_cpuset.job);
        let why = why_raised(job_cpuset, place.as_ref(), as_known);
        let initial_processes = outside.iter().map(|(process, _)| *process).collect();
        record(draft, CpusetRecord::Created(job_cpuset.clone()));
        let change = CpusetChange::Create { job_cpuset: job_cpuset.clone(), initial_processes };
        push(changes, &job_cpuset.job, change, as_known, why);
    } else if let Some(path) = known.map(|known| known.job_cpuset.path) {
        draft.state.cpusets.confirm(&path);
    }
    if !outside.is_empty() {
        keep_masks(draft, &job_cpuset.job);
    }
    for (process, from) in born {
        record(draft, CpusetRecord::Moved { process, from, to: job_cpuset.path.clone() });
    }
    // The previous cgroup of the same path was removed, so no process of it is left.
    let is_made_again = was_there && place.is_none();
    // systemd moves the initial processes of a scope when it creates the scope.
    let are_moved_by_systemd = job_cpuset.cgroup_owner == CgroupOwner::Systemd && place.is_none();
    for (index, (process, from)) in outside.into_iter().enumerate() {
        let original = record_move(draft, job_cpuset, process, &from);
        if is_made_again && index == 0 {
            record(draft, CpusetRecord::Origin { path: job_cpuset.path.clone(), from: original.cgroup });
        }
        if !are_moved_by_systemd {
            let (to, again) = (job_cpuset.path.clone(), original.was_moved_before);
            let why = format!("{} is kept in {to}; process {} was in {from}", job_cpuset.job, process.pid);
            push(changes, &job_cpuset.job, CpusetChange::MoveIn { process, from, to }, again, why);
        }
    }
}

/// Where a process that is moved into a cpuset came from.
struct OriginalCgroup {
    /// The cgroup that the process goes back to.
    cgroup: String,
    /// Whether the process was moved into the same cpuset before.
    was_moved_before: bool,
}

/// Records that a process is about to be moved from the cgroup `from` into a cpuset.
fn record_move(
    draft: &mut Draft<'_>,
    job_cpuset: &JobCpuset,
    process: ProcessId,
    from: &str,
) -> OriginalCgroup {
    let to = job_cpuset.path.clone();
    let was_moved_before = draft.state.cpusets.was_moved(process, &to);
    // The original cgroup of a process in another cpuset of pjw is the cgroup before that move.
    let other = draft.state.cpusets.containing(from);
    let cgroup = other.and_then(|managed| original_cgroup(draft.state, process, &managed.job_cpuset.path));
    let cgroup = cgroup.unwrap_or_else(|| from.to_owned());
    record(draft, CpusetRecord::Moved { process, from: cgroup.clone(), to });
    OriginalCgroup { cgroup, was_moved_before }
}

fn why_raised(job_cpuset: &JobCpuset, place: Option<&Cgroup>, as_known: bool) -> String {
    let cpus = &job_cpuset.spec.cpus;
    let found = place.and_then(|place| place.cpuset.as_ref());
    match found {
        Some(found) if as_known => {
            format!("the cpuset of {} was {} and is to be {cpus}", job_cpuset.path, shown(&found.cpus))
        }
        _ => format!("{} holds {cpus}: the cpuset of {} keeps it there", job_cpuset.job, job_cpuset.path),
    }
}

fn shown(cpus: &CpuSet) -> String {
    if cpus.is_empty() { "empty".to_owned() } else { cpus.to_string() }
}

/// Writes to the journal the masks that the threads of a job, and of its processes that are being restored, requested:
/// a cpuset is about to change their masks.
fn keep_masks(draft: &mut Draft<'_>, job: &JobId) {
    let state = &*draft.state;
    let machine = state.topology.cpus();
    let restoring = state.restoring.values().filter(|member| member.job == *job);
    let members = state.members_of(job).chain(restoring);
    let threads = members.flat_map(|member| {
        member
            .threads
            .iter()
            .map(|(&tid, thread)| (ThreadId { process: member.id, tid, start: thread.start }, thread))
    });
    let is_bound = |thread: &MemberThread| {
        thread.lives() && thread.mask.as_ref().is_some_and(|entry| !machine.is_subset(entry.original()))
    };
    let bound: Vec<ThreadId> = threads.filter(|(_, thread)| is_bound(thread)).map(|(id, _)| id).collect();
    bound.into_iter().for_each(|thread| draft.keep_mask(thread));
}

/// Widens a cpuset that no job needs, moves its processes back to their original cgroups, and removes the cpuset.
fn remove_cpuset(draft: &mut Draft<'_>, path: &str, changes: &mut PendingCpusetChanges) {
    let state = &*draft.state;
    let Some(managed) = state.cpusets.at(path).cloned() else { return };
    let job_cpuset = managed.job_cpuset.clone();
    let place = match state.cgroups.get(path) {
        None => return,
        Some(Observed::Gone) => {
            record(draft, CpusetRecord::Removed { path: path.to_owned() });
            return;
        }
        // A cpuset that could not be read is neither widened nor removed.
        Some(Observed::Present(place)) if place.cpuset.is_none() && !place.has_no_cpuset() => return,
        Some(Observed::Present(place)) => place.clone(),
    };
    let scheduler = job_cpuset.cgroup_owner == CgroupOwner::Scheduler;
    let open = is_open(state, &place);
    // If the scheduler has written the cpuset since pjw wrote it, the scheduler's content stays.
    let ours = place.cpuset.as_ref().is_some_and(|cpuset| managed.wrote(cpuset));
    if scheduler && (open || !ours) {
        record(draft, CpusetRecord::Removed { path: path.to_owned() });
        return;
    }
    if !managed.unwanted {
        keep_masks(draft, &job_cpuset.job);
        record(draft, CpusetRecord::Unwanted { path: path.to_owned() });
    }
    if !open && !draft.state.cpusets.has_failed_removal(path) {
        let why = format!("{} needs {path} no more", job_cpuset.job);
        push(changes, &job_cpuset.job, CpusetChange::Widen { job_cpuset: job_cpuset.clone() }, false, why);
    }
    if scheduler {
        return;
    }
    let returns = returns(draft.state, path);
    let (going, staying): (Vec<_>, Vec<_>) = returns.into_iter().partition(|(_, home)| home.is_some());
    let returning = !going.is_empty();
    for (process, home) in going {
        let Some(to) = home else { continue };
        let why = format!("process {} came from {to}", process.pid);
        push(
            changes,
            &job_cpuset.job,
            CpusetChange::MoveBack { process, from: path.to_owned(), to },
            false,
            why,
        );
    }
    // The cpuset controller was switched off, so no cpuset limits the processes that have no cgroup to return to.
    if place.has_no_cpuset() && !returning && !staying.is_empty() {
        record(draft, CpusetRecord::Removed { path: path.to_owned() });
        return;
    }
    let emptied = staying.is_empty() && (returning || !place.populated);
    if emptied && !draft.state.cpusets.has_failed_removal(path) {
        let why = format!("nobody is left in {path}");
        let job = job_cpuset.job.clone();
        push(changes, &job, CpusetChange::Remove { job_cpuset }, false, why);
    }
}

fn is_open(state: &WardenState, place: &Cgroup) -> bool {
    let online = state.pool.online();
    place
        .cpuset
        .as_ref()
        .is_none_or(|cpuset| (cpuset.cpus.is_empty() || online.is_subset(&cpuset.cpus)) && !cpuset.isolated)
}

fn push(changes: &mut PendingCpusetChanges, job: &JobId, change: CpusetChange, again: bool, why: String) {
    changes.busy.insert(job.clone());
    changes.actions.push(CpusetAction { job: job.clone(), change, again, why });
}

/// Applies a record to the registry of cpusets, and adds it to the records for the journal.
fn record(draft: &mut Draft<'_>, record: CpusetRecord) {
    draft.state.apply_cpuset_record(&record, draft.now.since_boot);
    draft.out.record(Record::Cpuset(record));
}
