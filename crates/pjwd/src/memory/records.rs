//! The latest readings of the memory of each job, and the predictions that follow from them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use pjw_core::diagnosis::map_lock::MmapLockWaits;
use pjw_core::diagnosis::memory::{PredictedMemoryShortage, WorkerMemory, predict_memory_shortage};
use pjw_core::job::JobId;
use pjw_core::plan::Warning;
use pjw_core::time::{Nanos, UnixMillis};

use super::node_findings::RemoteNumaFindings;
use super::reading::{JobMemoryReading, ReadingKind};

/// The number of readings that are kept of each job: two hours with one reading in 30 s.
const MAX_SAMPLES: usize = 240;
/// The time after its end for which a reading is returned again to a caller without administrator rights, as a multiple
/// of the CPU time that the reading took.
const REUSE_FACTOR: u32 = 20;
/// The time for which a reading is returned again in any case, even if it took little CPU time.
const MIN_REUSE: Duration = Duration::from_secs(1);
/// The time for which a prediction from the pages of processes is not replaced by one from an estimate.
const MAX_PREDICTION_AGE: Duration = Duration::from_secs(300);
/// The number of estimates from which a prediction follows.
const MIN_ESTIMATES: usize = 3;
/// The time for which a prediction is kept without another reading from which one may follow.
const MAX_SHORTAGE_AGE: Duration = Duration::from_secs(20 * 60);

/// A summary of one measurement of a job's memory use, for the memory history of the job. All sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySample {
    /// The UTC time of the measurement.
    pub time: UnixMillis,
    /// The method of the measurement.
    pub kind: ReadingKind,
    /// The sum of the resident set sizes of the processes. Processes with the same address space count once.
    pub rss: u64,
    /// The sum of the proportional set sizes of the processes. For the method [`ReadingKind::Estimate`]: the anonymous
    /// memory and the mapped files that the kernel charged to the memory cgroup of the job.
    pub pss: u64,
    /// The part of `rss` that other address spaces also map, in permille. For the method [`ReadingKind::Estimate`]:
    /// the part of the anonymous memory that processes of the job share.
    pub shared_permille: u32,
    /// The number of processes of the job.
    pub processes: u32,
}

/// What is known of the memory of one job.
#[derive(Debug, Default)]
struct JobRecord {
    /// When the job began, as the status shows it. A later job may have the same id.
    since: String,
    samples: VecDeque<MemorySample>,
    /// The private memory of the workers, by readings of pages.
    workers: VecDeque<WorkerMemory>,
    /// The private memory of the workers, by estimates. An estimate can't be compared with a reading of pages.
    estimated_workers: VecDeque<WorkerMemory>,
    /// The latest reading of each kind.
    latest: BTreeMap<ReadingKind, Arc<JobMemoryReading>>,
    /// The largest memory use that any reading found, in bytes.
    largest: u64,
    /// The result of the latest reading that observed the threads.
    map_lock_waits: Vec<MmapLockWaits>,
    node_findings: RemoteNumaFindings,
    shortage: Option<PredictedMemoryShortage>,
}

impl JobRecord {
    /// Stores `workers`, a measurement of the memory that each worker (an address space of the job) has for itself.
    /// Then predicts again whether the memory of the job will run out, from this and earlier measurements of the same
    /// kind. `available` is the memory that is still available, in bytes.
    ///
    /// An estimate is less exact than a reading of pages. So it does not change the prediction if the last reading of
    /// pages is younger than [`MAX_PREDICTION_AGE`].
    fn update_shortage_prediction(&mut self, workers: WorkerMemory, kind: ReadingKind, available: u64) {
        let is_estimate = kind == ReadingKind::Estimate;
        let has_recent_pages = self.workers.back().is_some_and(|pages| {
            Duration::from_nanos(workers.at.0.saturating_sub(pages.at.0)) < MAX_PREDICTION_AGE
        });
        let history = if is_estimate { &mut self.estimated_workers } else { &mut self.workers };
        push_bounded(history, workers);
        if !is_estimate {
            self.shortage = predict_memory_shortage(history.make_contiguous(), available);
        } else if !has_recent_pages {
            // pjwd estimates without a request, also while a job still loads its data. So only workers that grow over
            // several estimates count.
            let is_enough = workers.workers > 1 && history.len() >= MIN_ESTIMATES;
            let history = history.make_contiguous();
            self.shortage = is_enough.then(|| predict_memory_shortage(history, available)).flatten();
        }
    }

