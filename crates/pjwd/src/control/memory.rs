//! The answers to `GetMemory`, and the readings of memory without a request.
//!
//! A reading of a large job takes seconds of CPU time. So the callers of one thread take turns. A user who is no
//! administrator gets a recent reading if there is one, and only some calls of this user may wait. A reading that such
//! a user has begun is finished and kept, also if the caller hangs up: otherwise calls that hang up would cause any
//! number of readings.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pjw_core::job::JobId;
use pjw_core::memory::ProcessMemory;
use pjw_core::plan::Warning;
use pjw_core::refusal::Refusal;
use pjw_core::usage::{MemoryReading, SharedMemory};
use pjw_ipc::call::{self, CallError, Reply};
use pjw_ipc::server::Peer;
use pjw_ipc::wire;
use pjw_linux::sys::clock;
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, sleep_until};

use super::inbox::{EventLoopMessage, MessageSender, WarningOrigin};
use super::memory_findings::{map_lock_to_wire, memory_by_node, remote_memory_to_wire};
use super::query::{Query, QueryAnswer};
use super::server::{ControlService, parse_job_id_argument};
use super::settings::ControlSettings;
use crate::memory::MemorySettings;
use crate::memory::reading::{DeniedProcess, JobMemoryReading, ProcessesToRead, ReadingError, ReadingKind};
use crate::memory::records::{MemoryRecords, MemorySample};
use crate::memory::turns::TurnRequester;
use crate::view::status::PublishedStatus;
use crate::view::to_wire::{format_rfc3339, saturating_u32, status_warning_to_wire};

/// The largest number of processes in a reply. A reply is bounded, and more rows are of no use to people.
const MAX_PROCESSES: usize = 1000;
/// The largest number of calls of one user, who is no administrator, that wait for a reading of the same kind.
const MAX_WAITING: usize = 4;

/// The party that asks for a measurement of a job's memory: a user or pjwd itself. Also says whether the party can
/// request any number of measurements.
#[derive(Debug, Clone, Copy)]
pub(super) struct MeasurementRequester {
    /// The party that waits for a turn of the memory reader thread.
    pub(super) turn_requester: TurnRequester,
    /// Whether the party can request any number of measurements.
    pub(super) is_admin: bool,
}

/// Records the readings of one job.
struct JobRecorder {
    id: JobId,
    /// When the job began, as the status shows it.
    since: String,
    records: Rc<RefCell<MemoryRecords>>,
    status: watch::Receiver<Arc<PublishedStatus>>,
    outbox: MessageSender,
}

impl JobRecorder {
    /// Stores `reading` and reports it to the event loop, unless the job has ended. Returns the reading. A reading
    /// without resident memory is not reported. A reading of counters alone and a sample of pages are not stored.
    fn record_reading(&self, reading: JobMemoryReading) -> Arc<JobMemoryReading> {
        if reading.kind == ReadingKind::NodeSample {
            return Arc::new(reading);
        }
        let status = self.status.borrow();
        forget_ended_jobs(&self.records, &status);
        let name = self.id.to_string();
        if !status.jobs.iter().any(|job| job.id == name && job.since == self.since) {
            return Arc::new(reading);
        }
        // A reading of no page says nothing about the job.
        if reading.sum.rss > 0 {
            let (job, since, figures) = (self.id.clone(), self.since.clone(), figures_for_report(&reading));
            let _ = self.outbox.send(EventLoopMessage::MemoryWasRead { job, since, figures });
        }
        if reading.kind == ReadingKind::Counters {
            self.records.borrow_mut().remove_outdated_shortage_prediction(&self.id, reading.at.since_boot);
            return Arc::new(reading);
        }
        self.records.borrow_mut().add(&self.id, &self.since, reading)
    }
}

/// Returns the values of `reading` that the report of the job needs.
fn figures_for_report(reading: &JobMemoryReading) -> MemoryReading {
    let JobMemoryReading { kind, sum, peak, .. } = reading;
    let is_estimate = *kind == ReadingKind::Estimate;
    let shared = SharedMemory { permille: sum.shared_permille, is_estimate };
    let is_by_counters = *kind == ReadingKind::Counters;
    MemoryReading {
        shared: (!is_by_counters).then_some(shared),
        pss: (!is_by_counters && !is_estimate).then_some(sum.pss),
        rss: is_by_counters.then_some(sum.rss),
        peak: *peak,
    }
}

