//! First phase of a cycle: what was seen is taken into what is known.
//!
//! Nothing is decided here but who is still there. A process is gone if a look at it says so, if a full look
//! doesn't list it, or if its number now belongs to a process with another start time.

use std::collections::BTreeMap;

use crate::bindings;
use crate::cpuset::CpuSet;
use crate::event::{Event, EventKind};
use crate::fortify::is_a_walls;
use crate::membership::Evidence;
use crate::process::{Pid, ProcessId, ThreadId, Tid};
use crate::reconcile::Draft;
use crate::snapshot::{Nanos, Process, Scope, Seen, Snapshot};
use crate::state::{Hotplug, Known, Member, MemberThread, WardenState};
use crate::stirred::Stirred;
use crate::touch::Touch;

/// Takes in who is there.
pub(crate) fn meet_all(draft: &mut Draft<'_>, snapshot: &Snapshot) {
    note_online(draft, &snapshot.online);
    draft.state.places.extend(snapshot.cgroups.clone());
    let places = draft.state.job_cgroups();
    draft.state.places.retain(|path, _| places.contains(path));
    for process in snapshot.processes.values().filter_map(Seen::here) {
        meet(draft, process);
    }
    bindings::sort_out(draft);
}

/// Forgets who is gone. This comes after the membership of the others is settled: a parent that has just
/// exited still tells whose its children are.
pub(crate) fn forget_gone(draft: &mut Draft<'_>, snapshot: &Snapshot) {
    let state = &mut draft.state;
    let gone: Vec<Pid> = match snapshot.scope {
        Scope::Full => {
            let known = state.processes.keys().copied().chain(state.watched_pids());
            known.filter(|pid| snapshot.processes.get(pid).and_then(Seen::here).is_none()).collect()
        }
        Scope::Partial(_) => {
            let looked_at = snapshot.processes.iter();
            looked_at.filter(|(_, seen)| seen.here().is_none()).map(|(&pid, _)| pid).collect()
        }
    };
    for pid in gone {
        state.forget(pid);
    }
    if draft.full {
        forget_touches_of_nobody(draft);
    }
}

/// A journal may tell of threads whose process nobody watches any more: there is nothing to put back.
fn forget_touches_of_nobody(draft: &mut Draft<'_>) {
    let state = &draft.state;
    let watched = |process: ProcessId| state.watched(process.pid).is_some_and(|member| member.id == process);
    let lost: Vec<ThreadId> = state.touched.keys().filter(|id| !watched(id.process)).copied().collect();
    for thread in lost {
        draft.untouch(thread);
    }
}

fn note_online(draft: &mut Draft<'_>, online: &CpuSet) {
    let machine = draft.state.topology.cpus().clone();
    let online = online.intersection(&machine);
    let was = draft.state.pool.online();
    if online == was {
        return;
    }
    draft.state.pool.set_online(&online);
    draft.state.stirred = Stirred::everything();
    draft.replugged = true;
    let at = draft.now.since_boot;
    let earlier = draft.state.hotplug.take().filter(|earlier| bindings::is_soon_after(earlier.at, at));
    let steady = earlier.map_or_else(|| was.clone(), |earlier| earlier.steady.intersection(&was));
    draft.state.hotplug = Some(Hotplug { at, steady });
    for (cpus, word) in [(was.difference(&online), "offline"), (online.difference(&was), "online")] {
        if !cpus.is_empty() {
            draft
                .events
                .push(Event::new(EventKind::Hotplug, format!("PUs {cpus} went {word}")).with_cpus(&cpus));
        }
    }
}

