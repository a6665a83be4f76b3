//! Carries out commands. A command is checked first; then it is carried out completely or refused.

use crate::allocate::defrag::{self, DefragPlan};
use crate::allocate::{PuOffer, request_for_all_available};
use crate::basics::{Pid, Uid, prelude::*};
use crate::phases::commands::request::{build_job_request, check_borrower, why_not_wait};
use crate::phases::commands::types::{AssignCommand, Caller, Command, ProvisionCommand, Reply};
use crate::phases::{draft::CycleDraft, jobs, lending, membership, membership::add_member};
use crate::state::Member;
use crate::terms::{
    BatchRole, CpuRequest, DaemonMode, EndCondition, Event, EventKind, ExhaustionPolicy, GrantedBy, Job,
    JobId, JobRequest, JobSource, MembershipEvidence, Ownership, PriorityClass, Provision, ProvisionRule,
    Refusal, WantedCores,
};

/// Carries out `commands` in order. Returns one result for each command: the reply, or the reason for a refusal.
pub(crate) fn execute_commands(
    draft: &mut CycleDraft<'_>,
    commands: &[Command],
) -> Vec<Result<Reply, Refusal>> {
    commands.iter().map(|command| execute_command(draft, command)).collect()
}

/// Carries out `command`. If it is refused, returns the reason. The refusal of a command to assign or release a job is
/// also reported by an event, unless [`Refusal::is_reported`] returns false.
fn execute_command(draft: &mut CycleDraft<'_>, command: &Command) -> Result<Reply, Refusal> {
    let result = match command {
        Command::Assign(args) => assign(draft, args).map(Box::new).map(Reply::Assigned),
        Command::Release { job, caller } => release(draft, job, caller).map(Reply::Released),
        Command::Undo { job, why, .. } => {
            jobs::release_job(draft, job, &format!("the kernel refused to keep it on its cores: {why}"));
            Ok(Reply::Released(vec![job.clone()]))
        }
        Command::ReleaseAll { caller } => release_all(draft, caller).map(Reply::Released),
        Command::Want { job, cores, caller } => {
            want(draft, job, *cores, caller).map(Box::new).map(Reply::Wanted)
        }
        Command::Provision(args) => provision(draft, args).map(Box::new).map(Reply::Assigned),
        Command::Defrag { caller } => defragment(draft, *caller).map(Box::new).map(Reply::Moved),
    };
    if let (Err(refusal), Command::Assign(AssignCommand { job, .. }) | Command::Release { job, .. }) =
        (&result, command)
        && refusal.is_reported()
    {
        draft.out.events.push(Event::new(EventKind::Refused, refusal.to_string()).with_job(job));
    }
    result
}

/// Releases the job `id`, and returns its id. Refused in observe mode, for an unknown job, and for a caller who may not
/// change the request of the job.
fn release(draft: &mut CycleDraft<'_>, id: &JobId, caller: &Caller) -> Result<Vec<JobId>, Refusal> {
    require_enforce_mode(draft)?;
    let job = draft.state.jobs.get(id).ok_or_else(|| Refusal::NoSuchJob { job: id.clone() })?;
    check_may_change_request(job, caller)?;
    jobs::release_job(draft, id, "released on request");
    Ok(vec![id.clone()])
}

/// Releases all jobs that the caller may release, and returns their ids. The processes of a released job may then join
/// a job that is found only now: this job is released too. Refused in observe mode.
fn release_all(draft: &mut CycleDraft<'_>, caller: &Caller) -> Result<Vec<JobId>, Refusal> {
    require_enforce_mode(draft)?;
    let mut released = Vec::new();
    loop {
        let may_release = |job: &&Job| !job.was_released && check_may_change_request(job, caller).is_ok();
        let jobs = draft.state.jobs.values().filter(may_release);
        let ids: Vec<JobId> = jobs.map(|job| job.id.clone()).collect();
        if ids.is_empty() {
            return Ok(released);
        }
        for id in &ids {
            jobs::release_job(draft, id, "released with all others on request");
        }
        released.extend(ids);
        membership::update_members(draft);
    }
}