    /// Removes a prediction if the last reading from which one may follow is older than [`MAX_SHORTAGE_AGE`].
    fn remove_outdated_shortage_prediction(&mut self, now: Nanos) {
        let last =
            self.workers.back().into_iter().chain(self.estimated_workers.back()).map(|workers| workers.at.0);
        let age = last.max().map(|last| Duration::from_nanos(now.0.saturating_sub(last)));
        if age.is_some_and(|age| age > MAX_SHORTAGE_AGE) {
            self.shortage = None;
        }
    }
}

/// The stored measurements of the memory use of each job: the latest full results, a history of summaries, and the
/// prediction of a memory shortage.
#[derive(Debug, Default)]
pub struct MemoryRecords {
    jobs: BTreeMap<JobId, JobRecord>,
}

impl MemoryRecords {
    /// Removes the stored measurements of an earlier job that had the same id as the present job `job`.
    /// `job_start_time` is the start time of the present job: the field `since` of the job in the published status
    /// ([`Job::since`](pjw_ipc::wire::Job::since)), a UTC time as text (RFC 3339). [`MemoryRecords::add`] stores this
    /// text with the measurements. If the stored text differs from `job_start_time`, the measurements belong to an
    /// earlier job.
    pub fn remove_earlier_job(&mut self, job: &JobId, job_start_time: &str) {
        if self.jobs.get(job).is_some_and(|record| record.since != job_start_time) {
            self.jobs.remove(job);
        }
    }

    /// Stores `reading`, a measurement of the memory use of the job `job`, and returns it as an `Arc`. `job_start_time`
    /// is the start time of the job, as in [`MemoryRecords::remove_earlier_job`]. Stored measurements of an earlier job
    /// with the same id but another start time are removed.
    ///
    /// Also updates the prediction of a memory shortage. The prediction needs the private memory of the workers. A
    /// worker is a process of the job with much memory that no other process maps.
    ///
    /// - A measurement that read the pages of workers gives a new prediction.
    /// - A measurement of the kind [`ReadingKind::Estimate`] is less exact. If it has data about workers, it changes
    ///   the prediction only if the pages of workers were last read at least five minutes before.
    /// - A measurement without data about workers gives no prediction. It removes the present prediction if the last
    ///   data about workers is more than 20 minutes old.
    pub fn add(
        &mut self,
        job: &JobId,
        job_start_time: &str,
        reading: JobMemoryReading,
    ) -> Arc<JobMemoryReading> {
        let record = self.record_of(job, job_start_time);
        let sample = MemorySample {
            time: reading.at.wall_clock,
            kind: reading.kind,
            rss: reading.sum.rss,
            pss: reading.sum.pss,
            shared_permille: reading.sum.shared_permille,
            processes: u32::try_from(reading.processes.len()).unwrap_or(u32::MAX),
        };
        push_bounded(&mut record.samples, sample);
        record.largest = record.largest.max(reading.sum.pss);
        if let Some(waits) = &reading.map_lock_waits {
            record.map_lock_waits.clone_from(waits);
        }
        if let Some(workers) = reading.workers {
            record.update_shortage_prediction(workers, reading.kind, reading.available);
        } else {
            record.remove_outdated_shortage_prediction(reading.at.since_boot);
        }
        let reading = Arc::new(reading);
        record.latest.insert(reading.kind, Arc::clone(&reading));
        reading
    }

