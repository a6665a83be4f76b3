//! The counts of processes and threads per job. Only dirty jobs are counted again.

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
                    pids.extend(self.jobs.get(job).into_iter().flat_map(|known| &known.pids));
                    pids.extend(state.members_of(job).map(|member| member.id.pid));
                }
                DirtyScope::Processes(some) => pids.extend(some),
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
        self.jobs.get(job).map(|known| known.sum).unwrap_or_default()
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
        let known = self.jobs.entry(job.id.clone()).or_default();
        known.pids.insert(member.id.pid);
        known.sum.change(counts, u32::saturating_add, u64::saturating_add);
    }

    /// Counts the active threads (those that a scan reads each time) of the process `pid` again. Returns false if all
    /// threads of the process must be counted instead, for example because other threads have become active.
    fn update_active_threads(&mut self, state: &WardenState, pid: Pid) -> bool {
        let Some(member) = state.members.get(&pid) else { return false };
        let Some(active) = state.members.active_threads_of(pid) else { return false };
        let Some(counted) = self.members.get_mut(&pid).filter(|counted| counted.job == member.job) else {
            return false;
        };
        let is_same = counted.active_threads.keys().eq(active);
        let Some((job, known)) = state.jobs.get(&member.job).zip(self.jobs.get_mut(&member.job)) else {
            return false;
        };
        if !is_same {
            return false;
        }
        for (&tid, before) in &mut counted.active_threads {
            let Some(thread) = member.threads.get(&tid) else { return false };
            let now = count_thread(state, job, member, tid, thread);
            for counts in [&mut counted.counts, &mut known.sum] {
                counts.change(*before, u32::saturating_sub, u64::saturating_sub);
                counts.change(now, u32::saturating_add, u64::saturating_add);
            }
            *before = now;
        }
        true
    }

    fn remove(&mut self, pid: Pid) {
        let Some(CountedMember { job, counts, .. }) = self.members.remove(&pid) else { return };
        let Some(known) = self.jobs.get_mut(&job) else { return };
        known.pids.remove(&pid);
        known.sum.change(counts, u32::saturating_sub, u64::saturating_sub);
        if known.pids.is_empty() {
            self.jobs.remove(&job);
        }
    }
}

impl ProcessCounts {
    /// Changes each number by the same number in `by`. `how` and `how64` are the operation, such as a saturating
    /// addition.
    fn change(&mut self, by: Self, how: fn(u32, u32) -> u32, how64: fn(u64, u64) -> u64) {
        self.processes = how(self.processes, by.processes);
        self.threads = how(self.threads, by.threads);
        self.hot_threads = how(self.hot_threads, by.hot_threads);
        self.pinned_threads = how(self.pinned_threads, by.pinned_threads);
        self.outside_threads = how(self.outside_threads, by.outside_threads);
        self.strays = how(self.strays, by.strays);
        self.outside_cpuset = how(self.outside_cpuset, by.outside_cpuset);
        self.demand.total_permille = how64(self.demand.total_permille, by.demand.total_permille);
        self.demand.waiting_permille = how64(self.demand.waiting_permille, by.demand.waiting_permille);
    }
}

/// Returns the numbers that the process `member` and its threads add to the [`ProcessCounts`] of the job `job`.
fn count_process(state: &WardenState, job: &Job, member: &Member) -> ProcessCounts {
    let mut counts = ProcessCounts {
        processes: 1,
        strays: u32::from(is_outside(state, job, member)),
        outside_cpuset: u32::from(!state.is_in_job_cpuset(member)),
        ..ProcessCounts::default()
    };
    for (&tid, thread) in &member.threads {
        let of_thread = count_thread(state, job, member, tid, thread);
        counts.change(of_thread, u32::saturating_add, u64::saturating_add);
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
fn is_outside(state: &WardenState, job: &Job, member: &Member) -> bool {
    let Some(known) = state.processes.get(&member.id.pid).filter(|_| job.cgroup.is_some()) else {
        return false;
    };
    let is_inside =
        |claim: &JobReference| claim.job == job.id && matches!(claim.kind, JobIdAttribute::Cgroup(_));
    !known.batch_identity.job_references.iter().any(is_inside)
}
