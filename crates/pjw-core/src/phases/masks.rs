//! Last phase of a cycle: the masks that threads should have, compared with the masks that the kernel shows.
//!
//! The *original* mask of a thread is the one that a release puts back: see [`crate::state::masks`]. Its *target* is what
//! the original becomes inside the grant of its job. Threads that run are pinned to one PU of the target. A thread outside
//! of the grant is restricted to the grant again; a tighter mask that the program chose inside the grant is its own target.

use crate::basics::prelude::*;
use crate::basics::{CpuSet, Pid, ProcessId, Pu, ThreadId};
use crate::phases::attempts::ReportedAttempts;
use crate::phases::draft::Draft;
use crate::phases::observe::make_missing_masks;
use crate::phases::pinning::{HotThread, ThreadAffinity, balance};
use crate::state::{MaskEntry, Member, MemberThread, WardenState, target_mask};
use crate::terms::{Action, ActionKind, Event, EventKind, JobId, Oversubscribed, Policy, usable_grant};

/// Plans the affinity masks of all jobs. The masks of the jobs in `busy` wait for their cpusets. `told` contains the
/// violations that were reported already.
pub(crate) fn plan(draft: &mut Draft<'_>, busy: &BTreeSet<JobId>, mut told: ReportedAttempts) -> Vec<Action> {
    let mut actions = Vec::new();
    let ids: Vec<JobId> = draft.state.jobs.keys().cloned().collect();
    for id in ids {
        actions.extend(confine_job(draft, &id, busy.contains(&id), &mut told));
    }
    // Jobs whose cpusets change are planned again after the change.
    busy.iter().for_each(|job| draft.still_dirty.add_job(job));
    actions
}

/// A thread of the job with everything that decides about its mask.
struct ThreadPlan<'a> {
    id: ThreadId,
    thread: &'a MemberThread,
    entry: &'a MaskEntry,
    /// The mask that it should have, unless it is pinned.
    target: CpuSet,
    /// The PU to which pjw pinned it.
    pinned: Option<Pu>,
    /// Whether it chose the same PU as another process while PUs of the grant idle.
    shares_pu: bool,
    /// Whether the cpuset of the job holds it.
    in_cpuset: bool,
    /// Whether that cpuset is exactly the grant, so that a thread that requests every PU gets the grant.
    follows_cpuset: bool,
}

impl ThreadPlan<'_> {
    /// Whether the program requested a mask that is not within the grant, or every PU, after pjw had set its mask.
    fn has_left(&self, grant: &CpuSet) -> bool {
        let asked_for_all = self.in_cpuset && self.target == *grant;
        self.entry.has_left() && (asked_for_all || !self.thread.allowed.is_subset(grant))
    }

    /// The mask for sched_setaffinity(2) that makes the effective mask `to`.
    fn request(&self, to: &CpuSet, grant: &CpuSet, machine: &CpuSet, online: &CpuSet) -> CpuSet {
        let is_everything = online.is_subset(to) || (self.follows_cpuset && to == grant);
        if is_everything { machine.clone() } else { to.clone() }
    }

    /// Whether the kernel remembers a request of pjw that the cpuset hides: the request would take effect in another
    /// cgroup, and children inherit it.
    fn is_request_hidden(&self, grant: &CpuSet) -> bool {
        let requested = self.entry.requested().filter(|_| !self.entry.is_programs());
        self.follows_cpuset && requested.is_some_and(|requested| !grant.is_subset(requested))
    }
}

