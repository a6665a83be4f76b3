//! The counts of processes and threads per job, for the status. Only the jobs in the [`DirtySet`] of a cycle are
//! counted again.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::ids::{Pid, Tid};
use pjw_core::job::{Job, JobId};
use pjw_core::snapshot::{JobIdAttribute, JobReference};
use pjw_core::state::dirty::{DirtyScope, DirtySet};
use pjw_core::state::members::MemberThread;
use pjw_core::state::{Member, WardenState};

/// The CPU demand of a job: how many PUs (logical CPUs) the threads of the job use or wait for. The values are
/// averages over the last scans.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuDemand {
    /// The share of time for which a thread runs or waits for a PU, summed over all threads, in permille.
    /// 1000 means one PU all the time.
    pub total_permille: u64,
    /// The share of time for which a thread waits for a PU, summed over all threads, in permille. It is
    /// included in `total_permille`.
    pub waiting_permille: u64,
}

/// The numbers of processes and threads of one job or of one process, for the status: all of them, and those with some
/// property, such as the threads that are pinned to one PU (logical CPU).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessCounts {
    /// The number of processes.
    pub(crate) processes: u32,
    /// The number of threads of these processes.
    pub(crate) threads: u32,
    /// The number of hot threads: threads that run or wait for a PU most of the time.
    pub(crate) hot_threads: u32,
    /// The number of threads that pjwd pinned to one PU.
    pub(crate) pinned_threads: u32,
    /// The number of threads whose affinity mask contains PUs that are not granted to the job.
    pub(crate) outside_threads: u32,
    /// The number of processes outside the cgroup that the batch scheduler made for the job.
    pub(crate) strays: u32,
    /// The number of processes that are not in the job's cpuset.
    pub(crate) outside_cpuset: u32,
    /// The CPU demand of the threads.
    pub(crate) demand: CpuDemand,
}

/// The numbers of processes and threads of each job, for the status.
#[derive(Debug, Default)]
pub(crate) struct JobCounts {
    members: BTreeMap<Pid, CountedMember>,
    jobs: BTreeMap<JobId, CountedJob>,
}

/// A process of a job: the numbers that the process and its threads add to those of the job, and the part of these
/// numbers that comes from each active thread.
#[derive(Debug)]
struct CountedMember {
    job: JobId,
    counts: ProcessCounts,
    active_threads: BTreeMap<Tid, ProcessCounts>,
}

/// A job: the sums over its counted processes, and the ids of these processes.
#[derive(Debug, Default)]
struct CountedJob {
    sum: ProcessCounts,
    pids: BTreeSet<Pid>,
}

impl JobCounts {
    /// Counts the processes and threads again of those jobs that `dirty` names, because they may have changed. If
    /// only the active threads of a process were scanned, only these are counted again. `state` has the jobs and
    /// their processes.
    pub(crate) fn update(&mut self, state: &WardenState, dirty: &DirtySet) {
        if dirty.contains_everything() {
            *self = Self::default();
            state.members.values().for_each(|member| self.add(state, member));
            return;
        }
        for (job, part) in dirty.listed_jobs() {
            let mut pids: Vec<Pid> = state.members.active_pids_of(job).collect();
            pids.retain(|&pid| part.contains_whole_process(pid) || !self.update_active_threads(state, pid));
            match part {
                DirtyScope::Whole => {
                    pids.extend(self.jobs.get(job).into_iter().flat_map(|counted| &counted.pids));
                    pids.extend(state.members_of(job).map(|member| member.id.pid));
                }
                DirtyScope::Processes(changed) => pids.extend(changed),
            }
            pids.sort_unstable();
            pids.dedup();
            for pid in pids {
                self.remove(pid);
                if let Some(member) = state.members.get(&pid) {
                    self.add(state, member);
                }
            }
        }
    }

    /// Returns the numbers of processes and threads of the job `job`. All numbers are zero if the job has no processes.
    pub(crate) fn counts_of(&self, job: &JobId) -> ProcessCounts {
        self.jobs.get(job).map(|counted| counted.sum).unwrap_or_default()
    }

    /// Counts the process `member` and its threads, and adds the numbers to those of its job. Does nothing if `state`
    /// does not have the job.
    fn add(&mut self, state: &WardenState, member: &Member) {
        let Some(job) = state.jobs.get(&member.job) else { return };
        let counts = count_process(state, job, member);
        let active = state.members.active_threads_of(member.id.pid).into_iter().flatten();
        let count_active =
            |&tid: &Tid| Some((tid, count_thread(state, job, member, tid, member.threads.get(&tid)?)));
        let active_threads = active.filter_map(count_active).collect();
        self.members.insert(member.id.pid, CountedMember { job: job.id.clone(), counts, active_threads });
        let counted_job = self.jobs.entry(job.id.clone()).or_default();
        counted_job.pids.insert(member.id.pid);
        counted_job.sum.add(counts);
    }

