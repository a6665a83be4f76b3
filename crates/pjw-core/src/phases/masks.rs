//! Last phase of a cycle: the masks that threads should have, compared with the masks that the kernel shows.
//!
//! The *original* mask of a thread is the one that a release puts back: see [`crate::state::masks`]. Its *target* is
//! what the original becomes inside the grant of its job. A thread outside of the grant is restricted to the grant
//! again; a tighter mask that the program chose inside the grant is its own target. In two cases, such a binding is
//! lifted, and the target is the whole grant: too many running threads are bound to some PUs while others idle
//! ([`crate::phases::overload`]), or the policy lifts every binding. A lift that does not help is taken back. Running
//! threads whose target is the whole grant are pinned to one PU.

mod nodes;
mod restores;
mod thread_plan;

use self::nodes::ChosenNodes;
pub(crate) use self::restores::plan_mask_restores;
use self::restores::restore_masks_of_job;
use self::thread_plan::ThreadPlan;
use crate::basics::{CpuSet, Nanos, Pid, ProcessId, Pu, ThreadId, cpus_text, prelude::*};
use crate::phases::overload::threads_to_unbind;
use crate::phases::pinning::{HotThread, choose_pins};
use crate::phases::{attempts::ReportedAttempts, draft::CycleDraft};
use crate::state::masks::lifted::{LiftReason, LiftedBinding};
use crate::state::{Member, WardenState};
use crate::terms::{
    BindingPolicy, Event, EventKind, Job, JobId, MaskAction, MaskActionKind, OversubscriptionPolicy, Policy,
};

/// Plans the changes of the affinity masks of the jobs that have changed ([`CycleDraft::jobs_to_plan`]).
///
/// - `waiting_jobs` are the jobs with a change of their cpuset that is not complete. Such a job gets no change while it
///   holds cores.
/// - `reported` has the calls of sched_setaffinity(2) for PUs (logical CPUs) outside of a job that this cycle has
///   already reported. The masks that these calls set are not reported again. It also has the threads of calls for PUs
///   of the job only: their masks are not reported.
pub(crate) fn plan_masks(
    draft: &mut CycleDraft<'_>,
    waiting_jobs: &BTreeSet<JobId>,
    mut reported: ReportedAttempts,
) -> Vec<MaskAction> {
    let jobs = draft.jobs_to_plan().into_iter();
    let plan = |id: JobId| {
        let waits_for_cpuset = waiting_jobs.contains(&id);
        plan_masks_of_job(draft, &id, PlannedMembers::Changed { waits_for_cpuset }, &mut reported)
    };
    jobs.flat_map(plan).collect()
}

/// Plans the changes of the affinity masks of the processes that the scan of this cycle found alive, as far as they are
/// members of jobs that hold cores. All other processes keep their masks.
pub(crate) fn plan_masks_of_scanned(draft: &mut CycleDraft<'_>) -> Vec<MaskAction> {
    let mut pids_by_job: BTreeMap<JobId, Vec<Pid>> = BTreeMap::new();
    for pid in draft.scanned_pids() {
        if let Some(member) = draft.state.members.get(&pid) {
            pids_by_job.entry(member.job.clone()).or_default().push(pid);
        }
    }
    let mut reported = ReportedAttempts::default();
    let plan = |(id, pids): (JobId, Vec<Pid>)| {
        plan_masks_of_job(draft, &id, PlannedMembers::Only(&pids), &mut reported)
    };
    pids_by_job.into_iter().flat_map(plan).collect()
}

/// The members (processes) of a job whose affinity masks are planned.
#[derive(Clone, Copy)]
enum PlannedMembers<'a> {
    /// The members that may have changed, as the dirty set says. `waits_for_cpuset` says whether a change of the job's
    /// cpuset is not complete: then no mask is planned while the job holds cores.
    Changed { waits_for_cpuset: bool },
    /// The members with these pids.
    Only(&'a [Pid]),
}

/// Sorts changes of affinity masks so that a pjwd that is killed between two of them leaves no mask that a later pjwd
/// can't find. A later pjwd without the journal looks only at the masks of first threads (the threads that began their
/// processes). So no other thread may have a narrow mask while the first thread has every PU (logical CPU) in `online`,
/// the online PUs. A change widens a mask if it restores the original mask, or if it gives the thread every online PU.
/// The order is:
///
/// - First, the changes that restrict a first thread that has every online PU now, and those that widen masks of other
///   threads.
/// - Then all other changes. Changes of the same group keep their order.
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