    /// Returns the record of the job `job`, which began at `job_start_time`. Makes an empty record if there is none.
    fn record_of(&mut self, job: &JobId, job_start_time: &str) -> &mut JobRecord {
        self.remove_earlier_job(job, job_start_time);
        let new_record = || JobRecord { since: job_start_time.to_owned(), ..JobRecord::default() };
        self.jobs.entry(job.clone()).or_insert_with(new_record)
    }

    /// Returns a mutable reference to the results of the samples of the pages of the job `job`. If nothing is stored
    /// about the job yet, adds an empty record first. `job_start_time` is the start time of the job, as in
    /// [`MemoryRecords::remove_earlier_job`]. What is stored about an earlier job with the same id is removed.
    pub fn remote_numa_findings_mut(&mut self, job: &JobId, job_start_time: &str) -> &mut RemoteNumaFindings {
        &mut self.record_of(job, job_start_time).node_findings
    }

    /// Returns the results of the samples of the pages of the job `job`: which of its processes have most of their
    /// memory on other NUMA nodes than their hot threads. `None` if nothing about the job is stored.
    #[must_use]
    pub fn remote_numa_findings(&self, job: &JobId) -> Option<&RemoteNumaFindings> {
        self.jobs.get(job).map(|record| &record.node_findings)
    }

    /// Returns the latest measurement of the memory use of the job `job` by the method `kind`, if the measurement is
    /// recent. Users who are not administrators get a recent measurement instead of a new one, because a measurement
    /// takes CPU time. A measurement stays recent for 20 times the CPU time that it took, but at least for one second
    /// after its end. `now` is the current time in ns since boot. Returns `None` if there is no recent measurement.
    #[must_use]
    pub fn recent_reading(
        &self,
        job: &JobId,
        kind: ReadingKind,
        now: Nanos,
    ) -> Option<Arc<JobMemoryReading>> {
        let latest = self.jobs.get(job)?.latest.get(&kind)?;
        let age = Duration::from_nanos(now.0.saturating_sub(latest.ended_at.0));
        let limit = latest.cost.saturating_mul(REUSE_FACTOR).max(MIN_REUSE);
        (age < limit).then(|| Arc::clone(latest))
    }

    /// Returns when the latest stored measurement of the memory use of the job `job` with the method
    /// [`ReadingKind::Pages`] began, in ns since boot. `None` if there is no such measurement. If less than half of
    /// the interval `memory.sample` has passed since then, pjwd skips the next regular measurement of the job.
    #[must_use]
    pub fn last_page_reading_at(&self, job: &JobId) -> Option<Nanos> {
        Some(self.jobs.get(job)?.latest.get(&ReadingKind::Pages)?.at.since_boot)
    }

    /// Returns the time at which the latest stored measurement of the memory use of the job `job` ended, in ns since
    /// boot. All methods of measurement ([`ReadingKind`]) count. `None` if no measurement of the job is stored.
    #[must_use]
    pub fn last_measurement_ended_at(&self, job: &JobId) -> Option<Nanos> {
        self.jobs.get(job)?.latest.values().map(|reading| reading.ended_at).max()
    }

    /// Returns the memory history of the job `job`: one summary for each of its latest 240 measurements, oldest
    /// first. Empty if no measurement of the job is stored.
    pub fn samples(&self, job: &JobId) -> impl Iterator<Item = &MemorySample> {
        self.jobs.get(job).into_iter().flat_map(|record| &record.samples)
    }

    /// Returns the largest memory use of the job `job` that any measurement has found so far, in bytes. Returns 0 if
    /// no measurement of the job is stored. The method of a measurement ([`ReadingKind`]) determines what memory use
    /// means:
    ///
    /// - If the pages of the processes were read: the sum of the proportional set sizes (PSS) of the processes.
    /// - If the memory use was estimated: the anonymous memory and the mapped files that are charged to the job's
    ///   cgroup.
    #[must_use]
    pub fn largest_memory_use(&self, job: &JobId) -> u64 {
        self.jobs.get(job).map_or(0, |record| record.largest)
    }

