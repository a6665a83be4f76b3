//! A pulse as numbers: PUs counted, jobs beyond the limit folded into one.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_ipc::wire;
use pjw_linux::own_cost::OwnCost;

use super::pulse::{Load, Pulse};

/// The name under which jobs beyond the limit are summed. No job is called so: an id has a source and a colon.
pub const OTHER: &str = "other";

/// One job, or the sum of some.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JobFacts {
    /// The job's id, or [`OTHER`].
    pub id: String,
    /// Cores it holds, at least in part.
    pub cores: u64,
    /// PUs it holds.
    pub pus: u64,
    /// Cores it asked for.
    pub requested: u64,
    /// Its processes.
    pub processes: u64,
    /// Their threads.
    pub threads: u64,
    /// Those that run most of the time.
    pub hot: u64,
    /// Those that are pinned.
    pub pinned: u64,
    /// Those outside the job's cores.
    pub outside: u64,
    /// How much they run and wait.
    pub load: Load,
}

impl JobFacts {
    fn of(job: &wire::Job, load: Load, core_of: &BTreeMap<Pu, usize>) -> Self {
        let cpus = cpus(&job.cpus);
        let cores: BTreeSet<usize> = cpus.iter().filter_map(|pu| core_of.get(&pu).copied()).collect();
        Self {
            id: job.id.clone(),
            cores: cores.len() as u64,
            pus: cpus.len() as u64,
            requested: job.requested_cores.into(),
            processes: job.processes.into(),
            threads: job.threads.into(),
            hot: job.hot.into(),
            pinned: job.pinned.into(),
            outside: job.violations.into(),
            load,
        }
    }

    fn add(&mut self, other: &Self) {
        self.cores += other.cores;
        self.pus += other.pus;
        self.requested += other.requested;
        self.processes += other.processes;
        self.threads += other.threads;
        self.hot += other.hot;
        self.pinned += other.pinned;
        self.outside += other.outside;
        self.load.wanted_permille += other.load.wanted_permille;
        self.load.waiting_permille += other.load.waiting_permille;
    }
}

/// The machine's PUs, each counted once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolFacts {
    /// On, and nobody holds them.
    pub free: usize,
    /// On, and a job holds them.
    pub allocated: usize,
    /// On, and kept for the system.
    pub housekeeping: usize,
    /// Off, whoever holds them.
    pub offline: usize,
}

impl PoolFacts {
    fn of(pool: &wire::Pool, offline: &CpuSet) -> Self {
        let on = |list: &str| cpus(list).difference(offline).len();
        Self {
            free: on(&pool.free),
            allocated: on(&pool.allocated),
            housekeeping: on(&pool.housekeeping),
            offline: offline.len(),
        }
    }
}

/// All that the table reads.
#[derive(Debug)]
pub struct Facts<'p> {
    /// The pulse.
    pub pulse: &'p Pulse,
    /// What the daemon costs.
    pub own: OwnCost,
    /// The PUs.
    pub pool: PoolFacts,
    /// The jobs that have a name of their own, and [`OTHER`] if there are more.
    pub jobs: Vec<JobFacts>,
    /// How many jobs are in [`OTHER`].
    pub folded: usize,
}

impl<'p> Facts<'p> {
    /// Counts. Of the jobs, the `max_jobs` that have been known longest keep their names: a new one takes the name
    /// of none.
    #[must_use]
    pub fn new(pulse: &'p Pulse, own: OwnCost, max_jobs: usize) -> Self {
        let status = &pulse.scene.status;
        let core_of: BTreeMap<Pu, usize> = status
            .cores
            .iter()
            .enumerate()
            .flat_map(|(at, core)| cpus(&core.cpus).iter().map(|pu| (pu, at)).collect::<Vec<_>>())
            .collect();
        let mut order: Vec<usize> = (0..status.jobs.len()).collect();
        // Times of one length sort as text.
        order.sort_by_key(|&at| (&status.jobs[at].since, &status.jobs[at].id));
        let named: BTreeSet<usize> = order.into_iter().take(max_jobs).collect();
        let mut jobs = Vec::with_capacity(named.len() + 1);
        let mut other = JobFacts { id: OTHER.to_owned(), ..JobFacts::default() };
        for (at, job) in status.jobs.iter().enumerate() {
            let load = pulse.scene.loads.get(at).copied().unwrap_or_default();
            let facts = JobFacts::of(job, load, &core_of);
            if named.contains(&at) {
                jobs.push(facts);
            } else {
                other.add(&facts);
            }
        }
        let folded = status.jobs.len() - named.len();
        if folded > 0 {
            jobs.push(other);
        }
        Self { pulse, own, pool: PoolFacts::of(&status.pool, &pulse.offline), jobs, folded }
    }

    /// How many jobs `key` maps to each of the words; a word that is none of them counts nowhere.
    #[must_use]
    pub fn jobs_by<const N: usize>(
        &self,
        words: [&'static str; N],
        key: fn(&wire::Job) -> &str,
    ) -> [(&'static str, usize); N] {
        let jobs = &self.pulse.scene.status.jobs;
        words.map(|word| (word, jobs.iter().filter(|job| key(job) == word).count()))
    }

    /// How many warnings there are of each code.
    #[must_use]
    pub fn warnings(&self) -> BTreeMap<&'p str, usize> {
        let mut counts = BTreeMap::new();
        for warning in &self.pulse.scene.status.warnings {
            *counts.entry(warning.code.as_str()).or_default() += 1;
        }
        counts
    }
}

/// A list that this daemon wrote itself a moment ago.
fn cpus(list: &str) -> CpuSet {
    list.parse().unwrap_or_default()
}
