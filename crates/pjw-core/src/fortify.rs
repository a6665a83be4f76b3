//! Before the masks: which job gets which wall, and what becomes of walls that are not wanted any more.
//!
//! A job whose scheduler grants cores by a cpuset has its wall already. In a scheduler's own directory the warden
//! narrows the cpuset where the source allows it, and makes nothing below (a scheduler's rmdir would fail). Jobs that
//! no scheduler tracks are moved to a cgroup of their own. Whoever can have no wall is kept by masks, and told why.
//!
//! Masks are remembered before a cpuset changes, for a kernel may cut or forget them, and are planned once the wall
//! stands: `confine.rs`.

use std::collections::BTreeSet;

use crate::bindings;
use crate::confine::usable_grant;
use crate::cpuset::{CpuSet, Pu};
use crate::job::{GrantedBy, Job, JobId, Request};
use crate::policy::{Mode, Policy};
use crate::process::{Pid, ProcessId, ThreadId};
use crate::reconcile::Draft;
use crate::record::Record;
use crate::snapshot::{Cgroup, Cpuset, Seen};
use crate::state::{Member, WardenState};
use crate::topology::Level;
use crate::touch::{Touch, same};
use crate::wall::{Bounds, Cpusets, Enforcement, Mason, Wall, WallAction, WallChange, WallRecord, own_path};

mod residents;
mod told;

use residents::{born_inside, home, is_inhabited, outside, returns, why_unmovable};

/// What is to be built, and for whom: masks of these jobs wait until the walls were looked at again.
#[derive(Default)]
pub(crate) struct Works {
    pub(crate) actions: Vec<WallAction>,
    pub(crate) busy: BTreeSet<JobId>,
}

/// Where a job's wall is to be.
enum Site {
    /// There.
    Wall(Wall),
    /// Nobody has looked at its scheduler's directory yet.
    Unseen,
    /// It needs none: it holds nothing, or its scheduler's cpuset is its wall.
    Unneeded,
    /// Nowhere, and why.
    Nowhere(String),
}

/// Plans the changes of walls.
pub(crate) fn plan(draft: &mut Draft<'_>) -> Works {
    if draft.full {
        draft.state.walls.forgive();
    }
    let mut works = Works::default();
    let mut wanted: BTreeSet<String> = BTreeSet::new();
    let ids: Vec<JobId> = draft.state.jobs.keys().cloned().collect();
    for id in ids {
        match site(draft.state, draft.policy, &id) {
            Site::Wall(wall) => {
                wanted.insert(wall.path.clone());
                raise(draft, &wall, &mut works);
                told::tell_left_outside(draft, &id);
            }
            Site::Unseen => drop(works.busy.insert(id)),
            Site::Unneeded => {}
            Site::Nowhere(why) => {
                wanted.extend(standing(draft.state, draft.policy, &id));
                told::tell_unwalled(draft, &id, &why);
            }
        }
    }
    let paths: Vec<String> = draft.state.walls.paths().map(str::to_owned).collect();
    for path in paths.into_iter().filter(|path| !wanted.contains(path)) {
        dismantle(draft, &path, &mut works);
    }
    let troubles: Vec<_> = draft.state.walls.troubles().collect();
    draft.abstained.extend(troubles);
    works
}

/// The cgroup of a wall that holds its job on its cores though it can't be changed just now: systemd may be silent, a
/// look may have failed. Taking it down would help nobody.
fn standing(state: &WardenState, policy: &Policy, id: &JobId) -> Option<String> {
    let grant = usable_grant(state.jobs.get(id)?, &state.pool.online())?;
    let path = &state.walls.of(id)?.wall.path;
    let cpuset = state.places.get(path)?.here()?.cpuset.as_ref()?;
    let holds = !cpuset.effective.is_empty() && cpuset.effective.is_subset(&grant);
    (holds && policy.enforcement != Enforcement::Affinity).then(|| path.clone())
}

