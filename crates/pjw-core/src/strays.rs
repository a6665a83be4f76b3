//! Strays: processes of people who have jobs here, in no job themselves.
//!
//! They are reported always. With `adopt_strays` one of a user with a single job joins that job (`membership.rs`), and
//! those of a user with several are kept off every grant, since nobody can say to which they belong: they run where no
//! job does, and get their own masks back when their user has fewer jobs.

use std::collections::{BTreeMap, BTreeSet};

use crate::cpuset::CpuSet;
use crate::fortify::is_a_walls;
use crate::job::JobId;
use crate::membership::Evidence;
use crate::plan::{Abstained, Action, ActionKind};
use crate::policy::Policy;
use crate::process::{Comm, Pid, ThreadId, Uid};
use crate::reconcile::Draft;
use crate::snapshot::Process;
use crate::state::{Member, WardenState};

/// Whoever asks the warden is no stray for that, nor is the daemon of somebody else.
const OUR_PROGRAMS: [&str; 2] = ["pjwctl", "pjwd"];

/// The only job of the user of a stray, where strays are adopted.
pub(crate) fn by_adoption(draft: &Draft<'_>, process: &Process) -> Option<JobId> {
    if !draft.policy.adopt_strays || !is_stray(draft, process) {
        return None;
    }
    let mut jobs = jobs_of(draft.state, process.uid);
    let only = jobs.next()?;
    jobs.next().is_none().then(|| only.clone())
}

/// A user's jobs, without those that somebody released: the warden leaves them alone, and the user's others too.
fn jobs_of(state: &WardenState, user: Uid) -> impl Iterator<Item = &JobId> {
    state.jobs.values().filter(move |job| job.owner == user && !job.let_go).map(|job| &job.id)
}

