//! What readings of memory find out about a job: processes whose memory is on other NUMA nodes than their hot threads,
//! and threads that wait for one another to map memory.

use std::collections::BTreeMap;

use pjw_core::diagnosis::map_lock::MmapLockWaits;
use pjw_core::diagnosis::remote_numa_memory::{MemoryByNode, RemoteNumaMemory};
use pjw_core::ids::Pid;
use pjw_core::job::JobId;
use pjw_core::memory::ProcessMemory;
use pjw_ipc::call::{self, CallError};
use pjw_ipc::wire;
use pjw_linux::sys::clock;

use super::query::{Query, QueryAnswer};
use super::server::ControlService;
use crate::memory::reading::{JobMemoryReading, ReadingKind};
use crate::view::to_wire::saturating_u32;

/// The largest number of processes with remote memory that the reasons of a job name.
const MAX_NAMED: usize = 4;

impl ControlService {
    /// Returns those processes of the job `id` most of whose memory is on NUMA nodes where none of their hot threads
    /// runs now. `by_node` has the memory of the processes.
    pub(super) async fn find_remote_numa_memory(
        &self,
        id: &JobId,
        by_node: BTreeMap<Pid, MemoryByNode>,
    ) -> Result<Vec<RemoteNumaMemory>, CallError> {
        if by_node.is_empty() {
            return Ok(Vec::new());
        }
        match self.query_loop(Query::RemoteNumaMemory { job: id.clone(), by_node }).await? {
            QueryAnswer::RemoteNumaMemory(remote) => Ok(remote),
            _ => Ok(Vec::new()),
        }
    }

    /// Returns the processes of the job `id` with remote memory, as the last two samples found them. The memory is that
    /// of the last sample, and the hot threads are those of now. So a process that has ended meanwhile is left out, and
    /// so is one without hot threads: nothing waits for its memory.
    pub(super) async fn sampled_remote_numa_memory(&self, id: &JobId) -> Vec<RemoteNumaMemory> {
        let now = clock::now().since_boot;
        let confirmed =
            self.memory_records.borrow().remote_numa_findings(id).map(|found| found.confirmed(now));
        let confirmed = confirmed.unwrap_or_default();
        let by_node = confirmed.iter().map(|(process, memory)| (process.pid, memory.clone())).collect();
        let mut remote = self.find_remote_numa_memory(id, by_node).await.unwrap_or_default();
        // Another process may have got the pid.
        remote.retain(|remote| confirmed.contains_key(&remote.id));
        remote
    }

    /// Adds sentences to `reasons`, the answer to the call `ExplainJob` for the job `id`, and returns the answer. The
    /// sentences describe two findings about the memory of the job:
    ///
    /// - Processes with most of their memory on other NUMA nodes than their hot threads, as the last two samples found
    ///   them.
    /// - Threads that wait for one another to map or unmap memory, as the latest reading with a request found them.
    pub(super) async fn add_memory_findings(
        &self,
        id: &JobId,
        mut reasons: call::ExplainJobReply,
    ) -> call::ExplainJobReply {
        if self.forget_readings_of_earlier_job(id).is_ok() {
            let remote = self.sampled_remote_numa_memory(id).await;
            reasons.grant_reasons.extend(remote_memory_sentences(id, &remote));
            let records = self.memory_records.borrow();
            let sentences = records.map_lock_waits(id).iter().map(|waits| {
                let description = waits.description();
                format!(
                    "when its memory was last read: {description}; pjwctl show {id} --memory has the remedy"
                )
            });
            reasons.grant_reasons.extend(sentences);
        }
        reasons
    }
}

/// Returns the memory on each NUMA node of the processes in `reading` for which it is known. Empty if it was neither
/// read nor estimated.
pub(super) fn memory_by_node(reading: &JobMemoryReading) -> BTreeMap<Pid, MemoryByNode> {
    let processes = reading.processes.iter().filter(|process| !process.bytes_by_node.is_empty());
    let memory = |process: &ProcessMemory| match reading.kind {
        ReadingKind::NodeSample => MemoryByNode::from_sample(process.bytes_by_node.clone(), process.rss),
        _ => MemoryByNode::from_all_pages(process.bytes_by_node.clone()),
    };
    processes.map(|process| (process.pid, memory(process))).collect()
}

/// Returns one sentence for each process in `remote`, with the remedy. If there are many, the last sentence has the
/// number of the others.
fn remote_memory_sentences(id: &JobId, remote: &[RemoteNumaMemory]) -> Vec<String> {
    let sentence = |remote: &RemoteNumaMemory| {
        let (pid, description, remedy) = (remote.id.pid, remote.description(), remote.remedy());
        format!("process {pid}, when its memory was last sampled: {description}; {remedy}")
    };
    let mut sentences: Vec<String> = remote.iter().take(MAX_NAMED).map(sentence).collect();
    let more = remote.len().saturating_sub(MAX_NAMED);
    if more > 0 {
        let subject = if more == 1 { "process has" } else { "processes have" };
        sentences.push(format!(
            "{more} more {subject} most of the memory far from the hot threads: pjwctl show {id} --memory --nodes names \
             them"
        ));
    }
    sentences
}

pub(super) fn remote_memory_to_wire(remote: &RemoteNumaMemory) -> wire::FarMemory {
    wire::FarMemory {
        pid: remote.id.pid.0,
        busy_threads: saturating_u32(remote.hot_threads),
        thread_nodes: remote.thread_nodes.iter().copied().collect(),
        memory_node: remote.memory_node,
        far: remote.remote_bytes,
        text: remote.description(),
        remedy: remote.remedy(),
    }
}

pub(super) fn map_lock_to_wire(waits: &MmapLockWaits) -> wire::MapLockWaits {
    wire::MapLockWaits {
        pids: waits.pids.iter().map(|pid| pid.0).collect(),
        threads: waits.threads,
        text: waits.description(),
        remedy: MmapLockWaits::remedy().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::ids::{ProcessId, StartTime};

    use super::*;

    #[test]
    fn the_first_processes_with_remote_memory_are_named_with_the_remedy_and_the_others_counted() {
        let remote = |pid| RemoteNumaMemory {
            id: ProcessId { pid: Pid(pid), start: StartTime(1) },
            hot_threads: 2,
            thread_nodes: [0].into(),
            memory_node: 1,
            remote_bytes: 900 << 20,
            total_bytes: 1000 << 20,
            is_sample: true,
        };
        let processes: Vec<RemoteNumaMemory> = (1..=6).map(remote).collect();
        let id: JobId = "a".parse().unwrap();
        let sentences = remote_memory_sentences(&id, &processes);
        assert_eq!(sentences.len(), 5);
        let expected = "process 1, when its memory was last sampled: 2 hot threads run on NUMA node 0, and about \
                        900.0 MiB of 1000.0 MiB of the memory is elsewhere, most of it on node 1; move the memory: \
                        migratepages 1 1 0 ";
        assert!(sentences[0].starts_with(expected), "{}", sentences[0]);
        let more = "2 more processes have most of the memory far from the hot threads: pjwctl show manual:a --memory \
                    --nodes names them";
        assert_eq!(sentences[4], more);
        assert!(remote_memory_sentences(&id, &[]).is_empty());
    }
}