/// Removes the stored readings of the jobs that are no longer in `status`.
fn forget_ended_jobs(records: &RefCell<MemoryRecords>, status: &PublishedStatus) {
    let existing: BTreeSet<&str> = status.jobs.iter().map(|job| job.id.as_str()).collect();
    let mut records = records.borrow_mut();
    let has_ended = |job: &&JobId| !existing.contains(job.to_string().as_str());
    let ended: Vec<JobId> = records.job_ids().filter(has_ended).cloned().collect();
    ended.iter().for_each(|job| records.remove_job(job));
}

impl ControlService {
    /// Answers the call `GetMemory` of the client `peer`: returns the memory use of one job. For an administrator, the
    /// memory is always measured. Another user gets the latest stored measurement if this measurement is recent;
    /// otherwise the memory is measured.
    ///
    /// # Errors
    /// If there is no such job, or if the memory can't be measured. If `request` asks for an estimate of the memory on
    /// each NUMA node. If the user of the client already has too many calls that wait.
    pub(super) async fn answer_get_memory(
        &self,
        peer: Peer,
        request: call::GetMemory,
    ) -> Result<Reply, CallError> {
        let id = parse_job_id_argument(&request.job)?;
        self.forget_readings_of_earlier_job(&id)?;
        let kind = match (request.estimate.unwrap_or(false), request.nodes.unwrap_or(false)) {
            (true, true) => {
                let why = "the memory on each NUMA node is no estimate: leave out one of estimate and nodes";
                return Err(CallError::Refused(why.to_owned()));
            }
            (true, false) => ReadingKind::Estimate,
            (false, false) => ReadingKind::Pages,
            (false, true) => ReadingKind::PagesByNode,
        };
        let is_admin = self.caller(peer).await.is_admin;
        let requester = MeasurementRequester { turn_requester: TurnRequester::User(peer.uid), is_admin };
        let reading = match self.recent_reading(&id, kind, requester) {
            Some(recent) => recent,
            None => self.measure_in_turn(&id, kind, requester).await?,
        };
        let remote = match kind {
            ReadingKind::PagesByNode => self.find_remote_numa_memory(&id, memory_by_node(&reading)).await?,
            _ => self.sampled_remote_numa_memory(&id).await,
        };
        let far = remote.iter().map(remote_memory_to_wire).collect();
        let memory = Box::new(wire::Memory { far, ..self.memory_to_wire(&id, &reading) });
        Ok(Reply::Memory { memory })
    }

    /// Forgets the readings of an earlier job with the same id. Returns when this job began, as the status shows it.
    pub(super) fn forget_readings_of_earlier_job(&self, id: &JobId) -> Result<String, CallError> {
        let since = self.published_job(id)?.since;
        self.memory_records.borrow_mut().remove_earlier_job(id, &since);
        Ok(since)
    }

    /// Returns the latest reading for a caller who may not cause any number of them, if it is new enough.
    fn recent_reading(
        &self,
        id: &JobId,
        kind: ReadingKind,
        requester: MeasurementRequester,
    ) -> Option<Arc<JobMemoryReading>> {
        let recent = || self.memory_records.borrow().recent_reading(id, kind, clock::now().since_boot);
        (!requester.is_admin).then(recent).flatten()
    }