fn meet(draft: &mut Draft<'_>, process: &Process) {
    let pid = process.id.pid;
    let state = &mut draft.state;
    let other_start = |id| id != process.id;
    let reused = state.processes.get(&pid).is_some_and(|known| other_start(known.process.id))
        || state.members.get(&pid).is_some_and(|member| other_start(member.id))
        || state.leaving.get(&pid).is_some_and(|member| other_start(member.id));
    if reused && !correct_start(draft, process.id) {
        draft.state.forget(pid);
    }
    let state = &mut draft.state;
    let before = state.processes.remove(&pid);
    let fresh = before.is_none();
    let moved = before.as_ref().is_some_and(|known| known.process.cgroup != process.cgroup);
    if moved {
        state.members.note_move();
    }
    // Of whom a rescan finds asleep where it was, nothing is new.
    let claims_more = process
        .claims
        .as_ref()
        .is_some_and(|claims| before.as_ref().is_none_or(|known| known.claims != *claims));
    let is_news = fresh || moved || claims_more || process.threads.is_some();
    let recorded = state.watched(pid).and_then(|member| member.met);
    let met = before.as_ref().map(|known| known.met).or(recorded).unwrap_or(draft.now.since_boot);
    let claims = process.claims.clone().or(before.map(|known| known.claims)).unwrap_or_default();
    let facts = Process { marks: None, claims: None, threads: None, ..process.clone() };
    state.processes.insert(pid, Known { process: facts, claims, met, fresh });
    if let Some(member) = state.members.get(&pid).filter(|_| is_news) {
        state.stirred.add(&member.job, pid);
    }
    draft.met.insert(pid);
    meet_threads(draft, process);
}

/// Whether a process is one whose start only the event of its birth had told; then that is corrected.
fn correct_start(draft: &mut Draft<'_>, id: ProcessId) -> bool {
    let state = &mut draft.state;
    let known = state.processes.get(&id.pid).map(|known| known.process.id);
    let Some(told) = known.or_else(|| Some(state.watched(id.pid)?.id)) else { return false };
    if !told.is_born_with(id) {
        return false;
    }
    let member = state.members.remove(id.pid);
    let is_member = member.is_some();
    if let Some(mut member) = member.or_else(|| state.leaving.remove(&id.pid)) {
        member.id = id;
        member.threads.values_mut().for_each(|thread| thread.start = id.start);
        if is_member {
            draft.records.push(member.joined());
            state.members.insert(member);
        } else {
            draft.records.push(member.left());
            state.leaving.insert(id.pid, member);
        }
    }
    let touches: Vec<(ThreadId, Touch)> =
        state.touched_in(told).map(|(&thread, touch)| (thread, touch.clone())).collect();
    for (thread, touch) in touches {
        draft.untouch(thread);
        draft.carry_on(ThreadId { process: id, tid: thread.tid, start: id.start }, touch);
    }
    true
}

/// Updates the threads of a watched process: who is gone is forgotten, who is new, or has a new mask, is asked whether it
/// is one that the warden gave to its creator.
pub(crate) fn meet_threads(draft: &mut Draft<'_>, seen: &Process) {
    let Draft { state, policy, now, replugged, .. } = draft;
    let pid = seen.id.pid;
    let Some(list) = &seen.threads else { return };
    let Some(process) = state.watched(pid).map(|member| member.id) else { return };
    let taken = state.members.take_threads(pid);
    let is_member = taken.is_some();
    let left = state.leaving.get_mut(&pid).filter(|_| !is_member);
    let mut before = taken.or_else(|| left.map(|left| std::mem::take(&mut left.threads))).unwrap_or_default();
    let mut threads: BTreeMap<Tid, MemberThread> = BTreeMap::new();
    let mut newcomers = Vec::new();
    let mut changed = Vec::new();
    for thread in list {
        let known = before.remove(&thread.tid).filter(|known| known.start == thread.start);
        let id = ThreadId { process, tid: thread.tid, start: thread.start };
        // What a creator gave may lie under a cpuset until its thread leaves that.
        if known.as_ref().is_none_or(|known| known.allowed != thread.allowed) {
            newcomers.push(id);
        }
        // A binding may look like what is left of the wall.
        if let Some(known) = known.as_ref().filter(|known| *replugged || known.allowed != thread.allowed) {
            let read = known.demand.read_at().unwrap_or(now.since_boot);
            changed.push((id, (known.allowed.clone(), read), thread.allowed.clone()));
        }
        let demand = known.map(|known| known.demand).unwrap_or_default();
        threads.insert(
            thread.tid,
            MemberThread {
                start: thread.start,
                comm: thread.comm,
                state: thread.state,
                last_cpu: thread.last_cpu,
                allowed: thread.allowed.clone(),
                demand: demand.after(thread.run_ns, thread.wait_ns, now.since_boot, seen.quiet_until, policy),
            },
        );
    }
    if is_member {
        state.members.put_threads(pid, threads);
    } else if let Some(left) = state.leaving.get_mut(&pid) {
        left.threads = threads;
    }
    let Some(member) = state.watched(pid) else { return };
    let alive = |id: &ThreadId| member.threads.get(&id.tid).is_some_and(|thread| thread.start == id.start);
    let ended: Vec<ThreadId> = state.touched_in(process).map(|(&id, _)| id).filter(|id| !alive(id)).collect();
    for thread in ended {
        state.touched.remove(&thread);
    }
    for (thread, (was, read), is) in changed {
        bindings::note(draft, thread, (&was, read), is);
    }
    for thread in newcomers {
        if !draft.state.touched.contains_key(&thread) {
            inherit(draft, thread);
        }
    }
}

