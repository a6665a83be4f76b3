//! Last phase of a cycle: the masks that threads should have, compared with the masks that the kernel shows.
//!
//! The *original* mask of a thread is the one that a release puts back: see [`crate::state::masks`]. Its *target* is
//! what the original becomes inside the grant of its job. A thread outside of the grant is restricted to the grant
//! again; a tighter mask that the program chose inside the grant is its own target. Except where too many running
//! threads are bound to some PUs while others idle ([`crate::phases::overload`]), or if the policy lifts every binding:
//! then the target is the whole grant. A lift that does not help is taken back. Running threads whose target is the
//! whole grant are pinned to one PU.

mod nodes;
mod thread_plan;

use self::nodes::ChosenNodes;
use self::thread_plan::ThreadPlan;
use crate::basics::{CpuSet, Nanos, ProcessId, Pu, ThreadId, cpus_text, prelude::*};
use crate::phases::overload::threads_to_unbind;
use crate::phases::pinning::{HotThread, choose_pins};
use crate::phases::{attempts::ReportedAttempts, draft::CycleDraft};
use crate::state::masks::lifted::{LiftReason, LiftedBinding};
use crate::state::{Member, WardenState};
use crate::terms::{
    BindingPolicy, Event, EventKind, Job, JobId, MaskAction, MaskActionKind, OversubscriptionPolicy, Policy,
};

/// Plans the changes of the affinity masks of jobs. Leaves out the jobs in `waiting_jobs`, because changes of their
/// cpusets are not complete. `reported` has the calls of sched_setaffinity(2) for PUs (logical CPUs) outside of a job.
/// This cycle has already reported these calls, so the masks that they set are not reported again.
pub(crate) fn plan_masks(
    draft: &mut CycleDraft<'_>,
    waiting_jobs: &BTreeSet<JobId>,
    mut reported: ReportedAttempts,
) -> Vec<MaskAction> {
    let jobs = draft.jobs_to_plan().into_iter();
    jobs.flat_map(|id| plan_masks_of_job(draft, &id, waiting_jobs.contains(&id), &mut reported)).collect()
}

/// Sorts changes of affinity masks. The first thread of a process is restricted before its other threads, and gets
/// every online PU (logical CPU) or its original mask after them. So a pjwd that is killed between two of these changes
/// leaves no narrow mask at another thread alone. A later daemon without the journal looks only at the masks of first
/// threads. `online` is the set of online PUs.
pub(crate) fn sort_mask_actions(mut actions: Vec<MaskAction>, online: &CpuSet) -> Vec<MaskAction> {
    actions.sort_by_key(|action| {
        let is_first = action.thread.is_first_thread();
        if action.kind == MaskActionKind::Restore || online.is_subset(&action.target_mask) {
            is_first
        } else {
            !(is_first && online.is_subset(&action.current_mask))
        }
    });
    actions
}

