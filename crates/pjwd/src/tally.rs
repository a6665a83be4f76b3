//! How many processes and threads each job has, and what becomes of them: counted anew only where something stirred.

use std::collections::BTreeMap;

use pjw_core::job::{Job, JobId};
use pjw_core::process::Pid;
use pjw_core::snapshot::{Claim, Mark};
use pjw_core::state::{Member, WardenState};
use pjw_core::stirred::{Part, Stirred};

use crate::metrics::pulse::Load;

/// What is counted of a job, or of one process of it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) processes: u32,
    pub(crate) threads: u32,
    pub(crate) hot: u32,
    pub(crate) pinned: u32,
    /// Threads that may run outside the job's cores.
    pub(crate) outside: u32,
    /// Processes that are not in the cgroup that their scheduler made for the job.
    pub(crate) strays: u32,
    /// Processes that no cpuset keeps on the job's cores.
    pub(crate) unwalled: u32,
    /// What its threads want.
    pub(crate) load: Load,
}

/// The counts of all jobs.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    members: BTreeMap<Pid, (JobId, Counts)>,
    jobs: BTreeMap<JobId, Counts>,
}

impl Tally {
    /// Counts what was stirred since the last time.
    pub(crate) fn renew(&mut self, state: &WardenState, stirred: &Stirred) {
        if stirred.is_everything() {
            *self = Self::default();
            state.members.values().for_each(|member| self.enter(state, member));
            return;
        }
        for (job, part) in stirred.parts() {
            let mut pids: Vec<Pid> = state.members.awake_of(job).collect();
            match part {
                Part::Whole => {
                    let known = self.members.iter().filter(|(_, (known, _))| known == job);
                    pids.extend(known.map(|(&pid, _)| pid));
                    pids.extend(state.members_of(job).map(|member| member.id.pid));
                }
                Part::Processes(some) => pids.extend(some),
            }
            pids.sort_unstable();
            pids.dedup();
            for pid in pids {
                self.strike(pid);
                if let Some(member) = state.members.get(&pid) {
                    self.enter(state, member);
                }
            }
        }
    }

    /// The counts of a job.
    pub(crate) fn of(&self, job: &JobId) -> Counts {
        self.jobs.get(job).copied().unwrap_or_default()
    }

    fn enter(&mut self, state: &WardenState, member: &Member) {
        let Some(job) = state.jobs.get(&member.job) else { return };
        let counts = count(state, job, member);
        self.members.insert(member.id.pid, (job.id.clone(), counts));
        self.jobs.entry(job.id.clone()).or_default().change(counts, u32::saturating_add, u64::saturating_add);
    }

    fn strike(&mut self, pid: Pid) {
        let Some((job, counts)) = self.members.remove(&pid) else { return };
        let Some(sum) = self.jobs.get_mut(&job) else { return };
        sum.change(counts, u32::saturating_sub, u64::saturating_sub);
        if *sum == Counts::default() {
            self.jobs.remove(&job);
        }
    }
}

impl Counts {
    fn change(&mut self, by: Self, how: fn(u32, u32) -> u32, how64: fn(u64, u64) -> u64) {
        self.processes = how(self.processes, by.processes);
        self.threads = how(self.threads, by.threads);
        self.hot = how(self.hot, by.hot);
        self.pinned = how(self.pinned, by.pinned);
        self.outside = how(self.outside, by.outside);
        self.strays = how(self.strays, by.strays);
        self.unwalled = how(self.unwalled, by.unwalled);
        self.load.wanted_permille = how64(self.load.wanted_permille, by.load.wanted_permille);
        self.load.waiting_permille = how64(self.load.waiting_permille, by.load.waiting_permille);
    }
}

fn count(state: &WardenState, job: &Job, member: &Member) -> Counts {
    let mut counts = Counts {
        processes: 1,
        strays: u32::from(is_outside(state, job, member)),
        unwalled: u32::from(!state.is_walled(member)),
        ..Counts::default()
    };
    let grant = job.grant.as_ref();
    for (&tid, thread) in &member.threads {
        counts.threads += 1;
        counts.hot += u32::from(thread.demand.hot);
        counts.pinned += u32::from(state.pin_of(member, tid).is_some());
        counts.load.wanted_permille += u64::from(thread.demand.permille);
        counts.load.waiting_permille += u64::from(thread.demand.waiting_permille);
        counts.outside += u32::from(grant.is_some_and(|grant| !thread.allowed.is_subset(&grant.cpus)));
    }
    counts
}

/// Whether a member was seen outside the directory that its scheduler made for the job.
fn is_outside(state: &WardenState, job: &Job, member: &Member) -> bool {
    let Some(known) = state.processes.get(&member.id.pid).filter(|_| job.cgroup.is_some()) else {
        return false;
    };
    let is_inside = |claim: &Claim| claim.job == job.id && matches!(claim.mark, Mark::Cgroup(_));
    !known.claims.claims.iter().any(is_inside)
}
