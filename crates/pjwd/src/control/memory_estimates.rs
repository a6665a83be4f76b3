//! The regular estimates of the memory of jobs, for their reports and for the warning before the memory runs out.
//!
//! An estimate reads counters of the kernel, and no pages except those of small jobs. A job that runs is estimated once
//! a minute. A job without hot threads is estimated every 16 minutes. A pause after each estimate keeps all of them
//! together within the CPU budget of the readings without a request (`memory.budget_permille`).
//!
//! After each estimate, a sample of the pages of the job's processes finds memory on other NUMA nodes than the hot
//! threads. So does a sample if the estimate is left out because the memory was just read.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pjw_core::job::JobId;
use pjw_ipc::wire;
use pjw_linux::sys::clock;
use tokio::time::{Instant, sleep};

use super::memory::MeasurementRequester;
use super::memory_findings::memory_by_node;
use super::server::ControlService;
use crate::memory::reading::ReadingKind;
use crate::memory::turns::TurnRequester;

/// The time from the first hot thread of a job to its first estimate. A shorter job gets no estimate.
const FIRST_AGE: Duration = Duration::from_secs(10);
/// The time between two estimates of a job that runs.
const INTERVAL: Duration = Duration::from_secs(60);
/// The longest time between two estimates of a job without hot threads.
const MAX_INTERVAL: Duration = Duration::from_secs(16 * 60);
/// The time between two looks whether an estimate is due.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// When each job is estimated next.
#[derive(Debug, Default)]
struct EstimateSchedule {
    jobs: BTreeMap<String, JobSchedule>,
}

/// When one job is estimated next, and why.
#[derive(Debug)]
struct JobSchedule {
    /// When the job began, as the status shows it. A later job may have the same id.
    since: String,
    next: Instant,
    interval: Duration,
    /// Whether the job had a hot thread or a warning at a look since the last estimate, or since the job began.
    was_hot_or_warned: bool,
    /// Whether the job was never estimated.
    is_new: bool,
}

impl EstimateSchedule {
    /// Returns the ids of those `jobs` whose memory must be estimated now, and plans the next estimate of each.
    /// `jobs` are all jobs of the status. `is_warned` says whether a job has a warning about its memory.
    ///
    /// - A job with such a warning, or with a hot thread (one that runs or waits for a PU most of the time) since the
    ///   last estimate, is estimated each [`INTERVAL`]. The first estimate is due [`FIRST_AGE`] after the thread was
    ///   seen.
    /// - Any other job is estimated each [`MAX_INTERVAL`].
    /// - Jobs that have ended or have no processes are removed from the schedule.
    fn take_due(
        &mut self,
        jobs: &[Arc<wire::Job>],
        is_warned: impl Fn(&str) -> bool,
        now: Instant,
    ) -> Vec<String> {
        let mut due = Vec::new();
        let mut earlier = std::mem::take(&mut self.jobs);
        for job in jobs.iter().filter(|job| job.processes > 0) {
            let new_schedule = || JobSchedule {
                since: job.since.clone(),
                next: now + MAX_INTERVAL,
                interval: MAX_INTERVAL,
                was_hot_or_warned: false,
                is_new: true,
            };
            let schedule = earlier.remove(&job.id).filter(|schedule| schedule.since == job.since);
            let mut schedule = schedule.unwrap_or_else(new_schedule);
            let is_hot_or_warned = job.hot > 0 || is_warned(&job.id);
            schedule.was_hot_or_warned |= is_hot_or_warned;
            if schedule.was_hot_or_warned && schedule.interval > INTERVAL {
                schedule.next = schedule.next.min(now + if schedule.is_new { FIRST_AGE } else { INTERVAL });
                schedule.interval = INTERVAL;
            }
            if now >= schedule.next {
                due.push(job.id.clone());
                schedule.interval = if schedule.was_hot_or_warned { INTERVAL } else { MAX_INTERVAL };
                schedule.next = now + schedule.interval;
                schedule.was_hot_or_warned = is_hot_or_warned;
                schedule.is_new = false;
            }
            self.jobs.insert(job.id.clone(), schedule);
        }
        due
    }
}

impl ControlService {
    /// Estimates the memory use of each job at intervals, from counters of the kernel. The first estimate of a job is
    /// made about ten seconds after a thread of the job became hot. A thread is hot if it runs or waits for a PU
    /// (logical CPU) most of the time. Later estimates are made once a minute, or every 16 minutes while no thread of
    /// the job is hot.
    ///
    /// Stores the results for the report on the job. Sends a warning to the event loop if the memory of a job will
    /// probably run out. On a machine with several NUMA nodes, also takes a sample of the pages of each job with hot
    /// threads, and stores which processes have most of their memory on other nodes than their hot threads.
    ///
    /// Pauses after each job, so that estimates and samples use at most the configured share of one PU
    /// (`memory.budget_permille`). Runs until the future is dropped, or the event loop has ended.
    pub async fn estimate_memory(self: Rc<Self>) {
        let requester = MeasurementRequester { turn_requester: TurnRequester::Daemon, is_admin: true };
        let mut schedule = EstimateSchedule::default();
        let mut status = self.status.clone();
        // While there are no jobs, this task sleeps.
        while status.wait_for(|status| !status.jobs.is_empty()).await.is_ok() {
            let jobs = status.borrow_and_update().jobs.clone();
            for id in schedule.take_due(&jobs, |id| self.is_warned(id), Instant::now()) {
                let Ok(id) = id.parse::<JobId>() else { continue };
                let mut cost = Duration::ZERO;
                // A job that ended meanwhile is no error, and nor is one whose memory can't be read.
                if !self.was_just_read(&id)
                    && let Ok(reading) = self.measure_in_turn(&id, ReadingKind::Counters, requester).await
                {
                    self.send_memory_warnings(self.memory_records.borrow().shortage_warnings());
                    cost = reading.cost;
                }
                cost += self.sample_numa_nodes(&id, requester).await;
                let budget = self.settings.borrow().memory;
                sleep(budget.pause_after(cost)).await;
            }
            sleep(LOOK_INTERVAL).await;
        }
    }