fn confine_job(
    draft: &mut Draft<'_>,
    id: &JobId,
    waits_for_cpuset: bool,
    told: &mut ReportedAttempts,
) -> Vec<Action> {
    let Some(job) = draft.state.jobs.get(id).cloned() else { return Vec::new() };
    let online = draft.state.pool.online();
    if job.grant.is_none() || job.released {
        return unconfine(draft, id);
    }
    if waits_for_cpuset {
        return Vec::new();
    }
    let Some(grant) = usable_grant(&job, &online) else { return Vec::new() };
    make_masks_of(draft, id);
    let Some(concerned) = draft.state.members.concerned(&draft.state.dirty, id) else { return Vec::new() };
    let mut plans = thread_plans(draft, &grant, concerned);
    find_shared_pus(&mut plans, &grant);
    let pins = pins(draft, id, &grant, &plans);
    let machine = draft.state.topology.cpus();

    let mut actions = Vec::new();
    let mut own = Vec::new();
    for plan in plans {
        let pin = pins.get(&plan.id).copied();
        let unpinned = if plan.shares_pu { &grant } else { &plan.target };
        let to = pin.map_or_else(|| unpinned.clone(), CpuSet::from);
        let requested = plan.request(&to, &grant, machine, &online);
        let is_lifted = to == grant && plan.is_request_hidden(&grant);
        let is_requested = !plan.entry.is_programs() && plan.entry.requested() == Some(&requested);
        if is_requested || (plan.thread.allowed == to && !is_lifted) {
            own.extend((plan.entry.is_programs() && plan.thread.allowed == to).then_some(plan.id));
            continue;
        }
        let kind = kind_of(&plan, pin, &grant);
        let why = reason(kind, &plan, &to, id, &grant, is_lifted);
        let from = plan.thread.allowed.clone();
        let original = plan.entry.original().clone();
        actions.push((Action { kind, job: id.clone(), thread: plan.id, from, to, requested, why }, original));
    }
    own.into_iter().for_each(|thread| draft.stop_keeping(thread));
    for (action, original) in &actions {
        draft.begin_write(action.thread, &action.requested, original);
    }
    let actions: Vec<Action> = actions.into_iter().map(|(action, _)| action).collect();
    report_violations(draft, id, &grant, &actions, told);
    actions
}

/// Makes the mask entries of threads whose cpuset was unread when they were scanned.
fn make_masks_of(draft: &mut Draft<'_>, id: &JobId) {
    let members = draft.state.members.concerned(&draft.state.dirty, id).unwrap_or_default();
    let lacks_mask =
        |member: &&Member| member.threads.values().any(|thread| thread.mask.is_none() && thread.lives());
    let pids: Vec<Pid> = members.into_iter().filter(lacks_mask).map(|member| member.id.pid).collect();
    pids.into_iter().for_each(|pid| make_missing_masks(draft, pid, &[]));
}

fn thread_plans<'a>(draft: &'a Draft<'_>, grant: &CpuSet, members: Vec<&'a Member>) -> Vec<ThreadPlan<'a>> {
    let state = &*draft.state;
    let mut plans = Vec::new();
    for member in members {
        let in_cpuset = state.is_in_job_cpuset(member);
        let follows_cpuset = in_cpuset && state.cpuset_read_around(member.id.pid) == Some(grant);
        for (&tid, thread) in member.threads.iter().filter(|(_, thread)| thread.lives()) {
            let Some(entry) = &thread.mask else { continue };
            let id = ThreadId { process: member.id, tid, start: thread.start };
            let target = target_mask(&state.topology, grant, entry.original(), member.inherited.as_ref());
            let pinned = entry.pin().filter(|&pin| target.single() != Some(pin));
            plans.push(ThreadPlan {
                id,
                thread,
                entry,
                target,
                pinned,
                shares_pu: false,
                in_cpuset,
                follows_cpuset,
            });
        }
    }
    plans
}

