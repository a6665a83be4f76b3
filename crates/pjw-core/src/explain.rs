//! The reasons for the present state, in sentences, for `pjwctl explain`.

use crate::basics::{CpuSet, Pid, Tid, Uid, cpus_text, prelude::*};
use crate::machine::{NumaNodeRule, numa_nodes_of_cpus};
use crate::phases::cpusets::moves::limit_by_other_job;
use crate::phases::cpusets::{EffectiveEnforcement, effective_enforcement, effective_enforcement_of_members};
use crate::phases::lending::{reason_not_to_borrow, reason_not_to_lend, squeeze::reason_not_to_squeeze};
use crate::phases::{jobs::find_offer, membership::ancestors, unassigned::jobs_of};
use crate::state::masks::lifted::{LiftReason, LiftedBinding};
use crate::state::{Member, MemberThread, WardenState};
use crate::terms::{
    BatchRole, DaemonMode, Grant, GrantedBy, Job, JobId, JobIdAttribute, MembershipEvidence, Ownership,
    Policy, PriorityClass, Process, StarvedPolicy,
};

/// Returns the sentences that `pjwctl explain` prints about a job. The sentences say why the job holds its
/// cores or holds none, what restricts the processes of the job to these cores, and why the processes belong to
/// the job.
#[must_use]
pub fn explain_job(state: &WardenState, policy: &Policy, job: &Job) -> Vec<String> {
    let mut members: Vec<&Member> = state.members_of(&job.id).collect();
    members.sort_by_key(|member| (core::cmp::Reverse(member.evidence), member.id));
    let mut sentences = Vec::new();
    match (&job.request, &job.grant) {
        _ if job.was_released => sentences.push(format!(
            "{} was released: its threads are left alone until its scheduler ends it, or it is assigned cores again",
            job.id
        )),
        (_, Some(grant)) => {
            sentences.push(grant_text(job, grant));
            sentences.extend(grant.reasons.iter().cloned());
            if members.is_empty() {
                sentences.push("no process belongs to it: what it holds is reserved".to_owned());
            } else if grant.ownership == Ownership::Frozen {
                sentences.push(frozen_text(state, policy));
            } else {
                sentences.push(enforcement_text(&effective_enforcement(state, policy, job), "its processes"));
            }
        }
        (Some(_), None) if job.is_borrower() && members.is_empty() => {
            sentences.push(format!("no process belongs to {}: it borrows cores as soon as one does", job.id));
        }
        (Some(request), None) => {
            sentences.push(if members.is_empty() {
                format!("{} waits for cores; no process belongs to it yet", job.id)
            } else if let Some(limited) = limited_members_text(state, &members) {
                format!("{} waits for cores; {limited}", job.id)
            } else {
                format!("{} waits for cores: its processes run unconfined", job.id)
            });
            let offer = find_offer(state, policy, &job.id, request);
            sentences.extend(offer.err().map(|why| why.to_string()));
        }
        (None, None) => {
            sentences.push(format!("the number of cores of {} is unknown: it is watched only", job.id));
        }
    }
    sentences.extend(provision_text(job));
    sentences.extend(wanted_cores_text(state, job));
    sentences.extend(within_job_text(state, policy, job));
    sentences.extend(lending_text(state, policy, job));
    match members.as_slice() {
        [] => {}
        [only] => sentences.push(format!("1 process belongs to it; {}", evidence_text(state, only))),
        [first, ..] => {
            let (count, evidence) = (members.len(), evidence_text(state, first));
            sentences.push(format!("{count} processes belong to it; {evidence}"));
        }
    }
    sentences.extend(shared_address_spaces_text(state, &members));
    sentences
}

/// Returns the PUs (logical CPUs) that the job holds at present. Empty if no PUs are granted to the job, or if the
/// processes of the job are frozen. A frozen job can't run, so the PUs that are granted to it have no effect.
#[must_use]
pub fn held_cpus(job: &Job) -> CpuSet {
    let grant = job.grant.as_ref().filter(|grant| grant.ownership != Ownership::Frozen);
    grant.map(|grant| grant.cpus.clone()).unwrap_or_default()
}