/// What keeps a job's processes on its cores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Keeping {
    /// A cpuset, all of them.
    Cpuset {
        /// Its cgroup; `None` where nobody knows its scheduler's.
        path: Option<String>,
    },
    /// Masks, at least some of them, and why.
    Affinity {
        /// Why no cpuset.
        why: String,
    },
    /// Nothing: it has no cores of its own, or the warden only watches.
    Nothing,
}

/// What keeps a job's processes on its cores, as far as was seen.
#[must_use]
pub fn keeping(state: &WardenState, policy: &Policy, job: &Job) -> Keeping {
    keeping_of(state, policy, job, state.members_of(&job.id))
}

/// The same, as far as these of its processes are concerned.
pub fn keeping_of<'a>(
    state: &WardenState,
    policy: &Policy,
    job: &Job,
    members: impl Iterator<Item = &'a Member>,
) -> Keeping {
    let Some(grant) = job.grant.as_ref().filter(|_| !job.let_go) else { return Keeping::Nothing };
    if grant.granted_by == GrantedBy::Scheduler {
        return Keeping::Cpuset { path: job.cgroup.clone() };
    }
    if policy.mode == Mode::Observe {
        return Keeping::Nothing;
    }
    let wall = match site(state, policy, &job.id) {
        Site::Wall(wall) => wall,
        Site::Nowhere(why) => return Keeping::Affinity { why },
        Site::Unseen | Site::Unneeded => {
            return Keeping::Affinity { why: "its scheduler's cgroup was not seen yet".to_owned() };
        }
    };
    let outside: Vec<&Member> = members.filter(|member| !state.is_walled(member)).collect();
    if let Some(why) = outside.iter().find_map(|member| why_unmovable(state, policy, member)) {
        return Keeping::Affinity { why };
    }
    let place = state.places.get(&wall.path).and_then(Seen::here);
    if !place.and_then(|place| place.cpuset.as_ref()).is_some_and(|cpuset| fits(&wall.bounds, cpuset)) {
        return Keeping::Affinity { why: format!("{} is not built yet", wall.path) };
    }
    match outside.first() {
        None => Keeping::Cpuset { path: Some(wall.path) },
        Some(member) => {
            Keeping::Affinity { why: format!("process {} is not in {} yet", member.id.pid, wall.path) }
        }
    }
}

fn site(state: &WardenState, policy: &Policy, id: &JobId) -> Site {
    let Some(job) = state.jobs.get(id).filter(|job| !job.let_go) else { return Site::Unneeded };
    let Some(grant) = usable_grant(job, &state.pool.online()) else { return Site::Unneeded };
    if job.grant.as_ref().is_some_and(|grant| grant.granted_by == GrantedBy::Scheduler) {
        return Site::Unneeded;
    }
    if policy.enforcement == Enforcement::Affinity {
        return Site::Nowhere("the configuration says enforcement = \"affinity\"".to_owned());
    }
    if let Some(why) = state.walls.refusal(id) {
        return Site::Nowhere(why.to_owned());
    }
    let (mason, path) = match plot(state, policy, job) {
        Ok(Some(plot)) => plot,
        Ok(None) => return Site::Unseen,
        Err(why) => return Site::Nowhere(why),
    };
    Site::Wall(Wall { job: id.clone(), mason, path, bounds: bounds(state, job, mason, grant) })
}