/// Stores the number of cores that the job `id` can use at present, and returns the job. If `cores` is `None`, deletes
/// the stored number. A number above [`Job::max_wanted_cores`] is stored unchanged, because this limit may grow.
/// Refused in each of these cases:
///
/// - pjw is in observe mode.
/// - The job is unknown, or the caller is neither its owner nor an administrator.
/// - The job has no request and holds no cores.
fn want(draft: &mut CycleDraft<'_>, id: &JobId, cores: Option<u32>, caller: &Caller) -> Result<Job, Refusal> {
    require_enforce_mode(draft)?;
    let job = draft.state.jobs.get(id).ok_or_else(|| Refusal::NoSuchJob { job: id.clone() })?;
    check_may_change(job, caller)?;
    if job.max_wanted_cores(&draft.state.topology).is_none() {
        return Err(Refusal::NoCpuRequest { job: id.clone() });
    }
    let mut job = job.clone();
    // The same number once more is no change: the time of the first one stays.
    if job.wanted_cores.map(|wanted| wanted.count) != cores {
        job.wanted_cores = cores.map(|given| WantedCores { count: given, given_at: draft.now.since_boot });
        draft.store_job(job.clone());
    }
    Ok(job)
}

/// Moves jobs to other cores to reduce fragmentation, and returns the moves. Refused in observe mode. Only
/// administrators may do this, because jobs of all users may move.
fn defragment(draft: &mut CycleDraft<'_>, caller: Caller) -> Result<DefragPlan, Refusal> {
    require_enforce_mode(draft)?;
    if !caller.is_admin {
        return Err(Refusal::DefragNeedsAdmin);
    }
    let plan = defrag::plan_defrag(draft.state, draft.policy);
    for step in &plan.steps {
        // The offer was made for a pool in which the job holds nothing.
        draft.state.pool.release(&step.job);
        jobs::grant_offer(draft, &step.job, &step.offer, false);
    }
    Ok(plan)
}

/// Refuses the command in observe mode, in which no mask is changed or restored.
fn require_enforce_mode(draft: &CycleDraft<'_>) -> Result<(), Refusal> {
    if draft.policy.mode == DaemonMode::Observe { Err(Refusal::ObserveOnly) } else { Ok(()) }
}

fn check_may_change(job: &Job, caller: &Caller) -> Result<(), Refusal> {
    if caller.is_admin || job.owner == caller.uid {
        return Ok(());
    }
    Err(Refusal::JobNotOwned { job: job.id.clone(), owner: job.owner })
}

/// Checks that the caller may release the job or change its request. The owner of the job and administrators may do
/// this. For a provision (a job whose cores an administrator has promised to a service), only administrators may.
fn check_may_change_request(job: &Job, caller: &Caller) -> Result<(), Refusal> {
    check_may_change(job, caller)?;
    if job.provision.is_none() || caller.is_admin {
        return Ok(());
    }
    Err(Refusal::ProvisionOfAdmin { job: job.id.clone() })
}

/// Carries out an assign command: makes or changes a job, grants its cores, and adds its processes. Returns the job. If
/// the command is refused, it changes nothing. The command grants no cores in these cases:
///
/// - The job has all cores of its request, and the request does not change. Or a batch system chose its cores.
/// - Too few cores are free, and the setting `on_exhausted` lets the job wait for cores.
/// - The job is a borrower (a job of the class besteffort): it borrows free cores, and cores that other jobs leave
///   idle.
fn assign(draft: &mut CycleDraft<'_>, args: &AssignCommand) -> Result<Job, Refusal> {
    require_enforce_mode(draft)?;
    let existing = draft.state.jobs.get(&args.job).cloned();
    check_may_assign(existing.as_ref(), args)?;
    let new_members = new_members(draft, args)?;
    let with_count = replace_everything_by_cores(draft, args)?;
    let args = with_count.as_ref().unwrap_or(args);
    let request = build_job_request(&draft.state.topology, existing.as_ref(), args)?;
    if let Some(job) = existing.as_ref().filter(|job| job.request.as_ref() != Some(&request)) {
        check_may_change_request(job, &args.caller)?;
    }
    let owner = owner_after_assign(draft, existing.as_ref(), args, &new_members);
    let borrows = request.class == PriorityClass::Besteffort;
    // A job gives back its own cores if it becomes a borrower, and its borrowed cores if it no longer is one.
    let gives_back = existing.as_ref().and_then(|job| job.grant.as_ref()).is_some_and(|grant| {
        if borrows { grant.ownership == Ownership::Owned } else { grant.ownership != Ownership::Owned }
    });
    let existing = existing.map(|job| if gives_back { Job { grant: None, ..job } } else { job });
    let offer = offer_for_assign(draft, existing.as_ref(), args, &request, owner)?;
    let is_new = existing.is_none();
    let end = if new_members.is_empty() { EndCondition::Timeout } else { EndCondition::LastProcessExit };
    let mut job = existing.unwrap_or_else(|| Job::new(args.job.clone(), owner, end, draft.now.wall_clock));
    job.owner = owner;
    job.request = Some(request);
    if job.was_released {
        // The time names the run in reports.
        job.detected_at = draft.now.wall_clock;
    }
    job.was_released = false;
    // This allows a move from any cgroup: only for the processes of `pjwctl run`, not for those that join later.
    job.started_by_pjwctl_run = args.must_be_new || (job.started_by_pjwctl_run && new_members.is_empty());
    if new_members.is_empty() && job.end_condition == EndCondition::Timeout {
        job.empty_since.get_or_insert(draft.now.since_boot);
    }
    job.sessions.extend(args.session);
    let starts = args.refuses_frozen && is_new && borrows && !new_members.is_empty();
    if starts && lending::would_freeze_new_job(draft.state, draft.policy, &job, draft.now.since_boot) {
        return Err(Refusal::WouldFreeze { job: job.id });
    }
    if gives_back {
        draft.state.pool.release(&args.job);
    }
    draft.store_job(job);
    if let Some((offer, shared)) = offer {
        jobs::grant_offer(draft, &args.job, &offer, shared);
    }
    for pid in new_members {
        add_member(draft, pid, &args.job, MembershipEvidence::Registered);
    }
    lending::update_loans(draft);
    draft.state.jobs.get(&args.job).cloned().ok_or_else(|| Refusal::NoSuchJob { job: args.job.clone() })
}