/// Returns the sentence about the PUs in `grant`, the grant of `job`: whether the job owns or borrows them, and who
/// granted them.
fn grant_text(job: &Job, grant: &Grant) -> String {
    let (id, cpus) = (&job.id, cpus_text(&grant.cpus));
    match (grant.ownership, grant.granted_by) {
        (Ownership::Owned, GrantedBy::Warden) => format!("{id} holds {cpus}, granted by pjwd"),
        (Ownership::Owned, GrantedBy::Scheduler) => format!("{id} holds {cpus}, granted by its scheduler"),
        (Ownership::Borrowed, _) => format!("{id} has no cores of its own, and borrows {cpus}"),
        (Ownership::Squeezed, _) => format!("{id} has no core, and runs on the housekeeping {cpus}"),
        (Ownership::Frozen, _) => format!("{id} has no core"),
    }
}

/// Returns the sentence about the frozen processes of a borrower that has no core now. A borrower is a job that has
/// no cores of its own and uses free cores and cores that other jobs leave idle. The sentence says why the processes
/// are frozen, and when they run again. In the mode `observe`, the sentence says that they are not frozen.
fn frozen_text(state: &WardenState, policy: &Policy) -> String {
    if policy.mode == DaemonMode::Observe {
        return "its processes are not frozen now: pjwd only watches".to_owned();
    }
    let why_frozen = match policy.lending.starved {
        StarvedPolicy::Freeze => "the configuration has lending.starved = \"freeze\"".to_owned(),
        StarvedPolicy::Squeeze => reason_not_to_squeeze(state, policy),
    };
    format!(
        "its processes are frozen, because {why_frozen}: they run again as soon as a core is free, or a job of the class \
         guaranteed leaves one idle (pjwctl jobs shows which jobs hold the cores)"
    )
}

/// The sentence about the number of cores that a job wants at present. `None` if it wants what it was granted.
fn wanted_cores_text(state: &WardenState, job: &Job) -> Option<String> {
    let wanted = job.wanted_core_count(&state.topology)?;
    let given = job.wanted_cores.map_or(wanted, |wanted| wanted.count);
    let more = if given > wanted { format!(" ({given} were asked for)") } else { String::new() };
    let limit = job.max_wanted_cores(&state.topology).unwrap_or(wanted);
    let noun = if limit == 1 { "core" } else { "cores" };
    let borrows = job.active_grant().is_some_and(|grant| grant.ownership == Ownership::Borrowed);
    let kept = if wanted == 0 && borrows {
        "; a besteffort job keeps one core, so that it can ask for more"
    } else {
        ""
    };
    Some(format!("it wants {wanted} of at most {limit} {noun} at present{more}{kept}"))
}

/// Returns the sentence about the rule `--within-job`, by which a new process of `job` gets a NUMA node. If the rule
/// has no effect, the sentence gives the reason. Returns `None` if the job requested no rule, or if no cores are
/// granted to the job.
fn within_job_text(state: &WardenState, policy: &Policy, job: &Job) -> Option<String> {
    let rule = job.request.as_ref()?.within_job;
    if rule == NumaNodeRule::Default {
        return None;
    }
    let grant = job.active_grant()?;
    if !policy.pin_hot_threads && !state.cpusets.has_isolated_partition(&job.id) {
        return Some(format!(
            "--within-job {rule} has no effect: no thread is pinned, because the configuration has balance.pin = false"
        ));
    }
    Some(match numa_nodes_of_cpus(&state.topology, &grant.cpus).len() {
        0 | 1 => format!("--within-job {rule} has no effect: its CPUs are on one NUMA node"),
        _ => format!("a new process with hot threads goes {} (--within-job {rule})", rule.description()),
    })
}

/// The sentence about a promise of cores to a service. `None` if the job is not a provision.
fn provision_text(job: &Job) -> Option<String> {
    let provision = job.provision.as_ref()?;
    let by = if provision.from_config { "the configuration" } else { "an administrator" };
    let rule = provision.rule.as_ref().map(|rule| format!("; processes with {rule} belong to it"));
    Some(format!("{by} promised these cores to it, with or without processes{}", rule.unwrap_or_default()))
}

