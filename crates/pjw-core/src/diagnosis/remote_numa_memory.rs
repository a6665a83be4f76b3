//! Remote NUMA memory: memory of a process in other NUMA nodes than those in which its hot threads run.

use crate::basics::{Pid, Pu, prelude::*};
use crate::diagnosis::words::{bytes_text, counted_noun, join_names};
use crate::machine::{Topology, TopologyLevel};

/// A process is reported if at least this share of its memory is remote NUMA memory, in permille.
const MIN_REMOTE_PERMILLE: u128 = 750;
/// Less memory than this fits into caches, so that its place matters little, in bytes.
const MIN_REMOTE_BYTES: u64 = 64 << 20;

/// A process, as input for [`find_remote_numa_memory`]: the PUs (logical CPUs) on which its hot threads last ran, and
/// the size of its memory on each NUMA node. A thread is hot if it runs or waits for a PU most of the time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HotProcessMemory {
    /// The process id.
    pub pid: Pid,
    /// The PU on which each hot thread ran last.
    pub last_cpus: Vec<Pu>,
    /// The memory of the process on each NUMA node, in bytes, by the kernel's number of the node, as in
    /// `/proc/PID/numa_maps`.
    pub bytes_by_node: BTreeMap<u32, u64>,
}

/// The remote NUMA memory of one process, for a finding of the diagnosis: its memory on NUMA nodes where none of its
/// hot threads runs. A thread is hot if it runs or waits for a PU (logical CPU) most of the time. Access to remote
/// memory has a higher latency and a lower bandwidth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteNumaMemory {
    /// The process id.
    pub pid: Pid,
    /// The number of hot threads of the process.
    pub hot_threads: usize,
    /// The NUMA nodes in which the hot threads ran last, by the kernel's numbers.
    pub thread_nodes: BTreeSet<u32>,
    /// The NUMA node with most of the remote memory, by the kernel's number.
    pub memory_node: u32,
    /// The memory on NUMA nodes where no hot thread runs, in bytes.
    pub remote_bytes: u64,
    /// All memory of the process, in bytes.
    pub total_bytes: u64,
}

impl RemoteNumaMemory {
    /// Returns one sentence for users that says where the hot threads of the process run and where its memory is. A
    /// thread is hot if it runs or waits for a PU (logical CPU) most of the time. The sentence does not name the
    /// process. Example: `2 hot threads run on NUMA node 0, and 900.0 MiB of 1000.0 MiB of the memory is elsewhere,
    /// most of it on node 1`.
    #[must_use]
    pub fn description(&self) -> String {
        let verb = if self.hot_threads == 1 { "runs" } else { "run" };
        let nodes = if self.thread_nodes.len() == 1 { "node" } else { "nodes" };
        format!(
            "{} {verb} on NUMA {nodes} {}, and {} of {} of the memory is elsewhere, most of it on node {}",
            counted_noun(self.hot_threads, "hot thread"),
            join_names(&self.thread_nodes),
            bytes_text(self.remote_bytes),
            bytes_text(self.total_bytes),
            self.memory_node
        )
    }

    /// Returns a text for users that says how to correct the placement of the memory. The text names two remedies:
    ///
    /// - The command `migratepages` (package numactl) moves memory of the process from one NUMA node to another. The
    ///   text names the NUMA node with most of the remote memory, and a NUMA node on which hot threads of the process
    ///   run. A thread is hot if it runs or waits for a PU (logical CPU) most of the time.
    /// - The option `--within-job packed` of `pjwctl` keeps new processes on the NUMA node of their parent.
    #[must_use]
    pub fn remedy(&self) -> String {
        let to = self.thread_nodes.first().copied().unwrap_or_default();
        format!(
            "move the memory: migratepages {} {} {to} (package numactl); for new processes, --within-job packed keeps children \
             where the parent's memory is",
            self.pid, self.memory_node
        )
    }
}

/// Returns the processes in `processes` with much remote NUMA memory: memory on NUMA nodes where none of the hot
/// threads of the process runs. A thread is hot if it runs or waits for a PU (logical CPU) most of the time. The remote
/// memory must be at least 64 MiB, and at least three quarters of the memory of the process.
///
/// Memory on a NUMA node without PUs, such as a memory expander, is ignored, because it is remote for every thread. A
/// process without hot threads is never in the result.
#[must_use]
pub fn find_remote_numa_memory(topology: &Topology, processes: &[HotProcessMemory]) -> Vec<RemoteNumaMemory> {
    processes.iter().filter_map(|process| remote_numa_memory(topology, process)).collect()
}

