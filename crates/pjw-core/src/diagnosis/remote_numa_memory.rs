//! Remote NUMA memory: memory of a process in other NUMA nodes than those in which its hot threads run.

use crate::basics::{ProcessId, Pu, prelude::*};
use crate::diagnosis::words::{bytes_text, counted_noun, join_names};
use crate::machine::{Topology, TopologyDomain, TopologyLevel};

/// A process is reported if at least this share of its memory is remote NUMA memory, in permille.
const MIN_REMOTE_PERMILLE: u128 = 750;
/// The same share by a sample of the memory. It is larger, because a sample has a standard error: 4 percentage points
/// with 128 pages, and 5 with 64.
const MIN_REMOTE_PERMILLE_OF_SAMPLE: u128 = 800;
/// The minimum remote NUMA memory of a reported process, in bytes: 64 MiB. Remote NUMA memory is memory on NUMA nodes
/// where none of the hot threads of the process runs. Less memory than this mostly fits into caches, so that its NUMA
/// node matters little.
pub const MIN_REMOTE_BYTES: u64 = 64 << 20;

/// The memory of one process on each NUMA node, in bytes. The sizes are either exact (the NUMA node of each page was
/// read) or estimated from a sample of the pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryByNode {
    /// The memory on each NUMA node, in bytes, by the kernel's number of the node.
    bytes: BTreeMap<u32, u64>,
    /// The memory whose node is unknown, in bytes.
    unknown_bytes: u64,
    is_sample: bool,
}

impl MemoryByNode {
    /// Makes the value from exact sizes: the NUMA node of each page of the process is known, as from
    /// `/proc/PID/numa_maps`. `bytes_by_node` has the bytes on each NUMA node. Its keys are the kernel's numbers of the
    /// nodes.
    #[must_use]
    pub fn from_all_pages(bytes_by_node: BTreeMap<u32, u64>) -> Self {
        Self { bytes: bytes_by_node, unknown_bytes: 0, is_sample: false }
    }

    /// Makes the value from estimated sizes: only a sample of the pages of the process was read.
    ///
    /// - `bytes_by_node` is the estimate from the sample
    ///   ([`PageSample::estimate_bytes_by_node`](super::page_sample::PageSample::estimate_bytes_by_node)).
    /// - `resident_bytes` is the resident memory of the process, huge pages included. The estimate does not cover some
    ///   of it, such as mapped files and huge pages of hugetlbfs. This part never counts as remote memory.
    #[must_use]
    pub fn from_sample(bytes_by_node: BTreeMap<u32, u64>, resident_bytes: u64) -> Self {
        let unknown_bytes = resident_bytes.saturating_sub(sum(bytes_by_node.values()));
        Self { bytes: bytes_by_node, unknown_bytes, is_sample: true }
    }
}

/// A process, as input for [`find_remote_numa_memory`]: the PUs (logical CPUs) on which its hot threads last ran, and
/// its memory on each NUMA node. A thread is hot if it runs or waits for a PU most of the time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HotProcessMemory {
    /// The pid and the start time of the process.
    pub id: ProcessId,
    /// The PU on which each hot thread ran last. Includes the hot threads of other processes that share the address
    /// space.
    pub last_cpus: Vec<Pu>,
    /// The memory of the process on each NUMA node.
    pub memory: MemoryByNode,
}

/// The remote NUMA memory of one process, for a finding of the diagnosis: its memory on NUMA nodes where none of its
/// hot threads runs. A thread is hot if it runs or waits for a PU (logical CPU) most of the time. Access to remote
/// memory has a higher latency and a lower bandwidth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteNumaMemory {
    /// The pid and the start time of the process.
    pub id: ProcessId,
    /// The number of hot threads that use the memory.
    pub hot_threads: usize,
    /// The NUMA nodes in which the hot threads ran last, by the kernel's numbers.
    pub thread_nodes: BTreeSet<u32>,
    /// The NUMA node with most of the remote memory, by the kernel's number.
    pub memory_node: u32,
    /// The memory on NUMA nodes where no hot thread runs, in bytes.
    pub remote_bytes: u64,
    /// All memory of the process, in bytes.
    pub total_bytes: u64,
    /// Whether `remote_bytes` is an estimate from a sample of the pages.
    pub is_sample: bool,
}