/// Plans the changes of the affinity masks of the threads of the job `id`, and returns them.
///
/// - If the job holds no cores, the changes restore the original masks (the masks before pjw changed them).
/// - If the job holds cores, the changes restrict the threads of `members` to these cores, and pin some threads to one PU
///   (logical CPU). No change is planned while `members` waits for a cpuset.
///
/// Writes the changes to the journal (the file with which a restarted daemon restores its state), and records the NUMA
/// nodes of processes. Adds an event for each process of which a thread left the PUs of the job. `reported` has the
/// processes and threads for which this cycle has already added an event: they get no second one. It also has the
/// threads for which a process of the job requested PUs of the job only: they have not left the job.
fn plan_masks_of_job(
    draft: &mut CycleDraft<'_>,
    id: &JobId,
    members: PlannedMembers<'_>,
    reported: &mut ReportedAttempts,
) -> Vec<MaskAction> {
    let online = draft.state.pool.online_cpus();
    let Some(job) = draft.state.jobs.get(id) else { return Vec::new() };
    if job.active_grant().is_none() {
        return match members {
            PlannedMembers::Changed { .. } => restore_masks_of_job(draft, id),
            PlannedMembers::Only(_) => Vec::new(),
        };
    }
    let waits_for_cpuset = matches!(members, PlannedMembers::Changed { waits_for_cpuset: true });
    let Some(grant) = job.online_granted_cpus(&online).filter(|_| !waits_for_cpuset) else {
        return Vec::new();
    };
    let has_partition = draft.state.cpusets.has_isolated_partition(id);
    let Some(concerned) = members_to_plan(draft, id, members) else { return Vec::new() };
    let mut plans = thread_plans(draft, &grant, concerned, has_partition, reported);
    match draft.policy.bindings {
        BindingPolicy::Respect => {}
        BindingPolicy::Repair => lift_overloaded_bindings(draft.state, &mut plans, &grant),
        BindingPolicy::Override => lift_all_bindings(&mut plans, &grant),
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
    let mut with_program_mask = Vec::new();
    for plan in plans {
        let pin = pins.get(&plan.id).copied();
        let target_mask = pin.map_or_else(|| plan.mask_without_pin(&grant).clone(), CpuSet::from);
        let requested_mask = plan.mask_to_request(&target_mask, &grant, machine, &online);
        let replaces_hidden_mask = target_mask == grant && plan.may_hide_requested_mask(&grant);
        let is_from_program = plan.entry.is_mask_from_program();
        let is_requested = !is_from_program && plan.entry.requested_mask() == Some(&requested_mask);
        let has_target_mask = plan.thread.effective_mask == target_mask;
        if is_requested || (has_target_mask && !replaces_hidden_mask) {
            if is_from_program && has_target_mask {
                with_program_mask.push(plan.id);
            }
            continue;
        }
        let (kind, reason) = kind_and_reason(&plan, pin, &target_mask, id, &grant, replaces_hidden_mask);
        let program_request = plan.replaced_request(kind, &grant, &draft.state.topology);
        actions.push(MaskAction {
            kind,
            job: id.clone(),
            thread: plan.id,
            current_mask: plan.thread.effective_mask.clone(),
            target_mask,
            requested_mask,
            program_request,
            reason,
        });
    }
    with_program_mask.into_iter().for_each(|thread| draft.stop_journaling(thread));
    used_nodes.into_iter().for_each(|(pid, node)| draft.state.members.set_numa_node(pid, node));
    draft.journal_mask_requests(&actions);
    report_violations(draft, id, &grant, &actions, reported);
    actions
}

/// Returns those of `members`, processes of the job `id`, whose affinity masks may have to change now. `None` if nothing
/// of the job has to be planned.
///
/// A change of the job's cpuset is delayed if it was begun in an earlier cycle and is not complete. Until then, the
/// members in the cpuset are left out. If the job has an isolated partition (a cpuset that has its PUs for itself), the
/// result is `None`.
fn members_to_plan<'a>(
    draft: &'a CycleDraft<'_>,
    id: &JobId,
    members: PlannedMembers<'_>,
) -> Option<Vec<&'a Member>> {
    let state = &*draft.state;
    let mut concerned = match members {
        PlannedMembers::Changed { .. } => state.members.members_to_plan(&state.dirty, id)?,
        PlannedMembers::Only(pids) => pids.iter().filter_map(|pid| state.members.get(pid)).collect(),
    };
    if state.cpusets.is_partition_delayed(id) {
        // A valid partition has its PUs for itself: the kernel refuses them in the mask of a thread outside.
        return None;
    }
    if state.cpusets.delayed_changes.has_change_for(id) {
        // The cpuset may be about to change.
        concerned.retain(|member| !state.is_in_job_cpuset(member));
    }
    Some(concerned)
}

