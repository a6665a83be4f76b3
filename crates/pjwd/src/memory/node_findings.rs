//! What samples of the pages of one job's processes found: which processes have most of their memory on other NUMA
//! nodes than their hot threads.
//!
//! A sample is an estimate, and the PU on which a thread last ran is that of one moment. So a finding is confirmed only
//! when two samples in a row of the process had it. A sample has only some processes of a large job. Some places are
//! for processes that were found, and the others follow in turns.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pjw_core::diagnosis::remote_numa_memory::{MemoryByNode, RemoteNumaMemory};
use pjw_core::ids::{Pid, ProcessId};
use pjw_core::time::Nanos;

use super::reading::JobProcess;

/// The shortest time after which a finding is forgotten: two and a half times the usual minute between two samples of a
/// job. A job is sampled less often if the samples of all jobs would use more than their share of a PU (logical CPU).
const MIN_MAX_AGE: Duration = Duration::from_secs(150);
/// The longest time after which a finding is forgotten: no sample is made while the job has no hot threads.
const LONGEST_MAX_AGE: Duration = Duration::from_secs(600);
/// The largest number of found processes that come before the others. The sample has as many places for others.
const MAX_FIRST: usize = 8;

/// The order in which processes of a job are chosen for a sample of the pages of the job. A sample has places for only
/// some processes of a large job. It finds the processes with most of their memory on other NUMA nodes than their hot
/// threads. A thread is hot if it runs or waits for a PU (logical CPU) most of the time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SampleOrder {
    /// The processes that are chosen before all others: at most 8. An earlier sample found most of their memory on
    /// other NUMA nodes than their hot threads. The next sample checks this again.
    pub first: BTreeSet<ProcessId>,
    /// The last process that was chosen for an earlier sample because it was next in order, and not because an earlier
    /// sample had found remote memory. Of processes with the same number of hot threads, those with a greater id than
    /// this process come first. `None` if there is no such process yet.
    pub after: Option<ProcessId>,
}

/// The results of the samples of the pages of one job. They say which processes of the job have most of their memory on
/// other NUMA nodes than their hot threads. A thread is hot if it runs or waits for a PU (logical CPU) most of the
/// time. Also says in which order the processes for the next sample are chosen.
#[derive(Debug, Default)]
pub struct RemoteNumaFindings {
    found: BTreeMap<ProcessId, NodeFinding>,
    last_in_turn: Option<ProcessId>,
    /// The time between the last two samples of the job.
    interval: Duration,
    last_sample_at: Option<Nanos>,
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
    fn is_recent(&self, now: Nanos, max_age: Duration) -> bool {
        time_between(self.sampled_at, now) <= max_age
    }
}

/// Returns the time from `earlier` to `later`, both in ns since boot.
fn time_between(earlier: Nanos, later: Nanos) -> Duration {
    Duration::from_nanos(later.0.saturating_sub(earlier.0))
}

impl RemoteNumaFindings {
    /// Returns the time after which a finding is forgotten.
    fn max_age(&self) -> Duration {
        (self.interval * 5 / 2).clamp(MIN_MAX_AGE, LONGEST_MAX_AGE)
    }

    /// Returns the order in which the processes for the next sample must be chosen.
    #[must_use]
    pub fn next_order(&self) -> SampleOrder {
        let mut found: Vec<_> = self.found.iter().collect();
        found.sort_by_key(|(_, finding)| (finding.is_confirmed, finding.sampled_at));
        let first = found.into_iter().take(MAX_FIRST).map(|(&id, _)| id).collect();
        SampleOrder { first, after: self.last_in_turn }
    }

    /// Stores which processes were chosen for a sample, so that the next sample continues with other processes. Must be
    /// called before [`RemoteNumaFindings::record`] for the same sample. `chosen` are the processes, in the order that
    /// [`RemoteNumaFindings::next_order`] returned.
    pub fn record_chosen_processes(&mut self, chosen: &[JobProcess]) {
        let last = chosen.iter().rfind(|process| !self.found.contains_key(&process.id));
        self.last_in_turn = last.map(|process| process.id).or(self.last_in_turn);
    }

