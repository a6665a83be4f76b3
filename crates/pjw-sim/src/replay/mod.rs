//! The replay of a job log on a machine. A job starts at its submit time if enough cores are free, else it is
//! refused. A started job holds its cores for its run time. Jobs that end at a moment free their cores before others
//! start at that moment.
//!
//! The allocator chooses the cores, with the pool as in the daemon, or a [`ReferencePolicy`] does with the same pool.
//! The result depends on the log, the machine and the options alone. Only the measured decision times differ from run
//! to run.

mod sums;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use pjw_core::allocate::offer::{LargestRequests, allocate, largest_requests};
use pjw_core::job::{CpuRequest, JobId, JobRequest, JobSource, Placement};
use pjw_core::state::pool::{PuOffer, PuPool};
use pjw_core::{cpuset::CpuSet, policy::Policy, topology::Topology};

use crate::locality::{LocalityCounts, PuLocations};
use crate::reference::ReferencePolicy;
use crate::swf::{JobLog, LoggedJob};

pub use crate::locality::ProcessorUnit;

/// The maximum number of samples of the free cores that a replay of a job log takes
/// ([`ReplayResult::free_cores_samples`]). For a long job log, the time between two samples is longer.
pub const MAX_FREE_CORES_SAMPLES: u32 = 100;

/// The algorithm that chooses the cores of each job in a replay of a job log: pjw's allocator, or a reference
/// policy (another rule, for comparison).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoreChooser {
    /// pjw's allocator. The field says whether the cores of each job are close together or spread over the
    /// machine.
    Allocator(Placement),
    /// A policy of another system, for comparison.
    Reference(ReferencePolicy),
}

/// The options of a replay of a job log: the algorithm that chooses the cores, and what a processor means in the log (a
/// core or a PU, which is a logical CPU). Also contains the PUs that are reserved for the system, so that no job gets
/// them.
#[derive(Debug, Clone)]
pub struct ReplayOptions {
    /// Whether the processor counts in the job log are numbers of cores or of PUs.
    pub unit: ProcessorUnit,
    /// The algorithm that chooses the cores of each job.
    pub chooser: CoreChooser,
    /// The housekeeping PUs, which are reserved for the system. No job gets one of these PUs.
    pub housekeeping_cpus: CpuSet,
}

/// A job that a replay of a job log started, with the PUs (logical CPUs) that were chosen for the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartedJob {
    /// The job, as the log describes it.
    pub job: LoggedJob,
    /// The PUs that the job holds from its start to its end.
    pub cpus: CpuSet,
    /// The numbers of packages, NUMA nodes and L3 caches that the PUs of the job use, and the number of split cores. A
    /// core is split if the job got some, but not all of its PUs.
    pub domains_used: LocalityCounts,
    /// The wall-clock time that the algorithm took to choose the PUs of this job, measured on the machine
    /// that runs the replay. This is not simulated time.
    pub decision_time: Duration,
}

impl StartedJob {
    /// Returns the time at which this job ends in the replay, in seconds since the time 0 of the job log. This is the
    /// submit time of the job plus its run time, because the replay starts each job at its submit time. If too few
    /// cores are free at the submit time, the replay refuses the job instead of starting it later.
    #[must_use]
    pub fn end_s(&self) -> u64 {
        self.job.submit_s.saturating_add(self.job.run_s)
    }
}

/// How many cores were free at one time of a replay of a job log. Contains four numbers: the cores that one new
/// job could get inside one L3 cache, inside one NUMA node, inside one package, and on the whole machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeCoresSample {
    /// The simulated time of the sample, in seconds since the time 0 of the replayed job log.
    pub time_s: u64,
    /// The largest requests for whole cores that could be served at this time: by one L3 cache, by one NUMA
    /// node, by one package, and by the whole machine.
    pub largest_requests: LargestRequests,
}

