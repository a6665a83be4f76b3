//! Last phase of a cycle: the masks that should be, compared with the masks that are.
//!
//! A thread's *wish* is the mask it has by its own doing: the one it was found with, or one it set since. The
//! *home* of a thread is what its wish becomes inside its job's grant. The warden repairs what is outside and
//! pins what runs; a tighter mask of the program's own inside the grant is kept. What the warden writes is
//! remembered with the wish it covers, so that letting go puts the wish back.

use std::collections::{BTreeMap, BTreeSet};

use crate::balance::{Freedom, Runner, balance};
use crate::bindings;
use crate::cpuset::{CpuSet, Pu};
use crate::event::{Event, EventKind};
use crate::fortify::{self, Works, is_a_walls};
use crate::job::{Job, JobId};
use crate::plan::{Action, ActionKind, Plan};
use crate::policy::{Oversubscribed, Policy};
use crate::process::{ProcessId, ThreadId, Tid};
use crate::reconcile::Draft;
use crate::state::{Member, MemberThread, WardenState};
use crate::topology::Topology;
use crate::touch::Touch;
use crate::{asks, strays};

/// Plans the changes of masks, restoring first: a job that was let go should not keep a new job's cores busy.
pub(crate) fn plan(draft: &mut Draft<'_>) -> Plan {
    let Works { actions: walls, busy } = fortify::plan(draft);
    let kept_off = strays::keep_off(draft);
    let mut actions = restore(draft);
    actions.extend(kept_off);
    let ids: Vec<JobId> = draft.state.jobs.keys().cloned().collect();
    for id in ids {
        actions.extend(confine_job(draft, &id, busy.contains(&id)));
    }
    // Whose walls are in work is looked at again once they stand.
    busy.iter().for_each(|job| draft.unsettled.add_job(job));
    Plan { walls, actions }
}

/// Where a wish leads inside a grant: see the module's head. `inherited` is the mask of whoever started the
/// job; it says nothing about what the program wants.
#[must_use]
pub(crate) fn home(topology: &Topology, grant: &CpuSet, wish: &CpuSet, inherited: Option<&CpuSet>) -> CpuSet {
    let unasked = inherited == Some(wish);
    if unasked || grant.is_subset(wish) || topology.cpus().is_subset(wish) {
        return grant.clone();
    }
    if wish.is_subset(grant) && !wish.is_empty() {
        return wish.clone();
    }
    translate(topology, grant, wish)
}

/// The k-th PU of the machine becomes the k-th of the grant, both counted in the machine's order and the grant
/// starting over at its end, so that ranks bound to PUs 0, 1, 2, … of the machine don't pile up on one core.
fn translate(topology: &Topology, grant: &CpuSet, wish: &CpuSet) -> CpuSet {
    let seats = topology.ordered(grant);
    let ranks = topology.order().iter().enumerate().filter(|(_, pu)| wish.contains(**pu));
    let translated: CpuSet =
        ranks.filter_map(|(rank, _)| seats.get(rank % seats.len().max(1))).copied().collect();
    if translated.is_empty() { grant.clone() } else { translated }
}

/// What a thread's present mask is.
enum Standing {
    /// What the warden made it, or the whole grant.
    Warden {
        /// The wish underneath.
        wish: CpuSet,
    },
    /// Its own choice, inside the grant.
    Own,
    /// Outside the grant.
    Outside {
        /// Whether it had been put inside before.
        again: bool,
    },
}

/// Where a thread is to stay, and what helps with that.
struct Enclosure<'a> {
    grant: &'a CpuSet,
    online: &'a CpuSet,
    /// Whether a cpuset holds it there.
    walled: bool,
    /// See [`crate::wall::Ground::masks_last`].
    masks_last: bool,
    /// See [`bindings::steady`], where the kernel forgets masks.
    steady: Option<&'a CpuSet>,
}

