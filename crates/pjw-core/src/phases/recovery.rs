//! Cpusets of an earlier daemon that the journal does not know, because the state directory was lost.
//!
//! The node lists the cgroups of pjw when the daemon starts. The name of a cgroup gives the job, its cpuset the cores,
//! and its attributes the owner and the cgroup from which the processes came. A cpuset with processes becomes a job
//! again: its processes are members because they are in the cgroup (`membership/mod.rs`), and its cores are not given
//! to another job. Every other cpuset is removed as one that no job needs.
//!
//! In the cgroup of a batch system, an attribute says that pjw wrote the cpuset, and which daemon. Without it, the
//! cpuset would be taken for a grant of the batch system. Its job is found again by the batch system's own cgroup. A
//! cpuset of another daemon is left as it is.

use alloc::sync::Arc;

use crate::basics::{CpuSet, Pid, ProcessId, Pu, Uid, cpus_text, prelude::*};
use crate::machine::TopologyLevel;
use crate::phases::cpusets::planned::allows_every_pu;
use crate::phases::{draft::CycleDraft, unknown_masks};
use crate::state::cpusets::LeftoverDecision;
use crate::state::{PuHolder, WardenState};
use crate::terms::{
    Cgroup, CgroupCreator, CpuRequest, CpusetHierarchy, CpusetRecord, CpusetSpec, DaemonMode, EndCondition,
    Event, EventKind, Grant, GrantedBy, Job, JobCpuset, JobRequest, LeftoverCpuset, Observed, Ownership,
    Placement, PriorityClass, Process, UnknownMaskRecord, Warning, own_cgroups::CgroupPlace,
};

/// A cgroup that an earlier daemon made for a job and that the journal does not name, with what the scan read about it.
struct Candidate {
    found: LeftoverCpuset,
    job_cpuset: JobCpuset,
    /// The place of the cgroup: it says whether the job has an isolated partition, or is of the class besteffort.
    place: CgroupPlace,
    cgroup: Cgroup,
    /// The processes in the cgroup, oldest first, each with its user.
    processes: Vec<(ProcessId, Uid)>,
}

/// The decision about a cpuset that an earlier daemon made for a job and that the journal does not name.
enum RecoveryDecision {
    /// The job of the cpuset gets these PUs.
    Kept(CpuSet),
    /// The cpuset is removed. The text says why its processes lose their cores. `None` if no process loses cores.
    Removed(Option<String>),
}

/// Decides about each cpuset that an earlier daemon made and that the journal does not name. The journal is the file
/// with which a restarted daemon restores its state. The cpuset becomes the cpuset of a job again, or is removed.
/// Special cases:
///
/// - Nothing is done until a full scan has read these cgroups.
/// - A cpuset of another daemon of pjw is left as it is. Its entry is dropped if the cpuset has other PUs now.
/// - In mode `observe`, nothing else is decided: all other entries stay for a later cycle.
pub(crate) fn recover_cpusets(draft: &mut CycleDraft<'_>) {
    if !draft.full {
        return;
    }
    let observes = draft.policy.mode == DaemonMode::Observe;
    let mut candidates: Vec<Candidate> = Vec::new();
    for found in draft.state.cpusets.take_leftover_cpusets() {
        match draft.seen.cgroups.get(&found.path) {
            _ if observes && found.other_writer.is_none() => draft.state.cpusets.keep_leftover_cpuset(found),
            None => draft.state.cpusets.add_leftover_cpuset(found),
            Some(Observed::Gone) => {}
            Some(Observed::Present(cgroup)) if found.other_writer.is_some() => {
                keep_cpuset_of_other_daemon(draft, found, cgroup);
            }
            Some(Observed::Present(cgroup)) => match &found.scheduler_cpuset {
                Some(job_cpuset) => recover_scheduler_cpuset(draft, job_cpuset, cgroup),
                None => candidates.extend(recovery_candidate(draft, found, cgroup)),
            },
        }
    }
    // The kernel counts the numbers of cgroups up: the older of two cpusets with the same PUs keeps them.
    candidates.sort_by(|one, other| {
        (one.cgroup.id.inode, &one.found.path).cmp(&(other.cgroup.id.inode, &other.found.path))
    });
    candidates.iter().for_each(|candidate| recover_candidate(draft, candidate));
}

/// Keeps the entry `found` of a cpuset that another daemon of pjw wrote in the batch system's cgroup `cgroup`. Drops
/// the entry if the cpuset has other PUs now.
fn keep_cpuset_of_other_daemon(draft: &mut CycleDraft<'_>, found: LeftoverCpuset, cgroup: &Cgroup) {
    let written = found.scheduler_cpuset.as_ref().map(|written| &written.spec.cpus);
    if written.is_some() && written == cgroup.cpuset.as_ref().map(|cpuset| &cpuset.cpus) {
        draft.state.cpusets.keep_leftover_cpuset(found);
    }
}

