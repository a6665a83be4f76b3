//! Commands: what people ask for is checked and granted, or refused with a sentence, and nothing half-done.

use crate::allocate::{allocate, share};
use crate::command::{Assign, Caller, Command, Refusal, Reply};
use crate::defrag::{self, Defrag};
use crate::event::{Event, EventKind};
use crate::job::{Amount, GrantedBy, Job, JobId, Lifetime, Placement, Request, Source};
use crate::membership::{self, Evidence, enroll};
use crate::policy::{Mode, OnExhausted};
use crate::process::{Pid, Uid};
use crate::reconcile::Draft;
use crate::snapshot::Role;
use crate::topology::Topology;
use crate::topology::fittings::Device;
use crate::{hotplug, jobs};

/// Serves the commands in their order.
pub(crate) fn all(draft: &mut Draft<'_>, commands: &[Command]) -> Vec<Result<Reply, Refusal>> {
    commands.iter().map(|command| one(draft, command)).collect()
}

fn one(draft: &mut Draft<'_>, command: &Command) -> Result<Reply, Refusal> {
    let served = match command {
        Command::Assign(wish) => assign(draft, wish).map(Box::new).map(Reply::Assigned),
        Command::Release { job, caller } => release(draft, job, caller).map(Reply::Released),
        Command::ReleaseAll { caller } => release_all(draft, caller).map(Reply::Released),
        Command::Defrag { caller } => heal(draft, *caller).map(Box::new).map(Reply::Moved),
    };
    if let (Err(refusal), Command::Assign(Assign { job, .. }) | Command::Release { job, .. }) =
        (&served, command)
    {
        draft.events.push(Event::new(EventKind::Refused, refusal.to_string()).of(job));
    }
    served
}

fn release(draft: &mut Draft<'_>, id: &JobId, caller: &Caller) -> Result<Vec<JobId>, Refusal> {
    not_only_observing(draft)?;
    let job = draft.state.jobs.get(id).ok_or_else(|| Refusal::NoSuchJob { job: id.clone() })?;
    may_change(job, caller)?;
    jobs::let_go(draft, id, "released on request");
    Ok(vec![id.clone()])
}

/// Everybody may ask for all; everybody gets what may be theirs to release. A process that is let go by one job
/// may turn out to be another's, which is let go as well.
fn release_all(draft: &mut Draft<'_>, caller: &Caller) -> Result<Vec<JobId>, Refusal> {
    not_only_observing(draft)?;
    let mut released = Vec::new();
    loop {
        let held = draft.state.jobs.values().filter(|job| !job.let_go);
        let theirs = held.filter(|job| may_change(job, caller).is_ok());
        let ids: Vec<JobId> = theirs.map(|job| job.id.clone()).collect();
        if ids.is_empty() {
            return Ok(released);
        }
        for id in &ids {
            jobs::let_go(draft, id, "released with all others on request");
        }
        released.extend(ids);
        membership::map(draft);
    }
}

/// Moves jobs together. Whose they are doesn't matter, so it is for administrators.
fn heal(draft: &mut Draft<'_>, caller: Caller) -> Result<Defrag, Refusal> {
    not_only_observing(draft)?;
    if !caller.admin {
        return Err(Refusal::MovesAreForAdmins);
    }
    let healing = defrag::defrag(draft.state, draft.policy);
    for step in &healing.steps {
        // As it was when the offer was made.
        draft.state.pool.release(&step.job);
        jobs::take(draft, &step.job, &step.offer);
    }
    Ok(healing)
}

/// A warden that only watches changes no mask, not even back.
fn not_only_observing(draft: &Draft<'_>) -> Result<(), Refusal> {
    if draft.policy.mode == Mode::Observe { Err(Refusal::ObserveOnly) } else { Ok(()) }
}

fn may_change(job: &Job, caller: &Caller) -> Result<(), Refusal> {
    if caller.admin || job.owner == caller.uid {
        return Ok(());
    }
    Err(Refusal::NotYourJob { job: job.id.clone(), owner: job.owner })
}

