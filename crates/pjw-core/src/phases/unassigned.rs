//! Unassigned processes: processes that belong to no job, of users who have jobs here.
//!
//! They are always reported. With `adopt_strays`, an unassigned process of a user with a single job joins that job
//! (`membership.rs`). The processes of a user with several jobs are kept off every grant, because their job can't be
//! known. Their original masks are restored when the user has fewer jobs.

use crate::basics::prelude::*;
use crate::basics::{Comm, CpuSet, Pid, ThreadId, Uid};
use crate::phases::draft::{Draft, Output};
use crate::state::{Member, WardenState};
use crate::terms::{Action, ActionKind, Evidence, JobId, Policy, Process, Warning};

/// The names of pjw's own programs. Their processes never count as unassigned.
const OUR_PROGRAMS: [&str; 2] = ["pjwctl", "pjwd"];

/// The job that adopts an unassigned process: the only job of its user. `None` if the process is not unassigned, its
/// user has several jobs, or unassigned processes are not adopted.
pub(crate) fn by_adoption(draft: &Draft<'_>, process: &Process) -> Option<JobId> {
    if !draft.policy.adopt_strays || !is_stray(draft, process) {
        return None;
    }
    let mut jobs = jobs_of(draft.state, process.uid);
    let only = jobs.next()?;
    jobs.next().is_none().then(|| only.clone())
}

/// The jobs of a user, without released jobs. A released job adopts no process, and does not count as one of several
/// jobs.
fn jobs_of(state: &WardenState, user: Uid) -> impl Iterator<Item = &JobId> {
    state.jobs.values().filter(move |job| job.owner == user && !job.released).map(|job| &job.id)
}

/// The unassigned processes by user: processes in no job, of users who have jobs here. A user who has jobs and no
/// such process has an empty set.
#[must_use]
pub fn unassigned(state: &WardenState, policy: &Policy) -> BTreeMap<Uid, BTreeSet<Pid>> {
    let owners = state.jobs.values().map(|job| job.owner);
    let people = owners.filter(|owner| owner.0 >= policy.first_person_uid);
    let mut strays: BTreeMap<Uid, BTreeSet<Pid>> = people.map(|owner| (owner, BTreeSet::new())).collect();
    for known in state.processes.values() {
        let process = &known.process;
        if let Some(pids) = strays.get_mut(&process.uid).filter(|_| is_free(state, policy, process)) {
            pids.insert(process.id.pid);
        }
    }
    strays
}

fn is_free(state: &WardenState, policy: &Policy, process: &Process) -> bool {
    let pid = process.id.pid;
    let is_ours = || OUR_PROGRAMS.iter().any(|name| process.comm == Comm::from(*name));
    !process.kernel && policy.own_pid != Some(pid) && !state.members.contains_key(&pid) && !is_ours()
}

/// Updates the unassigned processes: from all processes if a job was made or removed, else from the scanned
/// processes.
fn count(draft: &mut Draft<'_>) {
    let scanned = draft.scanned_pids();
    let Draft { state, policy, jobs_changed, .. } = draft;
    let state: &mut WardenState = state;
    if *jobs_changed {
        state.unassigned = unassigned(state, policy);
        return;
    }
    for pid in scanned {
        state.remove_unassigned(pid);
        let Some(process) = state.processes.get(&pid).map(|known| &known.process) else { continue };
        if is_free(state, policy, process)
            && let Some(strays) = state.unassigned.get_mut(&process.uid)
        {
            strays.insert(pid);
        }
    }
}

/// Whether a process is unassigned: in no job, of a user who has jobs here.
fn is_stray(draft: &Draft<'_>, process: &Process) -> bool {
    let (state, policy) = (&*draft.state, draft.policy);
    is_free(state, policy, process)
        && process.uid.0 >= policy.first_person_uid
        && state.jobs.values().any(|job| job.owner == process.uid)
}