/// Returns the threads of `members` (processes of a job) as input for the choice of their masks. `grant` has the PUs of
/// the job, and `reported` the threads for which a process of the job requested PUs of the job only. Also decides for
/// which threads a binding (a mask of the program) that pjw had lifted is restored. These threads are left out:
///
/// - Threads that have exited.
/// - Threads without a mask entry (what pjw knows about the mask of a thread).
/// - Inactive threads, if only the active threads of their process must be planned
///   ([`crate::state::members::Members::active_threads_to_plan`]). But if the job has an isolated partition
///   (`has_isolated_partition`), inactive threads stay in the result, because all threads are pinned.
fn thread_plans<'a>(
    draft: &'a CycleDraft<'_>,
    grant: &CpuSet,
    members: Vec<&'a Member>,
    has_isolated_partition: bool,
    reported: &ReportedAttempts,
) -> Vec<ThreadPlan<'a>> {
    let state = &*draft.state;
    let has_all_cpus = state.pool.online_cpus().is_subset(grant);
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
            let was_lifted = lifted.is_some_and(|lifted| !lifted.is_restored);
            let has_lift_failed = lifted.is_some_and(|lifted| lifted.is_restored);
            let may_have_requested_others =
                !has_all_cpus && !reported.is_within_job(state, &(id.process, id.tid));
            plans.push(ThreadPlan {
                id,
                member,
                thread,
                entry,
                own,
                was_lifted,
                is_rebound: false,
                has_lift_failed,
                lifted: None,
                in_cpuset,
                follows_cpuset,
                may_have_requested_others,
            });
        }
    }
    mark_failed_lifts(&mut plans, draft.now.since_boot);
    plans
}