/// Returns the sentence about the lending of idle cores. Jobs of the class guaranteed lend the cores that they leave
/// idle to borrowers (jobs of the class besteffort). The sentence says:
///
/// - for a job that lends cores: which cores it lends to which borrowers,
/// - for another job of the class guaranteed: why it lends none,
/// - for a borrower that can't get lent cores: why it can't.
///
/// Returns `None` for all other jobs.
fn lending_text(state: &WardenState, policy: &Policy, job: &Job) -> Option<String> {
    let lent = state.pool.lent_by(&job.id);
    if !lent.is_empty() {
        let borrowers: BTreeSet<String> =
            lent.iter().filter_map(|pu| Some(state.pool.borrower(pu)?.to_string())).collect();
        let borrowers: Vec<String> = borrowers.into_iter().collect();
        return Some(format!("it leaves {} idle: lent to {}", cpus_text(&lent), borrowers.join(", ")));
    }
    if job.has_priority_class(PriorityClass::Guaranteed) {
        return Some(not_lent_text(state, policy, job));
    }
    if !job.is_borrower() {
        return None;
    }
    // Idle priority needs the cpuset's cgroup: a process outside would slow down the owner of a lent core.
    let has_processes = state.members_of(&job.id).next().is_some();
    let realtime = "a thread of it has a real-time priority, so owners would wait for it (pjwctl status names the process)";
    let why = reason_not_to_lend(policy).or_else(|| match effective_enforcement(state, policy, job) {
        _ if state.lending.is_realtime_borrower(&job.id) => Some(realtime.to_owned()),
        EffectiveEnforcement::Affinity { why } if has_processes => Some(why),
        _ => None,
    })?;
    Some(format!("it borrows free cores only, not those that other jobs leave idle: {why}"))
}

/// Returns the sentence that says why none of the cores of `owner`, a job of the class guaranteed, is lent.
fn not_lent_text(state: &WardenState, policy: &Policy, owner: &Job) -> String {
    if let Some(why) = reason_not_to_lend(policy) {
        return format!("the cores that it leaves idle are not lent: {why}");
    }
    if owner.request.as_ref().is_some_and(|request| request.isolated) {
        return "its cores are an isolated partition: they are not lent".to_owned();
    }
    let granted = owner.grant.as_ref().map(|grant| &grant.cpus);
    if granted.is_some_and(|cpus| !cpus.is_empty() && cpus.is_subset(&state.jobs.shared_cpus())) {
        return "other jobs share its cores: they are not lent".to_owned();
    }
    if !state.jobs.has_borrowers() {
        return "none of its cores is lent: no job of the class besteffort wants one".to_owned();
    }
    let buffer = policy.lending.buffer_cores;
    let used = state.lending.owner_state(&owner.id).and_then(|known| known.used_core_count());
    let (kept, why) = match (owner.wanted_core_count(&state.topology), used) {
        (Some(wanted), _) => (wanted, format!("it wants {wanted} of them")),
        (None, None) => return "none of its cores is lent: its use of them was not measured yet".to_owned(),
        (None, Some(used)) => {
            (used.saturating_add(buffer), format!("it uses {used}, a buffer of {buffer} stays free for it"))
        }
    };
    let cores = granted.map_or(0, |cpus| state.topology.overlapping_core_count(cpus));
    let why = match reason_not_to_borrow(state, policy) {
        _ if kept >= cores => why,
        Some(no_borrower) => no_borrower.to_owned(),
        None => {
            let lend_after = policy.lending.lend_after;
            format!("{why}, and the rest is lent after it was idle for {lend_after:?} or longer")
        }
    };
    format!("none of its cores is lent: {why}")
}