/// Records that pjw manages `job_cpuset`, which an earlier daemon wrote in the cgroup `cgroup` of a batch system, and
/// adds an event. Later phases of this cycle then give the job the same PUs, or remove the cpuset. Does nothing in each
/// of these cases:
///
/// - The batch system has written other PUs since.
/// - The cpuset already counts as a grant of the batch system: its PUs are the cores of the job.
fn recover_scheduler_cpuset(draft: &mut CycleDraft<'_>, job_cpuset: &JobCpuset, cgroup: &Cgroup) {
    let JobCpuset { job, path, spec, .. } = job_cpuset;
    let known = draft.state.jobs.get(job).and_then(|job| job.grant_chosen_by(GrantedBy::Scheduler));
    if known.is_some() || cgroup.cpuset.as_ref().is_none_or(|cpuset| cpuset.cpus != spec.cpus) {
        return;
    }
    draft.record_cpuset(CpusetRecord::Created(job_cpuset.clone()));
    if !draft.state.topology.cpus().is_subset(&spec.cpus) {
        let found = UnknownMaskRecord::CpusetFound { job: job.clone(), cpus: spec.cpus.clone() };
        unknown_masks::apply_and_journal(draft, found);
    }
    let text =
        format!("{path} was found with {} from an earlier pjwd without a record", cpus_text(&spec.cpus));
    draft.out.events.push(Event::new(EventKind::Recovered, text).with_job(job));
}

/// Returns a cgroup that an earlier daemon made for a job as a candidate for recovery: the job whose id the path of the
/// cgroup contains, the settings of the cpuset, and the processes in the cgroup. `found` has the path of the cgroup.
/// `cgroup` has the settings as the scan read them. `None` if pjw can't use cpusets on this machine, or if the path is
/// not one at which pjw makes the cgroups of jobs.
fn recovery_candidate(draft: &CycleDraft<'_>, found: LeftoverCpuset, cgroup: &Cgroup) -> Option<Candidate> {
    let creator = match draft.policy.cpuset_support.hierarchy {
        CpusetHierarchy::Unavailable { .. } => return None,
        CpusetHierarchy::Systemd => CgroupCreator::Systemd,
        CpusetHierarchy::Unified | CpusetHierarchy::Legacy => CgroupCreator::Warden,
    };
    let (job, place) = draft.policy.own_cgroups.job_at_path(&found.path, creator)?;
    let cpuset = cgroup.cpuset.as_ref();
    let nodes: CpuSet =
        draft.state.topology.domains(TopologyLevel::NumaNode).map(|node| Pu(node.number)).collect();
    let spec = CpusetSpec {
        cpus: cpuset.map(|cpuset| cpuset.cpus.clone()).unwrap_or_default(),
        // In v1 every cpuset names its nodes, also where the memory is not limited.
        mems: cpuset
            .map(|cpuset| cpuset.mems.clone())
            .filter(|mems| !mems.is_empty() && !nodes.is_subset(mems)),
        isolated: cpuset.is_some_and(|cpuset| cpuset.isolated),
        idle: place == CgroupPlace::Besteffort,
        frozen: false,
    };
    let inside = draft.state.processes.processes_in_cgroup(&found.path).map(|known| &known.process);
    let mut inside: Vec<&Process> = inside.filter(|process| process.id.pid != Pid(1)).collect();
    inside.sort_by_key(|process| (process.id.start, process.id.pid));
    let processes = inside.into_iter().map(|process| (process.id, process.uid)).collect();
    let job_cpuset = JobCpuset { job, creator, path: found.path.clone(), spec };
    Some(Candidate { found, job_cpuset, place, cgroup: cgroup.clone(), processes })
}