/// Plans the changes of the affinity masks of the threads of the job `id`, adds them to the records for the journal
/// (pjwd's files), and returns them. If the job holds no cores, the changes restore the original masks. If the job
/// holds cores and `waits_for_cpuset` is true, plans no change, because a change of the job's cpuset is not complete.
/// Also records the NUMA nodes of processes. Adds an event for each process of which a thread left the PUs of the job,
/// unless this cycle has already reported the process or the call that changed the mask (`reported`).
fn plan_masks_of_job(
    draft: &mut CycleDraft<'_>,
    id: &JobId,
    waits_for_cpuset: bool,
    reported: &mut ReportedAttempts,
) -> Vec<MaskAction> {
    let online = draft.state.pool.online_cpus();
    let Some(job) = draft.state.jobs.get(id) else { return Vec::new() };
    if job.active_grant().is_none() {
        return restore_masks_of_job(draft, id);
    }
    let Some(grant) = job.online_granted_cpus(&online).filter(|_| !waits_for_cpuset) else {
        return Vec::new();
    };
    let has_partition = draft.state.cpusets.has_isolated_partition(id);
    let Some(concerned) = members_to_plan(draft, id) else { return Vec::new() };
    let mut plans = thread_plans(draft, &grant, concerned, has_partition);
    match draft.policy.bindings {
        BindingPolicy::Respect => {}
        BindingPolicy::Repair => lift_overloaded_bindings(draft.state, &mut plans, &grant),
        BindingPolicy::Override => lift_all(&mut plans, &grant),
    }
    if draft.state.jobs.get(id).is_some_and(Job::is_borrower) {
        // The owner waits for the threads that run.
        plans.sort_by_key(|plan| !plan.thread.demand.is_hot);
    }
    let nodes = ChosenNodes::choose(draft, id, &grant, &plans);
    let pins = choose_pins_of_job(draft, id, &grant, &plans, &nodes);
    let used_nodes = nodes.nodes_to_record(&draft.state.topology, &grant, &plans, &pins);
    let machine = draft.state.topology.cpus();

    let mut actions = Vec::new();
    let mut own = Vec::new();
    for plan in plans {
        let pin = pins.get(&plan.id).copied();
        let target_mask = pin.map_or_else(|| plan.mask_without_pin(&grant).clone(), CpuSet::from);
        let requested_mask = plan.mask_to_request(&target_mask, &grant, machine, &online);
        let is_lifted = target_mask == grant && plan.may_hide_requested_mask(&grant);
        let is_requested =
            !plan.entry.is_mask_from_program() && plan.entry.requested_mask() == Some(&requested_mask);
        if is_requested || (plan.thread.effective_mask == target_mask && !is_lifted) {
            own.extend(
                (plan.entry.is_mask_from_program() && plan.thread.effective_mask == target_mask)
                    .then_some(plan.id),
            );
            continue;
        }
        let (kind, why) = kind_and_reason(&plan, pin, &target_mask, id, &grant, is_lifted);
        let current_mask = plan.thread.effective_mask.clone();
        actions.push(MaskAction {
            kind,
            job: id.clone(),
            thread: plan.id,
            current_mask,
            target_mask,
            requested_mask,
            reason: why,
        });
    }
    own.into_iter().for_each(|thread| draft.stop_journaling(thread));
    used_nodes.into_iter().for_each(|(pid, node)| draft.state.members.set_numa_node(pid, node));
    draft.journal_mask_requests(&actions);
    report_violations(draft, id, &grant, &actions, reported);
    actions
}

/// Returns the members of the job `id` whose affinity masks may have to change now. `None` if there are none, or if a
/// change of the job's isolated partition is delayed. While another change of the job's cpuset is delayed, the members
/// in the cpuset are left out.
fn members_to_plan<'a>(draft: &'a CycleDraft<'_>, id: &JobId) -> Option<Vec<&'a Member>> {
    let mut concerned = draft.state.members.members_to_plan(&draft.state.dirty, id)?;
    if draft.state.cpusets.is_partition_delayed(id) {
        // A valid partition has its PUs for itself: the kernel refuses them in the mask of a thread outside.
        return None;
    }
    if draft.state.cpusets.delayed_changes.has_change_for(id) {
        // The cpuset may be about to change.
        concerned.retain(|member| !draft.state.is_in_job_cpuset(member));
    }
    Some(concerned)
}

/// Returns the threads of `members` (processes of a job) as input for the choice of their masks. `grant` has the PUs of
/// the job. Threads that have exited and threads without a mask entry are left out. If only the active threads of a
/// process must be planned ([`crate::state::members::Members::active_threads_to_plan`]), its other threads are left out
/// too. Except: if the job has an isolated partition, inactive threads are not left out, because all threads are
/// pinned. Also decides for which threads a binding that pjw had lifted is restored.
fn thread_plans<'a>(
    draft: &'a CycleDraft<'_>,
    grant: &CpuSet,
    members: Vec<&'a Member>,
    has_isolated_partition: bool,
) -> Vec<ThreadPlan<'a>> {
    let state = &*draft.state;
    let mut plans = Vec::new();
    for member in members {
        let in_cpuset = state.is_in_job_cpuset(member);
        let follows_cpuset = in_cpuset && state.nearest_cpuset_cpus(member.id.pid) == Some(grant);
        let active =
            state.members.active_threads_to_plan(&state.dirty, member).filter(|_| !has_isolated_partition);
        for (id, thread) in member.living_threads_in(active) {
            let Some(entry) = &thread.mask_entry else { continue };
            let own = state.program_bound_cpus(grant, member, entry);
            let is_lifted_by_policy = |lifted: &&LiftedBinding| match draft.policy.bindings {
                BindingPolicy::Respect => false,
                BindingPolicy::Repair => lifted.reason == LiftReason::Overload,
                BindingPolicy::Override => true,
            };
            let lifted = entry.lifted_binding(&own).filter(is_lifted_by_policy);
            let was_unbound = lifted.is_some_and(|lifted| !lifted.is_restored);
            let has_lift_failed = lifted.is_some_and(|lifted| lifted.is_restored);
            plans.push(ThreadPlan {
                id,
                member,
                thread,
                entry,
                own,
                was_unbound,
                is_rebound: false,
                has_lift_failed,
                lifted: None,
                in_cpuset,
                follows_cpuset,
            });
        }
    }
    mark_failed_lifts(&mut plans, draft.now.since_boot);
    plans
}