    /// Takes a sample of the pages of processes of the job `id` that have hot threads. Stores which of them have most
    /// of their memory on other NUMA nodes than these threads. Returns the CPU time of the sample. Does nothing on a
    /// machine with one NUMA node, or if the job has no hot threads.
    async fn sample_numa_nodes(&self, id: &JobId, requester: MeasurementRequester) -> Duration {
        if self.status.borrow().summary.node.numa_nodes < 2 {
            return Duration::ZERO;
        }
        let Ok(job) = self.published_job(id) else { return Duration::ZERO };
        if job.hot == 0 {
            return Duration::ZERO;
        }
        // Processes that have ended or that can't be read are no error, and nothing is known of them then.
        let Ok(reading) = self.measure_in_turn(id, ReadingKind::NodeSample, requester).await else {
            return Duration::ZERO;
        };
        let by_node = memory_by_node(&reading);
        if let Ok(remote) = self.find_remote_numa_memory(id, by_node.clone()).await
            && self.published_job(id).is_ok_and(|now| now.since == job.since)
        {
            let mut records = self.memory_records.borrow_mut();
            let findings = records.remote_numa_findings_mut(id, &job.since);
            findings.record(by_node, &remote, reading.at.since_boot);
        }
        reading.cost
    }

    fn is_warned(&self, id: &str) -> bool {
        id.parse().is_ok_and(|id| self.memory_records.borrow().shortage_warning(&id).is_some())
    }

    /// Whether the memory of a job was read in the last half of the interval, on request or by `memory.sample`.
    fn was_just_read(&self, id: &JobId) -> bool {
        let last = self.memory_records.borrow().last_measurement_ended_at(id);
        last.is_some_and(|at| {
            Duration::from_nanos(clock::now().since_boot.0.saturating_sub(at.0)) < INTERVAL / 2
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOT_WARNED: fn(&str) -> bool = |_| false;

    fn job(id: &str, since: &str, hot: u32) -> Arc<wire::Job> {
        Arc::new(wire::Job {
            id: id.to_owned(),
            since: since.to_owned(),
            processes: 1,
            hot,
            ..wire::Job::default()
        })
    }

    /// Returns the seconds, from 0 to `seconds`, in which the estimate of a job is due. `hot` returns the number of
    /// hot threads in a second.
    fn due_seconds(seconds: u64, hot: impl Fn(u64) -> u32) -> Vec<u64> {
        let (mut schedule, begin) = (EstimateSchedule::default(), Instant::now());
        let looks = (0..=seconds).step_by(5);
        looks
            .filter(|&second| {
                let jobs = [job("a", "12:00", hot(second))];
                !schedule.take_due(&jobs, NOT_WARNED, begin + Duration::from_secs(second)).is_empty()
            })
            .collect()
    }

    #[test]
    fn a_job_that_runs_is_estimated_when_it_is_ten_seconds_old_and_then_once_a_minute() {
        assert_eq!(due_seconds(200, |_| 1), [10, 70, 130, 190]);
    }

    #[test]
    fn a_job_without_hot_threads_is_estimated_more_rarely_until_it_runs_again() {
        assert_eq!(due_seconds(3000, |_| 0), [960, 1920, 2880]);
        assert_eq!(due_seconds(1200, |second| u32::from(second == 1000)), [960, 1060, 1120]);
        assert_eq!(
            due_seconds(200, |second| u32::from(second == 100)),
            [110, 170],
            "ten seconds after it began to run"
        );
    }

    #[test]
    fn a_job_about_which_there_is_a_warning_is_estimated_as_if_it_were_hot() {
        let (mut schedule, begin) = (EstimateSchedule::default(), Instant::now());
        let looks = (0..=200).step_by(5).filter(|&second| {
            let jobs = [job("a", "12:00", 0)];
            !schedule.take_due(&jobs, |id| id == "a", begin + Duration::from_secs(second)).is_empty()
        });
        assert_eq!(looks.collect::<Vec<_>>(), [10, 70, 130, 190]);
    }

    #[test]
    fn a_job_that_ended_is_forgotten_and_a_new_one_with_its_id_begins_again() {
        let (mut schedule, begin) = (EstimateSchedule::default(), Instant::now());
        let at = |second| begin + Duration::from_secs(second);
        assert_eq!(schedule.take_due(&[job("a", "12:00", 1)], NOT_WARNED, at(0)), Vec::<String>::new());
        assert_eq!(schedule.take_due(&[job("a", "12:00", 1)], NOT_WARNED, at(10)), ["a"]);
        assert_eq!(schedule.take_due(&[job("a", "12:05", 1)], NOT_WARNED, at(75)), Vec::<String>::new());
        assert_eq!(schedule.take_due(&[job("a", "12:05", 1)], NOT_WARNED, at(85)), ["a"]);
        let _ = schedule.take_due(&[], NOT_WARNED, at(90));
        assert!(schedule.jobs.is_empty());
    }
}
