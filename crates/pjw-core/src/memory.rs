//! The memory of a job: sums over its processes, and an estimate of what they share.
//!
//! Processes that were forked share the pages that none of them has changed since. The resident set size (RSS) of a
//! process counts such pages in full, the proportional set size (PSS) divides them by the number of address spaces that
//! map them, and the unique set size (USS) leaves them out.

use crate::basics::{Pid, prelude::*};

/// The memory of one process: its resident, proportional and unique set size (RSS, PSS, USS), its page tables,
/// its swapped-out memory, and its memory on each NUMA node. All sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessMemory {
    /// The process id.
    pub pid: Pid,
    /// The resident set size: all pages in memory that the process maps.
    pub rss: u64,
    /// The proportional set size: each page divided by the number of address spaces that map it.
    pub pss: u64,
    /// The unique set size: the pages that no other address space maps.
    pub uss: u64,
    /// The size of the page tables.
    pub page_tables: u64,
    /// The memory that is swapped out.
    pub swap: u64,
    /// The number of the address space. Processes with the same number share one, as after clone(2) with `CLONE_VM`.
    /// `None` if the process could not be compared with others: it then counts as an address space of its own.
    pub address_space: Option<u32>,
    /// The bytes in memory on each NUMA node, by the kernel's number of the node. Empty if they were not read.
    pub bytes_by_node: BTreeMap<u32, u64>,
}

/// The memory of a job: the sums of the memory sizes of its processes. If several processes share an address
/// space, only one of them counts. All sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JobMemory {
    /// The sum of the resident set sizes. A page that n address spaces map is counted n times.
    pub rss: u64,
    /// The sum of the proportional set sizes: the memory that the job uses. If another program also maps a page, only
    /// the job's part of this page counts.
    pub pss: u64,
    /// The sum of the unique set sizes.
    pub uss: u64,
    /// The part of `rss` that is shared with other address spaces, in permille.
    pub shared_permille: u32,
    /// The sum of the sizes of the page tables.
    pub page_tables: u64,
    /// The sum of the memory that is swapped out.
    pub swap: u64,
    /// The number of address spaces. Each process that could not be compared counts as one.
    pub address_spaces: u32,
    /// The sum of the bytes in memory on each NUMA node, by the kernel's number of the node. A page that n address
    /// spaces map is counted n times. Empty if the memory on the nodes was not read.
    pub bytes_by_node: BTreeMap<u32, u64>,
}

impl JobMemory {
    /// Returns the sums of the memory sizes of `processes`. If several processes share an address space, only
    /// the first of them counts, because the kernel reports the same memory for each.
    #[must_use]
    pub fn sum(processes: &[ProcessMemory]) -> Self {
        let mut counted_spaces = BTreeSet::new();
        let mut sum = Self::default();
        let mut is_first =
            |process: &&ProcessMemory| process.address_space.is_none_or(|space| counted_spaces.insert(space));
        for process in processes.iter().filter(|process| is_first(process)) {
            let add = |total: &mut u64, part: u64| *total = total.saturating_add(part);
            add(&mut sum.rss, process.rss);
            add(&mut sum.pss, process.pss);
            add(&mut sum.uss, process.uss);
            add(&mut sum.page_tables, process.page_tables);
            add(&mut sum.swap, process.swap);
            for (&node, &bytes) in &process.bytes_by_node {
                add(sum.bytes_by_node.entry(node).or_default(), bytes);
            }
            sum.address_spaces += 1;
        }
        sum.shared_permille = permille(sum.rss.saturating_sub(sum.uss), sum.rss);
        sum
    }
}

/// Estimates how much of the anonymous memory in `process_bytes` is shared between the processes, in permille of
/// the sum of `process_bytes`. Returns 0 if there are fewer than two processes with memory.
///
/// - `cgroup_bytes` is the anonymous memory of the cgroup of the processes, in bytes. The kernel counts each page
///   once.
/// - `process_bytes` is the anonymous memory of each process, in bytes. A shared page counts for each process
///   that maps the page.
///
/// The estimate assumes that all processes map each shared page, like workers that were forked from one parent.
/// A process that is much smaller than the largest processes has little effect on the result.
#[must_use]
pub fn estimate_shared_permille(cgroup_bytes: u64, process_bytes: &[u64]) -> u32 {
    // In pages, so that squares of any sizes fit.
    let pages = |bytes: u64| u128::from(bytes >> 12);
    let total: u128 = process_bytes.iter().map(|&size| pages(size)).sum();
    let squares: u128 = process_bytes.iter().map(|&size| pages(size) * pages(size)).sum();
    let excess = total.saturating_sub(pages(cgroup_bytes));
    // With n processes of equal size, total² / squares is n. `total` counts a page that all map n times, which is n - 1
    // times too often. So shared = excess * n / (n - 1), where n / (n - 1) = total² / (total² - squares).
    let denominator = total.saturating_mul(total).saturating_sub(squares);
    if total == 0 || denominator == 0 {
        return 0;
    }
    let shared = excess.saturating_mul(1000).saturating_mul(total) / denominator;
    u32::try_from(shared.min(1000)).unwrap_or(1000)
}