fn standing(thread: &MemberThread, touch: Option<&Touch>, enclosure: &Enclosure<'_>) -> Standing {
    let Enclosure { grant, online, walled, masks_last, steady } = *enclosure;
    let may_be_cut = |on| bindings::may_be_cut(&thread.allowed, grant, on);
    let cut = |touch: &Touch| {
        walled && (steady.is_some_and(may_be_cut) || touch.cut_to(&thread.allowed, grant, masks_last))
    };
    let ours =
        touch.filter(|touch| touch.made(&thread.allowed, online) || touch.is_dark(online) || cut(touch));
    if let Some(touch) = ours {
        return Standing::Warden { wish: touch.before.clone() };
    }
    match (thread.allowed.is_subset(grant), touch) {
        (true, None) if thread.allowed == *grant => Standing::Warden { wish: thread.allowed.clone() },
        (true, _) => Standing::Own,
        (false, touch) => Standing::Outside { again: touch.is_some() },
    }
}

/// A thread of the job with everything that decides about its mask.
struct Seat<'a> {
    id: ThreadId,
    thread: &'a MemberThread,
    wish: CpuSet,
    home: CpuSet,
    standing: Standing,
    pinned: Option<Pu>,
    cut_from: Option<CpuSet>,
    /// Whether its own PU is that of other ranks too while others idle.
    stacked: bool,
    /// Whether a cpuset holds it inside.
    walled: bool,
    /// Whether a mask from elsewhere lies under the cpuset, out of sight: the kernel would bring it out again in
    /// another cgroup, and gives it to children.
    hidden: bool,
}

fn confine_job(draft: &mut Draft<'_>, id: &JobId, walls_in_work: bool) -> Vec<Action> {
    let Some(job) = draft.state.jobs.get(id).cloned() else { return Vec::new() };
    let online = draft.state.pool.online();
    if job.grant.is_none() || job.let_go {
        return unconfine(draft, id, &online);
    }
    if walls_in_work {
        // Its masks wait for them.
        return Vec::new();
    }
    let Some(grant) = usable_grant(&job, &online) else { return Vec::new() };
    let Some(concerned) = draft.state.stirred.of(draft.state, id) else { return Vec::new() };
    let mut seats = seats(draft, &grant, concerned);
    part_stacks(&mut seats, &grant);
    let pins = pins(draft, id, &grant, &seats);

    let mut actions = Vec::new();
    let mut settled = Vec::new();
    for seat in seats {
        let pin = pins.get(&seat.id).copied();
        let loose = if seat.stacked { &grant } else { &seat.home };
        let to = pin.map_or_else(|| loose.clone(), CpuSet::from);
        let is_cut = seat.cut_from.as_ref() == Some(&to) && seat.thread.allowed != to;
        if is_cut && matches!(seat.standing, Standing::Warden { .. }) {
            continue;
        }
        let own = matches!(seat.standing, Standing::Own) && pin.is_none() && !seat.stacked;
        let hidden = seat.hidden && to == grant && pin.is_none();
        if own || (seat.thread.allowed == to && !hidden) {
            settled.push((seat.id, own, seat.wish, to));
            continue;
        }
        let kind = kind_of(&seat, pin);
        let why = reason(kind, &seat, &to, id, &grant);
        actions.push((
            Action {
                kind,
                job: id.clone(),
                thread: seat.id,
                from: seat.thread.allowed.clone(),
                to,
                walled: seat.walled,
                why,
            },
            seat.wish,
        ));
    }
    for (thread, own, wish, set) in settled {
        if own {
            draft.untouch(thread);
        } else if draft.state.touched.contains_key(&thread) {
            draft.touch(thread, wish, set);
        }
    }
    for (action, wish) in &actions {
        draft.touch(action.thread, wish.clone(), action.to.clone());
    }
    let actions: Vec<Action> = actions.into_iter().map(|(action, _)| action).collect();
    tell_violations(draft, id, &grant, &actions);
    actions
}

/// What a job holds of the PUs that are on; `None` if that is nothing.
pub(crate) fn usable_grant(job: &Job, online: &CpuSet) -> Option<CpuSet> {
    let grant = job.grant.as_ref()?.cpus.intersection(online);
    (!grant.is_empty()).then_some(grant)
}

