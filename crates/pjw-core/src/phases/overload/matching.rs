//! Gives each of several threads a PU of its own inside its mask, as far as that is possible.
//!
//! This is a maximum matching of threads and PUs by augmenting paths. A search for a path visits each PU and each
//! thread at most once, and PUs from which no path leads to a free PU are not visited again. So the time is at most
//! quadratic in the number of threads.

use alloc::collections::VecDeque;

use crate::basics::{CpuSet, Pu, prelude::*};
use crate::machine::Topology;

/// An assignment of threads to PUs (logical CPUs): each assigned thread has one PU, and each PU has at most one thread.
pub(crate) struct ThreadPuMatching<'a> {
    topology: &'a Topology,
    /// All PUs that threads can get.
    pus: &'a CpuSet,
    /// The masks of the threads that have a PU, by the index of the thread.
    masks: Vec<&'a CpuSet>,
    /// The PUs of these threads, by the index of the thread.
    pu_of: Vec<Pu>,
    /// The index of the thread on each PU.
    thread_on: BTreeMap<Pu, usize>,
    /// The PUs without a thread.
    free: CpuSet,
    /// The PUs of the cores without a thread.
    on_idle_cores: CpuSet,
    /// PUs whose threads can only exchange these PUs among each other.
    saturated: CpuSet,
}

impl<'a> ThreadPuMatching<'a> {
    /// Makes an empty assignment for the PUs (logical CPUs) `pus`.
    pub(crate) fn new(topology: &'a Topology, pus: &'a CpuSet) -> Self {
        Self {
            topology,
            pus,
            masks: Vec::new(),
            pu_of: Vec::new(),
            thread_on: BTreeMap::new(),
            free: pus.clone(),
            on_idle_cores: pus.clone(),
            saturated: CpuSet::new(),
        }
    }

    /// Returns the PUs (logical CPUs) to which no thread is assigned.
    pub(crate) fn free_pus(&self) -> &CpuSet {
        &self.free
    }

    /// Returns the number of cores that have no assigned thread on any PU (logical CPU).
    pub(crate) fn idle_core_count(&self) -> usize {
        self.topology.overlapping_core_count(&self.on_idle_cores) as usize
    }

    /// Returns the PU (logical CPU) of each assigned thread, in the order in which the threads were added.
    pub(crate) fn assigned_pus(&self) -> &[Pu] {
        &self.pu_of
    }

    /// Assigns one more thread to a PU (logical CPU) in its affinity mask `mask`, on an idle core if possible. Returns
    /// whether the thread got a PU. If necessary, threads that were added earlier get another PU of their masks, but
    /// none loses its PU without a replacement. So the first thread has the highest priority. `mask` must be a subset
    /// of the PUs of the assignment.
    pub(crate) fn add_thread(&mut self, mask: &'a CpuSet) -> bool {
        let unused = mask.first_common(&self.on_idle_cores).or_else(|| mask.first_common(&self.free));
        let new = self.pu_of.len();
        let path = match unused {
            Some(pu) => Some((pu, BTreeMap::from([(pu, new)]))),
            None => self.find_path(mask, new),
        };
        let Some((free, wanted_by)) = path else { return false };
        self.masks.push(mask);
        self.pu_of.push(free);
        self.assign_along_path(free, &wanted_by);
        true
    }

    /// Searches a chain of threads that ends at a free PU: each thread can get the PU of the next thread, and the last
    /// one can get the free PU. The chain begins with the new thread, which has the index `new` and the mask `mask`.
    /// Returns the free PU, and for each visited PU the index of the thread that would get this PU. `None` if there is
    /// no such chain. The visited PUs are then saturated: later searches leave them out.
    fn find_path(&mut self, mask: &CpuSet, new: usize) -> Option<(Pu, BTreeMap<Pu, usize>)> {
        let mut wanted_by = BTreeMap::new();
        let mut unvisited = self.pus.difference(&self.saturated);
        let mut queue = VecDeque::from([new]);
        while let Some(thread) = queue.pop_front() {
            let mask = self.masks.get(thread).copied().unwrap_or(mask);
            while let Some(pu) = mask.first_common(&unvisited) {
                unvisited.remove(pu);
                wanted_by.insert(pu, thread);
                let Some(&holder) = self.thread_on.get(&pu) else { return Some((pu, wanted_by)) };
                queue.push_back(holder);
            }
        }
        self.saturated.extend(wanted_by.into_keys());
        None
    }