    /// Returns the address spaces of the job `job` whose threads wait for one another to map or unmap memory. The
    /// result comes from the latest measurement that observed the threads. Empty if this measurement found no such
    /// threads, or if no measurement has observed the threads.
    #[must_use]
    pub fn map_lock_waits(&self, job: &JobId) -> &[MmapLockWaits] {
        self.jobs.get(job).map_or(&[], |record| &record.map_lock_waits)
    }

    /// Returns a warning if the job `job` will probably run out of memory soon. The prediction compares the growth of
    /// the job's private memory with the memory that the cgroup of the job and the machine have left. `None` if no
    /// shortage is predicted, or if there are too few measurements for a prediction.
    #[must_use]
    pub fn shortage_warning(&self, job: &JobId) -> Option<Warning> {
        let shortage = self.jobs.get(job)?.shortage?;
        let warning = Warning::new("memory", shortage.description(), PredictedMemoryShortage::remedy());
        Some(Warning { job: Some(job.clone()), ..warning })
    }

    /// Returns one warning for each job whose memory will probably run out soon
    /// ([`MemoryRecords::shortage_warning`]). Empty if no shortage is predicted.
    #[must_use]
    pub fn shortage_warnings(&self) -> Vec<Warning> {
        self.jobs.keys().filter_map(|job| self.shortage_warning(job)).collect()
    }

    /// Removes the prediction of a memory shortage for the job `job`, if the newest stored measurement of the private
    /// memory of its workers is more than 20 minutes old. A worker is a process of the job with much memory that no
    /// other process maps. `now` is the current time in ns since boot.
    ///
    /// [`MemoryRecords::add`] does the same. So this function is needed only after a measurement of the kind
    /// [`ReadingKind::Counters`], which is not stored.
    pub fn remove_outdated_shortage_prediction(&mut self, job: &JobId, now: Nanos) {
        if let Some(record) = self.jobs.get_mut(job) {
            record.remove_outdated_shortage_prediction(now);
        }
    }

    /// Returns the ids of the jobs about whose memory anything is stored.
    pub fn job_ids(&self) -> impl Iterator<Item = &JobId> {
        self.jobs.keys()
    }

    /// Removes all stored measurements of the memory use of the job `job`. Must be called when the job has ended.
    pub fn remove_job(&mut self, job: &JobId) {
        self.jobs.remove(job);
    }
}