/// Checks that the caller may make or change the job of the assign command `args`. `existing` is the job before the
/// command. Refused in each of these cases:
///
/// - The job exists, and the command requires a new one ([`AssignCommand::must_be_new`]).
/// - The caller is no administrator, and the job belongs to another user, or the command names another user as its
///   owner.
/// - The caller is no administrator, and the command would make a job of a batch system.
fn check_may_assign(existing: Option<&Job>, args: &AssignCommand) -> Result<(), Refusal> {
    if let Some(job) = existing {
        if args.must_be_new {
            let may_release = !job.was_released && check_may_change_request(job, &args.caller).is_ok();
            return Err(Refusal::JobExists { job: job.id.clone(), may_release });
        }
        check_may_change(job, &args.caller)?;
    } else if !args.caller.is_admin && args.job.source() != JobSource::Manual {
        return Err(Refusal::SchedulerJobByUser { job: args.job.clone() });
    }
    match args.owner.filter(|&owner| !args.caller.is_admin && owner != args.caller.uid) {
        Some(owner) => Err(Refusal::JobForOtherUser { job: args.job.clone(), owner }),
        None => Ok(()),
    }
}

/// Replaces a request for everything ([`AssignCommand::everything`]) by a number of cores or PUs (logical CPUs).
/// Returns the changed command, or `None` if `args` does not request everything. The number is that of the free cores
/// or PUs, and those that the job holds. For a borrower (a job of the class besteffort), it is that of all cores with
/// an online PU that is not reserved for the system. Refused if the number is 0.
fn replace_everything_by_cores(
    draft: &CycleDraft<'_>,
    args: &AssignCommand,
) -> Result<Option<AssignCommand>, Refusal> {
    let Some(unit) = args.everything else { return Ok(None) };
    let state = &*draft.state;
    let earlier_class = || Some(state.jobs.get(&args.job)?.request.as_ref()?.class);
    let class = args.class.or_else(earlier_class);
    let cpu_request = if class == Some(PriorityClass::Besteffort) {
        // A borrower takes no cores from anybody, and can use each core that is idle at some time.
        let usable = state.pool.online_cpus().difference(&state.pool.housekeeping_cpus());
        CpuRequest::Cores(state.topology.overlapping_core_count(&usable))
    } else {
        request_for_all_available(&args.job, unit, &state.pool, &state.topology, draft.policy)
    };
    if cpu_request.requests_no_cpus() {
        return Err(Refusal::NothingFree { unit });
    }
    Ok(Some(AssignCommand { cpu_request: Some(cpu_request), everything: None, ..args.clone() }))
}