fn assign(draft: &mut Draft<'_>, wish: &Assign) -> Result<Job, Refusal> {
    not_only_observing(draft)?;
    let present = draft.state.jobs.get(&wish.job).cloned();
    if let Some(job) = &present {
        if wish.fresh {
            return Err(Refusal::JobExists { job: job.id.clone() });
        }
        may_change(job, &wish.caller)?;
    } else if !wish.caller.admin && wish.job.source() != Source::Manual {
        return Err(Refusal::NotYoursToName { job: wish.job.clone() });
    }
    if let Some(owner) = wish.owner.filter(|&owner| !wish.caller.admin && owner != wish.caller.uid) {
        return Err(Refusal::NotYoursToGive { job: wish.job.clone(), owner });
    }
    let newcomers = newcomers(draft, wish)?;
    let request = request(&draft.state.topology, present.as_ref(), wish)?;
    let owner = owner(draft, present.as_ref(), wish, &newcomers);
    let offer = offer(draft, present.as_ref(), wish, &request, owner)?;

    let lifetime = match present.as_ref().map(|job| job.lifetime) {
        Some(lifetime) => lifetime,
        None if newcomers.is_empty() => Lifetime::Reservation,
        None => Lifetime::Members,
    };
    let mut job = present.unwrap_or_else(|| Job::new(wish.job.clone(), owner, lifetime, draft.now.wall));
    job.owner = owner;
    job.request = Some(request);
    job.let_go = false;
    // Others that join later did not ask to be moved.
    job.launched = wish.fresh || (job.launched && newcomers.is_empty());
    if newcomers.is_empty() && job.lifetime == Lifetime::Reservation {
        job.empty_since.get_or_insert(draft.now.since_boot);
    }
    job.sessions.extend(wish.session);
    draft.put_job(job);
    match offer {
        Served::Granted(offer) => jobs::take(draft, &wish.job, &offer),
        Served::Shared(offer) => jobs::take_shared(draft, &wish.job, &offer),
        Served::Waits | Served::Unchanged => {}
    }
    for pid in newcomers {
        enroll(draft, pid, &wish.job, Evidence::Registered);
    }
    draft.state.jobs.get(&wish.job).cloned().ok_or_else(|| Refusal::NoSuchJob { job: wish.job.clone() })
}

/// The processes that join, each checked; one that may not join spoils the whole wish.
fn newcomers(draft: &Draft<'_>, wish: &Assign) -> Result<Vec<Pid>, Refusal> {
    let mut pids = wish.pids.clone();
    if let Some(session) = wish.session {
        let inside = draft.state.processes.values().filter(|known| known.process.session == session);
        let before = pids.len();
        pids.extend(inside.map(|known| known.process.id.pid));
        if pids.len() == before {
            return Err(Refusal::NoSuchSession { session });
        }
    }
    pids.sort_unstable();
    pids.dedup();
    for &pid in &pids {
        may_join(draft, pid, wish)?;
    }
    Ok(pids)
}

fn may_join(draft: &Draft<'_>, pid: Pid, wish: &Assign) -> Result<(), Refusal> {
    let known = draft.state.processes.get(&pid).ok_or(Refusal::NoSuchProcess { pid })?;
    let process = &known.process;
    let unjailable = if process.kernel {
        Some("it is a kernel thread")
    } else if pid == Pid(1) {
        Some("it is the system's first process")
    } else if draft.policy.own_pid == Some(pid) {
        Some("it is the warden itself")
    } else if process.uid == Uid::ROOT && known.claims.role != Role::Ordinary {
        Some("it is a scheduler's own process")
    } else {
        None
    };
    if let Some(why) = unjailable {
        return Err(Refusal::Unjailable { pid, why });
    }
    if !wish.caller.admin && process.uid != wish.caller.uid {
        return Err(Refusal::NotYourProcess { pid, owner: process.uid });
    }
    if let Some(user) = draft.policy.only_user.filter(|&user| user != process.uid) {
        return Err(Refusal::OutOfReach { pid, owner: process.uid, user });
    }
    match draft.state.members.get(&pid) {
        // Who was only found may be registered elsewhere, unless a scheduler's cgroup holds it.
        Some(member) if member.job != wish.job && member.evidence >= Evidence::Cgroup => {
            Err(Refusal::InOtherJob { pid, job: member.job.clone() })
        }
        _ => Ok(()),
    }
}

fn request(topology: &Topology, present: Option<&Job>, wish: &Assign) -> Result<Request, Refusal> {
    let before = present.and_then(|job| job.request.clone());
    let amount = wish.amount.clone().or_else(|| before.as_ref().map(|request| request.amount.clone()));
    let amount = amount.ok_or_else(|| Refusal::NoAmount { job: wish.job.clone() })?;
    let was_explicit = before.as_ref().is_some_and(|request| request.placement == Placement::Explicit);
    let placement = match (&amount, wish.placement) {
        (Amount::Exactly(_), _) => Placement::Explicit,
        (_, Some(placement)) if placement != Placement::Explicit => placement,
        _ if was_explicit => Placement::default(),
        _ => before.as_ref().map(|request| request.placement).unwrap_or_default(),
    };
    let class = wish.class.or_else(|| before.as_ref().map(|request| request.class)).unwrap_or_default();
    let near = match wish.near.as_deref() {
        None => before.and_then(|request| request.near),
        Some("") => None,
        Some(name) => Some(device(topology, name)?),
    };
    let was = |asked: fn(&Request) -> bool| present.and_then(|job| job.request.as_ref()).is_some_and(asked);
    let bind_memory = wish.bind_memory.unwrap_or_else(|| was(|request| request.bind_memory));
    let isolated = wish.isolated.unwrap_or_else(|| was(|request| request.isolated));
    Ok(Request { amount, placement, class, near, bind_memory, isolated })
}

