//! Detailed questions, which the loop answers from its own state: the published view is small on purpose.

use std::ops::Bound;
use std::sync::Arc;

use pjw_core::explain;
use pjw_core::job::JobId;
use pjw_core::membership::Evidence;
use pjw_core::policy::Policy;
use pjw_core::process::{Pid, ProcessId, Tid};
use pjw_core::state::{Member, MemberThread, WardenState};
use pjw_ipc::call::{DefragReply, PlanReply};

/// What is asked.
#[derive(Debug)]
pub enum Question {
    /// The members of a job, a page at a time.
    Members {
        /// Which job.
        job: JobId,
        /// After which place the page starts.
        after: Option<Place>,
        /// How many members it may hold.
        limit: usize,
    },
    /// Why a job holds what it holds.
    Job(JobId),
    /// Why a process is where it is.
    Process {
        /// Which process.
        pid: Pid,
        /// After which of its threads the page starts.
        after: Option<Tid>,
    },
    /// What the next cycle would do.
    Plan {
        /// Whether a recent answer won't do.
        fresh: bool,
    },
    /// Which jobs would have to move so that larger requests fit.
    Defrag {
        /// Whether a recent answer won't do.
        fresh: bool,
    },
}

/// So many threads are in an answer at most: a process may have as many as it likes.
pub const MOST_THREADS: usize = 1000;

/// How far an answer came, and where the next page begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// After this process,
    pub pid: Pid,
    /// or, if it was not told of to its end, after this thread of it.
    pub tid: Option<Tid>,
}

/// The answer; `None` where there is no such thing.
#[derive(Debug)]
pub enum Answer {
    /// A page of members, and where the next begins if there are more.
    Members(Option<(Vec<MemberFacts>, Option<Place>)>),
    /// Why a job holds what it holds.
    Job(Option<JobReasons>),
    /// Why a process is where it is.
    Process(ProcessReasons),
    /// What the next cycle would do, and what it would not, and why: one answer for all who asked.
    Plan(Arc<PlanReply>),
    /// Which jobs would have to move: one answer for all who asked.
    Defrag(Arc<DefragReply>),
}

/// A member with its threads.
#[derive(Debug)]
pub struct MemberFacts {
    /// Which process.
    pub id: ProcessId,
    /// How it is known to be a member.
    pub evidence: Evidence,
    /// Its name and user, if it was seen since it joined.
    pub process: Option<pjw_core::snapshot::Process>,
    /// Its threads.
    pub threads: Vec<ThreadFacts>,
}

/// A thread of a member.
#[derive(Debug)]
pub struct ThreadFacts {
    /// Its number.
    pub tid: Tid,
    /// What is known of it.
    pub thread: MemberThread,
    /// The PU it is pinned to.
    pub pinned: Option<pjw_core::cpuset::Pu>,
    /// Why it may run where it may.
    pub because: String,
}

/// Why a job holds what it holds.
#[derive(Debug)]
pub struct JobReasons {
    /// Its PUs.
    pub cpus: pjw_core::cpuset::CpuSet,
    /// The reasons.
    pub because: Vec<String>,
    /// The second-best choice.
    pub runner_up: String,
}

/// Why a process is where it is.
#[derive(Debug)]
pub struct ProcessReasons {
    /// Whether it was there at the last look.
    pub known: bool,
    /// Its job.
    pub job: Option<JobId>,
    /// The reasons.
    pub because: Vec<String>,
    /// Its threads, if it is a member.
    pub threads: Vec<ThreadFacts>,
    /// After which thread there are more.
    pub next: Option<Tid>,
}

/// The members of a job after a place.
#[must_use]
pub fn members(state: &WardenState, job: &JobId, after: Option<Place>, limit: usize) -> Answer {
    if !state.jobs.contains_key(job) {
        return Answer::Members(None);
    }
    let mut page: Vec<MemberFacts> = Vec::new();
    let mut room = MOST_THREADS;
    let mut told = after;
    for member in state.members_of(job) {
        let begun = told.filter(|place| place.pid == member.id.pid).and_then(|place| place.tid);
        if begun.is_none() && told.is_some_and(|place| place.pid >= member.id.pid) {
            continue;
        }
        if page.len() >= limit || room == 0 {
            return Answer::Members(Some((page, told)));
        }
        let (threads, next) = threads(state, member, begun, room);
        room -= threads.len();
        // Of a process that had begun before, nothing may be left to tell.
        if begun.is_none() || !threads.is_empty() {
            let process = state.processes.get(&member.id.pid).map(|known| known.process.clone());
            page.push(MemberFacts { id: member.id, evidence: member.evidence, process, threads });
        }
        told = Some(Place { pid: member.id.pid, tid: next });
        if next.is_some() {
            return Answer::Members(Some((page, told)));
        }
    }
    Answer::Members(Some((page, None)))
}

/// Why a job holds what it holds.
#[must_use]
pub fn job(state: &WardenState, policy: &Policy, id: &JobId) -> Answer {
    Answer::Job(state.jobs.get(id).map(|job| JobReasons {
        cpus: job.grant.as_ref().map(|grant| grant.cpus.clone()).unwrap_or_default(),
        because: explain::job(state, policy, job),
        runner_up: job.grant.as_ref().map(|grant| grant.runner_up.clone()).unwrap_or_default(),
    }))
}

/// Why a process is where it is, with its threads after one of them.
#[must_use]
pub fn process(state: &WardenState, policy: &Policy, pid: Pid, after: Option<Tid>) -> Answer {
    let member = state.members.get(&pid);
    let (threads, next) =
        member.map(|member| threads(state, member, after, MOST_THREADS)).unwrap_or_default();
    Answer::Process(ProcessReasons {
        known: state.processes.contains_key(&pid),
        job: member.map(|member| member.job.clone()),
        because: explain::process(state, policy, pid),
        threads,
        next,
    })
}

/// So many threads of a member, and the last of them if there are more.
fn threads(
    state: &WardenState,
    member: &Member,
    after: Option<Tid>,
    most: usize,
) -> (Vec<ThreadFacts>, Option<Tid>) {
    let after = after.map_or(Bound::Unbounded, Bound::Excluded);
    let mut rest = member.threads.range((after, Bound::Unbounded));
    let facts = |(&tid, thread): (&Tid, &MemberThread)| ThreadFacts {
        tid,
        thread: thread.clone(),
        pinned: state.pin_of(member, tid),
        because: explain::thread(state, member, tid, thread),
    };
    let told: Vec<ThreadFacts> = rest.by_ref().take(most).map(facts).collect();
    let last = told.last().map(|thread| thread.tid).filter(|_| rest.next().is_some());
    (told, last)
}

#[cfg(test)]
#[path = "question/tests.rs"]
mod tests;