/// Returns the sentence that says by which means (`by`) processes are kept on the grant of their job: a cpuset,
/// affinity masks or nothing. `processes` is the term for the processes in the sentence, such as `its processes`.
fn enforcement_text(by: &EffectiveEnforcement, processes: &str) -> String {
    match by {
        EffectiveEnforcement::Cpuset { path: Some(path) } => {
            format!("the cpuset of {path} keeps {processes} there")
        }
        EffectiveEnforcement::Cpuset { path: None } => {
            format!("a cpuset of its scheduler's keeps {processes} there")
        }
        EffectiveEnforcement::Affinity { why } => {
            format!("masks on each thread keep {processes} there: {why}")
        }
        EffectiveEnforcement::NotYet { why } => {
            format!(
                "{processes} may run elsewhere until the kernel has completed the isolated partition: {why}"
            )
        }
        EffectiveEnforcement::Nothing => format!("nothing keeps {processes} there: pjwd only watches"),
    }
}

/// Returns the sentence that the cpuset of another job limits the process `pid`, whose job holds no cores. `limit` has
/// the other job, and the PUs (logical CPUs) of its cpuset.
fn limit_text(pid: Pid, (other, cpus): (&JobId, &CpuSet)) -> String {
    format!("the cpuset of {other} limits process {pid} to {}", cpus_text(cpus))
}

/// Returns the sentence about those of `members`, the processes of a job that holds no cores, that the cpusets of other
/// jobs limit. `None` if there are none.
fn limited_members_text(state: &WardenState, members: &[&Member]) -> Option<String> {
    let mut limited =
        members.iter().filter_map(|member| Some((member.id.pid, limit_by_other_job(state, member)?)));
    let (pid, limit) = limited.next()?;
    let more = match limited.count() {
        0 => String::new(),
        others => format!("; cpusets of other jobs limit {others} more of its processes"),
    };
    Some(format!("{}{more}", limit_text(pid, limit)))
}

/// Returns the sentences that `pjwctl explain` prints about the process `pid`. The sentences say why the
/// process belongs to its job, or why it belongs to no job. If the last scan did not find the process, the
/// result is one sentence that says so.
#[must_use]
pub fn explain_process(state: &WardenState, policy: &Policy, pid: Pid) -> Vec<String> {
    let Some(known) = state.processes.get(&pid) else {
        return vec![format!("the last scan found no process {pid}")];
    };
    let mut sentences = Vec::new();
    if let Some(member) = state.members.get(&pid) {
        sentences.push(evidence_text(state, member));
        match state.jobs.get(&member.job).and_then(|job| Some((job, job.active_grant()?))) {
            Some((job, grant)) if grant.ownership == Ownership::Frozen => {
                sentences.push(grant_text(job, grant));
                sentences.push(frozen_text(state, policy));
            }
            Some((job, grant)) => {
                sentences.push(format!("{} holds {}", member.job, cpus_text(&grant.cpus)));
                let by = effective_enforcement_of_members(state, policy, job, core::iter::once(member));
                sentences.push(enforcement_text(&by, "it"));
            }
            None => sentences.push(match limit_by_other_job(state, member) {
                Some(limit) => format!("{} holds no cores; {}", member.job, limit_text(pid, limit)),
                None => format!("{} holds no cores: its processes run unconfined", member.job),
            }),
        }
        sentences.extend(address_space_text(state, member));
        return sentences;
    }
    if known.process.is_kernel_thread {
        sentences.push(format!("process {pid} is a kernel thread: no job owns those"));
    } else if let BatchRole::Launcher(source) | BatchRole::Helper(source) = known.batch_identity.role {
        sentences.push(format!("process {pid} ({}) is one of {source}'s own processes", known.process.comm));
    } else {
        sentences.push(format!(
            "no command registered process {pid}, and neither its cgroup nor an ancestor names a job"
        ));
    }
    for reference in &known.batch_identity.job_references {
        if let JobIdAttribute::Environment { .. } = reference.kind {
            sentences.push(format!(
                "its environment names {}, which alone proves nothing: anyone can set a variable",
                reference.job
            ));
        }
    }
    sentences.extend(stray_text(state, policy, &known.process));
    sentences
}