/// The result of a replay of a job log: the jobs that got cores, the number of refused jobs, and samples of the
/// free cores over time.
#[derive(Debug, Clone)]
pub struct ReplayResult {
    /// The jobs that got cores, ascending by start time. The start time of a job is its submit time.
    pub started_jobs: Vec<StartedJob>,
    /// The number of jobs that could not be started, because too few cores were free at their submit time.
    pub refused_count: u32,
    /// Samples of the free cores: at most [`MAX_FREE_CORES_SAMPLES`], at equal intervals from the first submit time to
    /// the last.
    pub free_cores_samples: Vec<FreeCoresSample>,
    /// The number of processors of the machine that jobs can use. Depends on [`ReplayOptions::unit`]:
    ///
    /// - [`ProcessorUnit::Core`]: the number of cores that have no housekeeping PU.
    /// - [`ProcessorUnit::Pu`]: the number of PUs that are not housekeeping PUs.
    pub usable_processors: u32,
    /// The submit time of the first job.
    begin_s: u64,
    unit: ProcessorUnit,
}

/// The decision about one job in a replay of a job log: the PUs (logical CPUs) that were chosen for the job, or a
/// refusal. Also contains the state of the machine just before the decision. In this state, each PU is free, granted
/// to an earlier job, or reserved for the system.
#[derive(Debug, Clone, Copy)]
pub struct JobDecision<'r> {
    /// The job, as the log describes it.
    pub job: LoggedJob,
    /// The use of each PU before the decision. A PU is granted to a job, reserved for the system, or free.
    pub holders_before: &'r PuPool,
    /// The PUs that were chosen for the job. `None` if the job was refused.
    pub cpus: Option<&'r CpuSet>,
}

/// Replays the job log `log` on a simulated machine with the topology `topology`. Each job gets cores at its
/// submit time, or is refused if too few cores are free. After its run time, a job frees its cores. For each
/// job, the function calls `on_decision` with the decision, before the job gets the cores. Returns the started
/// jobs and statistics.
pub fn replay(
    topology: &Topology,
    log: &JobLog,
    options: &ReplayOptions,
    mut on_decision: impl FnMut(JobDecision<'_>),
) -> ReplayResult {
    let mut machine = Machine::new(topology, options);
    let usable_processors = machine.free_processors();
    let mut sample_times = sample_times(log).peekable();
    // The end times of the running jobs, the earliest first, with the indexes of the jobs in the log.
    let mut ends: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let (mut started_jobs, mut free_cores_samples) = (Vec::<StartedJob>::new(), Vec::new());
    let mut refused_count = 0;
    let mut take_sample = |machine: &mut Machine<'_>, ends: &mut BinaryHeap<_>, time_s| {
        machine.end_jobs_until(time_s, ends);
        free_cores_samples
            .push(FreeCoresSample { time_s, largest_requests: largest_requests(&machine.pool, topology) });
    };
    for (index, &job) in log.jobs.iter().enumerate() {
        while let Some(time_s) = sample_times.next_if(|&time_s| time_s < job.submit_s) {
            take_sample(&mut machine, &mut ends, time_s);
        }
        machine.end_jobs_until(job.submit_s, &mut ends);
        let begin = Instant::now();
        let choice = machine.choose_processors(index, job.processors);
        let decision_time = begin.elapsed();
        on_decision(JobDecision {
            job,
            holders_before: &machine.pool,
            cpus: choice.as_ref().map(|choice| &choice.cpus),
        });
        let Some(choice) = choice.filter(|choice| machine.commit_choice(index, choice)) else {
            refused_count += 1;
            continue;
        };
        let domains_used = machine.locality.domains_used(&choice.cpus);
        let started = StartedJob { job, cpus: choice.cpus, domains_used, decision_time };
        ends.push(Reverse((started.end_s(), index)));
        started_jobs.push(started);
    }
    sample_times.for_each(|time_s| take_sample(&mut machine, &mut ends, time_s));
    let begin_s = log.jobs.first().map_or(0, |job| job.submit_s);
    ReplayResult {
        started_jobs,
        refused_count,
        free_cores_samples,
        usable_processors,
        begin_s,
        unit: options.unit,
    }
}