/// Recovers the cpuset of `candidate`: a cgroup that an earlier daemon made for a job and that the journal (the file
/// with which a restarted daemon restores its state) does not name. First records that pjw manages the cpuset. Then
/// gives the cpuset to the job again, or marks it for removal, as [`decide_recovery`] decides. Adds an event about the
/// decision. Does nothing if pjw already manages a cpuset at this path.
fn recover_candidate(draft: &mut CycleDraft<'_>, candidate: &Candidate) {
    let JobCpuset { job, path, .. } = &candidate.job_cpuset;
    if draft.state.cpusets.cpuset_at(path).is_some() {
        return;
    }
    // The job itself may be recorded: its class and options are then known.
    let is_recorded = draft.state.jobs.get(job).is_some_and(|job| job.grant.is_some());
    let decision = decide_recovery(draft.state, candidate);
    draft.record_cpuset(CpusetRecord::Created(candidate.job_cpuset.clone()));
    // systemd manages the root of its hierarchy: without another place, the processes stay in their scope, which is
    // widened.
    let root = (candidate.job_cpuset.creator == CgroupCreator::Warden).then(|| "/".to_owned());
    if let Some(from) = candidate.found.origin_cgroup.clone().or(root) {
        draft.record_cpuset(CpusetRecord::Origin { path: path.clone(), from });
    }
    let processes = candidate.processes.iter().map(|(process, _)| *process).collect();
    let (text, cpus, removal_reason) = match decision {
        RecoveryDecision::Kept(cpus) => {
            store_job_of_cpuset(draft, candidate, &cpus);
            if !draft.state.topology.cpus().is_subset(&cpus) {
                let found = UnknownMaskRecord::CpusetFound { job: job.clone(), cpus: cpus.clone() };
                unknown_masks::apply_and_journal(draft, found);
            }
            (format!("found in {path} without a record; it keeps {}", cpus_text(&cpus)), Some(cpus), None)
        }
        RecoveryDecision::Removed(why) => {
            draft.record_cpuset(CpusetRecord::Unwanted { path: path.clone() });
            let because = why.clone().unwrap_or_else(|| "no process needs it".to_owned());
            (format!("{path} was found without a record and is removed: {because}"), None, why)
        }
    };
    let is_notable = (cpus.is_some() && !is_recorded) || removal_reason.is_some();
    let mut event = Event::new(EventKind::Recovered, text).with_job(job);
    event.cpus = cpus;
    draft.out.events.push(event);
    if is_notable {
        let request = draft.state.jobs.get(job).and_then(|job| job.request.clone());
        let recovered = LeftoverDecision { job: job.clone(), request, processes, removal_reason };
        draft.state.cpusets.add_leftover_decision(path, recovered);
    }
}

/// Decides whether the cpuset of `candidate` becomes the cpuset of its job again, and with which PUs. Changes nothing.
/// The first of these rules that applies decides:
///
/// 1. A cpuset without processes is removed.
/// 2. If the job has a grant (PUs that it holds), the job gets the PUs of this grant.
/// 3. A cpuset without a recorded owner that does not restrict its processes is removed.
/// 4. A job of the class besteffort (a job that borrows idle cores) gets the cpuset.
/// 5. The cpuset is removed if it has no PUs, if the machine lacks some of them, or if another job holds some of them.
/// 6. Otherwise, the job gets the cpuset.
fn decide_recovery(state: &WardenState, candidate: &Candidate) -> RecoveryDecision {
    let Candidate { found, job_cpuset: JobCpuset { job, path, .. }, cgroup, processes, .. } = candidate;
    let Some(cpuset) = cgroup.cpuset.as_ref().filter(|_| !processes.is_empty()) else {
        return RecoveryDecision::Removed(None);
    };
    // The record of the cpuset may be lost although that of the grant is not.
    if let Some(grant) = state.jobs.get(job).and_then(|job| job.grant.as_ref()) {
        return RecoveryDecision::Kept(grant.cpus.clone());
    }
    if found.owner.is_none() && allows_every_pu(state, cgroup) {
        return RecoveryDecision::Removed(None);
    }
    if candidate.place == CgroupPlace::Besteffort {
        return RecoveryDecision::Kept(cpuset.effective_cpus.clone());
    }
    let cpus = &cpuset.effective_cpus;
    let unknown = cpus.difference(state.topology.cpus());
    if cpus.is_empty() {
        return RecoveryDecision::Removed(Some(format!("{path} has no CPUs")));
    }
    if !unknown.is_empty() {
        return RecoveryDecision::Removed(Some(format!(
            "{path} has {}, which this machine does not have",
            cpus_text(&unknown)
        )));
    }
    let holder = cpus.iter().find_map(|pu| match state.pool.holder(pu) {
        Some(PuHolder::Job(holder)) if holder != job => Some(holder),
        _ => None,
    });
    match holder {
        Some(holder) => {
            let why = format!("{path} has {}, and {holder} holds some of them", cpus_text(cpus));
            RecoveryDecision::Removed(Some(why))
        }
        None => RecoveryDecision::Kept(cpus.clone()),
    }
}

