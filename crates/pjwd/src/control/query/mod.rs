//! Queries for details that the published status does not have. The event loop answers them from its state.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use pjw_core::cpuset::CpuSet;
use pjw_core::diagnosis::remote_numa_memory::{
    HotProcessMemory, MemoryByNode, RemoteNumaMemory, can_have_remote_numa_memory, find_remote_numa_memory,
};
use pjw_core::ids::{Pid, ProcessId, Tid};
use pjw_core::state::{Member, MemberThread, WardenState};
use pjw_core::{evidence::MembershipEvidence, explain, job::JobId, policy::Policy};
use pjw_ipc::call::{DefragReply, ExplainJobReply, PlanReply};
use pjw_ipc::report::Report;

use crate::memory::node_findings::SampleOrder;
use crate::memory::reading::{JobProcess, ProcessesToRead};

/// A request for details that only the event loop has, such as the reasons for an affinity mask. The control server
/// (the part of pjwd that answers clients) sends the query to the event loop. Most other requests need no query: the
/// control server answers these from the values that the event loop publishes, such as the status.
#[derive(Debug)]
pub enum Query {
    /// One page of the list of a job's processes and threads.
    Members {
        /// The id of the job.
        job: JobId,
        /// The end of the previous page, after which the page starts. `None` for the first page.
        after: Option<PageCursor>,
        /// The maximum number of processes on the page.
        limit: usize,
    },
    /// The processes that belong to the job with this id, and the PUs of the job that are idle.
    MemberProcesses(JobId),
    /// The processes of a job of whose pages a sample is taken: at most 16. The answer is a
    /// [`QueryAnswer::MemberProcesses`].
    ProcessesToSample {
        /// The id of the job.
        job: JobId,
        /// Which processes come first.
        order: SampleOrder,
    },
    /// The processes of a job with most of their memory on NUMA nodes where none of their hot threads runs. A thread is
    /// hot if it runs or waits for a PU (logical CPU) most of the time.
    RemoteNumaMemory {
        /// The id of the job.
        job: JobId,
        /// For each process whose memory was measured or estimated: the memory on each NUMA node.
        by_node: BTreeMap<Pid, MemoryByNode>,
    },
    /// The reasons why the job with this id holds its CPUs.
    JobReasons(JobId),
    /// The reasons why a process belongs to its job or to no job, and the reasons for the affinity masks of its
    /// threads.
    ProcessReasons {
        /// The pid of the process.
        pid: Pid,
        /// The last thread on the previous page of threads, after which the page starts. `None` for the first
        /// page.
        after: Option<Tid>,
    },
    /// The reports of jobs that have ended.
    Reports {
        /// The id of the job whose reports are wanted. `None` for the reports of all jobs.
        job: Option<JobId>,
        /// The maximum number of reports. `None` for all that are stored.
        last: Option<u32>,
    },
    /// The changes of affinity masks and cpusets that the next cycle (scan, decision and changes) of the daemon would
    /// make.
    Plan {
        /// Whether the client requires a new result. If false, a result that is up to one second old
        /// suffices.
        fresh: bool,
    },
    /// The moves of jobs to other cores that would defragment the machine, so that larger requests fit.
    Defrag {
        /// Whether the client requires a new result. If false, a result that is up to one second old
        /// suffices.
        fresh: bool,
    },
}

/// The maximum number of threads on one page of a reply about a job or a process, summed over all processes on the
/// page. Further threads are on the next page.
pub const MAX_THREADS_PER_PAGE: usize = 1000;

/// The largest number of processes of a job of whose pages a sample is taken.
const MAX_SAMPLED_PROCESSES: usize = 16;

/// The position at which one page of a job's processes and threads ends: the last process and the last thread on the
/// page. The next page starts after this position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCursor {
    /// The pid of the last process on the page.
    pub pid: Pid,
    /// The last thread of `pid` on the page, if more threads of `pid` follow on the next page. `None` if the
    /// page contains the remaining threads of `pid`.
    pub tid: Option<Tid>,
}