fn seats<'a>(draft: &'a Draft<'_>, grant: &CpuSet, members: Vec<&'a Member>) -> Vec<Seat<'a>> {
    let state = &*draft.state;
    let online = &state.pool.online();
    let masks_last = draft.policy.ground.masks_last;
    let steady = bindings::steady(state, draft.now.since_boot).filter(|_| !masks_last);
    let steady = steady.as_ref();
    let seat = |member: &'a Member, walled: bool, tid: Tid, thread: &'a MemberThread| {
        let id = ThreadId { process: member.id, tid, start: thread.start };
        let touch = state.touched.get(&id);
        let enclosure = Enclosure { grant, online, walled, masks_last, steady };
        let standing = standing(thread, touch, &enclosure);
        let wish = match &standing {
            // Inside a scheduler's cpuset every mask looks like the cpuset: what was asked for can't be read, and
            // is everything unless a program said otherwise.
            Standing::Warden { .. } if walled && touch.is_none() => state.topology.cpus().clone(),
            Standing::Warden { wish } => wish.clone(),
            // Who may run wherever a PU is on will want those that are off now when they come back.
            Standing::Outside { .. } if online.is_subset(&thread.allowed) => state.topology.cpus().clone(),
            Standing::Own | Standing::Outside { .. } if is_a_walls(state, member.id.pid, &thread.allowed) => {
                state.topology.cpus().clone()
            }
            Standing::Own | Standing::Outside { .. } => thread.allowed.clone(),
        };
        let home = home(&state.topology, grant, &wish, member.inherited.as_ref());
        // A mask that nobody asked for is no binding, however tight.
        let standing = match standing {
            Standing::Own if home == *grant => Standing::Outside { again: walled && touch.is_some() },
            other => other,
        };
        let pinned = touch.and_then(|touch| touch.set.single()).filter(|&pu| home.single() != Some(pu));
        let cut_from = touch.and_then(|touch| touch.cut_from.clone());
        let everything = state.topology.cpus();
        let from_elsewhere =
            touch.is_some_and(|touch| touch.set != *grant && !everything.is_subset(&touch.set));
        let hidden = walled && masks_last && from_elsewhere && matches!(standing, Standing::Warden { .. });
        Seat { id, thread, wish, home, standing, pinned, cut_from, stacked: false, walled, hidden }
    };
    members
        .into_iter()
        .map(|member| (member, state.is_walled(member)))
        .flat_map(|(member, walled)| {
            member.threads.iter().map(move |(&tid, thread)| (member, walled, tid, thread))
        })
        .filter(|(_, _, _, thread)| thread.lives())
        .map(|(member, walled, tid, thread)| seat(member, walled, tid, thread))
        .collect()
}

/// Finds ranks that bound themselves to one PU while others of the grant idle, as two launchers in one job do that
/// know nothing of each other: all but the first give way. Threads of one process that share a PU are left alone:
/// that program knows of them.
fn part_stacks(seats: &mut [Seat<'_>], grant: &CpuSet) {
    let mut ranks: BTreeMap<Pu, BTreeSet<ProcessId>> = BTreeMap::new();
    let mut floaters = 0;
    for seat in seats.iter().filter(|seat| seat.thread.demand.hot) {
        match seat.home.single() {
            Some(pu) => drop(ranks.entry(pu).or_default().insert(seat.id.process)),
            None => floaters += 1,
        }
    }
    let idle = grant.len().saturating_sub(ranks.len() + floaters);
    if idle == 0 {
        return;
    }
    for seat in seats.iter_mut().filter(|seat| seat.thread.demand.hot) {
        let sharing = seat.home.single().and_then(|pu| ranks.get(&pu));
        seat.stacked = sharing.and_then(BTreeSet::first).is_some_and(|first| *first != seat.id.process);
    }
}

/// Which threads are pinned where. In an isolated partition the kernel balances nothing, and every thread needs a PU.
fn pins(draft: &Draft<'_>, id: &JobId, grant: &CpuSet, seats: &[Seat<'_>]) -> BTreeMap<ThreadId, Pu> {
    let topology = &draft.state.topology;
    if !draft.state.walls.of(id).is_some_and(|built| built.wall.bounds.isolated) {
        let runners: Vec<Runner> = seats.iter().filter_map(|seat| runner(seat, grant)).collect();
        return balance(topology, grant, &runners, draft.policy);
    }
    let mut inside: Vec<&Seat<'_>> = seats.iter().filter(|seat| seat.walled).collect();
    inside.sort_by_key(|seat| !seat.thread.demand.hot);
    let runners: Vec<Runner> = inside.into_iter().filter_map(|seat| placed(seat, grant)).collect();
    let rules = Policy { pin: true, oversubscribed: Oversubscribed::Spread, ..draft.policy.clone() };
    balance(topology, grant, &runners, &rules)
}