    /// Counts the active threads (those that a scan reads each time) of the process `pid` again. Returns false if all
    /// threads of the process must be counted instead, for example because other threads have become active.
    fn update_active_threads(&mut self, state: &WardenState, pid: Pid) -> bool {
        let Some(member) = state.members.get(&pid) else { return false };
        let Some(active) = state.members.active_threads_of(pid) else { return false };
        let Some(counted) = self.members.get_mut(&pid).filter(|counted| counted.job == member.job) else {
            return false;
        };
        if !counted.active_threads.keys().eq(active) {
            return false;
        }
        let Some((job, counted_job)) = state.jobs.get(&member.job).zip(self.jobs.get_mut(&member.job)) else {
            return false;
        };
        for (&tid, before) in &mut counted.active_threads {
            let Some(thread) = member.threads.get(&tid) else { return false };
            let now = count_thread(state, job, member, tid, thread);
            for counts in [&mut counted.counts, &mut counted_job.sum] {
                counts.subtract(*before);
                counts.add(now);
            }
            *before = now;
        }
        true
    }

    fn remove(&mut self, pid: Pid) {
        let Some(CountedMember { job, counts, .. }) = self.members.remove(&pid) else { return };
        let Some(counted_job) = self.jobs.get_mut(&job) else { return };
        counted_job.pids.remove(&pid);
        counted_job.sum.subtract(counts);
        if counted_job.pids.is_empty() {
            self.jobs.remove(&job);
        }
    }
}

impl ProcessCounts {
    fn add(&mut self, other: Self) {
        self.combine(other, u32::saturating_add, u64::saturating_add);
    }

    fn subtract(&mut self, other: Self) {
        self.combine(other, u32::saturating_sub, u64::saturating_sub);
    }

    /// Replaces each number by the result of `op32` or `op64` for this number and the same number of `other`.
    fn combine(&mut self, other: Self, op32: fn(u32, u32) -> u32, op64: fn(u64, u64) -> u64) {
        self.processes = op32(self.processes, other.processes);
        self.threads = op32(self.threads, other.threads);
        self.hot_threads = op32(self.hot_threads, other.hot_threads);
        self.pinned_threads = op32(self.pinned_threads, other.pinned_threads);
        self.outside_threads = op32(self.outside_threads, other.outside_threads);
        self.strays = op32(self.strays, other.strays);
        self.outside_cpuset = op32(self.outside_cpuset, other.outside_cpuset);
        self.demand.total_permille = op64(self.demand.total_permille, other.demand.total_permille);
        self.demand.waiting_permille = op64(self.demand.waiting_permille, other.demand.waiting_permille);
    }
}

/// Returns the numbers that the process `member` and its threads add to the [`ProcessCounts`] of the job `job`.
fn count_process(state: &WardenState, job: &Job, member: &Member) -> ProcessCounts {
    let mut counts = ProcessCounts {
        processes: 1,
        strays: u32::from(is_stray(state, job, member)),
        outside_cpuset: u32::from(!state.is_in_job_cpuset(member)),
        ..ProcessCounts::default()
    };
    for (&tid, thread) in &member.threads {
        counts.add(count_thread(state, job, member, tid, thread));
    }
    counts
}

/// Returns the numbers that one thread adds to the [`ProcessCounts`] of the job `job`: 1 or 0 for each property of a
/// thread, and the CPU demand. `tid` is the id of the thread, and `member` is its process.
fn count_thread(
    state: &WardenState,
    job: &Job,
    member: &Member,
    tid: Tid,
    thread: &MemberThread,
) -> ProcessCounts {
    let is_outside = job.grant.as_ref().is_some_and(|grant| !thread.effective_mask.is_subset(&grant.cpus));
    ProcessCounts {
        threads: 1,
        hot_threads: thread.demand.is_hot.into(),
        pinned_threads: state.pinned_pu_of(member, tid).is_some().into(),
        outside_threads: is_outside.into(),
        demand: CpuDemand {
            total_permille: thread.demand.permille.into(),
            waiting_permille: thread.demand.waiting_permille.into(),
        },
        ..ProcessCounts::default()
    }
}

/// Whether the last scan found the process `member` outside the cgroup that the batch scheduler made for the job.
fn is_stray(state: &WardenState, job: &Job, member: &Member) -> bool {
    if job.cgroup.is_none() {
        return false;
    }
    let Some(process) = state.processes.get(&member.id.pid) else { return false };
    let is_inside =
        |claim: &JobReference| claim.job == job.id && matches!(claim.kind, JobIdAttribute::Cgroup(_));
    !process.batch_identity.job_references.iter().any(is_inside)
}