/// Who is to make the wall's cgroup, and where; `None` before its scheduler's directory was looked at.
fn plot(state: &WardenState, policy: &Policy, job: &Job) -> Result<Option<(Mason, String)>, String> {
    let isolated = job.request.as_ref().is_some_and(|request| request.isolated);
    let own = |mason| Ok(Some((mason, own_path(&job.id, mason, isolated))));
    let cpusets = &policy.ground.cpusets;
    let source = job.id.source();
    match (cpusets, source.is_scheduler()) {
        (Cpusets::Nowhere { why }, _) => Err(why.clone()),
        (Cpusets::Systemd, false) => own(Mason::Systemd),
        (Cpusets::Unified, false) => own(Mason::Warden),
        (Cpusets::Legacy, false) => own(Mason::Warden),
        (_, true) => {
            let Some(path) = &job.cgroup else {
                return if *cpusets == Cpusets::Legacy {
                    own(Mason::Warden)
                } else {
                    Err(format!(
                        "{source} made no cgroup for {}, and its processes stay where {source} watches them",
                        job.id
                    ))
                };
            };
            let Some(seen) = state.places.get(path) else { return Ok(None) };
            match seen.here().and_then(|place| place.cpuset.as_ref()) {
                Some(_) if policy.narrowable.contains(&source) => Ok(Some((Mason::Scheduler, path.clone()))),
                Some(_) => Err(format!("the cpuset of {path} is {source}'s to write")),
                // v1: the cpuset hierarchy is another than the one by which the scheduler knows its processes.
                None if *cpusets == Cpusets::Legacy => own(Mason::Warden),
                None => Err(format!("{path} has no cpuset: {source} doesn't enable that controller")),
            }
        }
    }
}

fn bounds(state: &WardenState, job: &Job, mason: Mason, cpus: CpuSet) -> Bounds {
    let asked =
        |wish: fn(&Request) -> bool| mason != Mason::Scheduler && job.request.as_ref().is_some_and(wish);
    let nodes = state.topology.domains(Level::NumaNode).filter(|node| node.cpus.intersects(&cpus));
    let mems = asked(|request| request.bind_memory)
        .then(|| nodes.map(|node| Pu(node.number)).collect::<CpuSet>())
        .filter(|nodes| !nodes.is_empty());
    Bounds { cpus, mems, isolated: asked(|request| request.isolated) }
}

/// Whether a cpuset is what it should be. The PUs it may use are fewer where the machine has switched some off.
fn fits(bounds: &Bounds, cpuset: &Cpuset) -> bool {
    cpuset.cpus == bounds.cpus
        && cpuset.effective.is_subset(&bounds.cpus)
        && bounds.mems.as_ref().is_none_or(|mems| *mems == cpuset.mems)
        && cpuset.isolated == bounds.isolated
}

fn raise(draft: &mut Draft<'_>, wall: &Wall, works: &mut Works) {
    let state = &*draft.state;
    let known = state.walls.at(&wall.path).cloned();
    let place = state.places.get(&wall.path);
    if known.is_some() && place.is_none() {
        works.busy.insert(wall.job.clone());
        return;
    }
    let place = place.and_then(Seen::here).cloned();
    if wall.mason == Mason::Scheduler && place.is_none() {
        return;
    }
    let cpuset = place.as_ref().and_then(|place| place.cpuset.as_ref());
    let was_there = known.is_some();
    let as_known = known.as_ref().is_some_and(|known| known.wall == *wall && !known.unwanted);
    let stands = cpuset.is_some_and(|cpuset| fits(&wall.bounds, cpuset)) && as_known;
    let concerned = if stands { state.stirred.of(state, &wall.job) } else { None };
    let concerned = concerned.or_else(|| (!stands).then(|| state.members_of(&wall.job).collect()));
    let Some(concerned) = concerned else { return };
    // Masks that were not seen can't be remembered: their look comes in this same cycle.
    if concerned.iter().any(|member| member.threads.is_empty()) {
        works.busy.insert(wall.job.clone());
        return;
    }
    let outside = if wall.mason == Mason::Scheduler { Vec::new() } else { outside(draft, wall, &concerned) };
    let born = born_inside(draft, wall, &concerned);
    if !stands {
        if place.is_none() && outside.is_empty() && !is_inhabited(state, wall) {
            return;
        }
        remember_masks(draft, &wall.job);
        if let Some(known) = &known {
            remember_followers(draft, &known.wall, &wall.bounds.cpus);
        }
        let why = why_raised(wall, place.as_ref(), as_known);
        let founders = outside.iter().map(|(process, _)| *process).collect();
        record(draft, WallRecord::Raised(wall.clone()));
        let change = WallChange::Raise { wall: wall.clone(), founders };
        push(works, &wall.job, change, as_known, why);
    } else if let Some(path) = known.map(|known| known.wall.path) {
        draft.state.walls.settled(&path);
    }
    if !outside.is_empty() {
        remember_masks(draft, &wall.job);
    }
    for (process, from) in born {
        record(draft, WallRecord::Moved { process, from, to: wall.path.clone() });
    }
    // systemd moves the founders of a scope that is not there yet.
    let founded = wall.mason == Mason::Systemd && place.is_none();
    // Of whoever lived behind the wall that was there before, nobody is left.
    let mut anew = was_there && place.is_none();
    for (process, from) in outside {
        let to = wall.path.clone();
        let again = draft.state.walls.was_moved(process, &to);
        // Who comes out of another wall belongs where it came from then.
        let other = draft.state.walls.around(&from);
        let home = other.and_then(|built| home(draft.state, process, &built.wall.path));
        let home = home.unwrap_or_else(|| from.clone());
        if std::mem::take(&mut anew) {
            record(draft, WallRecord::Origin { path: to.clone(), from: home.clone() });
        }
        record(draft, WallRecord::Moved { process, from: home, to: to.clone() });
        if !founded {
            let why = format!("{} is kept in {to}; process {} was in {from}", wall.job, process.pid);
            push(works, &wall.job, WallChange::Admit { process, from, to }, again, why);
        }
    }
}