    /// Measures the memory use of the job `id` by the method `kind`, stores the result, and returns it. Except: a
    /// sample of pages is not stored. First waits until the thread that measures memory is free for `requester`. If
    /// another call has stored a recent measurement during the wait, and `requester` is no administrator, returns the
    /// stored measurement.
    ///
    /// # Errors
    /// If there is no such job, or if the memory can't be measured. If too many calls of the same user wait already.
    pub(super) async fn measure_in_turn(
        &self,
        id: &JobId,
        kind: ReadingKind,
        requester: MeasurementRequester,
    ) -> Result<Arc<JobMemoryReading>, CallError> {
        let max_waiting = if requester.is_admin { usize::MAX } else { MAX_WAITING };
        let reader = self.memory_readers.reader_of(kind);
        let turn = reader.turns.wait_for_turn(requester.turn_requester, max_waiting).await;
        let turn = turn.map_err(|error| CallError::Busy(error.to_string()))?;
        let since = self.forget_readings_of_earlier_job(id)?;
        // Calls at the same time share one reading.
        if let Some(recent) = self.recent_reading(id, kind, requester) {
            return Ok(recent);
        }
        let job = self.processes_to_read(id, &since, kind).await?;
        let owner = self.published_job(id)?.owner;
        let wanted = Arc::new(());
        // A clone in the task keeps the reading of a user who is no administrator wanted, also without the caller.
        let clone_of_task = (!requester.is_admin).then(|| Arc::clone(&wanted));
        let reading = reader.request_reading(
            owner,
            job,
            kind,
            requester.turn_requester != TurnRequester::Daemon,
            Arc::downgrade(&wanted),
        );
        let recorder = JobRecorder {
            id: id.clone(),
            since,
            records: Rc::clone(&self.memory_records),
            status: self.status.clone(),
            outbox: self.outbox.clone(),
        };
        // A task of its own: the turn lasts until the thread is free, also if the caller hangs up.
        let recorded = spawn_local(async move {
            let _held = (turn, clone_of_task);
            reading.await.map(|reading| recorder.record_reading(reading))
        });
        let result = recorded.await;
        drop(wanted);
        let result = result.unwrap_or_else(|error| Err(ReadingError::NoThread(error.to_string())));
        result.map_err(|error| refused(id, &error))
    }

    /// Returns the processes of the job `id` that a reading of the kind `kind` reads, and the idle PUs of the job.
    /// `since` is when the job began, as the status shows it. Refuses the call if there is no such job.
    async fn processes_to_read(
        &self,
        id: &JobId,
        since: &str,
        kind: ReadingKind,
    ) -> Result<ProcessesToRead, CallError> {
        let is_sample = kind == ReadingKind::NodeSample;
        let query = if is_sample {
            let order = self.memory_records.borrow_mut().remote_numa_findings_mut(id, since).next_order();
            Query::ProcessesToSample { job: id.clone(), order }
        } else {
            Query::MemberProcesses(id.clone())
        };
        let answer = self.query_loop(query).await?;
        let QueryAnswer::MemberProcesses(Some(job)) = answer else {
            return Err(CallError::Refused(Refusal::NoSuchJob { job: id.clone() }.to_string()));
        };
        if is_sample {
            self.memory_records
                .borrow_mut()
                .remote_numa_findings_mut(id, since)
                .record_chosen_processes(&job.processes);
        }
        Ok(job)
    }

    /// Sends `warnings`, the predicted memory shortages of jobs, to the event loop, which publishes the warnings in the
    /// status. Sends nothing if the warnings are the same as in the last call.
    pub(super) fn send_memory_warnings(&self, warnings: Vec<Warning>) {
        if *self.memory_warnings.borrow() != warnings {
            self.memory_warnings.replace(warnings.clone());
            let _ = self.outbox.send(EventLoopMessage::Warnings { origin: WarningOrigin::Memory, warnings });
        }
    }

    /// Removes the memory measurements of the job `job`, which has ended. Also removes a warning about the job's memory
    /// from the status.
    pub(super) fn remove_memory_readings(&self, job: &JobId) {
        self.memory_records.borrow_mut().remove_job(job);
        let is_warned = !self.memory_warnings.borrow().is_empty();
        if is_warned {
            self.send_memory_warnings(self.memory_records.borrow().shortage_warnings());
        }
    }

    fn job_ids(&self) -> Vec<JobId> {
        self.status.borrow().jobs.iter().filter_map(|job| job.id.parse().ok()).collect()
    }