/// Marks the threads that were not helped when pjw lifted their binding: they wait for a PU nearly as much as before
/// ([`LiftedBinding::must_restore_binding`]). The binding of such a thread is put in force again, and is not lifted a
/// second time.
fn mark_failed_lifts(plans: &mut [ThreadPlan<'_>], now: Nanos) {
    let is_failed = |plan: &ThreadPlan<'_>| {
        let lifted = plan.entry.lifted_binding(&plan.own).filter(|_| plan.was_unbound);
        lifted.is_some_and(|lifted| {
            let is_left_behind = |other: &&ThreadPlan<'_>| {
                other.thread.demand.is_hot && !other.was_unbound && other.own.is_subset(&lifted.mask)
            };
            let left_behind = plans.iter().filter(is_left_behind);
            let waiting_of_others = left_behind.map(|other| other.thread.demand.waiting_permille);
            lifted.must_restore_binding(&plan.thread.demand, waiting_of_others, now)
        })
    };
    let failed: Vec<bool> = plans.iter().map(is_failed).collect();
    for (plan, is_failed) in plans.iter_mut().zip(failed) {
        plan.is_rebound = is_failed;
        plan.has_lift_failed |= is_failed;
    }
}

/// Marks the hot threads whose bindings are lifted now, because too many hot threads are bound to the same PUs. A
/// thread that may run outside of `grant` is not marked: the thread is restricted to `grant` first.
fn lift_overloaded_bindings(state: &WardenState, plans: &mut [ThreadPlan<'_>], grant: &CpuSet) {
    let hot = plans.iter().filter(|plan| plan.thread.demand.is_hot);
    let hot_threads: Vec<HotThread> = hot.map(|plan| hot_thread(plan, grant)).collect();
    let inherited = processes_bound_to_one_core(state, plans, grant);
    let overloaded = threads_to_unbind(&state.topology, grant, &hot_threads, &inherited);
    for plan in plans {
        let is_inside = plan.thread.effective_mask.is_subset(grant);
        let is_lifted = is_inside && !plan.has_lift_failed && overloaded.contains(&plan.id);
        plan.lifted = is_lifted.then_some(LiftReason::Overload);
    }
}

/// Returns the processes whose binding was probably set by a launcher, which binds each process to one core by default.
/// Each of these conditions holds for such a process:
///
/// - All its threads have the same binding.
/// - The binding has PUs (logical CPUs) of a single core.
/// - The process has more hot threads than the binding has PUs.
///
/// A binding to several cores is assumed to be intended. A process with a thread whose mask was not yet read is left
/// out.
fn processes_bound_to_one_core(
    state: &WardenState,
    plans: &[ThreadPlan<'_>],
    grant: &CpuSet,
) -> BTreeSet<ProcessId> {
    let mut hot: BTreeMap<ProcessId, (&ThreadPlan<'_>, usize)> = BTreeMap::new();
    for plan in plans.iter().filter(|plan| plan.thread.demand.is_hot && plan.own != *grant) {
        hot.entry(plan.id.process).or_insert((plan, 0)).1 += 1;
    }
    let has_one_binding = |plan: &ThreadPlan<'_>| {
        plan.member.living_threads().all(|(_, thread)| {
            let entry = thread.mask_entry.as_ref();
            entry.is_some_and(|entry| state.program_bound_cpus(grant, plan.member, entry) == plan.own)
        })
    };
    let is_in_one_core =
        |own: &CpuSet| own.first().is_some_and(|first| own.is_subset(&state.topology.core_cpus(first)));
    hot.retain(|_, (plan, count)| {
        *count > plan.own.len() && is_in_one_core(&plan.own) && has_one_binding(plan)
    });
    hot.into_keys().collect()
}

/// Lifts every binding that is still in force. A thread outside of the grant is confined first.
fn lift_all(plans: &mut [ThreadPlan<'_>], grant: &CpuSet) {
    for plan in plans {
        let is_bound = plan.own != *grant && !plan.was_unbound;
        let is_inside = plan.thread.effective_mask.is_subset(grant);
        plan.lifted = (is_inside && is_bound).then_some(LiftReason::Policy);
    }
}

/// Chooses the PU to which each thread of a job is pinned. Threads of a borrower are not pinned, because its PUs change
/// often. In an isolated partition, all threads in the cpuset are pinned, because the kernel does not balance load
/// there. Otherwise only hot threads can be pinned. PUs that are not lent are used if there are enough for all these
/// threads.
fn choose_pins_of_job(
    draft: &CycleDraft<'_>,
    id: &JobId,
    grant: &CpuSet,
    plans: &[ThreadPlan<'_>],
    nodes: &ChosenNodes,
) -> BTreeMap<ThreadId, Pu> {
    if draft.state.jobs.get(id).is_some_and(Job::is_borrower) {
        return BTreeMap::new();
    }
    let has_isolated_partition = draft.state.cpusets.has_isolated_partition(id);
    let is_candidate = |plan: &&ThreadPlan<'_>| {
        if has_isolated_partition { plan.in_cpuset } else { plan.thread.demand.is_hot }
    };
    let mut candidates: Vec<&ThreadPlan<'_>> = plans.iter().filter(is_candidate).collect();
    candidates.sort_by_key(|plan| !plan.thread.demand.is_hot);
    let kept = grant.difference(&draft.state.pool.lent_cpus());
    // With fewer of these PUs than candidates, some threads would wait while the borrower runs.
    let kept = if kept.len() < candidates.len() { grant } else { &kept };
    let input = |plan: &ThreadPlan<'_>| {
        let hot_thread = hot_thread(plan, grant);
        let mask = if hot_thread.mask == *grant { kept.clone() } else { hot_thread.mask };
        // A rule of the user for NUMA nodes is stronger.
        let address_space =
            draft.state.address_spaces.group_of(plan.id.process).filter(|_| !nodes.has_rule());
        HotThread { mask, numa_node: nodes.preferred_node(plan.member), address_space, ..hot_thread }
    };
    let threads: Vec<HotThread> = candidates.into_iter().map(input).collect();
    let spread = OversubscriptionPolicy::Spread;
    let pin_all = || Policy { pin_hot_threads: true, oversubscription: spread, ..draft.policy.clone() };
    let pin_all = has_isolated_partition.then(pin_all);
    choose_pins(&draft.state.topology, kept, &threads, pin_all.as_ref().unwrap_or(draft.policy))
}

/// A thread as input for [`choose_pins`] and [`threads_to_unbind`], without a NUMA node and an address space.
fn hot_thread(plan: &ThreadPlan<'_>, grant: &CpuSet) -> HotThread {
    let (thread, last_cpu) = (plan.id, plan.thread.last_cpu);
    let (mask, pinned_pu) = (plan.mask_without_pin(grant).clone(), plan.pinned_pu(grant));
    HotThread { thread, last_cpu, mask, pinned_pu, numa_node: None, address_space: None }
}

/// Returns the kind of the planned change of a thread's mask to `target`, and the reason for the change as text for
/// users. `plan` describes the thread. `pin` is the PU to which the change pins the thread. `None` if the change pins
/// the thread to no PU. `grant` has the PUs of `job`. `is_lifted` is true if `target` equals `grant`, and the kernel
/// may store an earlier mask of pjw without some PUs of `grant`, which has no effect in the cpuset of the job. If
/// several kinds fit, the first one in the function counts.
fn kind_and_reason(
    plan: &ThreadPlan<'_>,
    pin: Option<Pu>,
    target: &CpuSet,
    job: &JobId,
    grant: &CpuSet,
    is_lifted: bool,
) -> (MaskActionKind, String) {
    let is_inside = plan.thread.effective_mask.is_subset(grant);
    let demand = plan.thread.demand.permille / 10;
    let (current, own) = (cpus_text(&plan.thread.effective_mask), cpus_text(&plan.own));
    let held = cpus_text(grant);
    match pin {
        _ if plan.has_left_grant(grant) && is_inside => (
            MaskActionKind::Repair,
            format!("the thread requested more than its share: the cpuset of {job} kept it on {current}"),
        ),
        _ if plan.has_left_grant(grant) => {
            (MaskActionKind::Repair, format!("the thread left {held} of {job}: it was found on {current}"))
        }
        _ if plan.lifted == Some(LiftReason::Overload) => (
            MaskActionKind::Unbind,
            format!("too many running threads of {job} are bound to {own}, while others of {held} idle"),
        ),
        _ if plan.lifted == Some(LiftReason::Policy) => (
            MaskActionKind::Override,
            format!("the configuration (affinity = \"override\") lifts the thread's own binding to {own}"),
        ),
        _ if plan.is_rebound && is_inside => (
            MaskActionKind::Rebind,
            format!("the thread's own binding to {own} is in force again: lifting it did not help"),
        ),
        Some(_) if is_inside => (
            MaskActionKind::Pin,
            format!("the thread wants a PU {demand} % of the time: one of {held} for it"),
        ),
        None if is_inside && plan.pinned_pu(grant).is_some() => (
            MaskActionKind::Float,
            format!("the thread wants a PU {demand} % of the time: it may use all of {}", cpus_text(target)),
        ),
        _ if is_lifted => (
            MaskActionKind::Confine,
            format!("the cpuset of {job} keeps it on {held}: a mask from elsewhere is lifted"),
        ),
        _ if target == grant => {
            (MaskActionKind::Confine, format!("{job} holds {held}; the thread may run on {current}"))
        }
        _ => (
            MaskActionKind::Confine,
            format!(
                "{job} holds {held}; the thread's own {} becomes {} there",
                cpus_text(plan.entry.original_mask()),
                cpus_text(target)
            ),
        ),
    }
}

/// Adds one event for each process of which a thread has replaced the mask of pjw by a mask with PUs outside of `grant`
/// or by the mask of all PUs, and adds the process to `reported`. `actions` has the changes that repair these masks. No
/// event is added for a process in `reported`. Also none if the mask is inside `grant` and `reported` has the thread:
/// the violation was reported when the thread requested the mask.
fn report_violations(
    draft: &mut CycleDraft<'_>,
    job: &JobId,
    grant: &CpuSet,
    actions: &[MaskAction],
    reported: &mut ReportedAttempts,
) {
    let repairs = actions.iter().filter(|action| action.kind == MaskActionKind::Repair);
    for MaskAction { thread, current_mask, .. } in repairs {
        let pid = thread.process.pid;
        let requester = (thread.process, thread.tid);
        draft.state.reported_affinity_targets.remove(&requester);
        let inside = current_mask.is_subset(grant);
        // An affinity request in a cpuset, and a later move out of that cpuset, are two violations.
        let is_reported = inside && reported.threads.contains(&requester);
        if !is_reported && reported.processes.insert(pid) {
            let (held, current) = (cpus_text(grant), cpus_text(current_mask));
            let text = if inside {
                format!("a thread of process {pid} requested every PU: its cpuset kept it on {current}")
            } else {
                format!("a thread of process {pid} left {held}: found on {current}")
            };
            let mut event =
                Event::new(EventKind::Violation, text).with_job(job).with_pid(pid).with_cpus(current_mask);
            event.tid = Some(thread.tid);
            draft.out.events.push(event);
        }
    }
}

/// Returns the changes that restore the original masks of the threads of the job `id`, after they were added to the
/// records for the journal. The job holds no cores, so its threads must not stay on the cores of other jobs. Their
/// processes stay members. After a full scan, also records for the journal which threads have their original masks.
fn restore_masks_of_job(draft: &mut CycleDraft<'_>, id: &JobId) -> Vec<MaskAction> {
    let Some(members) = draft.state.members.members_to_plan(&draft.state.dirty, id) else {
        return Vec::new();
    };
    let (actions, done): (Vec<_>, Vec<_>) =
        members.into_iter().map(|member| mask_restore_actions(draft.state, member)).unzip();
    let (actions, done) = (actions.concat(), done.concat());
    // Only after a full scan: see `plan_mask_restores`.
    if draft.full {
        done.into_iter().for_each(|thread| draft.stop_journaling(thread));
    }
    draft.journal_mask_requests(&actions);
    actions
}

/// Returns the actions that restore the original masks of a process's threads, and the threads that need no action: the
/// mask need not be restored, the kernel refuses the original mask, or the original mask has no online PU.
fn mask_restore_actions(state: &WardenState, member: &Member) -> (Vec<MaskAction>, Vec<ThreadId>) {
    let online = state.pool.online_cpus();
    let mut actions = Vec::new();
    let mut done = Vec::new();
    for (id, known) in member.living_threads() {
        let Some(entry) = &known.mask_entry else { continue };
        let target = entry.original_mask().clone();
        // A mask without an online PU can't be requested.
        if entry.needs_no_restore() || !target.intersects(&online) {
            done.push(id);
            continue;
        }
        let why = format!("{} has no cores of its own: back to {target}", member.job);
        let kind = MaskActionKind::Restore;
        actions.push(MaskAction::with_exact_mask(kind, &member.job, id, &known.effective_mask, target, why));
    }
    (actions, done)
}

/// Plans the changes of affinity masks that give the threads of released processes their original masks back. Leaves
/// out processes that are kept off the cores of jobs. pjw keeps track of a process with restored masks until a full
/// scan, because an unknown child may still have a mask that pjw had set for its parent. pjw also keeps track of the
/// process while it is in a cpuset of pjw, because kernels before Linux 6.2 replace the mask when the process leaves
/// the cpuset.
pub(crate) fn plan_mask_restores(draft: &mut CycleDraft<'_>) -> Vec<MaskAction> {
    draft.state.record_ongoing_restores(draft.now.since_boot);
    let mut actions = Vec::new();
    let mut restored: Vec<ProcessId> = Vec::new();
    let released = draft
        .state
        .processes_to_restore
        .values()
        .filter(|member| !draft.state.pids_kept_off_job_cpus.contains(&member.id.pid));
    for member in released {
        let (restores, _) = mask_restore_actions(draft.state, member);
        let is_hidden = |thread| draft.state.may_cpuset_hide_mask(member.id.pid, thread);
        let is_unread =
            member.threads.values().all(|thread| thread.mask_entry.is_none() && thread.is_alive());
        let cgroup = draft.state.process(member.id.pid).and_then(|process| process.cgroup.as_deref());
        let is_in_cpuset =
            cgroup.is_some_and(|cgroup| draft.state.cpusets.enclosing_cpuset(cgroup).is_some());
        let is_hidden = is_in_cpuset || member.threads.values().any(is_hidden);
        if restores.is_empty() && !is_unread && !is_hidden {
            restored.push(member.id);
        }
        actions.extend(restores);
    }
    draft.journal_mask_requests(&actions);
    if !draft.full {
        return actions;
    }
    for process in restored {
        let Some(member) = draft.state.processes_to_restore.get(&process.pid) else { continue };
        let kept: Vec<ThreadId> = member.journaled_masks().map(|(thread, _)| thread).collect();
        kept.into_iter().for_each(|thread| draft.stop_journaling(thread));
        if let Some(member) = draft.state.processes_to_restore.remove(&process.pid) {
            let is_settled = !draft.state.released_masks.contains_key(&member.job);
            draft.state.lineage.record_masks_restored(&member, is_settled);
        }
    }
    actions
}