/// The answer of the event loop to a [`Query`] of the control server.
#[derive(Debug)]
pub enum QueryAnswer {
    /// A page of the processes of a job, and the position after which the next page begins. The position is `None` if
    /// no page follows. The outer `Option` is `None` if the requested job does not exist.
    Members(Option<(Vec<MemberDetails>, Option<PageCursor>)>),
    /// The processes that belong to a job, ascending by pid, or those to sample in their order. `None` if the requested
    /// job does not exist.
    MemberProcesses(Option<ProcessesToRead>),
    /// The processes of a job with most of their memory on NUMA nodes where none of their hot threads runs, ascending
    /// by pid. A thread is hot if it runs or waits for a PU most of the time.
    RemoteNumaMemory(Vec<RemoteNumaMemory>),
    /// The reasons why a job holds its CPUs. `None` if the requested job does not exist.
    JobReasons(Option<ExplainJobReply>),
    /// The reasons why a process belongs to its job or to no job, and one page of the threads of the process.
    ProcessReasons(ProcessExplanation),
    /// The reports of jobs that have ended, the newest first.
    Reports(Vec<Arc<Report>>),
    /// The changes of affinity masks and cpusets that the next cycle (scan, decision and changes) of the daemon would
    /// make. All clients that wait for such an answer share this value.
    Plan(Arc<PlanReply>),
    /// The moves of jobs that would defragment the machine. All clients that wait for these moves share this
    /// value.
    Defrag(Arc<DefragReply>),
}

/// The description of a process that belongs to a job, in the answer to a [`Query`]. Contains the kind of evidence
/// that the process belongs to the job, and one page of the threads of the process.
#[derive(Debug)]
pub struct MemberDetails {
    /// The pid and the start time of the process.
    pub id: ProcessId,
    /// The kind of evidence that the process belongs to the job.
    pub evidence: MembershipEvidence,
    /// The name, the user and other facts about the process, as a scan last read them. `None` if no scan has
    /// read the process since it joined the job.
    pub process: Option<pjw_core::snapshot::Process>,
    /// The number of the group of processes that share one address space, if the process belongs to such a group.
    /// `None` if no other process shares the address space of the process, or if that is unknown.
    pub address_space: Option<u32>,
    /// The threads of the process that are on this page, ascending by tid.
    pub threads: Vec<ThreadDetails>,
}

/// The description of a thread of a job's process, in the answer to a [`Query`]. Contains the reason for the affinity
/// mask of the thread.
#[derive(Debug)]
pub struct ThreadDetails {
    /// The thread id (tid).
    pub tid: Tid,
    /// The name, state, CPU demand and affinity mask of the thread, as a scan last read them.
    pub thread: MemberThread,
    /// The PU to which pjwd pinned the thread. `None` if pjwd did not pin the thread.
    pub pinned_pu: Option<pjw_core::cpuset::Pu>,
    /// The reason for the affinity mask of the thread, in one sentence.
    pub mask_reason: String,
}

/// The reasons why a process belongs to its job or to no job, in the answer to a [`Query`]. Also contains one page of
/// the threads of the process, with the reasons for their affinity masks.
#[derive(Debug)]
pub struct ProcessExplanation {
    /// Whether the requested process exists, according to the last scan.
    pub process_exists: bool,
    /// The job to which the process belongs. `None` if it belongs to no job.
    pub job: Option<JobId>,
    /// The reasons why the process belongs to its job or to none, one sentence each.
    pub membership_reasons: Vec<String>,
    /// One page of the threads of the process, ascending by tid: at most [`MAX_THREADS_PER_PAGE`]. Empty if
    /// the process belongs to no job.
    pub threads: Vec<ThreadDetails>,
    /// The last thread on this page, after which the next page starts. `None` if this page is the last one.
    pub continue_after: Option<Tid>,
}