/// Adds `value` at the end, and removes the oldest value if there are more than [`MAX_SAMPLES`].
fn push_bounded<T>(values: &mut VecDeque<T>, value: T) {
    if values.len() >= MAX_SAMPLES {
        values.pop_front();
    }
    values.push_back(value);
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use super::super::turns::{MemoryReaderQueue, TooManyWaiting, Turn, TurnRequester};
    use super::*;
    use pjw_core::ids::{Pid, ProcessId, StartTime};
    use pjw_core::memory::JobMemory;
    use pjw_core::time::Moment;

    const GIB: u64 = 1 << 30;

    fn reading(seconds: u64, own: u64, available: u64) -> JobMemoryReading {
        let since_boot = Nanos(seconds * 1_000_000_000);
        JobMemoryReading {
            kind: ReadingKind::Pages,
            at: Moment { since_boot, wall_clock: UnixMillis(0) },
            ended_at: since_boot,
            cost: Duration::from_millis(500),
            sum: JobMemory { pss: own, ..JobMemory::default() },
            processes: Vec::new(),
            peak: None,
            available,
            workers: Some(WorkerMemory { at: since_boot, workers: 8, private_bytes: own }),
            map_lock_waits: None,
            ended_processes: 0,
            denied: Vec::new(),
        }
    }

    fn poll(
        call: &mut Pin<Box<impl Future<Output = Result<Turn, TooManyWaiting>>>>,
    ) -> Poll<Result<Turn, TooManyWaiting>> {
        call.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    fn job() -> JobId {
        "a".parse().unwrap()
    }

    #[test]
    fn the_history_of_a_job_is_bounded_and_ends_with_the_job() {
        let mut records = MemoryRecords::default();
        for seconds in 0..MAX_SAMPLES as u64 + 10 {
            records.add(&job(), "12:00", reading(seconds, 1000 - seconds, GIB));
        }
        assert_eq!(records.samples(&job()).count(), MAX_SAMPLES);
        assert_eq!(records.largest_memory_use(&job()), 1000, "also of a reading that is no longer kept");
        records.remove_job(&job());
        assert_eq!((records.samples(&job()).count(), records.largest_memory_use(&job())), (0, 0));
    }

    #[test]
    fn a_new_job_with_the_id_of_an_earlier_one_begins_without_its_readings() {
        let mut records = MemoryRecords::default();
        records.add(&job(), "12:00", reading(0, GIB, GIB));
        records.remove_earlier_job(&job(), "12:00");
        assert_eq!(records.samples(&job()).count(), 1);
        records.add(&job(), "12:05", reading(0, 1, GIB));
        assert_eq!((records.samples(&job()).count(), records.largest_memory_use(&job())), (1, 1));
        records.remove_earlier_job(&job(), "12:10");
        assert_eq!(records.job_ids().count(), 0, "nothing is kept of a job without a reading");
    }

    #[test]
    fn a_reading_is_used_again_for_20_times_its_cpu_time() {
        let mut records = MemoryRecords::default();
        records.add(&job(), "12:00", reading(100, GIB, GIB));
        let recent = |seconds: u64, kind| {
            records.recent_reading(&job(), kind, Nanos(seconds * 1_000_000_000)).is_some()
        };
        assert!(recent(109, ReadingKind::Pages) && !recent(111, ReadingKind::Pages));
        assert!(!recent(100, ReadingKind::PagesByNode), "that kind was not read");
    }

    #[test]
    fn the_age_of_a_reading_counts_from_its_end() {
        let mut records = MemoryRecords::default();
        let slow = JobMemoryReading { ended_at: Nanos(400 * 1_000_000_000), ..reading(100, GIB, GIB) };
        records.add(&job(), "12:00", slow);
        let recent = |seconds: u64| {
            records.recent_reading(&job(), ReadingKind::Pages, Nanos(seconds * 1_000_000_000)).is_some()
        };
        assert!(recent(409) && !recent(411), "a reading that waited for a CPU is new when it ends");
    }

    #[test]
    fn waits_for_the_map_lock_are_known_until_threads_are_observed_again() {
        let waits =
            MmapLockWaits { pids: [Pid(7)].into(), threads: 4, blocked_permille: 300, system_permille: 900 };
        let mut records = MemoryRecords::default();
        for (second, observed, known) in
            [(1, None, 0), (2, Some(vec![waits]), 1), (3, None, 1), (4, Some(Vec::new()), 0)]
        {
            let reading = JobMemoryReading { map_lock_waits: observed, ..reading(second, GIB, GIB) };
            records.add(&job(), "12:00", reading);
            assert_eq!(records.map_lock_waits(&job()).len(), known, "{second}");
        }
        assert!(records.map_lock_waits(&"b".parse().unwrap()).is_empty());
    }

    #[test]
    fn the_findings_of_samples_are_kept_beside_readings_until_the_end_of_the_job() {
        let process = ProcessId { pid: Pid(7), start: StartTime(1) };
        let mut records = MemoryRecords::default();
        records.remote_numa_findings_mut(&job(), "12:00").record_chosen_processes(&[process.into()]);
        records.add(&job(), "12:00", reading(1, GIB, GIB));
        let turn = |records: &MemoryRecords| Some(records.remote_numa_findings(&job())?.next_order().after);
        assert_eq!(turn(&records), Some(Some(process)));
        assert_eq!(records.remote_numa_findings_mut(&job(), "12:05").next_order().after, None, "another job");
        records.remove_earlier_job(&job(), "12:10");
        assert_eq!(turn(&records), None);
    }

    #[test]
    fn of_many_calls_of_a_user_some_wait_and_share_one_reading_and_the_others_are_refused() {
        let turns = MemoryReaderQueue::default();
        let Poll::Ready(Ok(root_turn)) = poll(&mut Box::pin(turns.wait_for_turn(TurnRequester::User(0), 4)))
        else {
            panic!("it waits")
        };
        let (mut waiting, mut refused) = (Vec::new(), 0);
        for _ in 0..16 {
            let mut call = Box::pin(turns.wait_for_turn(TurnRequester::User(1000), 4));
            match poll(&mut call) {
                Poll::Pending => waiting.push(call),
                Poll::Ready(result) => {
                    assert!(result.unwrap_err().to_string().starts_with("4 of your calls wait"));
                    refused += 1;
                }
            }
        }
        assert_eq!((waiting.len(), refused), (4, 12));
        drop(root_turn);
        let mut records = MemoryRecords::default();
        let mut readings = 0;
        for mut call in waiting {
            let Poll::Ready(Ok(_turn)) = poll(&mut call) else { panic!("the turn before has ended") };
            if records.recent_reading(&job(), ReadingKind::Pages, Nanos(101 * 1_000_000_000)).is_none() {
                records.add(&job(), "12:00", reading(100, GIB, GIB));
                readings += 1;
            }
        }
        assert_eq!(readings, 1);
    }

    #[test]
    fn estimates_warn_too_if_no_pages_were_read_for_five_minutes() {
        let estimate =
            |seconds, own| JobMemoryReading { kind: ReadingKind::Estimate, ..reading(seconds, own, 2 * GIB) };
        let is_warned = |records: &MemoryRecords| records.shortage_warning(&job()).is_some();
        let mut records = MemoryRecords::default();
        records.add(&job(), "12:00", estimate(0, 4 * GIB));
        assert!(!is_warned(&records));
        records.add(&job(), "12:00", estimate(60, 5 * GIB));
        assert!(!is_warned(&records), "a job may load its data for a minute");
        records.add(&job(), "12:00", estimate(80, 6 * GIB));
        assert!(is_warned(&records));
        // The pages tell another amount: the two kinds are not compared with each other.
        records.add(&job(), "12:00", reading(90, GIB, 2 * GIB));
        assert!(!is_warned(&records));
        records.add(&job(), "12:00", estimate(120, 7 * GIB));
        assert!(!is_warned(&records), "the pages were read half a minute ago");
        records.add(&job(), "12:00", estimate(400, 10 * GIB));
        assert!(is_warned(&records));
        assert_eq!(records.last_measurement_ended_at(&job()), Some(Nanos(400_000_000_000)));
    }

    #[test]
    fn growing_workers_are_a_warning_until_they_stop() {
        let mut records = MemoryRecords::default();
        records.add(&job(), "12:00", reading(0, 4 * GIB, 2 * GIB));
        assert!(records.shortage_warnings().is_empty());
        records.add(&job(), "12:00", reading(60, 5 * GIB, 2 * GIB));
        let warnings = records.shortage_warnings();
        assert_eq!((warnings.len(), warnings[0].code, warnings[0].job.clone()), (1, "memory", Some(job())));
        assert!(
            warnings[0].text.starts_with("8 workers x 1.8 GiB of their own will not fit"),
            "{warnings:?}"
        );
        for seconds in 61..800 {
            records.add(&job(), "12:00", reading(seconds, 5 * GIB, 2 * GIB));
        }
        assert!(records.shortage_warnings().is_empty());
    }
}