/// The processes in no job of people who have jobs here, by user; nobody where a user has none.
#[must_use]
pub fn strays(state: &WardenState, policy: &Policy) -> BTreeMap<Uid, BTreeSet<Pid>> {
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

/// Finds the strays: among all processes where jobs came or went, and else among those that were looked at.
fn count(draft: &mut Draft<'_>) {
    let Draft { state, policy, met, jobs_changed, .. } = draft;
    let state: &mut WardenState = state;
    if *jobs_changed {
        state.strays = strays(state, policy);
        return;
    }
    for &pid in met.iter() {
        state.no_stray(pid);
        let Some(process) = state.processes.get(&pid).map(|known| &known.process) else { continue };
        if is_free(state, policy, process)
            && let Some(strays) = state.strays.get_mut(&process.uid)
        {
            strays.insert(pid);
        }
    }
}

/// Whether a process that no evidence claims runs for a person who has jobs here.
fn is_stray(draft: &Draft<'_>, process: &Process) -> bool {
    let (state, policy) = (&*draft.state, draft.policy);
    is_free(state, policy, process)
        && process.uid.0 >= policy.first_person_uid
        && state.jobs.values().any(|job| job.owner == process.uid)
}

/// Says who the strays are, and settles who is kept off the grants: they are watched like those that a job let go, whose
/// masks are the warden's to put back.
pub(crate) fn settle(draft: &mut Draft<'_>) {
    count(draft);
    report(draft);
    let (state, policy) = (&*draft.state, draft.policy);
    let mut aside: BTreeMap<Pid, JobId> = BTreeMap::new();
    if policy.adopt_strays {
        for (&user, pids) in &state.strays {
            let mut jobs = jobs_of(state, user);
            if let (Some(first), Some(_)) = (jobs.next(), jobs.next()) {
                aside.extend(pids.iter().map(|&pid| (pid, first.clone())));
            }
        }
    }
    if !aside.is_empty() && outside(state).is_empty() {
        tell_nowhere(&mut draft.abstained, &aside);
        // Better anywhere than on the cores of the one job that took their place.
        aside.clear();
    }
    let state = &*draft.state;
    let unknown = |pid: &Pid| !state.leaving.contains_key(pid);
    let newcomers: Vec<Member> = aside
        .iter()
        .filter(|(pid, _)| unknown(pid))
        .filter_map(|(pid, job)| {
            let known = state.processes.get(pid)?;
            Some(Member {
                id: known.process.id,
                job: job.clone(),
                evidence: Evidence::Adopted,
                inherited: None,
                met: Some(known.met),
                threads: BTreeMap::new(),
            })
        })
        .collect();
    for newcomer in newcomers {
        draft.records.push(newcomer.left());
        draft.newcomers.insert(newcomer.id.pid);
        draft.state.leaving.insert(newcomer.id.pid, newcomer);
    }
    draft.state.aside = aside.into_keys().collect();
}

/// What is no job's.
fn outside(state: &WardenState) -> CpuSet {
    let granted = state.jobs.values().filter_map(|job| job.grant.as_ref());
    let granted = granted.fold(CpuSet::new(), |all, grant| all.union(&grant.cpus));
    state.pool.online().difference(&granted)
}

/// What keeps the strays of users with several jobs off the cores of all jobs.
pub(crate) fn keep_off(draft: &mut Draft<'_>) -> Vec<Action> {
    let state = &*draft.state;
    if state.aside.is_empty() {
        return Vec::new();
    }
    let outside = outside(state);
    let mut moves = Vec::new();
    for member in state.aside.iter().filter_map(|pid| state.leaving.get(pid)) {
        moves.extend(moves_of(state, member, &outside));
    }
    for (action, wish) in &moves {
        draft.touch(action.thread, wish.clone(), action.to.clone());
    }
    moves.into_iter().map(|(action, _)| action).collect()
}

/// The actions for one process, each with the mask that its thread has by its own doing.
fn moves_of(state: &WardenState, member: &Member, outside: &CpuSet) -> Vec<(Action, CpuSet)> {
    let online = state.pool.online();
    let mut moves = Vec::new();
    for (&tid, thread) in member.threads.iter().filter(|(_, thread)| thread.lives()) {
        let id = ThreadId { process: member.id, tid, start: thread.start };
        let touch = state.touched.get(&id).filter(|touch| touch.made(&thread.allowed, &online));
        let everywhere =
            online.is_subset(&thread.allowed) || is_a_walls(state, member.id.pid, &thread.allowed);
        let wish = match touch {
            Some(touch) => touch.before.clone(),
            // Who may run wherever a PU is on will want those that are off now when they come back.
            None if everywhere => state.topology.cpus().clone(),
            None => thread.allowed.clone(),
        };
        let inside_wish = wish.intersection(outside);
        let to = if inside_wish.is_empty() { outside.clone() } else { inside_wish };
        // Where a cpuset made less of it, asking again brings no more.
        let cut = touch.is_some_and(|touch| touch.cut_from.as_ref() == Some(&to));
        if to == thread.allowed || cut {
            continue;
        }
        let why = format!("a stray of a user with several jobs: it may use what no job holds, {outside}");
        let (kind, job, from) = (ActionKind::KeepOff, member.job.clone(), thread.allowed.clone());
        moves.push((Action { kind, job, thread: id, from, to, walled: false, why }, wish));
    }
    moves
}

fn tell_nowhere(abstained: &mut Vec<Abstained>, aside: &BTreeMap<Pid, JobId>) {
    let Some((&first, _)) = aside.first_key_value() else { return };
    abstained.push(Abstained {
        job: None,
        pid: Some(first),
        tid: None,
        code: "stray-on-jobs",
        why: format!("{} strays run on cores of jobs: jobs hold every core", aside.len()),
        remedy: "housekeeping = \"1\" keeps a core for what belongs to no job".to_owned(),
    });
}

/// Says which users have processes outside their jobs.
fn report(draft: &mut Draft<'_>) {
    for (user, pids) in &draft.state.strays {
        let Some(&first) = pids.first() else { continue };
        let (count, belong) = match pids.len() {
            1 => ("1 process".to_owned(), "belongs"),
            several => (format!("{several} processes"), "belong"),
        };
        let why = format!("{count} of user {user} {belong} to no job, though the user has jobs here");
        draft.abstained.push(Abstained {
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