fn why_raised(wall: &Wall, place: Option<&Cgroup>, as_known: bool) -> String {
    let cpus = &wall.bounds.cpus;
    let found = place.and_then(|place| place.cpuset.as_ref());
    match found {
        Some(found) if as_known => {
            format!("the cpuset of {} was {} and is to be {cpus}", wall.path, shown(&found.cpus))
        }
        _ => format!("{} holds {cpus}: the cpuset of {} keeps it there", wall.job, wall.path),
    }
}

fn shown(cpus: &CpuSet) -> String {
    if cpus.is_empty() { "empty".to_owned() } else { cpus.to_string() }
}

/// Remembers the masks of a job's threads before a cpuset changes under them.
fn remember_masks(draft: &mut Draft<'_>, job: &JobId) {
    let state = &*draft.state;
    let online = state.pool.online();
    // Who was moved out while it was looked at may still have been seen with the mask that its wall had made.
    let made_inside = |process: ProcessId, mask: &CpuSet| {
        let wall = state.walls.of(job).filter(|built| state.walls.was_moved(process, &built.wall.path));
        wall.is_some_and(|built| built.made(mask, &online))
    };
    // Whoever is about to leave an opened wall too.
    let leaving = state.leaving.values().filter(|member| member.job == *job);
    let threads = state
        .members_of(job)
        .chain(leaving)
        .flat_map(|member| member.threads.iter().map(move |(&tid, thread)| (member.id, tid, thread)));
    let bound: Vec<(ThreadId, CpuSet)> = threads
        .filter(|(_, _, thread)| thread.lives() && !online.is_subset(&thread.allowed))
        .map(|(process, tid, thread)| {
            (ThreadId { process, tid, start: thread.start }, thread.allowed.clone())
        })
        .filter(|(id, mask)| !state.touched.contains_key(id) && !made_inside(id.process, mask))
        .filter(|(id, mask)| !is_a_walls(state, id.process.pid, mask))
        .filter(|(id, _)| !bindings::is_unclear(state, *id, draft.now.since_boot))
        .collect();
    for (thread, mask) in bound {
        draft.touch(thread, mask.clone(), mask);
    }
}

/// Whether the wall that a process is in, be it another job's, makes everybody's mask this one.
pub(crate) fn is_a_walls(state: &WardenState, pid: Pid, mask: &CpuSet) -> bool {
    state.wall_around(pid).is_some_and(|built| built.made(mask, &state.pool.online()))
}