/// Returns one page of the processes of `job`, ascending by pid, with their threads. `state` is the state of the
/// daemon, which contains the jobs and their processes. `after` is the position at which the previous page ended, or
/// `None` for the first page. The page has at most `limit` processes and [`MAX_THREADS_PER_PAGE`] threads. The result
/// is a [`QueryAnswer::Members`], which contains `None` if the job does not exist.
#[must_use]
pub fn members_page(
    state: &WardenState,
    job: &JobId,
    after: Option<PageCursor>,
    limit: usize,
) -> QueryAnswer {
    if !state.jobs.contains_key(job) {
        return QueryAnswer::Members(None);
    }
    let mut page: Vec<MemberDetails> = Vec::new();
    let mut free_rows = MAX_THREADS_PER_PAGE;
    let mut cursor = after;
    for member in state.members_of(job) {
        // The last thread of this process on the page before. `None` if that page has no part of the process, or all.
        let last_shown = cursor.filter(|cursor| cursor.pid == member.id.pid).and_then(|cursor| cursor.tid);
        if last_shown.is_none() && cursor.is_some_and(|cursor| cursor.pid >= member.id.pid) {
            continue;
        }
        if page.len() >= limit || free_rows == 0 {
            return QueryAnswer::Members(Some((page, cursor)));
        }
        let (threads, next) = threads_page(state, member, last_shown, free_rows);
        free_rows -= threads.len();
        // The other threads of a process on the page before may have ended.
        if last_shown.is_none() || !threads.is_empty() {
            let process = state.processes.get(&member.id.pid).map(|known| known.process.clone());
            let (id, evidence) = (member.id, member.evidence);
            let address_space = state.address_spaces.group_of(id);
            page.push(MemberDetails { id, evidence, process, address_space, threads });
        }
        cursor = Some(PageCursor { pid: member.id.pid, tid: next });
        if next.is_some() {
            return QueryAnswer::Members(Some((page, cursor)));
        }
    }
    QueryAnswer::Members(Some((page, None)))
}

/// Returns the processes that belong to the job `id`, for a measurement of their memory. If several processes share
/// one address space, the result has the same group number for each of them, so that this memory is counted once.
/// `state` is the state of the daemon, which contains the jobs and their processes. The result is a
/// [`QueryAnswer::MemberProcesses`], which contains `None` if the job does not exist.
#[must_use]
pub fn member_processes(state: &WardenState, id: &JobId) -> QueryAnswer {
    let to_read = || ProcessesToRead {
        processes: state.members_of(id).map(|member| job_process(state, member)).collect(),
        idle_cpus: idle_granted_cpus(state, id),
    };
    QueryAnswer::MemberProcesses(state.jobs.contains_key(id).then(to_read))
}

/// Returns the online PUs of the job `id` that no hot thread of the job is bound to. Empty if the job has as many hot
/// threads as PUs, or more: the threads that are not bound then need these PUs.
fn idle_granted_cpus(state: &WardenState, id: &JobId) -> CpuSet {
    let online = state.pool.online_cpus();
    let Some(grant) = state.jobs.get(id).and_then(|job| job.online_granted_cpus(&online)) else {
        return CpuSet::new();
    };
    let active = state.members.active_pids_of(id).filter_map(|pid| state.members.get(&pid));
    let (mut idle, mut hot) = (grant.clone(), 0);
    for thread in active.flat_map(hot_threads) {
        hot += 1;
        if !grant.is_subset(&thread.effective_mask) {
            idle = idle.difference(&thread.effective_mask);
        }
    }
    if hot < grant.len() { idle } else { CpuSet::new() }
}

fn job_process(state: &WardenState, member: &Member) -> JobProcess {
    JobProcess {
        id: member.id,
        group: state.address_spaces.group_of(member.id),
        threads: member.threads.len(),
    }
}

/// The hot threads of a process: those that run or wait for a PU most of the time.
fn hot_threads(member: &Member) -> impl Iterator<Item = &MemberThread> {
    member.threads.values().filter(|thread| thread.is_alive() && thread.demand.is_hot)
}

/// Returns a function that says of a process whether it is the first one with its address space for which the function
/// is called.
fn first_of_each_address_space(state: &WardenState) -> impl FnMut(&Member) -> bool {
    let mut seen_groups = BTreeSet::new();
    move |member| state.address_spaces.group_of(member.id).is_none_or(|group| seen_groups.insert(group))
}