/// Reports the unassigned processes, and decides which of them are kept off the grants. Those are tracked like
/// released processes, because pjw has to restore their original masks.
pub(crate) fn settle(draft: &mut Draft<'_>) {
    count(draft);
    report(draft);
    let (state, policy) = (&*draft.state, draft.policy);
    let mut excluded: BTreeMap<Pid, JobId> = BTreeMap::new();
    if policy.adopt_strays {
        for (&user, pids) in &state.unassigned {
            let mut jobs = jobs_of(state, user);
            if let (Some(first), Some(_)) = (jobs.next(), jobs.next()) {
                excluded.extend(pids.iter().map(|&pid| (pid, first.clone())));
            }
        }
    }
    if !excluded.is_empty() && outside(state).is_empty() {
        report_no_free_pus(&mut draft.out, &excluded);
        // Without a PU outside of all grants, the processes keep their masks.
        excluded.clear();
    }
    let state = &*draft.state;
    let unknown = |pid: &Pid| !state.restoring.contains_key(pid);
    let new_members: Vec<Member> = excluded
        .iter()
        .filter(|(pid, _)| unknown(pid))
        .filter_map(|(pid, job)| {
            let known = state.processes.get(pid)?;
            Some(Member {
                id: known.process.id,
                job: job.clone(),
                evidence: Evidence::Adopted,
                inherited: None,
                first_seen: Some(known.first_seen),
                threads: BTreeMap::new(),
            })
        })
        .collect();
    for newcomer in new_members {
        draft.out.record(newcomer.left());
        draft.new_members.insert(newcomer.id.pid);
        draft.state.restoring.insert(newcomer.id.pid, newcomer);
    }
    draft.state.excluded = excluded.into_keys().collect();
}

/// The online PUs that no job holds.
fn outside(state: &WardenState) -> CpuSet {
    let granted = state.jobs.values().filter_map(|job| job.grant.as_ref());
    let granted = granted.fold(CpuSet::new(), |all, grant| all.union(&grant.cpus));
    state.pool.online().difference(&granted)
}

/// The actions that keep the unassigned processes of users with several jobs off the cores of all jobs.
pub(crate) fn keep_off(draft: &mut Draft<'_>) -> Vec<Action> {
    let state = &*draft.state;
    if state.excluded.is_empty() {
        return Vec::new();
    }
    let outside = outside(state);
    let mut moves = Vec::new();
    for member in state.excluded.iter().filter_map(|pid| state.restoring.get(pid)) {
        moves.extend(moves_of(member, &outside));
    }
    for (action, original) in &moves {
        draft.begin_write(action.thread, &action.requested, original);
    }
    moves.into_iter().map(|(action, _)| action).collect()
}

/// The actions for one process, each with the original mask of its thread.
fn moves_of(member: &Member, outside: &CpuSet) -> Vec<(Action, CpuSet)> {
    let mut moves = Vec::new();
    for (&tid, thread) in member.threads.iter().filter(|(_, thread)| thread.lives()) {
        let Some(entry) = &thread.mask else { continue };
        let original = entry.original();
        let left = original.intersection(outside);
        let to = if left.is_empty() { outside.clone() } else { left };
        // If the cpuset leaves less of the mask, a second request changes nothing.
        let is_requested = !entry.is_programs() && entry.requested() == Some(&to);
        if to == thread.allowed || is_requested {
            continue;
        }
        let why = format!("a stray of a user with several jobs: it may use what no job holds, {outside}");
        let (kind, job, from) = (ActionKind::KeepOff, member.job.clone(), thread.allowed.clone());
        let id = ThreadId { process: member.id, tid, start: thread.start };
        moves
            .push((Action { kind, job, thread: id, from, requested: to.clone(), to, why }, original.clone()));
    }
    moves
}

fn report_no_free_pus(out: &mut Output, excluded: &BTreeMap<Pid, JobId>) {
    let Some((&first, _)) = excluded.first_key_value() else { return };
    out.warn(Warning {
        job: None,
        pid: Some(first),
        tid: None,
        code: "stray-on-jobs",
        why: format!("{} strays run on cores of jobs: jobs hold every core", excluded.len()),
        remedy: "housekeeping = \"1\" keeps a core for what belongs to no job".to_owned(),
    });
}

/// Reports which users have processes outside their jobs.
fn report(draft: &mut Draft<'_>) {
    for (user, pids) in &draft.state.unassigned {
        let Some(&first) = pids.first() else { continue };
        let (count, belong) = match pids.len() {
            1 => ("1 process".to_owned(), "belongs"),
            several => (format!("{several} processes"), "belong"),
        };
        let why = format!("{count} of user {user} {belong} to no job, though the user has jobs here");
        draft.out.warn(Warning {
            job: None,
            pid: Some(first),
            tid: None,
            code: "stray",
            why,
            remedy: "pjwctl assign JOB --pid PID makes one a member; adopt_strays = true does so by itself (on nodes \
                     for jobs only)"
                .to_owned(),
        });
    }
}
