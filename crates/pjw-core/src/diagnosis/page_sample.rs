//! A sample of the pages of a process: the addresses at which pages are looked up, and how much memory on each NUMA
//! node follows from the pages that were found there.

use core::cmp::Reverse;
use core::ops::Range;

use crate::basics::prelude::*;

/// The largest number of addresses of a sample. The kernel takes 0.2 to 0.5 us for each.
const MAX_ADDRESSES: u64 = 128;
/// The largest number of ranges from which the addresses come. Most other ranges are small, such as the stacks of
/// threads, of which hardly any page is in memory.
const MAX_RANGES: usize = 32;
/// A sample with fewer pages in memory says nothing. The standard error of a share of 64 pages is at most 6.3 %.
const MIN_PAGES: u64 = 64;
/// The distance between two addresses is at least this size, in bytes: the smallest size of a page.
const MIN_DISTANCE: u64 = 4096;

/// A sample of the memory of a process: random addresses in its largest ranges of private memory. The caller looks up
/// on which NUMA node the page at each address is. From these nodes, [`PageSample::estimate_bytes_by_node`] estimates
/// the memory on each NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageSample {
    /// The addresses, at most 128. Empty if the ranges are empty.
    pub addresses: Vec<u64>,
    /// The size of the sampled ranges, in bytes.
    range_bytes: u64,
}

impl PageSample {
    /// Chooses at most 128 random addresses in the memory of a process. `ranges` has the address ranges of its private
    /// memory. Only the 32 largest ranges are used. They are divided into parts of equal size, and one random address
    /// is chosen in each part. `seed` is the seed of the random numbers.
    #[must_use]
    pub fn choose(mut ranges: Vec<Range<u64>>, seed: u64) -> Self {
        ranges.sort_by_key(|range| (Reverse(size(range)), range.start));
        ranges.truncate(MAX_RANGES);
        let range_bytes = ranges.iter().map(size).fold(0, u64::saturating_add);
        let count = MAX_ADDRESSES.min(range_bytes / MIN_DISTANCE);
        let bytes_per_address = range_bytes.checked_div(count).unwrap_or(0);
        // Addresses at equal distances would not do: where pages alternate between two nodes, all can be on one node.
        let offset = |part: u64| {
            part * bytes_per_address + random_number(seed.wrapping_add(part)) % bytes_per_address.max(1)
        };
        let addresses = (0..count).filter_map(|part| address_at(&ranges, offset(part))).collect();
        Self { addresses, range_bytes }
    }

    /// Estimates the anonymous memory of the process on each NUMA node, in bytes. The keys of the result are the
    /// kernel's numbers of the nodes.
    ///
    /// - `nodes` has, for each sampled address, the NUMA node of the page at this address. `None` means that the page
    ///   is not in memory. Such a page is ignored.
    /// - `anonymous_bytes` is the anonymous memory of the process, as the kernel counts it. The values of the result
    ///   add up to about `anonymous_bytes`, or to the size of the sampled ranges if that is smaller.
    ///
    /// Returns `None` if fewer than 64 pages are in memory, because the estimate would be too inexact.
    #[must_use]
    pub fn estimate_bytes_by_node(
        &self,
        nodes: &[Option<u32>],
        anonymous_bytes: u64,
    ) -> Option<BTreeMap<u32, u64>> {
        let mut pages_by_node: BTreeMap<u32, u64> = BTreeMap::new();
        for &node in nodes.iter().flatten() {
            *pages_by_node.entry(node).or_default() += 1;
        }
        let all_pages: u64 = pages_by_node.values().sum();
        // The number of pages found times the size for which an address stands would have the error of the part of the
        // ranges that is in memory too.
        let bytes = u128::from(self.range_bytes.min(anonymous_bytes));
        let bytes_of = |pages: u64| u64::try_from(bytes * u128::from(pages) / u128::from(all_pages));
        let estimate = || {
            let by_node = pages_by_node.iter();
            by_node.map(|(&node, &pages)| (node, bytes_of(pages).unwrap_or(u64::MAX))).collect()
        };
        (all_pages >= MIN_PAGES).then(estimate)
    }
}

