//! The values that the metrics table reads, computed from the published status: the numbers of PUs by use, the values
//! of single jobs, and the sums over the jobs beyond `metrics.max_jobs`.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_ipc::wire;
use pjw_linux::sys::own_usage::ResourceUsage;

use super::meter::MetricsSnapshot;
use crate::view::counts::CpuDemand;

/// The value of the metrics label `jobid` for sums over several jobs. The metrics list only a limited number of jobs
/// one by one (configuration key `metrics.max_jobs`), and have sums for all further jobs. This text differs from
/// every job id, because each job id contains a colon.
pub const OTHER_JOBS_LABEL_VALUE: &str = "other";

/// The values of the metrics of one job, or the sums of these values over several jobs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JobMetrics {
    /// The id of the job. [`OTHER_JOBS_LABEL_VALUE`] if the values are sums over several jobs.
    pub id: String,
    /// The number of cores of which at least one PU is granted to the job.
    pub cores: u64,
    /// The number of PUs (hardware threads) that are granted to the job.
    pub pus: u64,
    /// The number of cores that the job requested. 0 if this number is unknown.
    pub requested_cores: u64,
    /// The number of processes that belong to the job.
    pub processes: u64,
    /// The number of threads of all processes of the job.
    pub threads: u64,
    /// The number of hot threads: threads that run or wait for a PU most of the time.
    pub hot_threads: u64,
    /// The number of threads that pjw pinned to one PU.
    pub pinned_threads: u64,
    /// The number of threads whose affinity mask contains PUs that are not granted to the job.
    pub outside_threads: u64,
    /// The CPU demand of the job: the share of time for which a thread runs or waits for a PU, summed over
    /// all threads of the job.
    pub demand: CpuDemand,
}

impl JobMetrics {
    /// Returns the metrics of a job from its description in the status. `demand` is the CPU demand of the job.
    /// `core_of` has the index of the core of each PU (logical CPU), to count the cores of the job.
    fn from_job(job: &wire::Job, demand: CpuDemand, core_of: &BTreeMap<Pu, usize>) -> Self {
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

    /// Adds all numbers of `other` to those of this job, so that the result has the sums of several jobs. Keeps the
    /// id.
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

/// The numbers of PUs (hardware threads) of the machine that are free, granted to jobs, reserved for the
/// system, or offline. Each PU is counted once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PuCounts {
    /// The number of online PUs that are neither granted to a job nor reserved for the system.
    pub free: usize,
    /// The number of online PUs that are granted to jobs.
    pub allocated: usize,
    /// The number of online PUs that are reserved for the system.
    pub housekeeping: usize,
    /// The number of offline PUs.
    pub offline: usize,
}

impl PuCounts {
    /// Counts the PUs in the description of the pool. The PUs in `offline` count as offline only.
    fn from_pool(pool: &wire::Pool, offline: &CpuSet) -> Self {
        let count_online = |list: &str| cpus(list).difference(offline).len();
        Self {
            free: count_online(&pool.free),
            allocated: count_online(&pool.allocated),
            housekeeping: count_online(&pool.housekeeping),
            offline: offline.len(),
        }
    }
}

/// The current values of all metrics of pjwd, computed from a [`MetricsSnapshot`]. The metrics text is written from
/// these values.
#[derive(Debug)]
pub struct MetricValues<'p> {
    /// The counters and the status at the end of the last cycle (scan, decision and changes).
    pub snapshot: &'p MetricsSnapshot,
    /// The CPU time and the memory that pjwd itself uses.
    pub own_usage: ResourceUsage,
    /// The numbers of PUs that are free, granted to jobs, reserved for the system, or offline.
    pub pu_counts: PuCounts,
    /// The metrics of single jobs, ordered by job id. The configuration key `metrics.max_jobs` limits the
    /// number of single jobs. If there are more jobs, only the oldest ones are listed. One more entry at the
    /// end then has the sums over all other jobs, with the id [`OTHER_JOBS_LABEL_VALUE`].
    pub jobs: Vec<JobMetrics>,
    /// The number of jobs in the sums of [`OTHER_JOBS_LABEL_VALUE`]. 0 if every job is listed in `jobs`.
    pub summed_jobs: usize,
}

impl<'p> MetricValues<'p> {
    /// Computes the values of all metrics from `snapshot`. `own_usage` is the CPU time and the memory that pjwd
    /// itself uses. The result lists the metrics of the `max_jobs` oldest jobs one by one, and the sums over all
    /// other jobs.
    #[must_use]
    pub fn new(snapshot: &'p MetricsSnapshot, own_usage: ResourceUsage, max_jobs: usize) -> Self {
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
        let single_jobs: BTreeSet<usize> = order.into_iter().take(max_jobs).collect();
        let mut jobs = Vec::with_capacity(single_jobs.len() + 1);
        let mut other = JobMetrics { id: OTHER_JOBS_LABEL_VALUE.to_owned(), ..JobMetrics::default() };
        for (at, job) in status.jobs.iter().enumerate() {
            let demand = snapshot.published.job_demands.get(at).copied().unwrap_or_default();
            let metrics = JobMetrics::from_job(job, demand, &core_of);
            if single_jobs.contains(&at) {
                jobs.push(metrics);
            } else {
                other.add(&metrics);
            }
        }
        let summed_jobs = status.jobs.len() - single_jobs.len();
        if summed_jobs > 0 {
            jobs.push(other);
        }
        Self {
            snapshot,
            own_usage,
            pu_counts: PuCounts::from_pool(&status.summary.pool, &snapshot.offline_pus),
            jobs,
            summed_jobs,
        }
    }

    /// Counts the jobs by a property, such as their state. `property` returns the value of the property for one job.
    /// Returns each of the `values` together with the number of jobs that have this value. A job with a value that is
    /// not in `values` is not counted.
    #[must_use]
    pub fn count_jobs_by<const N: usize>(
        &self,
        values: [&'static str; N],
        property: fn(&wire::Job) -> &str,
    ) -> [(&'static str, usize); N] {
        let jobs = &self.snapshot.published.status.jobs;
        values.map(|value| (value, jobs.iter().filter(|job| property(job) == value).count()))
    }

    /// Returns the number of warnings in the published status, for each warning code. A warning code is a word for
    /// the kind of the warning, such as `memory`. The result has no entry for a code without a warning.
    #[must_use]
    pub fn warning_counts(&self) -> BTreeMap<&'p str, usize> {
        let mut counts = BTreeMap::new();
        for warning in &self.snapshot.published.status.warnings {
            *counts.entry(warning.code.as_str()).or_default() += 1;
        }
        counts
    }
}

/// Parses a CPU list of the status. The daemon wrote the list, so it is never invalid.
fn cpus(list: &str) -> CpuSet {
    list.parse().unwrap_or_default()
}
