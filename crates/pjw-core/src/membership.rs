//! Which process belongs to which job, by evidence in the order of trust (DESIGN section 5).
//!
//! Weaker evidence never overrules stronger, and what is once known sticks to (pid, start time) for the
//! process's life, whatever cgroup, session or parent it moves to. The environment, which anyone can set, only
//! counts for the job's owner, and only if the job is known otherwise or an ancestor is that scheduler's
//! launcher; else a user could join someone else's jail, or make up jobs to hoard cores.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cpuset::CpuSet;
use crate::facts::{inherit_at_birth, meet_threads};
use crate::job::{Grant, GrantedBy, Job, JobId, Lifetime, Source};
use crate::process::{Pid, Uid};
use crate::reconcile::Draft;
use crate::snapshot::{Claim, Mark, OwnUnit, Process, Role, Seen};
use crate::state::{Known, Member, WardenState};
use crate::strays::by_adoption;

/// How it is known that a process belongs to its job, weakest first, so that `max` is the stronger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Evidence {
    /// Nothing but its user, who has exactly one job here (`adopt_strays`).
    Adopted,
    /// A variable in its environment, confirmed by its user and by stronger evidence for the job.
    Environment,
    /// Its process group or session.
    Session,
    /// Its parent is a member.
    Parent,
    /// The scheduler's cgroup, or Grid Engine's group id.
    Cgroup,
    /// Someone who may said so over the socket.
    Registered,
}

/// Finds the job of every process that has none yet, or only by weaker evidence.
pub(crate) fn map(draft: &mut Draft<'_>) {
    // A child can only be mapped after its parent, and a session after its first member: repeat until nothing
    // new is found. Each round maps at least one process, and process trees are shallow.
    loop {
        let units = OnceCell::new();
        let evidence = |known: &Known| Some((known.process.id.pid, evidence_for(draft, known, &units)?));
        let found: Vec<(Pid, Finding)> = suspects(draft).filter_map(evidence).collect();
        if found.is_empty() {
            break;
        }
        for (pid, finding) in found {
            join(draft, pid, &finding);
        }
    }
    follow_the_leaving(draft);
}

/// Whose job may be another than was known: who was looked at, and everybody where jobs came or went.
fn suspects<'a>(draft: &'a Draft<'_>) -> Box<dyn Iterator<Item = &'a Known> + 'a> {
    let processes = &draft.state.processes;
    if draft.jobs_changed {
        return Box::new(processes.values());
    }
    Box::new(draft.met.iter().filter_map(|pid| processes.get(pid)))
}

/// A child born to a process that was let go, but before its own mask was put back, has the warden's mask too.
fn follow_the_leaving(draft: &mut Draft<'_>) {
    let state = &*draft.state;
    let born_inside = |known: &&Known| {
        let process = &known.process;
        let parent = state.leaving.get(&process.parent).filter(|parent| parent.id.start <= process.id.start);
        let touched = |parent: &Member| {
            let online = state.pool.online();
            let mut touches = state.touched_in(parent.id).map(|(_, touch)| touch);
            process.mask.as_ref().is_some_and(|mask| {
                touches.any(|touch| {
                    let start = process.id.start;
                    touch.bequeathed(mask, start, &online) && !known.was_there(start, touch.since)
                })
            })
        };
        state.watched(process.id.pid).is_none() && parent.is_some_and(touched)
    };
    if state.leaving.is_empty() {
        return;
    }
    let followers: Vec<Member> = suspects(draft)
        .filter(born_inside)
        .filter_map(|known| {
            let parent = state.leaving.get(&known.process.parent)?;
            Some(Member {
                id: known.process.id,
                evidence: Evidence::Parent,
                met: Some(known.met),
                threads: BTreeMap::new(),
                ..parent.clone()
            })
        })
        .collect();
    for follower in followers {
        let pid = follower.id.pid;
        draft.records.push(follower.left());
        draft.state.leaving.insert(pid, follower);
        draft.newcomers.insert(pid);
        inherit_at_birth(draft, pid);
        meet_threads_of(draft, pid);
    }
}

/// What was found for one process.
struct Finding {
    job: JobId,
    evidence: Evidence,
    claim: Option<Claim>,
}

/// Process groups and sessions that belong to one job.
type Units = BTreeMap<(bool, Pid), JobId>;

