//! Detailed questions, which the loop answers from its own state: the published view is small on purpose.

use pjw_core::explain;
use pjw_core::job::JobId;
use pjw_core::plan::{Abstained, Plan};
use pjw_core::process::{Pid, Tid};
use pjw_core::state::{Member, MemberThread, WardenState};

/// What is asked.
#[derive(Debug)]
pub enum Question {
    /// The members of a job, a page at a time.
    Members {
        /// Which job.
        job: JobId,
        /// After which pid the page starts.
        after: Option<Pid>,
        /// How many members it may hold.
        limit: usize,
    },
    /// Why a job holds what it holds.
    Job(JobId),
    /// Why a process is where it is.
    Process(Pid),
    /// What the next cycle would do.
    Plan,
}

/// The answer; `None` where there is no such thing.
#[derive(Debug)]
pub enum Answer {
    /// A page of members, and whether there are more.
    Members(Option<(Vec<MemberFacts>, bool)>),
    /// Why a job holds what it holds.
    Job(Option<JobReasons>),
    /// Why a process is where it is.
    Process(ProcessReasons),
    /// What the next cycle would do, and what it would not, and why.
    Plan(Plan, Vec<Abstained>),
}

/// A member with its threads.
#[derive(Debug)]
pub struct MemberFacts {
    /// The member.
    pub member: Member,
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
}

/// The members of a job after a pid.
#[must_use]
pub fn members(state: &WardenState, job: &JobId, after: Option<Pid>, limit: usize) -> Answer {
    if !state.jobs.contains_key(job) {
        return Answer::Members(None);
    }
    let later = state.members_of(job).filter(|member| after.is_none_or(|after| member.id.pid > after));
    let mut page: Vec<&Member> = later.take(limit.saturating_add(1)).collect();
    let more = page.len() > limit;
    page.truncate(limit);
    Answer::Members(Some((page.into_iter().map(|member| facts(state, member)).collect(), more)))
}

/// Why a job holds what it holds.
#[must_use]
pub fn job(state: &WardenState, id: &JobId) -> Answer {
    Answer::Job(state.jobs.get(id).map(|job| JobReasons {
        cpus: job.grant.as_ref().map(|grant| grant.cpus.clone()).unwrap_or_default(),
        because: explain::job(state, job),
        runner_up: job.grant.as_ref().map(|grant| grant.runner_up.clone()).unwrap_or_default(),
    }))
}

/// Why a process is where it is.
#[must_use]
pub fn process(state: &WardenState, pid: Pid) -> Answer {
    let member = state.members.get(&pid);
    let threads = member.map(|member| facts(state, member).threads).unwrap_or_default();
    Answer::Process(ProcessReasons {
        known: state.processes.contains_key(&pid),
        job: member.map(|member| member.job.clone()),
        because: explain::process(state, pid),
        threads,
    })
}

fn facts(state: &WardenState, member: &Member) -> MemberFacts {
    let thread = |(&tid, thread): (&Tid, &MemberThread)| ThreadFacts {
        tid,
        thread: thread.clone(),
        pinned: state.pin_of(member, tid),
        because: explain::thread(state, member, tid, thread),
    };
    let threads = member.threads.iter().map(thread).collect();
    let process = state.processes.get(&member.id.pid).map(|known| known.process.clone());
    MemberFacts { member: member.clone(), process, threads }
}