/// Makes or changes a provision (a job whose cores are promised to a service), and returns the job. Processes that run
/// already join later in this cycle. A provision may have a rule that recognises the processes of the service. If the
/// rule changes, the members that only the former rule recognised leave. Refused in each of these cases:
///
/// - pjw is in observe mode, or the caller is no administrator.
/// - The name is that of a job of a batch system, or of an existing job that is no provision.
/// - Another provision has the same rule.
/// - The cores can't be granted, for example because too few are free. If too few are free, a provision from the
///   configuration file is not refused, nor is one that only gets another rule. It keeps the cores that it has, and
///   waits for the others.
fn provision(draft: &mut CycleDraft<'_>, args: &ProvisionCommand) -> Result<Job, Refusal> {
    require_enforce_mode(draft)?;
    if !args.caller.is_admin {
        return Err(Refusal::ProvisionNeedsAdmin);
    }
    if args.job.source() != JobSource::Manual {
        return Err(Refusal::SchedulerJobByUser { job: args.job.clone() });
    }
    let existing = draft.state.jobs.get(&args.job).cloned();
    if existing.as_ref().is_some_and(|job| job.provision.is_none()) {
        return Err(Refusal::ProvisionNameTaken { job: args.job.clone() });
    }
    let provision = provision_with_rule(existing.as_ref(), args);
    let rule = provision.rule.as_ref();
    let has_same_rule = |job: &&Job| {
        let rule_of_job = job.provision.as_ref().and_then(|provision| provision.rule.as_ref());
        job.id != args.job && rule.is_some() && rule_of_job == rule
    };
    if let Some(other) = draft.state.jobs.provisions().find(has_same_rule) {
        return Err(Refusal::ProvisionWithSameRule { job: args.job.clone(), other: other.id.clone() });
    }
    let request = JobRequest { class: PriorityClass::Guaranteed, ..JobRequest::with_core_count(args.cores) };
    let former_rule = existing.as_ref().and_then(|job| job.provision.as_ref()?.rule.as_ref());
    let with_same_request = existing.as_ref().filter(|job| job.request.as_ref() == Some(&request));
    let has_all =
        |job: &Job| job.grant.is_some() && !jobs::has_fewer_than_requested(&draft.state.topology, job);
    let keeps_cores = with_same_request.is_some_and(jobs::prefers_own_cores);
    let offer = if with_same_request.is_some_and(has_all) {
        None
    } else {
        match jobs::find_offer(draft.state, draft.policy, &args.job, &request) {
            // The job waits: at boot, jobs of the last run may still hold cores.
            Err(Refusal::NotEnoughCores { .. }) if args.provision.from_config => None,
            // The job keeps the cores that it has, and gets the others as soon as they are free.
            Err(Refusal::NotEnoughCores { .. }) if keeps_cores && former_rule != rule => None,
            // The job does not exchange cores of its own for shared ones.
            Ok((_, true)) if keeps_cores => None,
            offer => Some(offer?),
        }
    };
    membership::rule_change::apply_rule(draft, &args.job, former_rule, rule);
    let owner = owner_of_provision(existing.as_ref(), rule, args);
    let new_job = || Job::new(args.job.clone(), owner, EndCondition::Release, draft.now.wall_clock);
    let job = existing.unwrap_or_else(new_job);
    draft.store_job(Job { owner, request: Some(request), provision: Some(Box::new(provision)), ..job });
    if let Some((offer, shared)) = offer {
        jobs::grant_offer(draft, &args.job, &offer, shared);
    }
    draft.state.jobs.get(&args.job).cloned().ok_or_else(|| Refusal::NoSuchJob { job: args.job.clone() })
}

/// Returns the provision (the promise of cores to a service) of the command `args`, with its rule. The rule says which
/// processes belong to the service. `existing` is the job before the command. A command of a user that has no rule
/// keeps the rule of this job. An entry of the configuration file that has no rule removes it.
fn provision_with_rule(existing: Option<&Job>, args: &ProvisionCommand) -> Provision {
    let former = existing.and_then(|job| job.provision.as_ref()?.rule.as_ref());
    let kept = former.filter(|_| !args.provision.from_config);
    let rule = args.provision.rule.as_ref().or(kept).cloned();
    Provision { rule, ..args.provision.clone() }
}

/// Returns the user who owns the provision (a job whose cores are promised to a service) after the command `args`: the
/// user that `rule` names, or else the caller. A command of a user that has no rule does not change the owner of
/// `existing`, the job before the command.
fn owner_of_provision(existing: Option<&Job>, rule: Option<&ProvisionRule>, args: &ProvisionCommand) -> Uid {
    let keeps_owner = args.provision.rule.is_none() && !args.provision.from_config;
    let kept = existing.filter(|_| keeps_owner).map(|job| job.owner);
    kept.or_else(|| rule.and_then(|rule| rule.user)).unwrap_or(args.caller.uid)
}