/// The strongest evidence that would change what is known of a process.
fn evidence_for(draft: &Draft<'_>, known: &Known, units: &OnceCell<Units>) -> Option<Finding> {
    let (state, policy) = (&draft.state, draft.policy);
    let process = &known.process;
    if process.kernel || process.id.pid == Pid(1) || policy.own_pid == Some(process.id.pid) {
        return None;
    }
    let held = state.members.get(&process.id.pid);
    let stronger = |evidence: Evidence| held.is_none_or(|member| evidence > member.evidence);
    let enabled = |source: Source| policy.sources.contains(&source);

    let by_place = known.claims.claims.iter().find(|claim| {
        matches!(claim.mark, Mark::Cgroup(_) | Mark::ExtraGroup(_)) && enabled(claim.job.source())
    });
    let finding = if let Some(claim) = by_place.filter(|_| stronger(Evidence::Cgroup)) {
        Finding { job: claim.job.clone(), evidence: Evidence::Cgroup, claim: Some(claim.clone()) }
    } else if held.is_some() {
        return None;
    } else if let Some(parent) = parent_of(state, process) {
        let evidence = parent.evidence.min(Evidence::Parent);
        let evidence = if evidence == Evidence::Adopted { evidence } else { Evidence::Parent };
        Finding { job: parent.job.clone(), evidence, claim: None }
    } else if let Some(job) = by_birthmark(state, known) {
        Finding { job: job.clone(), evidence: Evidence::Parent, claim: None }
    } else if let Some(job) = by_unit(units.get_or_init(|| own_units(state)), process) {
        Finding { job: job.clone(), evidence: Evidence::Session, claim: None }
    } else if let Some(claim) = by_environment(state, known, &enabled) {
        Finding { job: claim.job.clone(), evidence: Evidence::Environment, claim: Some(claim.clone()) }
    } else {
        let job = by_adoption(draft, process)?;
        Finding { job, evidence: Evidence::Adopted, claim: None }
    };
    (!is_helper(state, known, &finding.job)).then_some(finding)
}

fn by_unit<'a>(units: &'a Units, process: &Process) -> Option<&'a JobId> {
    units.get(&(true, process.session)).or_else(|| units.get(&(false, process.group)))
}

/// The parent, if it is a member. Its number alone isn't enough: it must be the process that was the parent,
/// which a living process of that number, started earlier, is.
fn parent_of<'a>(state: &'a WardenState, process: &Process) -> Option<&'a Member> {
    state.members.get(&process.parent).filter(|parent| parent.id.start <= process.id.start)
}

/// The job inside which an orphan was born: its mask lies in the grant of a job of its own user, and the only
/// way to such a mask, short of choosing it, is to inherit it. This finds the daemonised grandchild whose
/// father had come and gone between two looks, where no fork events tell of it: where they do, they are believed. Root's
/// daemons choose masks, so root's orphans are left alone; so is whoever was there before the job's first process, or was
/// seen before.
fn by_birthmark<'a>(state: &'a WardenState, known: &Known) -> Option<&'a JobId> {
    let process = &known.process;
    let parent = state.processes.get(&process.parent);
    let orphan = process.parent == Pid(1) || parent.is_some_and(|parent| parent.process.uid != process.uid);
    let heard = state.births_heard_since.is_some_and(|since| process.id.start.at_the_earliest() >= since);
    let suspect = orphan && known.fresh && !heard && process.uid != Uid::ROOT;
    let mask = process.mask.as_ref().filter(|mask| suspect && !mask.is_empty())?;
    let born_inside = |job: &&Job| {
        let grant = job.grant.as_ref().filter(|grant| !grant.shared && grant.granted_by == GrantedBy::Warden);
        let narrow = |grant: &&Grant| !state.pool.online().is_subset(&grant.cpus);
        let younger = |member: &Member| member.id.start <= process.id.start;
        job.owner == process.uid
            && grant.filter(narrow).is_some_and(|grant| mask.is_subset(&grant.cpus))
            && state.members_of(&job.id).any(younger)
    };
    state.jobs.values().find(born_inside).map(|job| &job.id)
}

fn by_environment<'a>(
    state: &WardenState,
    known: &'a Known,
    enabled: &impl Fn(Source) -> bool,
) -> Option<&'a Claim> {
    known.claims.claims.iter().find(|claim| {
        let by_environment = matches!(claim.mark, Mark::Environment { .. });
        let confirmed = match state.jobs.get(&claim.job) {
            Some(job) => job.owner == known.process.uid,
            // A prolog runs as root below the launcher, with the job's variables: it must not become the owner.
            None => known.process.uid != Uid::ROOT && launched_by(state, &known.process, claim.job.source()),
        };
        by_environment && enabled(claim.job.source()) && confirmed
    })
}

/// Whether an ancestor is the source's launcher, and not one that the user could have started: names are free.
fn launched_by(state: &WardenState, process: &Process, source: Source) -> bool {
    ancestors(state, process).any(|ancestor| {
        ancestor.claims.role == Role::Launcher(source) && not_the_users(&ancestor.process, process.uid)
    })
}

fn not_the_users(process: &Process, user: Uid) -> bool {
    process.uid == Uid::ROOT || process.uid != user
}