/// A new thread has its creator's mask (sched_setaffinity(2)). If the warden made that mask, then what is to be
/// put back one day is what would be put back for the creator.
fn inherit(draft: &mut Draft<'_>, newcomer: ThreadId) {
    let state = &draft.state;
    let Some(member) = state.watched(newcomer.process.pid) else { return };
    let Some(thread) = member.threads.get(&newcomer.tid) else { return };
    let set = thread.allowed.clone();
    let parent = state.processes.get(&newcomer.process.pid).map(|known| known.process.parent);
    let parent = parent.and_then(|parent| state.watched(parent)).map(|parent| parent.id);
    let origin = made_by_warden(state, newcomer.process, newcomer, &set)
        .or_else(|| made_by_warden(state, parent?, newcomer, &set))
        .or_else(|| orphans_wish(state, member, newcomer, &set));
    if let Some(origin) = origin {
        draft.inherit(newcomer, origin, set);
    }
}

/// The same for the first thread of a process that has just become known, while its parent's masks are still
/// what they were at its birth.
pub(crate) fn inherit_at_birth(draft: &mut Draft<'_>, pid: Pid) {
    let state = &draft.state;
    let Some(process) = state.processes.get(&pid).map(|known| &known.process) else { return };
    let first = ThreadId { process: process.id, tid: Tid(pid.0), start: process.id.start };
    let parent = state.watched(process.parent).filter(|parent| parent.id.start <= process.id.start);
    let (Some(set), Some(parent)) = (process.mask.clone(), parent.map(|parent| parent.id)) else { return };
    if state.touched.contains_key(&first) {
        return;
    }
    if let Some(origin) = made_by_warden(state, parent, first, &set) {
        draft.inherit(first, origin, set);
    }
}

/// Where a mask comes from that was not chosen by who has it.
pub(crate) struct Origin {
    /// What is to be put back instead.
    pub(crate) before: CpuSet,
    /// Since when the warden has been handing it out.
    pub(crate) since: Nanos,
}

/// Where a newcomer's mask comes from, if it is one that the warden set on a thread of `process`.
fn made_by_warden(
    state: &WardenState,
    process: ProcessId,
    newcomer: ThreadId,
    mask: &CpuSet,
) -> Option<Origin> {
    let online = state.pool.online();
    let known = state.processes.get(&newcomer.process.pid).filter(|_| newcomer.process != process);
    let younger = |touch: &Touch| known.is_none_or(|known| !known.was_there(newcomer.start, touch.since));
    let mut touches = state.touched_in(process).map(|(_, touch)| touch);
    let touch = touches.find(|touch| touch.bequeathed(mask, newcomer.start, &online) && younger(touch))?;
    Some(Origin { before: touch.before.clone(), since: touch.since })
}

/// The creator of an orphan is gone. What the other threads of its job were given tells as much; and whoever
/// was born with exactly the grant got it from the warden.
fn orphans_wish(state: &WardenState, member: &Member, newcomer: ThreadId, mask: &CpuSet) -> Option<Origin> {
    // Who was named as a member may have had such a mask of its own before, and behind a wall everybody has it.
    if member.evidence == Evidence::Registered || is_a_walls(state, member.id.pid, mask) {
        return None;
    }
    let siblings =
        state.members.of(&member.job).chain(state.leaving.values().filter(|other| other.job == member.job));
    let told = siblings.map(|other| other.id).find_map(|other| made_by_warden(state, other, newcomer, mask));
    told.or_else(|| {
        let grant = state.jobs.get(&member.job)?.grant.as_ref()?;
        let known = state.processes.get(&member.id.pid);
        let was_there = known.is_some_and(|known| known.was_there(newcomer.start, grant.since));
        let born_inside = newcomer.start.at_the_latest() >= grant.since && !was_there;
        (born_inside && *mask == grant.cpus.intersection(&state.pool.online()))
            .then(|| Origin { before: state.topology.cpus().clone(), since: grant.since })
    })
}