fn size(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

/// Returns the address that is `offset` bytes after the start of the first range, as if the ranges followed one
/// another without gaps. `None` if the ranges are smaller together.
fn address_at(ranges: &[Range<u64>], mut offset: u64) -> Option<u64> {
    for range in ranges {
        if offset < size(range) {
            return Some(range.start + offset);
        }
        offset -= size(range);
    }
    None
}

/// Returns a number that looks random, and is always the same for the same `number`: the last step of the generator
/// `SplitMix64`.
fn random_number(number: u64) -> u64 {
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn sample_of(range: Range<u64>) -> PageSample {
        PageSample::choose(vec![range], 7)
    }

    fn count_in(sample: &PageSample, range: &Range<u64>) -> usize {
        sample.addresses.iter().filter(|address| range.contains(address)).count()
    }

    #[test]
    fn each_range_has_addresses_in_proportion_to_its_size() {
        let (large, small) = (MIB..97 * MIB, 200 * MIB..232 * MIB);
        let sample = PageSample::choose(vec![small.clone(), large.clone()], 7);
        assert_eq!((count_in(&sample, &large), count_in(&sample, &small)), (96, 32));
        assert_eq!(sample, PageSample::choose(vec![large.clone(), small.clone()], 7));
        assert_ne!(sample, PageSample::choose(vec![large, small], 8), "another seed");
    }

    #[test]
    fn small_ranges_beside_many_large_ones_have_no_address() {
        let stacks = (0..1000).map(|number| (1000 + number) * MIB..(1000 + number) * MIB + MIB / 2);
        let arrays = (0..MAX_RANGES as u64).map(|number| 16 * number * MIB..16 * (number + 1) * MIB);
        let sample = PageSample::choose(stacks.chain(arrays).collect(), 7);
        assert_eq!((sample.addresses.len(), count_in(&sample, &(0..512 * MIB))), (128, 128));
    }

    #[test]
    fn little_memory_has_few_addresses_and_none_has_none() {
        assert_eq!(sample_of(8192..8192 + 3 * 4096).addresses.len(), 3);
        assert_eq!(PageSample::choose(Vec::new(), 7).addresses, []);
        assert_eq!(PageSample::choose(vec![0..10, 4..4], 7).addresses, []);
        assert_eq!(PageSample::choose(vec![0..u64::MAX, 0..u64::MAX], 7).addresses.len(), 128);
    }

    #[test]
    fn pages_that_alternate_between_two_nodes_are_found_on_both() {
        let sample = sample_of(0..1024 * MIB);
        let node = |address: &u64| u32::from(!(address / 4096).is_multiple_of(2));
        let nodes: Vec<Option<u32>> = sample.addresses.iter().map(|address| Some(node(address))).collect();
        let by_node = sample.estimate_bytes_by_node(&nodes, u64::MAX).unwrap();
        assert!(by_node[&0] > 300 * MIB && by_node[&1] > 300 * MIB, "{by_node:?}");
        assert_eq!(by_node[&0] + by_node[&1], 1024 * MIB);
    }

    #[test]
    fn the_pages_found_give_the_shares_of_the_anonymous_memory_and_few_pages_say_nothing() {
        let sample = sample_of(0..128 * MIB);
        let nodes = |near: usize, far: usize| {
            [vec![Some(0); near], vec![Some(1); far], vec![None; 128 - near - far]].concat()
        };
        let estimate =
            |near, far, anonymous| sample.estimate_bytes_by_node(&nodes(near, far), anonymous * MIB);
        let bytes = |near: u64, far: u64| Some(BTreeMap::from([(0, near * MIB), (1, far * MIB)]));
        assert_eq!(estimate(16, 48, 80), bytes(20, 60), "how many pages were found changes only the shares");
        assert_eq!(estimate(32, 96, 80), bytes(20, 60));
        assert_eq!(estimate(32, 96, 1000), bytes(32, 96), "of memory outside the ranges nothing is known");
        assert_eq!(estimate(15, 48, 80), None, "63 pages");
        assert_eq!(sample.estimate_bytes_by_node(&[], 80 * MIB), None);
    }
}