/// Returns the sentence about a stray: a process in no job, of a user who has jobs on this machine. The sentence has
/// the remedy. If the process is part of a login, the sentence says that no warning tells of it. `None` if the process
/// is not a stray.
fn stray_text(state: &WardenState, policy: &Policy, process: &Process) -> Option<String> {
    let (pid, user) = (process.id.pid, process.uid);
    let is_in = |pids_by_user: &BTreeMap<Uid, BTreeSet<Pid>>| {
        pids_by_user.get(&user).is_some_and(|pids| pids.contains(&pid))
    };
    if !is_in(&state.unassigned_pids_by_user) {
        return None;
    }
    let jobs: Vec<&JobId> = jobs_of(state, user).collect();
    let (target, which) = match jobs.as_slice() {
        [only] => (only.to_string(), format!(" ({only})")),
        _ => ("JOB".to_owned(), String::new()),
    };
    let is_kept_off = policy.mode == DaemonMode::Enforce && state.pids_kept_off_job_cpus.contains(&pid);
    let kept_off =
        if is_kept_off { ", so it is kept off the cores of all jobs (adopt_strays = true)" } else { "" };
    let of_login =
        if is_in(&state.login_pids_by_user) { " of a login, of which no warning tells" } else { "" };
    Some(format!(
        "it is a stray{of_login}: user {user} has jobs here{which}, and it is in none{kept_off}; pjwctl assign \
         {target} --pid {pid} makes it a member"
    ))
}

/// Returns the sentence about the other processes that share the address space of `member`. Returns `None` if there
/// are none. A process that only owns the address space and does no work of the job ([`Member::is_task_host`]) is not
/// counted among the others.
fn address_space_text(state: &WardenState, member: &Member) -> Option<String> {
    let group = state.address_spaces.group_of(member.id)?;
    let is_host = |pid: &Pid| state.members.get(pid).is_some_and(Member::is_task_host);
    let others =
        state.address_spaces.pids_in_group(group).filter(|pid| *pid != member.id.pid && !is_host(pid));
    let others: Vec<Pid> = others.collect();
    if others.is_empty() {
        return None;
    }
    let shown: Vec<String> = others.iter().take(8).map(Pid::to_string).collect();
    let more = others.len().saturating_sub(shown.len());
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let noun = if others.len() == 1 { "process" } else { "processes" };
    if member.is_task_host() {
        let (verb, shown) = (if others.len() == 1 { "uses" } else { "use" }, shown.join(", "));
        return Some(format!("it owns the address space that {noun} {shown}{more} {verb}"));
    }
    Some(format!(
        "it shares its address space with {noun} {}{more}: each is balanced as a process of its own, and their memory counts once",
        shown.join(", ")
    ))
}

/// The sentence about the address spaces that processes of a job share. `None` if there are none.
fn shared_address_spaces_text(state: &WardenState, members: &[&Member]) -> Option<String> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    let tasks = members.iter().filter(|member| !member.is_task_host());
    let groups = tasks.filter_map(|member| state.address_spaces.group_of(member.id));
    groups.for_each(|group| *counts.entry(group).or_default() += 1);
    let counts: Vec<String> = counts.values().map(ToString::to_string).collect();
    (!counts.is_empty())
        .then(|| format!("of its processes, {} share one address space", counts.join(", and another ")))
}

/// Returns the sentence that says why the process `member` belongs to its job.
fn evidence_text(state: &WardenState, member: &Member) -> String {
    let (pid, job) = (member.id.pid, &member.job);
    match member.evidence {
        MembershipEvidence::Registered => format!("process {pid} was registered for {job} over the socket"),
        MembershipEvidence::JobCpuset => format!("process {pid} is in the cgroup that pjw made for {job}"),
        MembershipEvidence::Cgroup => format!("process {pid} is in {job} by its scheduler's cgroup"),
        MembershipEvidence::Parent => {
            let root = state.process(pid).and_then(|process| {
                let members = ancestors(state, process).map(|known| known.process.id.pid);
                members.take_while(|pid| state.members.contains_key(pid)).last()
            });
            match root {
                Some(root) => format!("process {pid} descends from {root}, which belongs to {job}"),
                None => format!("process {pid} was born to a process of {job} that has exited since"),
            }
        }
        MembershipEvidence::Provision => format!("process {pid} is recognised by the rule of {job}"),
        MembershipEvidence::Session => format!("process {pid} is in the session or process group of {job}"),
        MembershipEvidence::Environment => {
            format!("the environment of process {pid} names {job}, and its user and ancestors confirm it")
        }
        MembershipEvidence::Adopted => {
            format!("process {pid} was adopted: {job} is the only job of its user")
        }
    }
}

