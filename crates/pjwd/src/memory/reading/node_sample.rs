//! Estimates the memory of a process on each NUMA node from a sample of its pages.
//!
//! A sample takes 50 to 200 us of CPU time, also of a process with terabytes of memory: 0.2 to 0.5 us for each of the
//! 128 pages, and the rest for the list of the mappings (`/proc/PID/maps`). `numa_maps` takes 20 to 35 us per MiB.

use pjw_core::diagnosis::page_sample::PageSample;
use pjw_core::diagnosis::remote_numa_memory::MIN_REMOTE_BYTES;
use pjw_core::ids::Pid;
use pjw_core::memory::ProcessMemory;
use pjw_linux::proc::memory_use::ProcessMemoryCounters;
use pjw_linux::proc::page_nodes::page_nodes;
use pjw_linux::proc::procfs::ProcDir;

use super::spaces::LiveProcess;

/// The largest part of the lists of mappings that is read for one job, in bytes: that takes some 1 ms of CPU time. Its
/// processes have equal shares. A process with a list that is longer than its share has fewer mappings in the sample.
pub(super) const MAX_MAPS_BYTES: u64 = 256 << 10;

/// Estimates the memory of `process` on each NUMA node from a sample of its pages. Reads at most `max_maps_bytes` of
/// the list of its mappings. `seed` chooses the pages. Returns `None` if the process has little anonymous memory, if
/// too few of the sampled pages are in memory, if the process has ended, or if it can't be read.
pub(super) fn sample_nodes(
    proc: &mut ProcDir,
    process: &LiveProcess,
    max_maps_bytes: u64,
    seed: u64,
) -> Option<ProcessMemory> {
    let thread = process.thread?;
    let counters = proc.read_memory_counters(thread).ok()?;
    // So little can't be reported.
    if counters.anonymous < MIN_REMOTE_BYTES {
        return None;
    }
    let sample = PageSample::choose(proc.read_private_ranges(thread, max_maps_bytes).ok()?, seed);
    let nodes = page_nodes(thread, &sample.addresses).ok()?;
    memory_by_sample(process.id.pid, counters, &sample, &nodes)
}

/// Returns the memory of the process `pid` with the estimate by `sample`, whose pages are on `nodes`. The resident
/// memory includes the huge pages of hugetlbfs, which are in no sampled range: their node is unknown. Returns `None` if
/// too few of the sampled pages are in memory.
fn memory_by_sample(
    pid: Pid,
    counters: ProcessMemoryCounters,
    sample: &PageSample,
    nodes: &[Option<u32>],
) -> Option<ProcessMemory> {
    let ProcessMemoryCounters { rss, anonymous, huge_pages, page_tables, swap } = counters;
    Some(ProcessMemory {
        pid,
        rss: rss.saturating_add(huge_pages),
        pss: 0,
        uss: 0,
        page_tables,
        swap,
        address_space: None,
        bytes_by_node: sample.estimate_bytes_by_node(nodes, anonymous)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn huge_pages_are_resident_memory_of_which_the_node_is_unknown() {
        let counters = ProcessMemoryCounters {
            rss: 150 * MIB,
            anonymous: 100 * MIB,
            huge_pages: 1000 * MIB,
            ..ProcessMemoryCounters::default()
        };
        let range = 0..128 * MIB;
        let sample = PageSample::choose(vec![range], 7);
        let memory = memory_by_sample(Pid(7), counters, &sample, &[Some(1); 128]).unwrap();
        assert_eq!((memory.rss, memory.bytes_by_node), (1150 * MIB, [(1, 100 * MIB)].into()));
        assert_eq!(memory_by_sample(Pid(7), counters, &sample, &[None; 128]), None);
    }
}
