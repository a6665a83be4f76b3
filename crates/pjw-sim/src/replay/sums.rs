//! The figures of a replay: utilisation, means over the started jobs, decision times.

use std::time::Duration;

use super::{ReplayResult, StartedJob};
use crate::locality::{LocalityCounts, ProcessorUnit};

impl ReplayResult {
    /// Returns the number of jobs in the replay: the jobs that got cores, plus the refused jobs.
    #[must_use]
    pub fn job_count(&self) -> u32 {
        u32::try_from(self.started_jobs.len()).unwrap_or(u32::MAX).saturating_add(self.refused_count)
    }

    /// Returns the utilisation of the machine in the replay, from 0 to 1. This is the sum of (processors × run time)
    /// over the started jobs, divided by [`ReplayResult::usable_processors`] × (length of the period). The period is
    /// the time from the first submit time to the last end of a job. A processor is a whole core or a PU (logical CPU),
    /// as [`ReplayOptions::unit`](super::ReplayOptions::unit) says. Returns 0 if no job was started, or if the length
    /// of the period is 0.
    #[must_use]
    pub fn utilisation(&self) -> f64 {
        let end_s = self.started_jobs.iter().map(StartedJob::end_s).max().unwrap_or(self.begin_s);
        let processor_s = |started: &StartedJob| {
            let processors = match self.unit {
                ProcessorUnit::Core => started.job.processors,
                ProcessorUnit::Pu => u32::try_from(started.cpus.len()).unwrap_or(u32::MAX),
            };
            u128::from(processors) * u128::from(started.end_s() - started.job.submit_s)
        };
        let held_processor_s: u128 = self.started_jobs.iter().map(processor_s).sum();
        ratio(held_processor_s, u128::from(end_s - self.begin_s) * u128::from(self.usable_processors))
    }

    /// Returns the mean of one of the counts in [`LocalityCounts`] over the started jobs of the replay, such as the
    /// mean number of NUMA nodes that a job uses. `select_count` gets the counts of one job, and must return the
    /// count of which the mean is wanted, such as [`LocalityCounts::numa_nodes`]. Returns 0 if no job was started.
    #[must_use]
    pub fn mean_count(&self, select_count: impl Fn(&LocalityCounts) -> u32) -> f64 {
        let counts = self.started_jobs.iter().map(|started| select_count(&started.domains_used));
        let sum: u128 = counts.map(u128::from).sum();
        ratio(sum, self.started_jobs.len() as u128)
    }

    /// Returns the number of split cores, summed over the started jobs of the replay. A job splits a core if
    /// the job got some, but not all PUs (logical CPUs) of the core. A core that two jobs split counts twice.
    #[must_use]
    pub fn split_core_count(&self) -> u64 {
        self.started_jobs.iter().map(|started| u64::from(started.domains_used.split_cores)).sum()
    }

    /// Returns a percentile of the decision times of all started jobs. `percentile` is from 0 to 100. The
    /// decision time of a job is how long the algorithm took to choose the job's cores, in real time and not in
    /// simulated time. Returns zero if no job was started.
    #[must_use]
    pub fn decision_time_percentile(&self, percentile: usize) -> Duration {
        let mut times: Vec<Duration> =
            self.started_jobs.iter().map(|started| started.decision_time).collect();
        times.sort_unstable();
        let rank = (times.len() * percentile.min(100)).div_ceil(100).saturating_sub(1);
        times.get(rank).copied().unwrap_or_default()
    }
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people: 53 bits are plenty")]
fn ratio(part: u128, whole: u128) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
