//! What samples of the pages of one job's processes found: which processes have most of their memory on other NUMA
//! nodes than their hot threads.
//!
//! A sample is an estimate, and the PU on which a thread last ran is that of one moment. So a finding is confirmed only
//! when two samples in a row had it. A sample has only some processes of a large job. Those that were found are sampled
//! again at once, and the others follow in turns.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pjw_core::diagnosis::remote_numa_memory::{MemoryByNode, RemoteNumaMemory};
use pjw_core::ids::{Pid, ProcessId};
use pjw_core::time::Nanos;

use super::reading::JobProcess;

/// The time after which a finding is forgotten: two minutes, which is the time of two samples, and some time for a
/// sample that begins late.
const MAX_AGE: Duration = Duration::from_secs(150);

/// Which processes of a job a sample takes first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SampleOrder {
    /// The processes that come before all others: an earlier sample found them.
    pub first: BTreeSet<ProcessId>,
    /// The last process of the previous sample, except those in `first`. Among processes with as many hot threads, the
    /// sample begins after this process. `None` in the first sample.
    pub after: Option<ProcessId>,
}

/// The findings of the samples of one job, and the order of the next sample.
#[derive(Debug, Default)]
pub struct NodeFindings {
    found: BTreeMap<ProcessId, NodeFinding>,
    last_in_turn: Option<ProcessId>,
}

/// The latest sample of a process with most of its memory on other NUMA nodes than its hot threads.
#[derive(Debug)]
struct NodeFinding {
    memory: MemoryByNode,
    sampled_at: Nanos,
    /// Whether the sample before had the same result.
    is_confirmed: bool,
}

impl NodeFinding {
    fn is_recent(&self, now: Nanos) -> bool {
        Duration::from_nanos(now.0.saturating_sub(self.sampled_at.0)) <= MAX_AGE
    }
}

impl NodeFindings {
    /// Returns which processes the next sample takes first.
    #[must_use]
    pub fn next_order(&self) -> SampleOrder {
        SampleOrder { first: self.found.keys().copied().collect(), after: self.last_in_turn }
    }

    /// Stores where the turns of the next sample begin. `chosen` are the processes of the present sample, which were
    /// chosen in the order that [`NodeFindings::next_order`] returned.
    pub fn begin_sample(&mut self, chosen: &[JobProcess]) {
        let last = chosen.iter().rfind(|process| !self.found.contains_key(&process.id));
        self.last_in_turn = last.map(|process| process.id).or(self.last_in_turn);
    }

    /// Stores the result of a sample that began at the time `at`, in ns since boot. `sampled` has the memory of each
    /// process of which the sample says anything. `remote` are those of them with most of the memory on other NUMA
    /// nodes than their hot threads. The earlier finding about another process is kept for about two minutes.
    pub fn record(
        &mut self,
        mut sampled: BTreeMap<Pid, MemoryByNode>,
        remote: &[RemoteNumaMemory],
        at: Nanos,
    ) {
        let remote: BTreeSet<ProcessId> = remote.iter().map(|remote| remote.id).collect();
        self.found.retain(|id, finding| {
            finding.is_recent(at) && (remote.contains(id) || !sampled.contains_key(&id.pid))
        });
        for id in remote {
            let Some(memory) = sampled.remove(&id.pid) else { continue };
            let is_confirmed = self.found.contains_key(&id);
            self.found.insert(id, NodeFinding { memory, sampled_at: at, is_confirmed });
        }
    }