/// Returns the times at which the free cores are sampled, in s: evenly from the first submission of a job to the
/// last.
fn sample_times(log: &JobLog) -> impl Iterator<Item = u64> + use<> {
    let first = log.jobs.first().map_or(0, |job| job.submit_s);
    let span = log.jobs.last().map_or(0, |job| job.submit_s) - first;
    let steps = u64::from(MAX_FREE_CORES_SAMPLES - 1).min(span);
    let at = move |step: u64| {
        let offset = u128::from(span) * u128::from(step) / u128::from(steps.max(1));
        first.saturating_add(u64::try_from(offset).unwrap_or(u64::MAX))
    };
    (0..=steps).map(at)
}

/// The PUs that were chosen for a job. The allocator of pjw also makes an offer, a reference policy does not.
struct Choice {
    cpus: CpuSet,
    offer: Option<PuOffer>,
}

/// The simulated machine of the replay, with the PUs that each job holds.
struct Machine<'r> {
    topology: &'r Topology,
    locality: PuLocations,
    pool: PuPool,
    policy: Policy,
    options: &'r ReplayOptions,
}

impl<'r> Machine<'r> {
    fn new(topology: &'r Topology, options: &'r ReplayOptions) -> Self {
        let policy = Policy {
            housekeeping_cpus: options.housekeeping_cpus.clone(),
            share_smt: options.unit == ProcessorUnit::Pu,
            ..Policy::default()
        };
        let pool = PuPool::new(topology, &options.housekeeping_cpus);
        Self { topology, locality: PuLocations::from_topology(topology), pool, policy, options }
    }

    /// Returns the number of free processors: whole cores or PUs, as [`ReplayOptions::unit`] says.
    fn free_processors(&self) -> u32 {
        let free = self.pool.free_cpus();
        match self.options.unit {
            ProcessorUnit::Core => self.topology.whole_core_count(&free),
            ProcessorUnit::Pu => u32::try_from(free.len()).unwrap_or(u32::MAX),
        }
    }

    /// Chooses `count` processors for the job with the index `index` in the log. Uses the allocator of pjw or a
    /// reference policy (an algorithm for comparison), as the options say. Does not change the pool (the list of all
    /// PUs with their holders). Returns `None` if too few processors are free.
    fn choose_processors(&self, index: usize, count: u32) -> Option<Choice> {
        match self.options.chooser {
            CoreChooser::Allocator(placement) => {
                let cpu_request = match self.options.unit {
                    ProcessorUnit::Core => CpuRequest::Cores(count),
                    ProcessorUnit::Pu => CpuRequest::Pus(count),
                };
                let request = JobRequest { cpu_request, placement, ..JobRequest::with_core_count(count) };
                let job = job_id(index)?;
                let offer = allocate(&job, &request, &self.pool, self.topology, &self.policy).ok()?;
                Some(Choice { cpus: offer.cpus.clone(), offer: Some(offer) })
            }
            CoreChooser::Reference(reference) => {
                let cpus =
                    reference.choose_pus(count, self.options.unit, &self.pool.free_cpus(), &self.locality)?;
                Some(Choice { cpus, offer: None })
            }
        }
    }

    /// Commits the choice for the job with the index `index` to the pool. Returns whether all chosen PUs were free.
    fn commit_choice(&mut self, index: usize, choice: &Choice) -> bool {
        let Some(job) = job_id(index) else { return false };
        match &choice.offer {
            Some(offer) => self.pool.commit(&job, offer).is_ok(),
            None => self.pool.grant_available(&job, &choice.cpus).is_empty(),
        }
    }

    /// Ends the jobs in `ends` that end at `time_s` or before: removes them from `ends`, and frees their PUs.
    fn end_jobs_until(&mut self, time_s: u64, ends: &mut BinaryHeap<Reverse<(u64, usize)>>) {
        while let Some(&Reverse((_, index))) = ends.peek().filter(|Reverse((end_s, _))| *end_s <= time_s) {
            ends.pop();
            if let Some(job) = job_id(index) {
                self.pool.release(&job);
            }
        }
    }
}

/// Returns the id in the pool of the job with the index `index` in the log. The numbers of the jobs in a log may
/// repeat, so they can't be ids.
fn job_id(index: usize) -> Option<JobId> {
    JobId::new(JobSource::Manual, &index.to_string()).ok()
}

#[cfg(test)]
mod tests;