/// Returns the processes that use the address space of `member`: `member` itself, and all other processes with which it
/// shares the address space. `None` if one of these belongs to another job or to none: where its hot threads run is
/// unknown then. Also `None` if the kernel does not say which processes share an address space.
fn address_space_users<'a>(state: &'a WardenState, member: &'a Member) -> Option<Vec<&'a Member>> {
    if state.address_spaces.unknown_sharing_reason().is_some() {
        return None;
    }
    let Some(group) = state.address_spaces.group_of(member.id) else { return Some(vec![member]) };
    let user = |pid: Pid| state.members.get(&pid).filter(|user| user.job == member.job);
    state.address_spaces.pids_in_group(group).map(user).collect()
}

/// Returns the processes of the job `id` with hot threads, each with their number. Of processes that share an address
/// space, only the first is in the result, and the hot threads of all of them count. Leaves out processes with a thread
/// in uninterruptible sleep (state `D`) at the last scan: it may hold the lock of the address space (`mmap_lock`), for
/// which a sample would wait.
fn hot_processes<'a>(state: &'a WardenState, id: &'a JobId) -> Vec<(usize, &'a Member)> {
    let mut is_first = first_of_each_address_space(state);
    // A zombie has no address space any more.
    let alive = state.members_of(id).filter(|member| member.threads.values().any(MemberThread::is_alive));
    let counted = alive.filter(|member| is_first(member)).filter_map(|member| {
        let users = address_space_users(state, member)?;
        let has_blocked_thread = |user: &&Member| user.threads.values().any(|thread| thread.state == 'D');
        let hot: usize = users.iter().map(|user| hot_threads(user).count()).sum();
        (hot > 0 && !users.iter().any(has_blocked_thread)).then_some((hot, member))
    });
    counted.collect()
}

/// Chooses at most 16 processes of the job `id`, for the next sample of the pages of the job. The sample finds
/// processes with most of their memory on other NUMA nodes than their hot threads. A thread is hot if it runs or waits
/// for a PU (logical CPU) most of the time. Processes without hot threads, or with a thread in uninterruptible sleep
/// (state `D`), are not chosen.
///
/// `order` says which processes come first: those in [`SampleOrder::first`], and then those with the most hot threads.
/// Of processes with the same number of hot threads, those with an id greater than [`SampleOrder::after`] come first.
/// If several processes share one address space, at most one of them is chosen. Its number of hot threads is then the
/// sum over all these processes.
///
/// `state` is the state of the daemon. The result is a [`QueryAnswer::MemberProcesses`], which contains `None` if the
/// job does not exist. The contained list is empty if the machine has only one NUMA node with memory and PUs, or if the
/// kernel does not say which processes share an address space.
#[must_use]
pub fn processes_to_sample(state: &WardenState, id: &JobId, order: &SampleOrder) -> QueryAnswer {
    if !state.jobs.contains_key(id) {
        return QueryAnswer::MemberProcesses(None);
    }
    if !can_have_remote_numa_memory(&state.topology) {
        return QueryAnswer::MemberProcesses(Some(ProcessesToRead::default()));
    }
    let mut hot = hot_processes(state, id);
    hot.sort_by_key(|(threads, member)| {
        let had_its_turn = order.after.is_some_and(|after| member.id <= after);
        (!order.first.contains(&member.id), Reverse(*threads), had_its_turn, member.id)
    });
    hot.truncate(MAX_SAMPLED_PROCESSES);
    let processes = hot.into_iter().map(|(_, member)| job_process(state, member)).collect();
    let idle_cpus = idle_granted_cpus(state, id);
    QueryAnswer::MemberProcesses(Some(ProcessesToRead { processes, idle_cpus }))
}