/// Returns the path of the deepest cgroup that contains the cgroups at all of `paths`. Each path begins with
/// `/`. Returns `None` if `paths` is empty, or if only the root cgroup contains all of these cgroups.
#[must_use]
pub fn common_cgroup<'p>(paths: impl IntoIterator<Item = &'p str>) -> Option<String> {
    let mut paths = paths.into_iter();
    let mut common: Vec<&str> = components(paths.next()?).collect();
    for path in paths {
        let equal = common.iter().zip(components(path)).take_while(|(one, other)| *one == other);
        let equal_count = equal.count();
        common.truncate(equal_count);
    }
    (!common.is_empty()).then(|| common.iter().fold(String::new(), |path, part| path + "/" + part))
}

fn components(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty())
}

/// `part` in permille of `whole`. 0 if there is nothing.
fn permille(part: u64, whole: u64) -> u32 {
    let permille = u128::from(part) * 1000 / u128::from(whole.max(1));
    u32::try_from(permille.min(1000)).unwrap_or(1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn process(pid: u32, address_space: u32, rss: u64, pss: u64, uss: u64) -> ProcessMemory {
        let (page_tables, swap, bytes_by_node) = (1, 2, BTreeMap::from([(0, rss)]));
        let address_space = Some(address_space);
        ProcessMemory { pid: Pid(pid), rss, pss, uss, page_tables, swap, address_space, bytes_by_node }
    }

    #[test]
    fn the_memory_of_a_job_is_the_sum_over_its_processes() {
        let sum = JobMemory::sum(&[process(1, 0, 100, 60, 20), process(2, 1, 100, 60, 20)]);
        assert_eq!((sum.rss, sum.pss, sum.uss, sum.shared_permille), (200, 120, 40, 800));
        assert_eq!((sum.page_tables, sum.swap, sum.address_spaces), (2, 4, 2));
        assert_eq!(sum.bytes_by_node, BTreeMap::from([(0, 200)]));
        assert_eq!(JobMemory::sum(&[]), JobMemory::default());
    }

    #[test]
    fn an_address_space_of_several_processes_is_counted_once() {
        let sum = JobMemory::sum(&[
            process(1, 0, 100, 100, 100),
            process(2, 0, 100, 100, 100),
            process(3, 1, 7, 7, 7),
        ]);
        assert_eq!((sum.rss, sum.address_spaces), (107, 2));
    }

    #[test]
    fn a_process_that_could_not_be_compared_counts_as_an_address_space_of_its_own() {
        let unknown = |pid: u32| ProcessMemory { address_space: None, ..process(pid, 0, 100, 100, 100) };
        let sum = JobMemory::sum(&[unknown(1), unknown(2), process(3, 0, 7, 7, 7)]);
        assert_eq!((sum.rss, sum.address_spaces), (207, 3));
    }

    #[test]
    fn sums_and_shares_of_any_sizes_are_no_overflow() {
        let sum = JobMemory::sum(&[process(1, 0, u64::MAX, 1, 0), process(2, 1, u64::MAX, 1, 0)]);
        assert_eq!((sum.rss, sum.shared_permille), (u64::MAX, 1000));
        assert_eq!(estimate_shared_permille(0, &[u64::MAX; 3]), 1000);
    }

    #[test]
    fn the_shared_part_of_a_farm_is_estimated_from_its_cgroup() {
        // A master with 400 MiB, and four workers that share these and have 60 MiB of their own.
        let farm = [400 * MIB, 460 * MIB, 460 * MIB, 460 * MIB, 460 * MIB];
        let estimated = estimate_shared_permille(640 * MIB, &farm);
        let direct = 1000 * 2000 / 2240;
        assert!(estimated.abs_diff(direct) <= 10, "{estimated} {direct}");
        let mut with_shells = farm.to_vec();
        with_shells.extend([MIB; 3]);
        let estimated = estimate_shared_permille(643 * MIB, &with_shells);
        assert!(estimated.abs_diff(direct) <= 15, "small processes change little: {estimated} {direct}");
    }

    #[test]
    fn processes_that_share_nothing_have_a_shared_part_of_zero() {
        assert_eq!(estimate_shared_permille(500 * MIB, &[100 * MIB; 5]), 0);
        assert_eq!(estimate_shared_permille(900 * MIB, &[100 * MIB; 5]), 0, "more is charged than is mapped");
        assert_eq!(estimate_shared_permille(10 * MIB, &[100 * MIB]), 0, "one process shares with nobody");
        assert_eq!(estimate_shared_permille(10 * MIB, &[]), 0);
    }

    #[test]
    fn the_common_cgroup_is_the_deepest_one_that_contains_all() {
        let common = |paths: &[&str]| common_cgroup(paths.iter().copied());
        assert_eq!(common(&["/a/b/c", "/a/b/d", "/a/b"]).as_deref(), Some("/a/b"));
        assert_eq!(common(&["/a/b"]).as_deref(), Some("/a/b"));
        assert_eq!(common(&["/a/bc", "/a/bd"]).as_deref(), Some("/a"), "names are compared as a whole");
        assert_eq!(common(&["/a", "/b"]), None);
        assert_eq!(common(&["/", "/a"]), None);
        assert_eq!(common(&[]), None);
    }
}
