//! The answers to `GetMemory`, and the readings of memory without a request.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pjw_core::diagnosis::far_memory::FarMemory;
use pjw_core::job::JobId;
use pjw_core::memory::ProcessMemory;
use pjw_core::plan::Warning;
use pjw_core::refusal::Refusal;
use pjw_ipc::call::{self, CallError, Reply};
use pjw_ipc::server::Peer;
use pjw_ipc::wire;
use pjw_linux::sys::clock;
use tokio::time::{Instant, sleep, sleep_until};

use super::inbox::{Message, WarningOrigin};
use super::query::{Answer, Query};
use super::server::{ControlService, job_id};
use crate::memory::reading::{DeniedProcess, JobReading, ReadingError, ReadingKind};
use crate::memory::records::MemorySample;
use crate::view::to_wire::{format_rfc3339, saturating_u32, warning_to_status};

/// The largest number of processes in a reply. A reply is bounded, and more rows are of no use to people.
const MAX_PROCESSES: usize = 1000;

impl ControlService {
    /// Answers `GetMemory`.
    pub(super) async fn memory(&self, peer: Peer, request: call::GetMemory) -> Result<Reply, CallError> {
        let id = job_id(&request.job)?;
        let since = self.published_job(&id)?.since;
        self.memory_records.borrow_mut().begin(&id, &since);
        let kind = match (request.estimate.unwrap_or(false), request.nodes.unwrap_or(false)) {
            (true, true) => {
                let why = "the memory on each NUMA node is no estimate: leave out one of estimate and nodes";
                return Err(CallError::Refused(why.to_owned()));
            }
            (true, false) => ReadingKind::Estimate,
            (false, false) => ReadingKind::Pages,
            (false, true) => ReadingKind::PagesByNode,
        };
        // A reading costs the CPU time of the daemon. So the calls of users can't cause any number of them.
        let is_admin = self.caller(peer).await.is_admin;
        let recent = self.memory_records.borrow().recent(&id, kind, clock::now().since_boot);
        let reading = match recent.filter(|_| !is_admin) {
            Some(recent) => recent,
            None => self.read_memory(&id, kind).await?.map_err(|error| refused(&id, &error))?,
        };
        let far = self.far_memory(&id, &reading).await?;
        let far = far.iter().map(far_to_wire).collect();
        let memory = Box::new(wire::Memory { far, ..self.memory_to_wire(&id, &reading) });
        Ok(Reply::Memory { memory })
    }

    /// Returns the processes whose memory is far from their busy threads. Empty if the memory on each NUMA node was not read.
    async fn far_memory(&self, id: &JobId, reading: &JobReading) -> Result<Vec<FarMemory>, CallError> {
        let nodes = reading.processes.iter().filter(|process| !process.by_node.is_empty());
        let by_node: BTreeMap<_, _> = nodes.map(|process| (process.pid, process.by_node.clone())).collect();
        if by_node.is_empty() {
            return Ok(Vec::new());
        }
        match self.query_loop(Query::FarMemory { job: id.clone(), by_node }).await? {
            Answer::FarMemory(far) => Ok(far),
            _ => Ok(Vec::new()),
        }
    }

    /// Reads the memory of a job, and records it.
    async fn read_memory(
        &self,
        id: &JobId,
        kind: ReadingKind,
    ) -> Result<Result<Arc<JobReading>, ReadingError>, CallError> {
        let Answer::MemberProcesses(Some(processes)) =
            self.query_loop(Query::MemberProcesses(id.clone())).await?
        else {
            return Err(CallError::Refused(Refusal::NoSuchJob { job: id.clone() }.to_string()));
        };
        let reader = if kind == ReadingKind::Estimate { &self.estimate_reader } else { &self.page_reader };
        let read = reader.read(processes, kind).await;
        Ok(read.map(|reading| self.record_memory(id, reading)))
    }

    fn record_memory(&self, id: &JobId, reading: JobReading) -> Arc<JobReading> {
        let mut records = self.memory_records.borrow_mut();
        let existing: BTreeSet<JobId> = self.job_ids().into_iter().chain([id.clone()]).collect();
        records.retain(&existing);
        records.add(id, reading)
    }

