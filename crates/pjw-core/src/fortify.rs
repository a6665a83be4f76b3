//! Before the masks: which job gets which wall, and what becomes of walls that are not wanted any more.
//!
//! A job whose scheduler grants cores by a cpuset has its wall already. In a scheduler's own directory the warden
//! narrows the cpuset where the source allows it, and makes nothing below (a scheduler's rmdir would fail). Jobs that
//! no scheduler tracks are moved to a cgroup of their own. Whoever can have no wall is kept by masks, and told why.
//!
//! Masks are remembered before a cpuset changes, for a kernel may cut or forget them, and are planned once the wall
//! stands: `confine.rs`.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::bindings;
use crate::confine::usable_grant;
use crate::cpuset::{CpuSet, Pu};
use crate::job::{GrantedBy, Job, JobId, Request};
use crate::membership::Evidence;
use crate::policy::{Mode, Policy};
use crate::process::{Pid, ProcessId, ThreadId};
use crate::reconcile::Draft;
use crate::record::Record;
use crate::snapshot::{Cgroup, Cpuset, Mark, Seen};
use crate::state::{Member, WardenState};
use crate::topology::Level;
use crate::wall::{
    Bounds, Cpusets, Enforcement, Mason, Wall, WallAction, WallChange, WallRecord, lies_in, own_path,
};

mod told;

/// How the names of scopes begin that hold what people started: logins, systemd-run(1), terminals and desktops.
const SCOPES_OF_PEOPLE: [&str; 5] = ["session-", "run-", "app-", "tmux-spawn-", "vte-spawn-"];

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
    for (process, from) in outside {
        let to = wall.path.clone();
        let again = draft.state.walls.was_moved(process, &to);
        // Who comes out of another wall belongs where it came from then.
        let other = draft.state.walls.around(&from).map(|built| built.wall.path.clone());
        let home = other.and_then(|path| draft.state.walls.home_of(process, &path).map(str::to_owned));
        let home = home.unwrap_or_else(|| from.clone());
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

/// Whether members live in the wall's cgroup, as they do where the journal that knew of it was lost.
fn is_inhabited(state: &WardenState, wall: &Wall) -> bool {
    let place = |member: &Member| state.processes.get(&member.id.pid)?.process.cgroup.as_deref();
    state.members_of(&wall.job).any(|member| place(member).is_some_and(|at| lies_in(at, &wall.path)))
}

/// The members that are not in the wall and can be moved there, with the cgroups they are in.
fn outside(draft: &Draft<'_>, wall: &Wall, members: &[&Member]) -> Vec<(ProcessId, String)> {
    let state = &*draft.state;
    let place = |member: &&Member| {
        let at = state.processes.get(&member.id.pid)?.process.cgroup.as_deref()?;
        let to_move = !lies_in(at, &wall.path) && why_unmovable(state, draft.policy, member).is_none();
        to_move.then(|| (member.id, at.to_owned()))
    };
    members.iter().filter_map(place).collect()
}

/// Why a process stays in the cgroup it is in; `None` if it may be moved. Whoever made that cgroup for it may count
/// and kill its processes by it: a scheduler, a service manager, a container runtime.
fn why_unmovable(state: &WardenState, policy: &Policy, member: &Member) -> Option<String> {
    if let Some(why) = state.walls.immobility(member.id) {
        return Some(why.to_owned());
    }
    let known = state.processes.get(&member.id.pid)?;
    let at = known.process.cgroup.as_deref()?;
    let job = state.jobs.get(&member.job)?;
    let in_care = known.claims.claims.iter().find_map(|claim| match &claim.mark {
        Mark::Cgroup(_) if claim.job != member.job || policy.ground.cpusets != Cpusets::Legacy => {
            Some(&claim.job)
        }
        _ => None,
    });
    if let Some(other) = in_care {
        return Some(format!("process {} is in the care of {}", member.id.pid, other.source()));
    }
    // Who was adopted never asked to be moved: a user's service manager may be among them.
    let asked = job.launched && member.evidence != Evidence::Adopted;
    let own_doing = asked || is_free_to_leave(at, &policy.ground.cpusets);
    (!own_doing)
        .then(|| format!("process {} stays in {at}, which a service or a container counts by", member.id.pid))
}

/// Whether nothing depends on processes staying in this cgroup: the root, the scopes of logins and of commands that
/// people started in one, and other walls.
fn is_free_to_leave(at: &str, cpusets: &Cpusets) -> bool {
    let walls = ["/pjw", "/pjw.slice"].iter().any(|own| lies_in(at, own)) || at.starts_with("/pjw-");
    let scope = at.rsplit('/').next().and_then(|name| name.strip_suffix(".scope"));
    let of_people = |name: &str| SCOPES_OF_PEOPLE.iter().any(|start| name.starts_with(start));
    let unmanaged = *cpusets == Cpusets::Unified && !at.contains(".service") && !at.contains(".scope");
    at == "/" || walls || scope.is_some_and(of_people) || unmanaged
}

/// Who was born behind a wall belongs where its parent came from.
fn born_inside(draft: &Draft<'_>, wall: &Wall, members: &[&Member]) -> Vec<(ProcessId, String)> {
    if wall.mason == Mason::Scheduler {
        return Vec::new();
    }
    let state = &*draft.state;
    let home = |member: &&Member| {
        let process = &state.processes.get(&member.id.pid)?.process;
        let inside = process.cgroup.as_deref().is_some_and(|at| lies_in(at, &wall.path));
        if !inside || state.walls.was_moved(member.id, &wall.path) {
            return None;
        }
        let parent = state.members.get(&process.parent).map(|parent| parent.id);
        let home = state.walls.home_of(parent.unwrap_or(member.id), &wall.path)?;
        Some((member.id, home.to_owned()))
    };
    members.iter().filter_map(home).collect()
}

/// Remembers the masks of a job's threads before a cpuset changes under them.
fn remember_masks(draft: &mut Draft<'_>, job: &JobId) {
    let state = &*draft.state;
    let online = state.pool.online();
    let threads = state
        .members_of(job)
        .flat_map(|member| member.threads.iter().map(move |(&tid, thread)| (member.id, tid, thread)));
    let bound: Vec<(ThreadId, CpuSet)> = threads
        .filter(|(_, _, thread)| thread.lives() && !online.is_subset(&thread.allowed))
        .map(|(process, tid, thread)| {
            (ThreadId { process, tid, start: thread.start }, thread.allowed.clone())
        })
        .filter(|(id, mask)| !state.touched.contains_key(id) && !is_a_walls(state, id.process.pid, mask))
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

/// Who is in a wall, and where they belong; `None` where that place is gone.
fn returns(state: &WardenState, path: &str) -> Vec<(ProcessId, Option<String>)> {
    let inside = |at: &Option<Arc<str>>| at.as_deref().is_some_and(|at| lies_in(at, path));
    let processes = state.processes.values().map(|known| &known.process);
    processes
        .filter(|process| inside(&process.cgroup) && process.id.pid != Pid(1))
        .map(|process| {
            let home = state.walls.home_of(process.id, path).map(str::to_owned);
            (process.id, home.filter(|_| state.walls.immobility(process.id).is_none()))
        })
        .collect()
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