/// Returns the memory of `process` on NUMA nodes where none of its hot threads runs. Returns `None` if this is not
/// much ([`find_remote_numa_memory`] has the limits), or if the process has no hot threads. Also returns `None` if
/// the NUMA node of a hot thread is unknown.
fn remote_numa_memory(topology: &Topology, process: &HotProcessMemory) -> Option<RemoteNumaMemory> {
    let has_pus = |node: &u32| {
        topology
            .domains(TopologyLevel::NumaNode)
            .any(|domain| domain.number == *node && !domain.cpus.is_empty())
    };
    let node_of = |pu: &Pu| topology.domain_of(TopologyLevel::NumaNode, *pu).map(|node| node.number);
    let thread_nodes: BTreeSet<u32> = process.last_cpus.iter().map(node_of).collect::<Option<_>>()?;
    let memory_by_node = || process.bytes_by_node.iter().filter(|(node, _)| has_pus(node));
    let remote = || memory_by_node().filter(|(node, _)| !thread_nodes.contains(node));
    let sum = |total: u64, bytes: u64| total.saturating_add(bytes);
    let total_bytes = memory_by_node().map(|(_, &bytes)| bytes).fold(0, sum);
    let remote_bytes = remote().map(|(_, &bytes)| bytes).fold(0, sum);
    let is_most = u128::from(remote_bytes) * 1000 >= u128::from(total_bytes) * MIN_REMOTE_PERMILLE;
    let (&memory_node, _) = remote().max_by_key(|&(&node, &bytes)| (bytes, core::cmp::Reverse(node)))?;
    (!thread_nodes.is_empty() && is_most && remote_bytes >= MIN_REMOTE_BYTES).then_some(RemoteNumaMemory {
        pid: process.pid,
        hot_threads: process.last_cpus.len(),
        thread_nodes,
        memory_node,
        remote_bytes,
        total_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::regular_topology;

    const MIB: u64 = 1 << 20;

    /// Two NUMA nodes of four PUs: node 0 has the PUs 0-3.
    fn found(last_cpus: &[u32], mib_by_node: &[(u32, u64)]) -> Vec<RemoteNumaMemory> {
        let process = HotProcessMemory {
            pid: Pid(7),
            last_cpus: last_cpus.iter().copied().map(Pu).collect(),
            bytes_by_node: mib_by_node.iter().map(|&(node, mib)| (node, mib * MIB)).collect(),
        };
        find_remote_numa_memory(&regular_topology(2, 1, 1, 4, 1), &[process])
    }

    #[test]
    fn threads_whose_memory_is_on_another_node_are_found() {
        let remote = found(&[0, 3], &[(0, 100), (1, 900)]);
        assert_eq!((remote.len(), remote[0].memory_node, remote[0].remote_bytes), (1, 1, 900 * MIB));
        assert_eq!(
            remote[0].description(),
            "2 hot threads run on NUMA node 0, and 900.0 MiB of 1000.0 MiB of the memory is elsewhere, most of it on node 1"
        );
        assert!(
            remote[0].remedy().starts_with("move the memory: migratepages 7 1 0 "),
            "{}",
            remote[0].remedy()
        );
    }

    #[test]
    fn memory_beside_one_of_the_threads_is_not_remote() {
        assert_eq!(found(&[0, 4], &[(0, 500), (1, 500)]), []);
        assert_eq!(found(&[0, 4], &[(1, 1000)]), []);
        assert_eq!(found(&[4], &[(1, 1000)]), []);
    }

    #[test]
    fn a_little_remote_memory_is_not_reported() {
        assert_eq!(found(&[0], &[(0, 300), (1, 700)]), [], "less than three quarters");
        assert_eq!(found(&[0], &[(1, 63)]), [], "less than 64 MiB");
        assert_eq!(found(&[0], &[(0, 250), (1, 750)]).len(), 1);
    }

    #[test]
    fn memory_on_a_node_without_pus_and_threads_on_unknown_pus_are_left_out() {
        assert_eq!(found(&[0], &[(0, 100), (9, 900)]), []);
        assert_eq!(found(&[99], &[(1, 900)]), []);
        assert_eq!(found(&[], &[(1, 900)]), [], "no thread is hot");
        assert_eq!(found(&[0], &[(0, 100), (1, 900), (9, 5000)])[0].total_bytes, 1000 * MIB);
    }
}