/// Marks the threads that were not helped when pjw lifted their binding: replaced the mask by which the program bound
/// the thread. Such a thread waits for a PU nearly as much as before ([`LiftedBinding::must_restore_binding`]). Its
/// binding is put in force again, and is not lifted a second time. `now` is the present time, in ns since boot.
fn mark_failed_lifts(plans: &mut [ThreadPlan<'_>], now: Nanos) {
    let is_failed = |plan: &ThreadPlan<'_>| {
        let lifted = plan.entry.lifted_binding(&plan.own).filter(|_| plan.was_lifted);
        lifted.is_some_and(|lifted| {
            let is_left_behind = |other: &&ThreadPlan<'_>| {
                other.thread.demand.is_hot && !other.was_lifted && other.own.is_subset(&lifted.mask)
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

/// Marks the threads whose bindings are lifted now, because their program bound too many hot threads to the same PUs. A
/// thread is hot if it runs or waits for a PU most of the time. Two kinds of threads are not marked:
///
/// - A thread that may run outside of `grant`, the PUs of the job. It is restricted to `grant` first.
/// - A thread that an earlier lift of its binding did not help.
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
/// - The process has more hot threads (threads that run or wait for a PU most of the time) than the binding has PUs.
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

/// Marks all threads that their program bound to a part of `grant`, the PUs of the job: their bindings are lifted now.
/// A thread that may run outside of `grant` is not marked, because it is restricted to `grant` first.
fn lift_all_bindings(plans: &mut [ThreadPlan<'_>], grant: &CpuSet) {
    for plan in plans {
        let is_bound = plan.own != *grant && !plan.was_lifted;
        let is_inside = plan.thread.effective_mask.is_subset(grant);
        plan.lifted = (is_inside && is_bound).then_some(LiftReason::Policy);
    }
}

/// Chooses the PU to which each thread of the job `id` is pinned (restricted by pjw). A thread that is missing in the
/// result is not pinned, for example a thread that its program bound to some PUs. `grant` has the PUs of the job, and
/// `plans` has its threads.
///
/// - Only hot threads (threads that run or wait for a PU most of the time) are pinned.
/// - The only hot thread of a job is not pinned: no other thread takes its PU, and a program may count the CPUs of its
///   mask after a serial phase, to start as many threads. Except: the job lends PUs, or its user chose a rule for NUMA
///   nodes.
/// - In an isolated partition (a cpuset in which the kernel does not balance load), all threads in the cpuset are
///   pinned instead.
/// - Threads of a borrower (a job that runs on free and lent cores) are not pinned, because its PUs change often.
/// - PUs that are lent to a borrower are used only if the other PUs are too few for these threads.
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
    let may_run_anywhere = kept == *grant && !nodes.has_rule() && !has_isolated_partition;
    if candidates.len() < 2 && may_run_anywhere {
        return BTreeMap::new();
    }
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

/// Returns a thread as input for [`choose_pins`] and [`threads_to_unbind`], without a NUMA node and an address space.
fn hot_thread(plan: &ThreadPlan<'_>, grant: &CpuSet) -> HotThread {
    let (thread, last_cpu) = (plan.id, plan.thread.last_cpu);
    let (mask, pinned_pu) = (plan.mask_without_pin(grant).clone(), plan.pinned_pu(grant));
    HotThread { thread, last_cpu, mask, pinned_pu, numa_node: None, address_space: None }
}

/// Returns the kind of the planned change of a thread's mask to `target`, and the reason for the change as text for
/// users. If several kinds fit, the first one in the function counts.
///
/// - `pin` is the PU to which the change pins the thread. `None` if it pins the thread to no PU.
/// - `grant` has the PUs of `job`.
/// - `replaces_hidden_mask` is true if `target` equals `grant`, and the thread may have an earlier mask of pjw without
///   some PUs of `grant`. This mask has no effect in the cpuset of the job.
fn kind_and_reason(
    plan: &ThreadPlan<'_>,
    pin: Option<Pu>,
    target: &CpuSet,
    job: &JobId,
    grant: &CpuSet,
    replaces_hidden_mask: bool,
) -> (MaskActionKind, String) {
    let is_inside = plan.thread.effective_mask.is_subset(grant);
    let demand = plan.thread.demand.permille / 10;
    let (current, own) = (cpus_text(&plan.thread.effective_mask), cpus_text(&plan.own));
    let held = cpus_text(grant);
    if plan.has_left_grant(grant) {
        let why = if is_inside {
            format!("the thread requested more than its share: the cpuset of {job} kept it on {current}")
        } else {
            format!("the thread left {held} of {job}: it was found on {current}")
        };
        return (MaskActionKind::Repair, why);
    }
    match plan.lifted {
        Some(LiftReason::Overload) => {
            let why =
                format!("too many running threads of {job} are bound to {own}, while others of {held} idle");
            return (MaskActionKind::Unbind, why);
        }
        Some(LiftReason::Policy) => {
            let why = format!(
                "the configuration (affinity = \"override\") lifts the thread's own binding to {own}"
            );
            return (MaskActionKind::Override, why);
        }
        None => {}
    }
    if is_inside && plan.is_rebound {
        let why = format!("the thread's own binding to {own} is in force again: lifting it did not help");
        return (MaskActionKind::Rebind, why);
    }
    if is_inside && pin.is_some() {
        let why = format!("the thread wants a PU {demand} % of the time: one of {held} for it");
        return (MaskActionKind::Pin, why);
    }
    if is_inside && plan.pinned_pu(grant).is_some() {
        let target = cpus_text(target);
        let why = format!("the thread wants a PU {demand} % of the time: it may use all of {target}");
        return (MaskActionKind::Float, why);
    }
    let why = if replaces_hidden_mask {
        format!("the cpuset of {job} keeps it on {held}: a mask from elsewhere is lifted")
    } else if target == grant {
        format!("{job} holds {held}; the thread may run on {current}")
    } else {
        let original = cpus_text(plan.entry.original_mask());
        format!("{job} holds {held}; the thread's own {original} becomes {} there", cpus_text(target))
    };
    (MaskActionKind::Confine, why)
}

/// Adds one event for each process of which a thread left the PUs of its job: the program replaced the mask of pjw by a
/// mask with PUs outside of `grant` (the PUs of `job`), or by the mask of all PUs of the machine. `actions` has the
/// changes that repair these masks. The processes are added to `reported`. No event is added in these cases:
///
/// - `reported` already has the process.
/// - `reported` already has the thread, and its mask is inside `grant`: the call that requested the mask was reported.
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
        let has_attempt = reported.take_thread(draft.state, &requester);
        let inside = current_mask.is_subset(grant);
        // An affinity request in a cpuset, and a later move out of that cpuset, are two violations.
        let is_reported = inside && has_attempt;
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