/// Finds the processes of the job `id` with remote NUMA memory: most of the memory of such a process is on NUMA nodes
/// where none of its hot threads ran last. A thread is hot if it runs or waits for a PU (logical CPU) most of the time.
/// Several processes that share one address space are treated as one process with the threads of all of them. The
/// result contains at most one of these processes.
///
/// `state` is the state of the daemon, which contains the processes of the jobs. `memory_by_node` has the memory on
/// each NUMA node, for each process whose memory was measured or estimated. The result is a
/// [`QueryAnswer::RemoteNumaMemory`]. The list in the answer is empty if there is no such process, or if the job does
/// not exist. It is also empty if the kernel does not say which processes share an address space.
#[must_use]
pub fn processes_with_remote_numa_memory(
    state: &WardenState,
    id: &JobId,
    memory_by_node: BTreeMap<Pid, MemoryByNode>,
) -> QueryAnswer {
    let mut is_first = first_of_each_address_space(state);
    let processes = memory_by_node.into_iter().filter_map(|(pid, memory)| {
        let member =
            state.members.get(&pid).filter(|member| member.job == *id).filter(|member| is_first(member))?;
        let users = address_space_users(state, member)?;
        let last_cpus = users.into_iter().flat_map(hot_threads).map(|thread| thread.last_cpu).collect();
        Some(HotProcessMemory { id: member.id, last_cpus, memory })
    });
    let processes: Vec<HotProcessMemory> = processes.collect();
    QueryAnswer::RemoteNumaMemory(find_remote_numa_memory(&state.topology, &processes))
}

/// Returns the reasons why the job `id` holds its CPUs, or why it holds none. `state` is the state of the daemon,
/// which contains the jobs and their CPUs. `policy` is the policy in force (the configured rules). The result is a
/// [`QueryAnswer::JobReasons`], which contains `None` if the job does not exist.
#[must_use]
pub fn explain_job(state: &WardenState, policy: &Policy, id: &JobId) -> QueryAnswer {
    QueryAnswer::JobReasons(state.jobs.get(id).map(|job| ExplainJobReply {
        job: id.to_string(),
        cpus: explain::held_cpus(job).to_string(),
        grant_reasons: explain::explain_job(state, policy, job),
        second_best: job.grant.as_ref().map(|grant| grant.second_best.clone()).unwrap_or_default(),
    }))
}

/// Returns the reasons why the process `pid` belongs to its job or to no job, and one page of its threads with the
/// reasons for their affinity masks. `state` is the state of the daemon, which contains the jobs and the processes.
/// `policy` is the policy in force (the configured rules). The result is a [`QueryAnswer::ProcessReasons`]. If there
/// is no such process, [`ProcessExplanation::process_exists`] is false.
///
/// The page has at most [`MAX_THREADS_PER_PAGE`] threads. `after` is the last thread of the previous page, or `None`
/// for the first page. If the process belongs to no job, the page is empty.
#[must_use]
pub fn explain_process(state: &WardenState, policy: &Policy, pid: Pid, after: Option<Tid>) -> QueryAnswer {
    let member = state.members.get(&pid);
    let (threads, continue_after) =
        member.map(|member| threads_page(state, member, after, MAX_THREADS_PER_PAGE)).unwrap_or_default();
    QueryAnswer::ProcessReasons(ProcessExplanation {
        process_exists: state.processes.contains_key(&pid),
        job: member.map(|member| member.job.clone()),
        membership_reasons: explain::explain_process(state, policy, pid),
        threads,
        continue_after,
    })
}

/// Returns one page of the threads of `member` (a process of a job), in the order of their ids. The page has at most
/// `limit` threads. It begins after the thread `after`, or with the first thread if `after` is `None`. Also returns
/// the last thread of the page if more threads follow, as `after` for the next page.
fn threads_page(
    state: &WardenState,
    member: &Member,
    after: Option<Tid>,
    limit: usize,
) -> (Vec<ThreadDetails>, Option<Tid>) {
    let after = after.map_or(Bound::Unbounded, Bound::Excluded);
    let mut following = member.threads.range((after, Bound::Unbounded));
    let details = |(&tid, thread): (&Tid, &MemberThread)| ThreadDetails {
        tid,
        thread: thread.clone(),
        pinned_pu: state.pinned_pu_of(member, tid),
        mask_reason: explain::explain_mask(state, member, tid, thread),
    };
    let page: Vec<ThreadDetails> = following.by_ref().take(limit).map(details).collect();
    let last = page.last().map(|thread| thread.tid).filter(|_| following.next().is_some());
    (page, last)
}

#[cfg(test)]
mod tests;