/// Stores the job of `candidate` in the state, with the PUs `cpus` as its grant (the PUs that it holds). If the job has
/// no request, it gets a request for these PUs. Does nothing if the job is known and has a grant. A job of the class
/// besteffort gets no grant here: it borrows cores, and the phase `lending` chooses them.
fn store_job_of_cpuset(draft: &mut CycleDraft<'_>, candidate: &Candidate, cpus: &CpuSet) {
    let Candidate { found, job_cpuset: JobCpuset { job: id, path, spec, .. }, place, processes, .. } =
        candidate;
    if draft.state.jobs.get(id).is_some_and(|job| job.grant.is_some()) {
        return;
    }
    let oldest_user = processes.first().map(|(_, uid)| *uid);
    let owner = found.owner.or(oldest_user).unwrap_or(Uid::ROOT);
    let new_job = || Job::new(id.clone(), owner, EndCondition::LastProcessExit, draft.now.wall_clock);
    let mut job = draft.state.jobs.get(id).cloned().unwrap_or_else(new_job);
    let topology = &draft.state.topology;
    let has_whole_cores = cpus.iter().all(|pu| topology.core_cpus(pu).is_subset(cpus));
    let (cpu_request, placement) = if has_whole_cores {
        (CpuRequest::Cores(topology.overlapping_core_count(cpus)), Placement::Pack)
    } else {
        (CpuRequest::Exactly(cpus.clone()), Placement::Explicit)
    };
    let (bind_memory, isolated) = (spec.mems.is_some(), *place == CgroupPlace::Partition);
    let borrows = *place == CgroupPlace::Besteffort;
    let class = if borrows { PriorityClass::Besteffort } else { PriorityClass::Normal };
    let request =
        JobRequest { cpu_request, placement, bind_memory, isolated, class, ..JobRequest::with_core_count(0) };
    job.request.get_or_insert(request);
    if borrows {
        draft.store_job(job);
        return;
    }
    job.grant = Some(Grant {
        cpus: cpus.clone(),
        granted_by: GrantedBy::Warden,
        is_shared: false,
        // Half a core may have been granted while cores could be split. The next grant follows the configuration.
        may_split_cores: !has_whole_cores,
        granted_at: draft.now.since_boot,
        reasons: vec![format!("the cpuset of {path} was found with these CPUs, and no record of the job")],
        second_best: String::new(),
        ownership: Ownership::Owned,
    });
    draft.state.pool.restore_grant(id, cpus);
    draft.store_job(job);
}

/// Adds a warning for each job whose cpuset was found without a record of the job. If the job kept its cores, the
/// warning ends when the job gets another request or ends. If the job lost its cores, the warning ends when all of its
/// former processes have ended or belong to a job again.
pub(crate) fn warn_recovered_cpusets(draft: &mut CycleDraft<'_>) {
    let CycleDraft { state, out, .. } = draft;
    let mut recovered = state.cpusets.take_leftover_decisions();
    recovered.retain(|path, cpuset| {
        let warning = match cpuset.removal_reason.clone() {
            Some(why) => lost_cores_warning(state, cpuset, &why),
            None => kept_cores_warning(state, path, cpuset),
        };
        let is_warned = warning.is_some();
        out.warnings.extend(warning.map(Arc::new));
        is_warned
    });
    state.cpusets.set_leftover_decisions(recovered);
}

/// Returns the warning that processes lost their cores because pjw removes the cpuset `cpuset`, which was found without
/// a record. `why` is the reason for the removal. Before that, drops from `cpuset` the processes that have ended or
/// belong to a job again. `None` if no process is left.
fn lost_cores_warning(state: &WardenState, cpuset: &mut LeftoverDecision, why: &str) -> Option<Warning> {
    let is_outside = |process: &ProcessId| {
        let lives = state.process(process.pid).is_some_and(|known| known.id == *process);
        lives && !state.members.contains_key(&process.pid)
    };
    cpuset.processes.retain(is_outside);
    if cpuset.processes.is_empty() {
        return None;
    }
    let job = &cpuset.job;
    let pids: Vec<Pid> = cpuset.processes.iter().map(|process| process.pid).collect();
    let pids = unknown_masks::pids_text(&pids);
    let text = format!("{job} was found without a record and has no cores now: {why}. Its processes: {pids}");
    let remedy = format!("pjwctl assign {job} --cores N --pid PID for each of them gives it cores again");
    Some(Warning { job: Some(job.clone()), ..Warning::new("recovered", text, remedy) })
}

/// Returns the warning that the job keeps its cpuset, but has default options: the cpuset was found at `path` without a
/// record of the job. `None` if the job has ended or has got another request since.
fn kept_cores_warning(state: &WardenState, path: &str, cpuset: &LeftoverDecision) -> Option<Warning> {
    let id = &cpuset.job;
    state.jobs.get(id).filter(|job| job.request == cpuset.request)?;
    let text =
        format!("{id} was found in {path}, and no record of it: its class and options are the usual ones");
    let remedy =
        format!("pjwctl assign {id} with all options sets them again; pjwctl release {id} frees its cores");
    Some(Warning { job: Some(id.clone()), ..Warning::new("recovered", text, remedy) })
}