/// Finds processes that chose the same PU while other PUs of the grant are idle, as two launchers in one job do. All
/// but the first get another PU. Except threads of one process that share a PU: their program chose that.
fn find_shared_pus(plans: &mut [ThreadPlan<'_>], grant: &CpuSet) {
    let mut processes: BTreeMap<Pu, BTreeSet<ProcessId>> = BTreeMap::new();
    let mut floating = 0;
    for plan in plans.iter().filter(|plan| plan.thread.demand.hot) {
        match plan.target.single() {
            Some(pu) => drop(processes.entry(pu).or_default().insert(plan.id.process)),
            None => floating += 1,
        }
    }
    let idle = grant.len().saturating_sub(processes.len() + floating);
    if idle == 0 {
        return;
    }
    for plan in plans.iter_mut().filter(|plan| plan.thread.demand.hot) {
        let sharing = plan.target.single().and_then(|pu| processes.get(&pu));
        plan.shares_pu = sharing.and_then(BTreeSet::first).is_some_and(|first| *first != plan.id.process);
    }
}

/// Chooses the PUs to which threads are pinned. In an isolated partition the kernel does not balance threads between
/// PUs, so every thread is pinned.
fn pins(draft: &Draft<'_>, id: &JobId, grant: &CpuSet, plans: &[ThreadPlan<'_>]) -> BTreeMap<ThreadId, Pu> {
    let topology = &draft.state.topology;
    if !draft.state.cpusets.of(id).is_some_and(|managed| managed.job_cpuset.spec.isolated) {
        let hot = plans.iter().filter(|plan| plan.thread.demand.hot);
        let runners: Vec<HotThread> = hot.filter_map(|plan| runner(plan, grant)).collect();
        return balance(topology, grant, &runners, draft.policy);
    }
    let mut inside: Vec<&ThreadPlan<'_>> = plans.iter().filter(|plan| plan.in_cpuset).collect();
    inside.sort_by_key(|plan| !plan.thread.demand.hot);
    let runners: Vec<HotThread> = inside.into_iter().filter_map(|plan| runner(plan, grant)).collect();
    let rules = Policy { pin: true, oversubscribed: Oversubscribed::Spread, ..draft.policy.clone() };
    balance(topology, grant, &runners, &rules)
}

/// A thread for the placement of running threads. Threads that chose several PUs are left to the kernel.
fn runner(plan: &ThreadPlan<'_>, grant: &CpuSet) -> Option<HotThread> {
    let affinity = match plan.target.single() {
        _ if plan.target == *grant || plan.shares_pu => ThreadAffinity::Floating { pinned: plan.pinned },
        Some(pu) => ThreadAffinity::Bound(pu),
        None => return None,
    };
    Some(HotThread { thread: plan.id, last_cpu: plan.thread.last_cpu, affinity })
}

fn kind_of(plan: &ThreadPlan<'_>, pin: Option<Pu>, grant: &CpuSet) -> ActionKind {
    if plan.has_left(grant) {
        return ActionKind::Repair;
    }
    match pin {
        _ if !plan.thread.allowed.is_subset(grant) => ActionKind::Confine,
        Some(_) => ActionKind::Pin,
        None if plan.pinned.is_some() => ActionKind::Float,
        None => ActionKind::Confine,
    }
}

fn reason(
    kind: ActionKind,
    plan: &ThreadPlan<'_>,
    to: &CpuSet,
    job: &JobId,
    grant: &CpuSet,
    is_lifted: bool,
) -> String {
    let from = &plan.thread.allowed;
    let demand = plan.thread.demand.permille / 10;
    let original = plan.entry.original();
    match kind {
        ActionKind::Confine if is_lifted => {
            format!("the cpuset of {job} holds it on {grant}: a mask from elsewhere is lifted")
        }
        ActionKind::Confine if *to == *grant => format!("{job} holds {grant}; the thread may run on {from}"),
        ActionKind::Confine => {
            format!("{job} holds {grant}; the thread's own {original} becomes {to} there")
        }
        ActionKind::Repair if from.is_subset(grant) => {
            format!("the thread asked for more than its share: the cpuset of {job} kept it on {from}")
        }
        ActionKind::Repair => format!("the thread left {grant} of {job}: it was found on {from}"),
        ActionKind::Pin if plan.shares_pu => {
            format!(
                "other ranks of {job} chose {original} too while PUs of {grant} idle: this one runs beside them"
            )
        }
        ActionKind::Pin => format!("the thread runs {demand} % of the time: one PU of {grant} for it"),
        ActionKind::Float => format!("the thread runs {demand} % of the time: it may use all of {to}"),
        ActionKind::KeepOff | ActionKind::Restore => format!("{job} let go of it: back to {to}"),
    }
}