    /// Whether the pages of a job were read so recently that a sample is not due yet.
    fn has_new_reading(&self, id: &JobId, interval: Duration) -> bool {
        let last = self.memory_records.borrow().last_page_reading_at(id);
        last.is_some_and(|at| clock::now().since_boot.0.saturating_sub(at.0) < nanos(interval / 2))
    }

    /// Measures the memory use of each job at the configured interval (`memory.sample`), and stores the results for the
    /// memory history of the job. If a job will probably run out of memory, sends a warning to the event loop, which
    /// shows the warning in the status of the daemon. Pauses after each job, so that the measurements use at most the
    /// configured share of one PU (logical CPU): `memory.budget_permille`.
    ///
    /// Measures nothing while `memory.sample` is off. Changed settings apply at once. Runs until the future is dropped,
    /// or the event loop has ended.
    pub async fn sample_memory(self: Rc<Self>) {
        let mut settings = self.settings.clone();
        let sample = async |memory| self.sample_memory_of_jobs(memory).await;
        while run_until_settings_change(&mut settings, sample).await.is_ok() {}
    }

    /// Measures the memory of all jobs one after the other, at the interval in `memory`, and sends the warnings about
    /// memory to the event loop. Without an interval, measures nothing. Never returns.
    async fn sample_memory_of_jobs(&self, memory: MemorySettings) {
        let Some(interval) = memory.sample_interval else { return pending().await };
        let requester = MeasurementRequester { turn_requester: TurnRequester::Daemon, is_admin: true };
        loop {
            let begin = Instant::now();
            forget_ended_jobs(&self.memory_records, &self.status.borrow());
            self.send_memory_warnings(self.memory_records.borrow().shortage_warnings());
            for id in self.job_ids() {
                let has_processes = self.published_job(&id).is_ok_and(|job| job.processes > 0);
                if !has_processes || self.has_new_reading(&id, interval) {
                    continue;
                }
                if let Ok(reading) = self.measure_in_turn(&id, ReadingKind::Pages, requester).await {
                    self.send_memory_warnings(self.memory_records.borrow().shortage_warnings());
                    sleep(memory.pause_after(reading.cost)).await;
                }
            }
            sleep_until(begin + interval).await;
        }
    }

    /// Returns `reading` and the history of the memory of the job `id`, in the form for clients.
    fn memory_to_wire(&self, id: &JobId, reading: &JobMemoryReading) -> wire::Memory {
        let is_estimate = matches!(reading.kind, ReadingKind::Estimate | ReadingKind::Counters);
        let JobMemoryReading { sum, processes, .. } = reading;
        let mut largest: Vec<&ProcessMemory> = processes.iter().collect();
        largest.sort_by_key(|process| std::cmp::Reverse(process.rss));
        let more_processes = largest.len().saturating_sub(MAX_PROCESSES);
        largest.truncate(MAX_PROCESSES);
        largest.sort_by_key(|process| process.pid);
        let records = self.memory_records.borrow();
        wire::Memory {
            source: reading.kind.source_name().to_owned(),
            read_at: format_rfc3339(reading.at.wall_clock),
            cost_us: u64::try_from(reading.cost.as_micros()).unwrap_or(u64::MAX),
            rss: sum.rss,
            pss: sum.pss,
            uss: (!is_estimate).then_some(sum.uss),
            shared_permille: sum.shared_permille,
            page_tables: sum.page_tables,
            swap: sum.swap,
            peak: reading.peak.or(Some(records.largest_memory_use(id)).filter(|_| !is_estimate)),
            available: reading.available,
            address_spaces: sum.address_spaces,
            by_node: by_node_to_wire(&sum.bytes_by_node),
            processes: largest.into_iter().map(|process| process_to_wire(process, is_estimate)).collect(),
            more_processes: saturating_u32(more_processes),
            gone: reading.ended_processes,
            denied: reading.denied.iter().map(denied_to_wire).collect(),
            history: records.samples(id).map(sample_to_wire).collect(),
            warning: records.shortage_warning(id).as_ref().map(status_warning_to_wire),
            far: Vec::new(),
            map_lock_waits: reading.map_lock_waits.iter().flatten().map(map_lock_to_wire).collect(),
        }
    }
}