fn device(topology: &Topology, name: &str) -> Result<String, Refusal> {
    if topology.device(name).is_some() {
        return Ok(name.to_owned());
    }
    let name_of = |device: &Device| device.names.first().unwrap_or(&device.address).clone();
    let known: Vec<String> = topology.fittings().devices.iter().map(name_of).collect();
    let known = if known.is_empty() { "none that hwloc knows".to_owned() } else { known.join(", ") };
    Err(Refusal::NoSuchDevice { device: name.to_owned(), known })
}

/// A job belongs to whom an administrator names, else to whoever's processes it is made for; an empty one to who asks.
fn owner(draft: &Draft<'_>, present: Option<&Job>, wish: &Assign, newcomers: &[Pid]) -> Uid {
    let of_first =
        newcomers.first().and_then(|pid| draft.state.processes.get(pid)).map(|known| known.process.uid);
    wish.owner.or(present.map(|job| job.owner)).or(of_first).unwrap_or(wish.caller.uid)
}

/// What a wish gets.
enum Served {
    Granted(crate::allocate::Offer),
    Shared(crate::allocate::Offer),
    Waits,
    Unchanged,
}

fn offer(
    draft: &Draft<'_>,
    present: Option<&Job>,
    wish: &Assign,
    request: &Request,
    owner: Uid,
) -> Result<Served, Refusal> {
    let held = present.and_then(|job| job.grant.as_ref());
    let satisfied = |job: &Job| !hotplug::is_short(&draft.state.topology, job);
    let same = present.is_some_and(|job| job.request.as_ref() == Some(request) && satisfied(job));
    match held {
        Some(grant) if grant.granted_by == GrantedBy::Scheduler && !same && wish.amount.is_some() => {
            return Err(Refusal::SchedulersGrant { job: wish.job.clone() });
        }
        Some(grant) if same || grant.granted_by == GrantedBy::Scheduler => return Ok(Served::Unchanged),
        _ => {}
    }
    let (state, policy) = (&draft.state, draft.policy);
    if !wish.caller.admin {
        within_limit(draft, &wish.job, request, owner)?;
    }
    Ok(match allocate(&wish.job, request, &state.pool, &state.topology, policy) {
        Ok(offer) => Served::Granted(offer),
        Err(refusal @ (Refusal::NotEnough { .. } | Refusal::Held { .. })) => match policy.on_exhausted {
            OnExhausted::Refuse => return Err(refusal),
            OnExhausted::Share => Served::Shared(share(
                &wish.job,
                request,
                &state.pool,
                jobs::grants_of_others(state, &wish.job),
                &state.topology,
                policy,
            )?),
            // A job that waits for more keeps what it has; `run` can't wait, its command would run outside.
            OnExhausted::Wait if held.is_some() || wish.fresh => return Err(refusal),
            OnExhausted::Wait => Served::Waits,
        },
        Err(refusal) => return Err(refusal),
    })
}

/// What a user holds, and what the user's jobs wait for, counts: each core that is touched.
fn within_limit(draft: &Draft<'_>, id: &JobId, request: &Request, owner: Uid) -> Result<(), Refusal> {
    let limit = draft.policy.user_max_cores;
    if limit == 0 {
        return Err(Refusal::UsersMayNot);
    }
    let topology = &draft.state.topology;
    let others = draft.state.jobs.values().filter(|job| job.owner == owner && job.id != *id);
    let counted = |job: &Job| match (&job.grant, &job.request) {
        (Some(grant), _) => topology.cores_touched_by(&grant.cpus),
        (None, Some(request)) if !job.let_go => request.amount.in_cores(topology),
        (None, _) => 0,
    };
    let held = others.map(counted).fold(0, u32::saturating_add);
    let asked = request.amount.in_cores(topology);
    let total = held.saturating_add(asked);
    if total > limit { Err(Refusal::UserLimit { asked, total, limit }) } else { Ok(()) }
}