impl RemoteNumaMemory {
    /// Returns one sentence for users that says where the hot threads of the process run and where its memory is. A
    /// thread is hot if it runs or waits for a PU (logical CPU) most of the time. The sentence does not name the
    /// process. Example: `2 hot threads run on NUMA node 0, and 900.0 MiB of 1000.0 MiB of the memory is elsewhere,
    /// most of it on node 1`. If the memory is an estimate from a sample, the sentence says `about 900.0 MiB`.
    #[must_use]
    pub fn description(&self) -> String {
        let verb = if self.hot_threads == 1 { "runs" } else { "run" };
        let nodes = if self.thread_nodes.len() == 1 { "node" } else { "nodes" };
        let about = if self.is_sample { "about " } else { "" };
        format!(
            "{} {verb} on NUMA {nodes} {}, and {about}{} of {} of the memory is elsewhere, most of it on node {}",
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
            self.id.pid, self.memory_node
        )
    }
}

/// Returns whether processes of a machine can have remote NUMA memory: at least two NUMA nodes have both memory and PUs
/// (logical CPUs) that belong to them.
#[must_use]
pub fn can_have_remote_numa_memory(topology: &Topology) -> bool {
    nodes_with_pus(topology).filter(|node| node.memory_bytes > 0).count() > 1
}

/// Returns the NUMA nodes to which PUs (logical CPUs) belong. A node of memory alone has PUs too, those near it, but
/// these belong to another node.
fn nodes_with_pus(topology: &Topology) -> impl Iterator<Item = &TopologyDomain> {
    let nodes = topology.domains(TopologyLevel::NumaNode);
    nodes.filter(move |node| !topology.cpus_belonging_to(node).is_empty())
}

/// Returns the processes in `processes` with much remote NUMA memory: memory on NUMA nodes where none of the hot
/// threads of the process runs. A thread is hot if it runs or waits for a PU (logical CPU) most of the time. The remote
/// memory must be at least 64 MiB, and at least three quarters of the memory of the process. If the share is only
/// estimated from a sample of pages, it must be at least four fifths.
///
/// Memory on a NUMA node to which no PU belongs, such as a memory expander, is ignored, because it is remote for every
/// thread. A process without hot threads is never in the result.
#[must_use]
pub fn find_remote_numa_memory(topology: &Topology, processes: &[HotProcessMemory]) -> Vec<RemoteNumaMemory> {
    processes.iter().filter_map(|process| remote_numa_memory(topology, process)).collect()
}

/// Returns the memory of `process` on NUMA nodes where none of its hot threads runs. Returns `None` if this is not
/// much ([`find_remote_numa_memory`] has the limits), or if the process has no hot threads. Also returns `None` if
/// the NUMA node of a hot thread is unknown.
fn remote_numa_memory(topology: &Topology, process: &HotProcessMemory) -> Option<RemoteNumaMemory> {
    let nodes_with_pus: BTreeSet<u32> = nodes_with_pus(topology).map(|node| node.number).collect();
    let node_of = |pu: &Pu| topology.domain_of(TopologyLevel::NumaNode, *pu).map(|node| node.number);
    let thread_nodes: BTreeSet<u32> = process.last_cpus.iter().map(node_of).collect::<Option<_>>()?;
    let MemoryByNode { bytes, unknown_bytes, is_sample } = &process.memory;
    let memory_by_node = || bytes.iter().filter(|(node, _)| nodes_with_pus.contains(node));
    let remote = || memory_by_node().filter(|(node, _)| !thread_nodes.contains(node));
    let total_bytes = sum(memory_by_node().map(|(_, bytes)| bytes)).saturating_add(*unknown_bytes);
    let remote_bytes = sum(remote().map(|(_, bytes)| bytes));
    let min_permille = if *is_sample { MIN_REMOTE_PERMILLE_OF_SAMPLE } else { MIN_REMOTE_PERMILLE };
    let is_most = u128::from(remote_bytes) * 1000 >= u128::from(total_bytes) * min_permille;
    let (&memory_node, _) = remote().max_by_key(|&(&node, &bytes)| (bytes, core::cmp::Reverse(node)))?;
    (!thread_nodes.is_empty() && is_most && remote_bytes >= MIN_REMOTE_BYTES).then_some(RemoteNumaMemory {
        id: process.id,
        hot_threads: process.last_cpus.len(),
        thread_nodes,
        memory_node,
        remote_bytes,
        total_bytes,
        is_sample: *is_sample,
    })
}

