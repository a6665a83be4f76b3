//! What the warden knows between two cycles: the jobs, the pool, the members and what was done to their threads.

use std::collections::{BTreeMap, BTreeSet};

use crate::cpuset::{CpuSet, Pu};
use crate::demand::Demand;
use crate::job::{Job, JobId};
use crate::membership::Evidence;
use crate::pool::Pool;
use crate::process::{Comm, Pid, ProcessId, StartTime, ThreadId, Tid};
use crate::snapshot::{Claims, Process};
use crate::topology::Topology;

/// All of it. Facts about processes are kept only as far as the next decision needs them.
#[derive(Debug, Clone)]
pub struct WardenState {
    /// The machine.
    pub topology: Topology,
    /// Who holds each PU.
    pub pool: Pool,
    /// The jobs.
    pub jobs: BTreeMap<JobId, Job>,
    /// Every process of the node, as last seen.
    pub processes: BTreeMap<Pid, Known>,
    /// Which of them belong to a job.
    pub members: BTreeMap<Pid, Member>,
    /// What was done to threads.
    pub touched: BTreeMap<ThreadId, Touch>,
}

/// A process as last seen, without its threads and raw marks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// The facts; `marks`, `claims` and `threads` are `None`.
    pub process: Process,
    /// What its marks mean.
    pub claims: Claims,
}

/// A process of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Who it is.
    pub id: ProcessId,
    /// Its job.
    pub job: JobId,
    /// How that is known.
    pub evidence: Evidence,
    /// The mask that the job's first process was given by whoever started it. A thread with exactly this mask
    /// did not ask for it.
    pub inherited: Option<CpuSet>,
    /// Its threads as last seen.
    pub threads: BTreeMap<Tid, MemberThread>,
}

/// A thread of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberThread {
    /// When it started.
    pub start: StartTime,
    /// Its name.
    pub comm: Comm,
    /// The kernel's letter for its state.
    pub state: char,
    /// The PU it last ran on.
    pub last_cpu: Pu,
    /// Where it may run.
    pub allowed: CpuSet,
    /// How much it wants a CPU.
    pub demand: Demand,
}

/// What was done to a thread's mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Touch {
    /// The mask to put back.
    pub before: CpuSet,
    /// The mask the warden set last.
    pub set: CpuSet,
}

impl WardenState {
    /// A warden that knows nothing yet.
    #[must_use]
    pub fn new(topology: Topology, housekeeping: &CpuSet) -> Self {
        let pool = Pool::new(&topology, housekeeping);
        Self {
            topology,
            pool,
            jobs: BTreeMap::new(),
            processes: BTreeMap::new(),
            members: BTreeMap::new(),
            touched: BTreeMap::new(),
        }
    }

    /// The members of a job.
    pub fn members_of<'a>(&'a self, job: &'a JobId) -> impl Iterator<Item = &'a Member> + 'a {
        self.members.values().filter(move |member| &member.job == job)
    }

    /// The processes whose threads every cycle looks at.
    #[must_use]
    pub fn member_pids(&self) -> BTreeSet<Pid> {
        self.members.keys().copied().collect()
    }

    /// The scheduler's directories of the known jobs.
    #[must_use]
    pub fn job_cgroups(&self) -> BTreeSet<String> {
        self.jobs.values().filter_map(|job| job.cgroup.clone()).collect()
    }
}
