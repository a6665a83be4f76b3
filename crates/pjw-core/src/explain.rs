//! Why things are where they are, in sentences, for `pjwctl explain`.

use crate::confine::home;
use crate::cpuset::CpuSet;
use crate::fortify::{Keeping, keeping, keeping_of};
use crate::job::{GrantedBy, Job};
use crate::jobs::what_there_is;
use crate::membership::{Evidence, ancestors};
use crate::policy::Policy;
use crate::process::{Pid, ThreadId, Tid};
use crate::snapshot::{Mark, Role};
use crate::state::{Member, MemberThread, WardenState};

/// A set as a person reads it, `CPU 0` or `CPUs 0-3,8`: a bare list of one is taken for a count.
#[must_use]
pub fn named(cpus: &CpuSet) -> String {
    match cpus.len() {
        0 => "no CPU".to_owned(),
        1 => format!("CPU {cpus}"),
        _ => format!("CPUs {cpus}"),
    }
}

/// `CPU 0 is`, `CPUs 0-3 are`.
pub(crate) fn are(cpus: &CpuSet) -> String {
    format!("{} {}", named(cpus), if cpus.len() == 1 { "is" } else { "are" })
}

/// `CPU 0 was`, `CPUs 0-3 were`.
pub(crate) fn were(cpus: &CpuSet) -> String {
    format!("{} {}", named(cpus), if cpus.len() == 1 { "was" } else { "were" })
}

/// Why a job holds what it holds.
#[must_use]
pub fn job(state: &WardenState, policy: &Policy, job: &Job) -> Vec<String> {
    let mut members: Vec<&Member> = state.members_of(&job.id).collect();
    members.sort_by_key(|member| (std::cmp::Reverse(member.evidence), member.id));
    let mut because = Vec::new();
    match (&job.request, &job.grant) {
        _ if job.let_go => because.push(format!(
            "{} was released: its threads are left alone until its scheduler ends it, or it is assigned cores again",
            job.id
        )),
        (_, Some(grant)) => {
            let by = match grant.granted_by {
                GrantedBy::Warden => "the warden",
                GrantedBy::Scheduler => "its scheduler",
            };
            because.push(format!("{} holds {}, granted by {by}", job.id, named(&grant.cpus)));
            because.extend(grant.because.iter().cloned());
            if members.is_empty() {
                because.push("no process belongs to it: what it holds is reserved".to_owned());
            } else {
                because.push(kept(&keeping(state, policy, job), "its processes"));
            }
        }
        (Some(request), None) => {
            because.push(match members.is_empty() {
                true => format!("{} waits for cores; no process belongs to it yet", job.id),
                false => format!("{} waits for cores: its processes run unconfined", job.id),
            });
            let offer = what_there_is(state, policy, &job.id, request);
            because.extend(offer.err().map(|why| why.to_string()));
        }
        (None, None) => {
            because.push(format!("nobody said how many cores {} has: it is watched only", job.id));
        }
    }
    match members.as_slice() {
        [] => {}
        [only] => because.push(format!("1 process belongs to it; {}", how_known(state, only))),
        [first, ..] => {
            because.push(format!("{} processes belong to it; {}", members.len(), how_known(state, first)));
        }
    }
    because
}

/// What keeps somebody on the cores.
fn kept(by: &Keeping, whom: &str) -> String {
    match by {
        Keeping::Cpuset { path: Some(path) } => format!("the cpuset of {path} keeps {whom} there"),
        Keeping::Cpuset { path: None } => format!("a cpuset of its scheduler's keeps {whom} there"),
        Keeping::Affinity { why } => format!("masks on each thread keep {whom} there: {why}"),
        Keeping::Nothing => format!("nothing keeps {whom} there: the warden only watches"),
    }
}