/// Reports each violation when a scan finds it, once for each process. Except a violation that was reported when the
/// thread requested the mask.
fn report_violations(
    draft: &mut Draft<'_>,
    job: &JobId,
    grant: &CpuSet,
    actions: &[Action],
    told: &mut ReportedAttempts,
) {
    let ReportedAttempts { processes: told, threads: affinity_requesters } = told;
    for action in actions.iter().filter(|action| action.kind == ActionKind::Repair) {
        let pid = action.thread.process.pid;
        let asker = (action.thread.process, action.thread.tid);
        draft.state.affinity_requesters.remove(&asker);
        let inside = action.from.is_subset(grant);
        // An affinity request in a cpuset, and a later move out of that cpuset, are two violations.
        let is_told = inside && affinity_requesters.contains(&asker);
        if !is_told && told.insert(pid) {
            let text = if inside {
                format!("a thread of process {pid} asked for every PU: its cpuset kept it on {}", action.from)
            } else {
                format!("a thread of process {pid} left {grant}: found on {}", action.from)
            };
            let mut event =
                Event::new(EventKind::Violation, text).with_job(job).with_pid(pid).with_cpus(&action.from);
            event.tid = Some(action.thread.tid);
            draft.out.event(event);
        }
    }
}

/// The threads of a job that holds no cores must not stay on those of other jobs: they get their original masks back, and
/// their processes stay members.
fn unconfine(draft: &mut Draft<'_>, id: &JobId) -> Vec<Action> {
    let Some(members) = draft.state.members.concerned(&draft.state.dirty, id) else { return Vec::new() };
    let (actions, done): (Vec<_>, Vec<_>) =
        members.into_iter().map(|member| put_back(draft.state, member)).unzip();
    let (actions, done) = (actions.concat(), done.concat());
    // Only after a full scan: see `restore`.
    if draft.full && !draft.state.cpusets.has_pending_removal(id) {
        done.into_iter().for_each(|thread| draft.stop_keeping(thread));
    }
    begin_restores(draft, &actions);
    actions
}

/// The actions that give the threads of a process their original masks back, and the threads that have them.
fn put_back(state: &WardenState, member: &Member) -> (Vec<Action>, Vec<ThreadId>) {
    let online = state.pool.online();
    let mut actions = Vec::new();
    let mut done = Vec::new();
    for (&tid, thread) in member.threads.iter().filter(|(_, thread)| thread.lives()) {
        let id = ThreadId { process: member.id, tid, start: thread.start };
        let Some(entry) = &thread.mask else { continue };
        let to = entry.original().clone();
        // A mask without an online PU can't be requested.
        if entry.is_programs() || entry.requested() == Some(&to) || !to.intersects(&online) {
            done.push(id);
            continue;
        }
        let why = format!("{} has no cores of its own: back to {to}", member.job);
        let (from, job) = (thread.allowed.clone(), member.job.clone());
        actions.push(Action {
            kind: ActionKind::Restore,
            job,
            thread: id,
            from,
            requested: to.clone(),
            to,
            why,
        });
    }
    (actions, done)
}

fn begin_restores(draft: &mut Draft<'_>, actions: &[Action]) {
    for action in actions {
        draft.begin_write(action.thread, &action.requested, &action.to);
    }
}

/// Gives the threads of released processes their original masks back, and forgets the processes that have them. Except
/// before a full scan: a child that was born before the mask of its parent was restored has the mask that pjw had set.
pub(crate) fn restore(draft: &mut Draft<'_>) -> Vec<Action> {
    let mut actions = Vec::new();
    let mut restored: Vec<ProcessId> = Vec::new();
    let released =
        draft.state.restoring.values().filter(|member| !draft.state.excluded.contains(&member.id.pid));
    for member in released {
        let (back, _) = put_back(draft.state, member);
        let is_enclosed = draft.state.cpusets.has_pending_removal(&member.job);
        let is_unread = member.threads.values().all(|thread| thread.mask.is_none() && thread.lives());
        if back.is_empty() && !is_unread && !is_enclosed {
            restored.push(member.id);
        }
        actions.extend(back);
    }
    begin_restores(draft, &actions);
    if !draft.full {
        return actions;
    }
    for process in restored {
        let Some(member) = draft.state.restoring.get(&process.pid) else { continue };
        let kept: Vec<ThreadId> = member.kept_masks().map(|(thread, _)| thread).collect();
        kept.into_iter().for_each(|thread| draft.stop_keeping(thread));
        draft.state.restoring.remove(&process.pid);
    }
    actions
}