/// A hot thread, as the balance sees it. Threads bound to several PUs of their own choice are left to the kernel.
fn runner(seat: &Seat<'_>, grant: &CpuSet) -> Option<Runner> {
    placed(seat, grant).filter(|_| seat.thread.demand.hot)
}

fn placed(seat: &Seat<'_>, grant: &CpuSet) -> Option<Runner> {
    let freedom = match seat.home.single() {
        _ if seat.home == *grant || seat.stacked => Freedom::Floater { pinned: seat.pinned },
        Some(pu) => Freedom::Bound(pu),
        None => return None,
    };
    Some(Runner { thread: seat.id, last_cpu: seat.thread.last_cpu, freedom })
}

fn kind_of(seat: &Seat<'_>, pin: Option<Pu>) -> ActionKind {
    match (&seat.standing, pin) {
        (Standing::Outside { again: true }, _) => ActionKind::Repair,
        (Standing::Outside { again: false }, _) => ActionKind::Confine,
        (Standing::Warden { .. } | Standing::Own, Some(_)) => ActionKind::Pin,
        (Standing::Warden { .. } | Standing::Own, None) => {
            if seat.pinned.is_some() {
                ActionKind::Float
            } else {
                ActionKind::Confine
            }
        }
    }
}

fn reason(kind: ActionKind, seat: &Seat<'_>, to: &CpuSet, job: &JobId, grant: &CpuSet) -> String {
    let from = &seat.thread.allowed;
    let demand = seat.thread.demand.permille / 10;
    match kind {
        ActionKind::Confine if seat.hidden => {
            format!("the cpuset of {job} holds it on {grant}: a mask from elsewhere is lifted")
        }
        ActionKind::Confine if *to == *grant => format!("{job} holds {grant}; the thread may run on {from}"),
        ActionKind::Confine => {
            format!("{job} holds {grant}; the thread's own {} becomes {to} there", seat.wish)
        }
        ActionKind::Repair if from.is_subset(grant) => {
            format!("the thread asked for more than its share: the cpuset of {job} kept it on {from}")
        }
        ActionKind::Repair => format!("the thread left {grant} of {job}: it was found on {from}"),
        ActionKind::Pin if seat.stacked => {
            format!(
                "other ranks of {job} chose {} too while PUs of {grant} idle: this one runs beside them",
                seat.wish
            )
        }
        ActionKind::Pin => format!("the thread runs {demand} % of the time: one PU of {grant} for it"),
        ActionKind::Float => format!("the thread runs {demand} % of the time: it may use all of {to}"),
        ActionKind::KeepOff | ActionKind::Restore => format!("{job} let go of it: back to {to}"),
    }
}

/// A violation is told when it is seen, once for each process, unless that was told when the thread asked for it; that it
/// was repaired, when that is done.
fn tell_violations(draft: &mut Draft<'_>, job: &JobId, grant: &CpuSet, actions: &[Action]) {
    let asks::Told { processes: mut told, threads: askers } = std::mem::take(&mut draft.told);
    for action in actions.iter().filter(|action| action.kind == ActionKind::Repair) {
        let pid = action.thread.process.pid;
        let asker = (action.thread.process, action.thread.tid);
        draft.state.askers.remove(&asker);
        let inside = action.from.is_subset(grant);
        // Who asked inside a wall and was moved out of it is another matter.
        let is_told = inside && askers.contains(&asker);
        if !is_told && told.insert(pid) {
            let text = if inside {
                format!("a thread of process {pid} asked for every PU: its cpuset kept it on {}", action.from)
            } else {
                format!("a thread of process {pid} left {grant}: found on {}", action.from)
            };
            let mut event = Event::new(EventKind::Violation, text).of(job).at(pid).with_cpus(&action.from);
            event.tid = Some(action.thread.tid);
            draft.events.push(event);
        }
    }
    draft.told = asks::Told { processes: told, threads: askers };
}