/// Returns one sentence that `pjwctl explain` prints: the reason why a thread has its affinity mask. `tid` is the id of
/// the thread, `thread` has the facts about the thread, and `member` is the process of the thread. The sentence does
/// not name the thread, so that threads with the same reason can be listed together.
#[must_use]
pub fn explain_mask(state: &WardenState, member: &Member, tid: Tid, thread: &MemberThread) -> String {
    let allowed = cpus_text(&thread.effective_mask);
    let Some(grant) = state.jobs.get(&member.job).and_then(Job::active_grant) else {
        return format!("it is left on {allowed}: its job holds no cores");
    };
    if grant.ownership == Ownership::Frozen {
        return "it does not run: its job can borrow no core, and is frozen".to_owned();
    }
    let grant = &grant.cpus;
    let wants = format!("it wants a CPU {} % of the time (running or waiting)", thread.demand.permille / 10);
    if thread.effective_mask.is_empty() || !thread.effective_mask.is_subset(grant) {
        return format!(
            "it is outside {} for now: it may run on {allowed}; pjwctl plan shows what the next cycle does \
             about it, pjwctl status what hinders that",
            cpus_text(grant)
        );
    }
    let Some(entry) = thread.mask_entry.as_ref().filter(|entry| !entry.is_mask_from_program()) else {
        return if thread.effective_mask == *grant {
            format!("{wants} and floats over {allowed}, as it was found")
        } else {
            format!("it chose {allowed} itself, inside {}", cpus_text(grant))
        };
    };
    let own = state.program_bound_cpus(grant, member, entry);
    let binding = entry.lifted_binding(&own);
    let is_unbound = binding.is_some_and(|binding| !binding.is_restored);
    let lifted = binding.map(lifted_text).unwrap_or_default();
    if let Some(pu) = state.pinned_pu_of(member, tid) {
        let request = state.jobs.get(&member.job).and_then(|job| job.request.as_ref());
        let has_rule = request.is_some_and(|request| request.within_job != NumaNodeRule::Default);
        let node = member.numa_node.filter(|_| has_rule);
        let node = node.map(|node| format!(" (NUMA node {node} was chosen for its process)"));
        return format!("{wants} and is pinned to CPU {pu}{}{lifted}", node.unwrap_or_default());
    }
    let target = if is_unbound { grant } else { &own };
    let moved = moved_mask_text(entry.original_mask(), target, grant);
    format!("{wants} and floats over {}{moved}{lifted}", cpus_text(target))
}

/// Returns the end of a sentence about a thread whose own binding pjw lifted: pjw let the thread run on other PUs of
/// the job than those to which the program had bound it. The text says why pjw lifted the binding. If pjw restored
/// the binding, because other PUs did not help, the text says so.
fn lifted_text(binding: &LiftedBinding) -> String {
    let own = cpus_text(&binding.mask);
    match binding.reason {
        _ if binding.is_restored => format!(": other CPUs than its own {own} did not help"),
        LiftReason::Overload => {
            format!(
                ": too many running threads were bound to its own {own}, while other CPUs of the job idled"
            )
        }
        LiftReason::Policy => format!(": its own binding to {own} is lifted (affinity = \"override\")"),
    }
}

/// Returns the end of a sentence about a thread that floats over `target`: its own mask `original` was moved into the
/// PUs `grant` of its job. Empty if `target` is all of `grant`.
fn moved_mask_text(original: &CpuSet, target: &CpuSet, grant: &CpuSet) -> String {
    if target == grant {
        String::new()
    } else {
        format!(" (its own {}, moved inside {})", cpus_text(original), cpus_text(grant))
    }
}