/// Returns the processes that are to join the job: those that the command `args` names, and those of the session that
/// it names. Processes of pjwd in the session are left out, unless it has no others. Refused if the session has no
/// process, or if one of the processes may not join the job.
fn new_members(draft: &CycleDraft<'_>, args: &AssignCommand) -> Result<BTreeSet<Pid>, Refusal> {
    let mut pids: BTreeSet<Pid> = args.pids.iter().copied().collect();
    if let Some(session) = args.session {
        let processes = draft.state.processes.values().map(|known| &known.process);
        let inside = processes.filter(|process| process.session == session).map(|process| process.id.pid);
        // A pjwd that a user started by hand is often in the session of the user's shell.
        let (of_pjwd, others): (Vec<Pid>, Vec<Pid>) =
            inside.partition(|&pid| draft.policy.is_daemon_process(pid));
        if of_pjwd.is_empty() && others.is_empty() {
            return Err(Refusal::NoSuchSession { session });
        }
        pids.extend(if others.is_empty() { of_pjwd } else { others });
    }
    pids.iter().try_for_each(|&pid| check_may_join(draft, pid, args))?;
    Ok(pids)
}

/// Checks that the process `pid` may become a member of the job that `args` names. Refused in each of these cases:
///
/// - The process is unknown, a kernel thread, process 1, or a process of pjwd or of a scheduler.
/// - It belongs to another user, and the caller is no administrator.
/// - It belongs to another user than the only one whose processes pjwd manages.
/// - It is in another job because of a scheduler's cgroup or a command.
/// - It is in another job, and the command takes no processes from other jobs ([`AssignCommand::keeps_members`]). This
///   does not apply to an adopted process, which is in the other job only because its user has no further job.
fn check_may_join(draft: &CycleDraft<'_>, pid: Pid, args: &AssignCommand) -> Result<(), Refusal> {
    let known = draft.state.processes.get(&pid).ok_or(Refusal::NoSuchProcess { pid })?;
    let process = &known.process;
    let is_of_scheduler = process.uid == Uid::ROOT && known.batch_identity.role != BatchRole::Ordinary;
    let reasons_against = [
        (process.is_kernel_thread, "it is a kernel thread"),
        (pid == Pid(1), "it is the system's first process"),
        (draft.policy.is_daemon_process(pid), "it is a process of pjwd"),
        (is_of_scheduler, "it is a scheduler's own process"),
    ];
    if let Some((_, why)) = reasons_against.into_iter().find(|(applies, _)| *applies) {
        return Err(Refusal::CantBeMember { pid, why });
    }
    if !args.caller.is_admin && process.uid != args.caller.uid {
        return Err(Refusal::ProcessNotOwned { pid, owner: process.uid });
    }
    if let Some(user) = draft.policy.only_managed_user.filter(|&user| user != process.uid) {
        return Err(Refusal::NotDaemonsUser { pid, owner: process.uid, user });
    }
    // A process with weak evidence may change its job. One that a scheduler's cgroup or a command assigned stays.
    let member = draft.state.members.get(&pid).filter(|member| member.job != args.job);
    // An adopted process belongs to a job only because its user has no other one.
    let stays = |member: &Member| args.keeps_members && member.evidence > MembershipEvidence::Adopted;
    match member.filter(|member| stays(member) || member.evidence >= MembershipEvidence::Cgroup) {
        Some(member) if stays(member) => Err(Refusal::StaysInJob { pid, job: member.job.clone() }),
        // `pjwctl run` and `pjwctl spawn` require a new job, and name their own process.
        Some(member) if args.must_be_new => Err(Refusal::StarterInOtherJob { pid, job: member.job.clone() }),
        Some(member) => Err(Refusal::InOtherJob { pid, job: member.job.clone() }),
        None => Ok(()),
    }
}

/// Returns the user who owns the job after the command `args`. This is the first of these users that is known: the user
/// in `args`, the owner of `existing` (the job before the command), the user of the first process in `new_members`, the
/// caller.
fn owner_after_assign(
    draft: &CycleDraft<'_>,
    existing: Option<&Job>,
    args: &AssignCommand,
    new_members: &BTreeSet<Pid>,
) -> Uid {
    let first = new_members.first().and_then(|&pid| draft.state.process(pid));
    let owner = args.owner.or(existing.map(|job| job.owner));
    owner.or(first.map(|process| process.uid)).unwrap_or(args.caller.uid)
}