/// The threads of a job without cores of its own must not stay on those of others: they get their masks back,
/// and are members still.
fn unconfine(draft: &mut Draft<'_>, id: &JobId, online: &CpuSet) -> Vec<Action> {
    let (mut actions, mut done) = (Vec::new(), Vec::new());
    let masks_last = draft.policy.ground.masks_last;
    let Some(members) = draft.state.stirred.of(draft.state, id) else { return actions };
    for member in members {
        let (back, settled) = put_back(draft.state, member, online, masks_last);
        actions.extend(back);
        done.extend(settled);
    }
    // Only after a full look: see `restore`.
    if draft.full && !draft.state.walls.is_leaving(id) {
        done.into_iter().for_each(|thread| draft.untouch(thread));
    }
    actions
}

/// What it takes to give a process's threads their own masks back, and those that have them.
fn put_back(
    state: &WardenState,
    member: &Member,
    online: &CpuSet,
    masks_last: bool,
) -> (Vec<Action>, Vec<ThreadId>) {
    let mut actions = Vec::new();
    let mut settled = Vec::new();
    for (&tid, thread) in member.threads.iter().filter(|(_, thread)| thread.lives()) {
        let id = ThreadId { process: member.id, tid, start: thread.start };
        let Some(touch) = state.touched.get(&id) else { continue };
        let Some(to) = to_put_back(touch, &thread.allowed, online, masks_last) else {
            settled.push(id);
            continue;
        };
        let why = format!("{} has no cores of its own: back to {to}", member.job);
        let (from, job) = (thread.allowed.clone(), member.job.clone());
        actions.push(Action { kind: ActionKind::Restore, job, thread: id, from, to, walled: false, why });
    }
    (actions, settled)
}

/// Gives the threads of jobs that were let go their own masks back, and forgets those that have them. Who has
/// them is forgotten only after a full look: a child that was born before its parent's mask was put back is
/// known by the mask it has from it.
fn restore(draft: &mut Draft<'_>) -> Vec<Action> {
    let online = draft.state.pool.online();
    let mut actions = Vec::new();
    let mut gone: Vec<ProcessId> = Vec::new();
    let masks_last = draft.policy.ground.masks_last;
    let let_go = draft.state.leaving.values().filter(|member| !draft.state.aside.contains(&member.id.pid));
    for member in let_go {
        let (back, _) = put_back(draft.state, member, &online, masks_last);
        let enclosed = draft.state.walls.is_leaving(&member.job);
        if back.is_empty() && !member.threads.is_empty() && !enclosed {
            gone.push(member.id);
        }
        actions.extend(back);
    }
    if !draft.full {
        return actions;
    }
    for process in gone {
        let touched: Vec<ThreadId> = draft.state.touched_in(process).map(|(&id, _)| id).collect();
        touched.into_iter().for_each(|id| draft.untouch(id));
        draft.state.leaving.remove(&process.pid);
    }
    actions
}

/// The mask that a thread lacks, unless it chose another meanwhile or can't have it.
fn to_put_back(touch: &Touch, allowed: &CpuSet, online: &CpuSet, masks_last: bool) -> Option<CpuSet> {
    let before = touch.before.intersection(online);
    let dark = touch.is_dark(online);
    // What an older kernel makes of every mask when a wall is opened.
    let forgotten = !masks_last && online.is_subset(allowed);
    let by_warden = touch.made(allowed, online) || dark || forgotten;
    // A cpuset made less of it: that is all it will get.
    let cut = touch.cut_from.as_ref() == Some(&touch.before);
    let settled = !by_warden || cut || (before == *allowed && !dark) || before.is_empty();
    (!settled).then(|| touch.before.clone())
}