    /// Moves each thread of a chain to the PU of the next thread, so that the new thread gets a PU. `wanted_by` has the
    /// thread that would get each PU. The PU `free` goes to the last thread of the chain, the former PU of this thread
    /// to the thread before, and so on.
    fn assign_along_path(&mut self, free: Pu, wanted_by: &BTreeMap<Pu, usize>) {
        self.free.remove(free);
        self.on_idle_cores = self.on_idle_cores.difference(&self.topology.core_cpus(free));
        let mut vacant = free;
        while let Some(&thread) = wanted_by.get(&vacant) {
            self.thread_on.insert(vacant, thread);
            let Some(pu) = self.pu_of.get_mut(thread) else { return };
            let former = core::mem::replace(pu, vacant);
            if thread + 1 == self.masks.len() {
                return;
            }
            vacant = former;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cpu_set, regular_topology};
    use proptest::prelude::*;

    /// Adds threads with these masks in their order. Returns whether each got a PU, and the PUs.
    fn matched(masks: &[CpuSet]) -> (Vec<bool>, Vec<Pu>) {
        let (topology, pus) = (regular_topology(2, 1, 1, 2, 2), cpu_set("0-7"));
        let mut matching = ThreadPuMatching::new(&topology, &pus);
        let has_pu = masks.iter().map(|mask| matching.add_thread(mask)).collect();
        (has_pu, matching.assigned_pus().to_vec())
    }

    #[test]
    fn an_earlier_thread_makes_room_for_a_later_one() {
        let (has_pu, pus) = matched(&[cpu_set("0-1"), cpu_set("1-2"), cpu_set("0")]);
        assert_eq!((has_pu, pus), (vec![true; 3], vec![Pu(1), Pu(2), Pu(0)]));
    }

    #[test]
    fn a_thread_gets_an_idle_core_if_its_mask_has_one() {
        assert_eq!(matched(&[cpu_set("0,4"), cpu_set("0-1,4-5"), cpu_set("0-7")]).1, [Pu(0), Pu(1), Pu(2)]);
    }

    #[test]
    fn of_three_threads_on_two_pus_the_last_gets_none() {
        let masks = [cpu_set("0,4"), cpu_set("0,4"), cpu_set("0,4"), cpu_set("0"), cpu_set("0-1")];
        assert_eq!(matched(&masks).0, [true, true, false, false, true]);
    }

    /// The largest number of threads that can get a PU each, by Hall's theorem: for each set of PUs, at most its size
    /// of the threads whose masks lie in it.
    fn most_by_hall(masks: &[CpuSet]) -> usize {
        let sets = (0u64..256).map(|word| CpuSet::from_words(&[word]));
        let excess = sets.map(|pus| {
            let inside = masks.iter().filter(|mask| mask.is_subset(&pus)).count();
            inside.saturating_sub(pus.len())
        });
        masks.len() - excess.max().unwrap_or(0)
    }

    proptest! {
        #[test]
        fn as_many_threads_as_possible_get_a_pu_of_their_own_mask(
            words in proptest::collection::vec(1u64..256, 0..12),
        ) {
            let masks: Vec<CpuSet> = words.iter().map(|&word| CpuSet::from_words(&[word])).collect();
            let (has_pu, pus) = matched(&masks);
            let placed: Vec<&CpuSet> =
                masks.iter().zip(&has_pu).filter(|(_, has_pu)| **has_pu).map(|(mask, _)| mask).collect();
            prop_assert_eq!(placed.len(), pus.len());
            prop_assert!(placed.iter().zip(&pus).all(|(mask, pu)| mask.contains(*pu)));
            prop_assert_eq!(pus.iter().copied().collect::<CpuSet>().len(), pus.len());
            prop_assert_eq!(pus.len(), most_by_hall(&masks));
            // The first threads have priority: a thread without a PU adds nothing to those before it.
            for (index, has_pu) in has_pu.iter().enumerate() {
                let gain = most_by_hall(&masks[..=index]) - most_by_hall(&masks[..index]);
                prop_assert_eq!(gain == 1, *has_pu);
            }
        }
    }
}
