//! Why things are where they are, in sentences, for `pjwctl explain`.

use crate::confine::home;
use crate::cpuset::CpuSet;
use crate::job::{GrantedBy, Job};
use crate::membership::{Evidence, ancestors};
use crate::process::{Pid, ThreadId, Tid};
use crate::snapshot::{Mark, Role};
use crate::state::{Member, MemberThread, WardenState};

/// Why a job holds what it holds.
#[must_use]
pub fn job(state: &WardenState, job: &Job) -> Vec<String> {
    let mut because = Vec::new();
    match (&job.request, &job.grant) {
        (_, Some(grant)) => {
            let by = match grant.granted_by {
                GrantedBy::Warden => "the warden",
                GrantedBy::Scheduler => "its scheduler",
            };
            because.push(format!("{} holds {}, granted by {by}", job.id, grant.cpus));
            because.extend(grant.because.iter().cloned());
        }
        (Some(_), None) => because.push(format!("{} waits for cores: its processes run unconfined", job.id)),
        (None, None) => {
            because.push(format!("nobody said how many cores {} has: it is watched only", job.id));
        }
    }
    let mut members: Vec<&Member> = state.members_of(&job.id).collect();
    members.sort_by_key(|member| (std::cmp::Reverse(member.evidence), member.id));
    if let Some(first) = members.first() {
        because.push(format!("{} processes belong to it; {}", members.len(), how_known(state, first)));
    }
    because
}

/// Why a process is in its job, or in none.
#[must_use]
pub fn process(state: &WardenState, pid: Pid) -> Vec<String> {
    let Some(known) = state.processes.get(&pid) else {
        return vec![format!("process {pid} was not there at the last full look")];
    };
    let mut because = Vec::new();
    if let Some(member) = state.members.get(&pid) {
        because.push(how_known(state, member));
        let job = state.jobs.get(&member.job);
        match job.and_then(|job| job.grant.as_ref()) {
            Some(grant) => because.push(format!("{} holds {}", member.job, grant.cpus)),
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

/// Why a thread of a member may run where it may.
#[must_use]
pub fn thread(state: &WardenState, member: &Member, tid: Tid, thread: &MemberThread) -> String {
    let Some(grant) = state.jobs.get(&member.job).and_then(|job| job.grant.as_ref()) else {
        return format!("thread {tid} is left on {}: its job holds no cores", thread.allowed);
    };
    let id = ThreadId { process: member.id, tid, start: thread.start };
    let percent = thread.demand.permille / 10;
    let Some(touch) = state.touched.get(&id) else {
        return match thread.allowed == grant.cpus {
            true => format!(
                "thread {tid} floats over {} (it was born there), runs {percent} % of the time",
                grant.cpus
            ),
            false => format!("thread {tid} chose {} itself, inside {}", thread.allowed, grant.cpus),
        };
    };
    let wish = &touch.before;
    let home = home(&state.topology, &grant.cpus, wish, member.inherited.as_ref());
    if touch.set != home && touch.set.single().is_some() {
        return format!("thread {tid} runs {percent} % of the time and is pinned to {}", touch.set);
    }
    let own = own_wish(wish, &home, &grant.cpus);
    format!("thread {tid} runs {percent} % of the time and floats over {home}{own}")
}

fn own_wish(wish: &CpuSet, home: &CpuSet, grant: &CpuSet) -> String {
    if home == grant { String::new() } else { format!(" (its own {wish}, moved inside {grant})") }
}