    /// Stores the result of a sample that began at the time `at`, in ns since boot. `sampled` has the memory on each
    /// NUMA node for each process of which the sample has enough pages. `remote` lists those of these processes that
    /// have most of their memory on other NUMA nodes than their hot threads.
    ///
    /// Earlier results about the processes in `sampled` are replaced. Earlier results about other processes are dropped
    /// only if they are older than two and a half times the interval between the last two samples of the job. This
    /// limit is at least 150 s and at most 600 s.
    pub fn record(
        &mut self,
        mut sampled: BTreeMap<Pid, MemoryByNode>,
        remote: &[RemoteNumaMemory],
        at: Nanos,
    ) {
        let remote: BTreeSet<ProcessId> = remote.iter().map(|remote| remote.id).collect();
        self.interval = self.last_sample_at.map_or(Duration::ZERO, |last| time_between(last, at));
        self.last_sample_at = Some(at);
        let max_age = self.max_age();
        self.found.retain(|id, finding| {
            finding.is_recent(at, max_age) && (remote.contains(id) || !sampled.contains_key(&id.pid))
        });
        for id in remote {
            let Some(memory) = sampled.remove(&id.pid) else { continue };
            let is_confirmed = self.found.contains_key(&id);
            self.found.insert(id, NodeFinding { memory, sampled_at: at, is_confirmed });
        }
    }

    /// Returns the processes for which the last two samples of the process gave the same result: most of the memory is
    /// on other NUMA nodes than the hot threads. The value of each process is its memory on each NUMA
    /// node, from the last sample of the process. `now` is the current time in ns since boot. Leaves out results that
    /// are too old: the limit is the one in [`RemoteNumaFindings::record`]. Processes that have ended since are not
    /// left out.
    #[must_use]
    pub fn confirmed(&self, now: Nanos) -> BTreeMap<ProcessId, MemoryByNode> {
        let max_age = self.max_age();
        let is_known = |finding: &NodeFinding| finding.is_confirmed && finding.is_recent(now, max_age);
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
    fn record(findings: &mut RemoteNumaFindings, second: u64, sampled: &[u32], found: &[ProcessId]) {
        let memory = MemoryByNode::from_sample([(1, 1 << 30)].into(), 1 << 30);
        let sampled = sampled.iter().map(|&pid| (Pid(pid), memory.clone())).collect();
        let found: Vec<RemoteNumaMemory> = found.iter().copied().map(remote).collect();
        findings.record(sampled, &found, at(second));
    }

    fn confirmed(findings: &RemoteNumaFindings, second: u64) -> Vec<u32> {
        findings.confirmed(at(second)).keys().map(|id| id.pid.0).collect()
    }

    #[test]
    fn only_two_samples_in_a_row_are_a_finding() {
        let mut findings = RemoteNumaFindings::default();
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
        let mut findings = RemoteNumaFindings::default();
        record(&mut findings, 0, &[7], &[process(7)]);
        record(&mut findings, 60, &[7], &[process(7)]);
        record(&mut findings, 120, &[8], &[]);
        assert_eq!(confirmed(&findings, 120), [7]);
        assert_eq!(confirmed(&findings, 211), [0; 0], "also without another sample");
        record(&mut findings, 960, &[7], &[process(7)]);
        assert_eq!(confirmed(&findings, 960), [0; 0], "the sample before is too old");
    }

    #[test]
    fn samples_that_follow_each_other_slowly_confirm_a_finding_too() {
        let mut findings = RemoteNumaFindings::default();
        for second in [0, 200, 400] {
            record(&mut findings, second, &[7], &[process(7)]);
            assert_eq!(confirmed(&findings, second).len(), usize::from(second > 0));
        }
        assert_eq!(confirmed(&findings, 599), [7], "until the next sample");
        assert_eq!(confirmed(&findings, 901), [0; 0]);
    }

    #[test]
    fn many_processes_that_were_found_leave_places_for_others_and_unconfirmed_ones_come_first() {
        let mut findings = RemoteNumaFindings::default();
        let pids: Vec<u32> = (1..=16).collect();
        let found: Vec<ProcessId> = pids.iter().copied().map(process).collect();
        record(&mut findings, 0, &pids, &found);
        record(&mut findings, 60, &pids[..8], &found[..8]);
        assert_eq!(findings.next_order().first, found[8..].iter().copied().collect());
    }

    #[test]
    fn processes_that_were_found_come_first_and_do_not_change_the_turns() {
        let mut findings = RemoteNumaFindings::default();
        let chosen = |pids: &[u32]| -> Vec<JobProcess> {
            pids.iter().map(|&pid| JobProcess::from(process(pid))).collect()
        };
        assert_eq!(findings.next_order(), SampleOrder::default());
        findings.record_chosen_processes(&chosen(&[1, 2, 3]));
        record(&mut findings, 0, &[1, 2, 3], &[process(3)]);
        let after = |pid| SampleOrder { first: [process(3)].into(), after: Some(process(pid)) };
        assert_eq!(findings.next_order(), after(3));
        findings.record_chosen_processes(&chosen(&[3, 4, 5]));
        assert_eq!(findings.next_order(), after(5));
        findings.record_chosen_processes(&chosen(&[3]));
        assert_eq!(findings.next_order(), after(5), "only processes that were found");
    }
}
