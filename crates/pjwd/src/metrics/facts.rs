//! The values that the metrics table reads: PUs counted, and jobs beyond the limit summed into one.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_ipc::wire;
use pjw_linux::sys::own_usage::OwnUsage;

use super::meter::MetricsSnapshot;
use crate::view::counts::CpuDemand;

/// The value of the metrics label `jobid` for the sum of all jobs that have no metrics of their own. No job has this
/// id, because job ids contain a colon.
pub const OTHER_JOBS_LABEL: &str = "other";

/// The metrics of one job, or the sum of the metrics of all jobs that have none of their own.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JobMetrics {
    /// The id of the job, or [`OTHER_JOBS_LABEL`] for the sum of several jobs.
    pub id: String,
    /// The number of cores of which the job holds at least one PU.
    pub cores: u64,
    /// The number of PUs (logical CPUs) that the job holds.
    pub pus: u64,
    /// The number of cores that the job requested. 0 if unknown.
    pub requested_cores: u64,
    /// The number of processes that belong to the job.
    pub processes: u64,
    /// The number of threads of all processes of the job.
    pub threads: u64,
    /// The number of hot threads: those that run most of the time.
    pub hot_threads: u64,
    /// The number of threads that pjw pinned to one PU.
    pub pinned_threads: u64,
    /// The number of threads whose affinity mask is not within the job's cores.
    pub outside_threads: u64,
    /// The CPU demand of the threads of the job, smoothed over the last scans.
    pub demand: CpuDemand,
}

impl JobMetrics {
    fn of(job: &wire::Job, demand: CpuDemand, core_of: &BTreeMap<Pu, usize>) -> Self {
        let cpus = cpus(&job.cpus);
        let cores: BTreeSet<usize> = cpus.iter().filter_map(|pu| core_of.get(&pu).copied()).collect();
        Self {
            id: job.id.clone(),
            cores: cores.len() as u64,
            pus: cpus.len() as u64,
            requested_cores: job.requested_cores.into(),
            processes: job.processes.into(),
            threads: job.threads.into(),
            hot_threads: job.hot.into(),
            pinned_threads: job.pinned.into(),
            outside_threads: job.violations.into(),
            demand,
        }
    }

    fn add(&mut self, other: &Self) {
        self.cores += other.cores;
        self.pus += other.pus;
        self.requested_cores += other.requested_cores;
        self.processes += other.processes;
        self.threads += other.threads;
        self.hot_threads += other.hot_threads;
        self.pinned_threads += other.pinned_threads;
        self.outside_threads += other.outside_threads;
        self.demand.total_permille += other.demand.total_permille;
        self.demand.waiting_permille += other.demand.waiting_permille;
    }
}

/// How many PUs (logical CPUs) of the machine are free, held by jobs, reserved for the system, or offline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PuCounts {
    /// The number of online PUs that neither a job nor the system holds.
    pub free: usize,
    /// The number of online PUs that a job holds.
    pub allocated: usize,
    /// The number of online PUs that are reserved for the system.
    pub housekeeping: usize,
    /// The number of offline PUs.
    pub offline: usize,
}

impl PuCounts {
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

/// The computed values of all metrics, from which the metrics text is written.
#[derive(Debug)]
pub struct MetricValues<'p> {
    /// The counters and the status at the end of the last cycle.
    pub snapshot: &'p MetricsSnapshot,
    /// The CPU time and the memory that pjwd itself uses.
    pub own_usage: OwnUsage,
    /// How many PUs are free, held by jobs, reserved for the system, or offline.
    pub pu_counts: PuCounts,
    /// The metrics of the jobs, oldest first. If there are too many jobs, the last entry is the sum of those that
    /// have no metrics of their own ([`OTHER_JOBS_LABEL`]).
    pub jobs: Vec<JobMetrics>,
    /// The number of jobs in the sum [`OTHER_JOBS_LABEL`]. 0 if each job has metrics of its own.
    pub summed_jobs: usize,
}

impl<'p> MetricValues<'p> {
    /// Computes the values of all metrics after a cycle. `own_usage` is the CPU time and memory that pjwd
    /// itself uses. The oldest `max_jobs` jobs get metrics of their own. The metrics of all other jobs are
    /// summed.
    #[must_use]
    pub fn new(snapshot: &'p MetricsSnapshot, own_usage: OwnUsage, max_jobs: usize) -> Self {
        let status = &snapshot.published.status;
        let core_of: BTreeMap<Pu, usize> = status
            .cores
            .iter()
            .enumerate()
            .flat_map(|(at, core)| cpus(&core.cpus).iter().map(|pu| (pu, at)).collect::<Vec<_>>())
            .collect();
        let mut order: Vec<usize> = (0..status.jobs.len()).collect();
        // RFC 3339 times of equal length sort as text.
        order.sort_by_key(|&at| (&status.jobs[at].since, &status.jobs[at].id));
        let named: BTreeSet<usize> = order.into_iter().take(max_jobs).collect();
        let mut jobs = Vec::with_capacity(named.len() + 1);
        let mut other = JobMetrics { id: OTHER_JOBS_LABEL.to_owned(), ..JobMetrics::default() };
        for (at, job) in status.jobs.iter().enumerate() {
            let demand = snapshot.published.job_demands.get(at).copied().unwrap_or_default();
            let facts = JobMetrics::of(job, demand, &core_of);
            if named.contains(&at) {
                jobs.push(facts);
            } else {
                other.add(&facts);
            }
        }
        let summed_jobs = status.jobs.len() - named.len();
        if summed_jobs > 0 {
            jobs.push(other);
        }
        Self {
            snapshot,
            own_usage,
            pu_counts: PuCounts::of(&status.summary.pool, &snapshot.offline_pus),
            jobs,
            summed_jobs,
        }
    }

    /// Counts the jobs by a property, such as their state. `key` returns the value of this property for one
    /// job. The result has each value in `values` with its number of jobs.
    #[must_use]
    pub fn count_jobs_by<const N: usize>(
        &self,
        values: [&'static str; N],
        key: fn(&wire::Job) -> &str,
    ) -> [(&'static str, usize); N] {
        let jobs = &self.snapshot.published.status.jobs;
        values.map(|value| (value, jobs.iter().filter(|job| key(job) == value).count()))
    }

    /// Returns the number of warnings of each kind in the published status. The key is the code of the kind,
    /// such as `stray`.
    #[must_use]
    pub fn warning_counts(&self) -> BTreeMap<&'p str, usize> {
        let mut counts = BTreeMap::new();
        for warning in &self.snapshot.published.status.warnings {
            *counts.entry(warning.code.as_str()).or_default() += 1;
        }
        counts
    }
}

/// Parses a CPU list that this daemon wrote.
fn cpus(list: &str) -> CpuSet {
    list.parse().unwrap_or_default()
}