/// Why a process is in its job, or in none.
#[must_use]
pub fn process(state: &WardenState, policy: &Policy, pid: Pid) -> Vec<String> {
    let Some(known) = state.processes.get(&pid) else {
        return vec![format!("process {pid} was not there at the last look")];
    };
    let mut because = Vec::new();
    if let Some(member) = state.members.get(&pid) {
        because.push(how_known(state, member));
        let job = state.jobs.get(&member.job).filter(|job| !job.let_go);
        match job.and_then(|job| Some((job, job.grant.as_ref()?))) {
            Some((job, grant)) => {
                because.push(format!("{} holds {}", member.job, named(&grant.cpus)));
                because.push(kept(&keeping_of(state, policy, job, std::iter::once(member)), "it"));
            }
            None => because.push(format!("{} holds no cores: its processes run unconfined", member.job)),
        }
        return because;
    }
    if known.process.kernel {
        because.push(format!("process {pid} is a kernel thread: no job owns those"));
    } else if let Role::Launcher(source) | Role::Helper(source) = known.claims.role {
        because.push(format!("process {pid} ({}) is one of {source}'s own processes", known.process.comm));
    } else {
        because.push(format!(
            "nobody registered process {pid}, and neither its cgroup nor an ancestor names a job"
        ));
    }
    for claim in &known.claims.claims {
        if let Mark::Environment { .. } = claim.mark {
            because.push(format!(
                "its environment names {}, which alone proves nothing: anyone can set a variable",
                claim.job
            ));
        }
    }
    because
}

fn how_known(state: &WardenState, member: &Member) -> String {
    let (pid, job) = (member.id.pid, &member.job);
    match member.evidence {
        Evidence::Registered => format!("process {pid} was registered for {job} over the socket"),
        Evidence::Cgroup => format!("process {pid} is in {job} by its scheduler's cgroup"),
        Evidence::Parent => {
            let process = state.processes.get(&pid).map(|known| &known.process);
            let root = process.and_then(|process| {
                let members = ancestors(state, process).map(|known| known.process.id.pid);
                members.take_while(|pid| state.members.contains_key(pid)).last()
            });
            match root {
                Some(root) => format!("process {pid} descends from {root}, which belongs to {job}"),
                None => format!("process {pid} was born to a process of {job} that has exited since"),
            }
        }
        Evidence::Session => format!("process {pid} is in the session or process group of {job}"),
        Evidence::Environment => {
            format!("the environment of process {pid} names {job}, and its user and ancestors confirm it")
        }
        Evidence::Adopted => format!("process {pid} was adopted: {job} is the only job of its user"),
    }
}

/// Why a thread of a member may run where it may. The sentence leaves out which thread it is: several that are where
/// they are for the same reason have the same one.
#[must_use]
pub fn thread(state: &WardenState, member: &Member, tid: Tid, thread: &MemberThread) -> String {
    let allowed = named(&thread.allowed);
    let job = state.jobs.get(&member.job).filter(|job| !job.let_go);
    let Some(grant) = job.and_then(|job| job.grant.as_ref()) else {
        return format!("it is left on {allowed}: its job holds no cores");
    };
    let (grant, percent) = (&grant.cpus, thread.demand.permille / 10);
    if thread.allowed.is_empty() || !thread.allowed.is_subset(grant) {
        return format!(
            "it is outside {} for now: it may run on {allowed}; pjwctl plan shows what the next cycle does \
             about it, pjwctl status what hinders that",
            named(grant)
        );
    }
    let id = ThreadId { process: member.id, tid, start: thread.start };
    let chose = || format!("it chose {allowed} itself, inside {}", named(grant));
    let Some(touch) = state.touched.get(&id) else {
        return match thread.allowed == *grant {
            true => format!("it runs {percent} % of the time and floats over {allowed}, as it was found"),
            false => chose(),
        };
    };
    if let Some(pu) = state.pin_of(member, tid) {
        return format!("it runs {percent} % of the time and is pinned to CPU {pu}");
    }
    if thread.allowed != *grant && !touch.made(&thread.allowed, state.topology.cpus()) {
        return chose();
    }
    let home = home(&state.topology, grant, &touch.before, member.inherited.as_ref());
    let own = own_wish(&touch.before, &home, grant);
    format!("it runs {percent} % of the time and floats over {}{own}", named(&home))
}

fn own_wish(wish: &CpuSet, home: &CpuSet, grant: &CpuSet) -> String {
    if home == grant {
        String::new()
    } else {
        format!(" (its own {}, moved inside {})", named(wish), named(grant))
    }
}