    /// Sends the predictions to the event loop, which publishes them in the status, if they changed. Only while memory is
    /// sampled: a prediction that is not repeated would soon be out of date.
    fn send_memory_warnings(&self, warnings: Vec<Warning>) {
        if *self.memory_warnings.borrow() != warnings {
            self.memory_warnings.replace(warnings.clone());
            let _ = self.outbox.send(Message::Warnings { origin: WarningOrigin::Memory, warnings });
        }
    }

    fn job_ids(&self) -> Vec<JobId> {
        self.status.borrow().jobs.iter().filter_map(|job| job.id.parse().ok()).collect()
    }

    /// Whether the pages of a job were read so recently that a sample is not due yet.
    fn has_new_reading(&self, id: &JobId, interval: Duration) -> bool {
        let last = self.memory_records.borrow().last_pages(id);
        last.is_some_and(|at| clock::now().since_boot.0.saturating_sub(at.0) < nanos(interval / 2))
    }

    /// Reads the memory of all jobs in turns, as the configuration says. Runs until the future is dropped, or the event loop
    /// has ended.
    pub async fn sample_memory(self: Rc<Self>) {
        let mut settings = self.settings.clone();
        loop {
            let memory = settings.borrow_and_update().memory;
            let Some(interval) = memory.sample_interval else {
                self.send_memory_warnings(Vec::new());
                if settings.changed().await.is_err() {
                    return;
                }
                continue;
            };
            let begin = Instant::now();
            for id in self.job_ids().into_iter().filter(|id| !self.has_new_reading(id, interval)) {
                // A job that ended meanwhile is no error.
                let Some(job) = self.published_job(&id).ok().filter(|job| job.processes > 0) else {
                    continue;
                };
                self.memory_records.borrow_mut().begin(&id, &job.since);
                if let Ok(Ok(reading)) = self.read_memory(&id, ReadingKind::Pages).await {
                    self.send_memory_warnings(self.memory_records.borrow().warnings());
                    sleep(memory.pause_after(reading.cost)).await;
                }
            }
            tokio::select! {
                () = sleep_until(begin + interval) => {}
                changed = settings.changed() => if changed.is_err() { return },
            }
        }
    }

    fn memory_to_wire(&self, id: &JobId, reading: &JobReading) -> wire::Memory {
        let is_estimate = reading.kind == ReadingKind::Estimate;
        let JobReading { sum, processes, .. } = reading;
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
            peak: reading.peak.or(Some(records.largest(id)).filter(|_| !is_estimate)),
            available: reading.available,
            address_spaces: sum.address_spaces,
            by_node: by_node_to_wire(&sum.by_node),
            processes: largest.into_iter().map(|process| process_to_wire(process, is_estimate)).collect(),
            more_processes: saturating_u32(more_processes),
            gone: reading.gone,
            denied: reading.denied.iter().map(denied_to_wire).collect(),
            history: records.samples(id).map(sample_to_wire).collect(),
            warning: records.warning(id).as_ref().map(warning_to_status),
            far: Vec::new(),
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn refused(id: &JobId, error: &ReadingError) -> CallError {
    CallError::Refused(format!("the memory of {id} was not read: {error}"))
}

fn by_node_to_wire(by_node: &BTreeMap<u32, u64>) -> BTreeMap<String, u64> {
    by_node.iter().map(|(node, bytes)| (node.to_string(), *bytes)).collect()
}

fn process_to_wire(process: &ProcessMemory, is_estimate: bool) -> wire::ProcessMemory {
    wire::ProcessMemory {
        pid: process.pid.0,
        rss: process.rss,
        pss: (!is_estimate).then_some(process.pss),
        uss: (!is_estimate).then_some(process.uss),
        page_tables: process.page_tables,
        swap: process.swap,
        address_space: (!is_estimate).then_some(process.address_space),
        by_node: by_node_to_wire(&process.by_node),
    }
}

fn far_to_wire(far: &FarMemory) -> wire::FarMemory {
    wire::FarMemory {
        pid: far.pid.0,
        busy_threads: saturating_u32(far.busy_threads),
        thread_nodes: far.thread_nodes.iter().copied().collect(),
        memory_node: far.memory_node,
        far: far.far_bytes,
        text: far.sentence(),
        remedy: far.remedy(),
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