    /// Returns the processes that two samples in a row found, each with its memory by the last sample. `now` is the
    /// current time in ns since boot. Leaves out findings older than about two minutes. The processes may have ended.
    #[must_use]
    pub fn confirmed(&self, now: Nanos) -> BTreeMap<ProcessId, MemoryByNode> {
        let is_known = |finding: &NodeFinding| finding.is_confirmed && finding.is_recent(now);
        let known = self.found.iter().filter(|(_, finding)| is_known(finding));
        known.map(|(&id, finding)| (id, finding.memory.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::ids::StartTime;

    use super::*;

    fn process(pid: u32) -> ProcessId {
        ProcessId { pid: Pid(pid), start: StartTime(1) }
    }

    fn at(second: u64) -> Nanos {
        Nanos(second * 1_000_000_000)
    }

    fn remote(id: ProcessId) -> RemoteNumaMemory {
        RemoteNumaMemory {
            id,
            hot_threads: 1,
            thread_nodes: [0].into(),
            memory_node: 1,
            remote_bytes: 1 << 30,
            total_bytes: 1 << 30,
            is_sample: true,
        }
    }

    /// Records a sample of the processes with the pids `sampled`, which found the processes `found`.
    fn record(findings: &mut NodeFindings, second: u64, sampled: &[u32], found: &[ProcessId]) {
        let memory = MemoryByNode::from_sample([(1, 1 << 30)].into(), 1 << 30);
        let sampled = sampled.iter().map(|&pid| (Pid(pid), memory.clone())).collect();
        let found: Vec<RemoteNumaMemory> = found.iter().copied().map(remote).collect();
        findings.record(sampled, &found, at(second));
    }

    fn confirmed(findings: &NodeFindings, second: u64) -> Vec<u32> {
        findings.confirmed(at(second)).keys().map(|id| id.pid.0).collect()
    }

    #[test]
    fn only_two_samples_in_a_row_are_a_finding() {
        let mut findings = NodeFindings::default();
        record(&mut findings, 0, &[7, 8], &[process(7)]);
        assert_eq!(confirmed(&findings, 0), [0; 0], "one sample");
        record(&mut findings, 60, &[7, 8], &[process(8)]);
        record(&mut findings, 120, &[7, 8], &[process(7)]);
        assert_eq!(confirmed(&findings, 120), [0; 0], "not in a row");
        record(&mut findings, 180, &[7, 8], &[process(7)]);
        assert_eq!(confirmed(&findings, 180), [7]);
        record(&mut findings, 240, &[7, 8], &[]);
        assert_eq!(confirmed(&findings, 240), [0; 0]);
        let reused = ProcessId { start: StartTime(2), ..process(7) };
        record(&mut findings, 300, &[7], &[process(7)]);
        record(&mut findings, 360, &[7], &[reused]);
        assert_eq!(confirmed(&findings, 360), [0; 0], "another process with the same pid");
    }

    #[test]
    fn a_process_that_was_not_sampled_this_time_stays_known_for_about_two_minutes() {
        let mut findings = NodeFindings::default();
        record(&mut findings, 0, &[7], &[process(7)]);
        record(&mut findings, 60, &[7], &[process(7)]);
        record(&mut findings, 120, &[8], &[]);
        assert_eq!(confirmed(&findings, 120), [7]);
        assert_eq!(confirmed(&findings, 211), [0; 0], "also without another sample");
        record(&mut findings, 240, &[7], &[process(7)]);
        assert_eq!(confirmed(&findings, 240), [0; 0], "the sample before is too old");
    }

    #[test]
    fn processes_that_were_found_come_first_and_do_not_change_the_turns() {
        let mut findings = NodeFindings::default();
        let chosen = |pids: &[u32]| -> Vec<JobProcess> {
            pids.iter().map(|&pid| JobProcess::from(process(pid))).collect()
        };
        assert_eq!(findings.next_order(), SampleOrder::default());
        findings.begin_sample(&chosen(&[1, 2, 3]));
        record(&mut findings, 0, &[1, 2, 3], &[process(3)]);
        let after = |pid| SampleOrder { first: [process(3)].into(), after: Some(process(pid)) };
        assert_eq!(findings.next_order(), after(3));
        findings.begin_sample(&chosen(&[3, 4, 5]));
        assert_eq!(findings.next_order(), after(5));
        findings.begin_sample(&chosen(&[3]));
        assert_eq!(findings.next_order(), after(5), "only processes that were found");
    }
}