/// Before a cpuset changes: threads that had no PU of their own inside, and asked for nothing since, have all of the new one
/// after it. That is no choice of theirs.
fn remember_followers(draft: &mut Draft<'_>, was: &Wall, to: &CpuSet) {
    if was.bounds.cpus == *to {
        return;
    }
    let state = &*draft.state;
    let online = state.pool.online();
    let follows = |touch: &Touch| same(&touch.set, &was.bounds.cpus, &online);
    let inside = state.members_of(&was.job).filter(|member| state.is_walled(member));
    let threads = inside.flat_map(|member| {
        member.threads.iter().map(|(&tid, thread)| ThreadId { process: member.id, tid, start: thread.start })
    });
    let touches = threads.filter_map(|id| Some((id, state.touched.get(&id).filter(|touch| follows(touch))?)));
    let before: Vec<(ThreadId, CpuSet)> = touches.map(|(id, touch)| (id, touch.before.clone())).collect();
    for (thread, before) in before {
        draft.touch(thread, before, to.clone());
    }
}

/// Opens a wall that nobody wants, sends its processes back to where they came from, and removes it.
fn dismantle(draft: &mut Draft<'_>, path: &str, works: &mut Works) {
    let state = &*draft.state;
    let Some(built) = state.walls.at(path).cloned() else { return };
    let wall = built.wall.clone();
    let place = match state.places.get(path) {
        None => return,
        Some(Seen::Gone) => {
            record(draft, WallRecord::Razed { path: path.to_owned() });
            return;
        }
        // What can't be read is neither open nor closed.
        Some(Seen::Here(place)) if place.cpuset.is_none() && !place.is_open_ground() => return,
        Some(Seen::Here(place)) => place.clone(),
    };
    let scheduler = wall.mason == Mason::Scheduler;
    let open = is_open(state, &place);
    // Where its scheduler has written a cpuset of its own meanwhile, that is law and no wall of the warden's.
    let ours = place.cpuset.as_ref().is_some_and(|cpuset| built.wrote(cpuset));
    if scheduler && (open || !ours) {
        record(draft, WallRecord::Razed { path: path.to_owned() });
        return;
    }
    if !built.unwanted {
        remember_masks(draft, &wall.job);
        record(draft, WallRecord::Unwanted { path: path.to_owned() });
    }
    if !open && !draft.state.walls.lingers(path) {
        let why = format!("{} needs {path} no more", wall.job);
        push(works, &wall.job, WallChange::Open { wall: wall.clone() }, false, why);
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
        push(works, &wall.job, WallChange::Return { process, from: path.to_owned(), to }, false, why);
    }
    // Somebody switched the controller off: whoever has nowhere to go is behind no wall here either.
    if place.is_open_ground() && !returning && !staying.is_empty() {
        record(draft, WallRecord::Razed { path: path.to_owned() });
        return;
    }
    let emptied = staying.is_empty() && (returning || !place.populated);
    if emptied && !draft.state.walls.lingers(path) {
        let why = format!("nobody is left in {path}");
        let job = wall.job.clone();
        push(works, &job, WallChange::Raze { wall }, false, why);
    }
}

fn is_open(state: &WardenState, place: &Cgroup) -> bool {
    let online = state.pool.online();
    place
        .cpuset
        .as_ref()
        .is_none_or(|cpuset| (cpuset.cpus.is_empty() || online.is_subset(&cpuset.cpus)) && !cpuset.isolated)
}

fn push(works: &mut Works, job: &JobId, change: WallChange, again: bool, why: String) {
    works.busy.insert(job.clone());
    works.actions.push(WallAction { job: job.clone(), change, again, why });
}

/// Into the book and into the journal.
fn record(draft: &mut Draft<'_>, record: WallRecord) {
    draft.state.walls.take_in(&record);
    draft.records.push(Record::Wall(record));
}