/// The process's ancestors as far as they are known, nearest first.
pub(crate) fn ancestors<'a>(state: &'a WardenState, process: &'a Process) -> impl Iterator<Item = &'a Known> {
    // No process tree is deeper than pid_max, but facts from different moments could form a loop.
    let (mut next, mut start) = (process.parent, process.id.start);
    (0..4096).map_while(move |_| {
        // Whoever started later has the number of a parent that is gone.
        let known = state.processes.get(&next).filter(|known| known.process.id.start <= start)?;
        (next, start) = (known.process.parent, known.process.id.start);
        Some(known)
    })
}

/// Whether the process is a scheduler's own helper. A user's process that only has a helper's name is not.
fn is_helper(state: &WardenState, known: &Known, job: &JobId) -> bool {
    let helper = matches!(known.claims.role, Role::Helper(_) | Role::Launcher(_));
    let owner = state.jobs.get(job).map_or(known.process.uid, |job| job.owner);
    helper && (known.process.uid == Uid::ROOT || known.process.uid != owner)
}

/// The groups and sessions that sources, or `assign --session`, gave to one job as a whole. They count while a
/// member is in them: as long, the kernel can't give the number to someone else.
fn own_units(state: &WardenState) -> Units {
    let mut units = Units::new();
    for member in state.members.values() {
        let Some(known) = state.processes.get(&member.id.pid) else { continue };
        let own =
            known.claims.claims.iter().filter(|claim| claim.job == member.job).find_map(|claim| match claim
                .mark
            {
                Mark::Environment { own } => Some(own),
                _ => None,
            });
        match own {
            Some(OwnUnit::Session) => units.insert((true, known.process.session), member.job.clone()),
            Some(OwnUnit::Group) => units.insert((false, known.process.group), member.job.clone()),
            Some(OwnUnit::Nothing) | None => None,
        };
        let registered =
            state.jobs.get(&member.job).is_some_and(|job| job.sessions.contains(&known.process.session));
        if registered {
            units.insert((true, known.process.session), member.job.clone());
        }
    }
    units
}

fn join(draft: &mut Draft<'_>, pid: Pid, finding: &Finding) {
    let Some(known) = draft.state.processes.get(&pid) else { return };
    let owner = known.process.uid;
    let known = draft.state.jobs.get(&finding.job).cloned();
    let mut job =
        known.unwrap_or_else(|| Job::new(finding.job.clone(), owner, Lifetime::Members, draft.now.wall));
    // A hook that runs as root announces a job before anyone knows whose it is.
    if job.owner == Uid::ROOT && finding.claim.is_some() {
        job.owner = owner;
    }
    if let Some(Mark::Cgroup(path)) = finding.claim.as_ref().map(|claim| &claim.mark) {
        job.cgroup.get_or_insert_with(|| path.clone());
    }
    draft.put_job(job);
    enroll(draft, pid, &finding.job, finding.evidence);
}

/// Makes a process a member. Its threads are looked at next.
pub(crate) fn enroll(draft: &mut Draft<'_>, pid: Pid, job: &JobId, evidence: Evidence) {
    let Some(known) = draft.state.processes.get(&pid) else { return };
    let id = known.process.id;
    let met = Some(known.met);
    let inherited = inherited_mask(draft.state, &known.process);
    let before = draft.state.members.remove(pid).or_else(|| draft.state.leaving.remove(&pid));
    if let Some(before) = &before {
        draft.state.stirred.add(&before.job, pid);
    }
    // A thread list read under another job is as good under this one.
    let threads = before.map(|member| member.threads).unwrap_or_default();
    let member = Member { id, job: job.clone(), evidence, inherited, met, threads };
    draft.records.push(member.joined());
    draft.state.members.insert(member);
    draft.state.stirred.add(job, pid);
    draft.state.no_stray(pid);
    draft.newcomers.insert(pid);
    inherit_at_birth(draft, pid);
    meet_threads_of(draft, pid);
}

/// Takes in the threads of one who has just become watched, if this look has seen them.
fn meet_threads_of(draft: &mut Draft<'_>, pid: Pid) {
    let unknown = draft.state.watched(pid).is_some_and(|member| member.threads.is_empty());
    if let Some(process) = draft.seen.processes.get(&pid).and_then(Seen::here).filter(|_| unknown) {
        meet_threads(draft, process);
    }
}

/// The mask that came from whoever started the job: that of the nearest ancestor outside it.
fn inherited_mask(state: &WardenState, process: &Process) -> Option<CpuSet> {
    match parent_of(state, process) {
        Some(parent) => parent.inherited.clone(),
        None => state.processes.get(&process.parent).and_then(|parent| parent.process.mask.clone()),
    }
}