fn sum<'a>(sizes: impl Iterator<Item = &'a u64>) -> u64 {
    sizes.fold(0, |total, size| total.saturating_add(*size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::basics::{Pid, StartTime};
    use crate::testing::regular_topology;

    const PROCESS: ProcessId = ProcessId { pid: Pid(7), start: StartTime(1) };
    const MIB: u64 = 1 << 20;

    /// Two NUMA nodes of four PUs: node 0 has the PUs 0-3.
    fn found_in(last_cpus: &[u32], memory: MemoryByNode) -> Vec<RemoteNumaMemory> {
        let last_cpus = last_cpus.iter().copied().map(Pu).collect();
        let process = HotProcessMemory { id: PROCESS, last_cpus, memory };
        find_remote_numa_memory(&regular_topology(2, 1, 1, 4, 1), &[process])
    }

    fn bytes(mib_by_node: &[(u32, u64)]) -> BTreeMap<u32, u64> {
        mib_by_node.iter().map(|&(node, mib)| (node, mib * MIB)).collect()
    }

    fn found(last_cpus: &[u32], mib_by_node: &[(u32, u64)]) -> Vec<RemoteNumaMemory> {
        found_in(last_cpus, MemoryByNode::from_all_pages(bytes(mib_by_node)))
    }

    fn found_by_sample(mib_by_node: &[(u32, u64)], resident_mib: u64) -> Vec<RemoteNumaMemory> {
        found_in(&[0], MemoryByNode::from_sample(bytes(mib_by_node), resident_mib * MIB))
    }

    /// Four cores, and two NUMA nodes, each with its PUs and the size of its memory.
    fn with_nodes(nodes: [(&str, u64); 2]) -> Topology {
        let domain = |(number, (cpus, memory_bytes)): (u32, (&str, u64))| TopologyDomain {
            level: TopologyLevel::NumaNode,
            number,
            cpus: cpus.parse().unwrap(),
            memory_bytes,
        };
        let cores = regular_topology(1, 1, 1, 4, 1).cores().to_vec();
        Topology::new(cores, (0..).zip(nodes).map(domain).collect()).unwrap()
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
    fn a_sample_tells_of_remote_memory_with_a_margin_and_what_it_does_not_cover_is_not_remote() {
        let remote = found_by_sample(&[(0, 100), (1, 850)], 1000);
        assert_eq!((remote.len(), remote[0].memory_node, remote[0].total_bytes), (1, 1, 1000 * MIB));
        assert_eq!(
            remote[0].description(),
            "1 hot thread runs on NUMA node 0, and about 850.0 MiB of 1000.0 MiB of the memory is elsewhere, most of it \
             on node 1"
        );
        assert_eq!(found_by_sample(&[(0, 210), (1, 790)], 1000), [], "three quarters, but not four fifths");
        assert_eq!(found_by_sample(&[(1, 850)], 2000), [], "more than half of the memory is in mapped files");
        assert_eq!(found_by_sample(&[(1, 63)], 63), [], "less than 64 MiB");
        let too_large = found_by_sample(&[(1, 1100)], 1000);
        assert_eq!(too_large[0].total_bytes, 1100 * MIB, "an estimate can exceed the resident memory");
    }

    #[test]
    fn remote_memory_needs_two_nodes_with_cpus_and_memory() {
        assert!(!can_have_remote_numa_memory(&regular_topology(1, 1, 1, 4, 1)));
        assert!(can_have_remote_numa_memory(&regular_topology(1, 2, 1, 4, 1)));
        for nodes in [[("0-1", 1 << 30), ("2-3", 0)], [("0-3", 1 << 30), ("", 1 << 30)]] {
            assert!(!can_have_remote_numa_memory(&with_nodes(nodes)));
        }
    }

    #[test]
    fn memory_on_a_node_that_has_the_same_pus_as_the_node_to_which_they_belong_is_left_out() {
        let topology = with_nodes([("0-3", 1 << 30), ("0-3", 1 << 30)]);
        let memory = MemoryByNode::from_all_pages(bytes(&[(0, 100), (1, 900)]));
        let process = HotProcessMemory { id: PROCESS, last_cpus: vec![Pu(0)], memory };
        assert_eq!(find_remote_numa_memory(&topology, &[process]), []);
        assert!(!can_have_remote_numa_memory(&topology));
    }

    #[test]
    fn memory_on_a_node_without_pus_and_threads_on_unknown_pus_are_left_out() {
        assert_eq!(found(&[0], &[(0, 100), (9, 900)]), []);
        assert_eq!(found(&[99], &[(1, 900)]), []);
        assert_eq!(found(&[], &[(1, 900)]), [], "no thread is hot");
        assert_eq!(found(&[0], &[(0, 100), (1, 900), (9, 5000)])[0].total_bytes, 1000 * MIB);
    }
}