/// Runs `work` with the present memory settings, and returns when `work` ends. If these settings change before, stops
/// `work` and returns at once.
///
/// # Errors
/// If the event loop, which sends the settings, has ended.
async fn run_until_settings_change(
    settings: &mut watch::Receiver<ControlSettings>,
    work: impl AsyncFnOnce(MemorySettings),
) -> Result<(), watch::error::RecvError> {
    let memory = settings.borrow_and_update().memory;
    let changed = async { settings.wait_for(|settings| settings.memory != memory).await.map(drop) };
    tokio::select! {
        biased;
        changed = changed => changed,
        () = work(memory) => Ok(()),
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the error of the call after a failed reading, with a remedy if there is one.
fn refused(id: &JobId, error: &ReadingError) -> CallError {
    CallError::Refused(match error {
        ReadingError::NoOwnCgroup | ReadingError::ChargedElsewhere { .. } => {
            format!("{error}; pjwctl show {id} --memory reads its pages")
        }
        _ => format!("the memory of {id} was not read: {error}"),
    })
}

fn by_node_to_wire(by_node: &BTreeMap<u32, u64>) -> BTreeMap<String, u64> {
    by_node.iter().map(|(node, bytes)| (node.to_string(), *bytes)).collect()
}

/// Converts `process` to the form for clients. An estimate has no PSS and no USS.
fn process_to_wire(process: &ProcessMemory, is_estimate: bool) -> wire::ProcessMemory {
    wire::ProcessMemory {
        pid: process.pid.0,
        rss: process.rss,
        pss: (!is_estimate).then_some(process.pss),
        uss: (!is_estimate).then_some(process.uss),
        page_tables: process.page_tables,
        swap: process.swap,
        address_space: process.address_space,
        by_node: by_node_to_wire(&process.bytes_by_node),
    }
}

fn denied_to_wire(denied: &DeniedProcess) -> wire::MemoryDenied {
    wire::MemoryDenied { pid: denied.pid.0, uid: denied.uid, why: denied.reason.clone() }
}

fn sample_to_wire(sample: &MemorySample) -> wire::MemorySample {
    wire::MemorySample {
        time: format_rfc3339(sample.time),
        source: sample.kind.source_name().to_owned(),
        rss: sample.rss,
        pss: sample.pss,
        shared_permille: sample.shared_permille,
        processes: sample.processes,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use pjw_core::job::JobSource;

    use super::*;

    #[test]
    fn a_job_without_an_estimate_is_refused_with_the_reason_and_the_command_that_reads_its_pages() {
        let id = JobId::new(JobSource::Manual, "a").unwrap();
        let expected = "no estimate, because the job has no memory cgroup of its own; pjwctl show manual:a --memory reads its \
                        pages";
        assert_eq!(refused(&id, &ReadingError::NoOwnCgroup), CallError::Refused(expected.to_owned()));
    }

    #[test]
    fn a_change_of_the_settings_ends_what_is_done_with_the_old_ones_at_once() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let memory = MemorySettings { sample_interval: Some(Duration::from_secs(1)), budget_permille: 1 };
            let settings_with = |memory| ControlSettings { memory, ..ControlSettings::default() };
            let (sender, mut settings) = watch::channel(settings_with(memory));
            let last_memory = Cell::new(None);
            let pause = async |memory| {
                last_memory.set(Some(memory));
                // The first change leaves the memory settings as they are.
                sender.send(settings_with(memory)).unwrap();
                tokio::task::yield_now().await;
                sender.send(settings_with(MemorySettings::default())).unwrap();
                pending::<()>().await;
            };
            assert!(run_until_settings_change(&mut settings, pause).await.is_ok());
            assert_eq!(last_memory.get(), Some(memory));
            let work = async |memory| last_memory.set(Some(memory));
            assert!(run_until_settings_change(&mut settings, work).await.is_ok());
            assert_eq!(last_memory.get(), Some(MemorySettings::default()));
            drop(sender);
            assert!(run_until_settings_change(&mut settings, async |_| pending().await).await.is_err());
        });
    }
}