/// Returns the PUs (logical CPUs) to grant to the job for `request`, and whether other jobs may also hold some of them.
/// `existing` is the job before the command, and `owner` is its owner after the command. `None` if no PUs are granted
/// now:
///
/// - The job is a borrower (a job of the class besteffort): it borrows cores later in this cycle.
/// - The job has all cores of an unchanged request, or a batch system chose its cores.
/// - Too few cores are free, and the setting `on_exhausted` lets the job wait for cores.
///
/// Refused in each of these cases:
///
/// - The request can't be served, and the job can't wait.
/// - The caller is no administrator, and the owner would have more cores than a user may have.
/// - A batch system chose the cores of the job, and the command requests others.
/// - The job can't be a borrower with this request.
fn offer_for_assign(
    draft: &CycleDraft<'_>,
    existing: Option<&Job>,
    args: &AssignCommand,
    request: &JobRequest,
    owner: Uid,
) -> Result<Option<(PuOffer, bool)>, Refusal> {
    // Where processes go within the job has no influence on its cores.
    let has_same_cores =
        |before: &JobRequest| JobRequest { within_job: request.within_job, ..before.clone() } == *request;
    let is_unchanged = existing.is_some_and(|job| job.request.as_ref().is_some_and(has_same_cores));
    if request.class == PriorityClass::Besteffort {
        check_borrower(&args.job, request)?;
        // A process that joins takes no more cores than before, whatever the limit is by now.
        if !args.caller.is_admin && !is_unchanged {
            check_user_limit(draft, &args.job, request, owner)?;
        }
        return Ok(None);
    }
    let held = existing.and_then(|job| job.grant.as_ref());
    let has_all = |job: &Job| !jobs::has_fewer_than_requested(&draft.state.topology, job);
    let is_served = is_unchanged && existing.is_some_and(has_all);
    let is_chosen_by_scheduler = held.is_some_and(|grant| grant.granted_by == GrantedBy::Scheduler);
    if is_chosen_by_scheduler && !is_served && args.cpu_request.is_some() {
        return Err(Refusal::GrantedByScheduler { job: args.job.clone() });
    }
    if is_chosen_by_scheduler || (held.is_some() && is_served) {
        return Ok(None);
    }
    if !args.caller.is_admin {
        check_user_limit(draft, &args.job, request, owner)?;
    }
    match jobs::find_offer(draft.state, draft.policy, &args.job, request) {
        Err(shortage @ (Refusal::NotEnoughCores { .. } | Refusal::HeldByOtherJob { .. }))
            if draft.policy.exhaustion_policy == ExhaustionPolicy::Wait =>
        {
            match why_not_wait(held.is_some(), args.must_be_new) {
                None => Ok(None),
                Some(why) => Err(Refusal::DoesNotWait { shortage: Box::new(shortage), why }),
            }
        }
        offer => offer.map(Some),
    }
}

/// Refuses `request` for the job `id` if the jobs of `owner` would then have more cores than a user may have. If this
/// limit is 0, only administrators may request cores. These cores count for each job of the owner:
///
/// - Each core of which the job holds at least one PU (logical CPU).
/// - For a job that waits for cores, the cores that it requests. Also for a borrower (a job of the class besteffort),
///   because borrowed cores change all the time.
fn check_user_limit(
    draft: &CycleDraft<'_>,
    id: &JobId,
    request: &JobRequest,
    owner: Uid,
) -> Result<(), Refusal> {
    let limit = draft.policy.user_max_cores;
    if limit == 0 {
        return Err(Refusal::AssignNeedsAdmin);
    }
    let topology = &draft.state.topology;
    let others = draft.state.jobs.jobs_of_owner(owner).filter(|job| job.id != *id);
    let cores_of = |job: &Job| match (&job.grant, &job.request) {
        (Some(grant), _) if !job.is_borrower() => topology.overlapping_core_count(&grant.cpus),
        (_, Some(request)) if !job.was_released => request.cpu_request.core_count(topology),
        (_, _) => 0,
    };
    let held = others.map(cores_of).fold(0, u32::saturating_add);
    let requested = request.cpu_request.core_count(topology);
    let total = held.saturating_add(requested);
    if total > limit { Err(Refusal::UserLimitExceeded { requested, total, limit }) } else { Ok(()) }
}
