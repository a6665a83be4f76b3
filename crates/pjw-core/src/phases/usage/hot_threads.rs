//! The hot threads of a job at the end of a sample, and whether their program bound too many of them to the same PUs.

use crate::basics::{CpuSet, prelude::*};
use crate::state::WardenState;
use crate::terms::JobId;

/// A thread of which at least this share of the time is waiting, in permille, waits for a PU.
const WAITING_PERMILLE: u32 = 200;

/// With more masks than this, no mask is compared with the others: that would take too long in each sample.
const MAX_COMPARED_MASKS: usize = 256;

/// The number of hot threads of a job (threads that run or wait for a PU, a logical CPU, most of the time). Also the
/// number of those hot threads that their program bound to a part of the job's PUs.
#[derive(Debug, Default)]
pub(super) struct HotThreads {
    /// The number of all hot threads, bound or not.
    pub(super) count: u32,
    /// The hot threads with a binding that is in force, by the PUs of the binding.
    bound: BTreeMap<CpuSet, BoundThreads>,
}

/// The hot threads that are bound to the same PUs.
#[derive(Debug, Default)]
struct BoundThreads {
    count: usize,
    /// Whether one of them waits for a PU.
    has_waiters: bool,
}

impl HotThreads {
    /// Counts the hot threads of `job` (threads that run or wait for a PU, a logical CPU, most of the time). Counts
    /// separately, by the PUs of the binding, the hot threads that their program bound to a part of the job's PUs. A
    /// binding that pjw has lifted (replaced by another mask) does not count as a binding. Visits only the active
    /// threads of active processes, which recently ran or waited. The result is 0 if the job is unknown.
    pub(super) fn of_job(state: &WardenState, job: &JobId) -> Self {
        let online = state.pool.online_cpus();
        let grant = state.jobs.get(job).and_then(|job| job.online_granted_cpus(&online)).unwrap_or_default();
        let mut hot_threads = Self::default();
        let active = state.members.active_pids_of(job).filter_map(|pid| state.members.get(&pid));
        for member in active {
            let active = state.members.active_threads_of(member.id.pid);
            for (_, thread) in member.living_threads_in(active).filter(|(_, thread)| thread.demand.is_hot) {
                hot_threads.count += 1;
                let Some(entry) = thread.mask_entry.as_ref() else { continue };
                let own = state.program_bound_cpus(&grant, member, entry);
                if own != grant && !entry.is_binding_lifted(&own) {
                    let waits = thread.demand.waiting_permille >= WAITING_PERMILLE;
                    hot_threads.add_bound(own, waits);
                }
            }
        }
        hot_threads
    }

    fn add_bound(&mut self, own: CpuSet, waits: bool) {
        let bound = self.bound.entry(own).or_default();
        bound.count += 1;
        bound.has_waiters |= waits;
    }

    /// Returns whether a hot thread waits for a PU because its program bound it. This is so if a thread waits, and more
    /// hot threads of the job are bound to PUs of its mask than the mask has PUs. Otherwise, each of these threads
    /// could have a PU: a thread that waits then waits for another program or for a thread without a binding.
    ///
    /// With more than 256 different masks, only the threads with exactly the same mask are counted.
    pub(super) fn has_bound_waiters(&self) -> bool {
        let compares = self.bound.len() <= MAX_COMPARED_MASKS;
        let mut with_waiters = self.bound.iter().filter(|(_, bound)| bound.has_waiters);
        with_waiters.any(|(mask, bound)| {
            // Only a mask with several PUs can contain other masks.
            bound.count > mask.len() || (compares && mask.len() > 1 && self.bound_inside(mask) > mask.len())
        })
    }

    fn bound_inside(&self, mask: &CpuSet) -> usize {
        let inside = self.bound.iter().filter(|(other, _)| other.is_subset(mask));
        inside.map(|(_, bound)| bound.count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::cpu_set;

    /// Whether threads with these masks have waiters that count as bound. A mask with a `w` at its end is that of a
    /// thread that waits.
    fn has_bound_waiters(masks: &[&str]) -> bool {
        let mut hot_threads = HotThreads::default();
        for mask in masks {
            let cpus = mask.trim_end_matches('w');
            hot_threads.add_bound(cpu_set(cpus), cpus.len() < mask.len());
        }
        hot_threads.has_bound_waiters()
    }

    #[test]
    fn a_waiter_alone_in_its_mask_is_not_bound() {
        assert!(!has_bound_waiters(&[]));
        assert!(!has_bound_waiters(&["0w"]));
        assert!(!has_bound_waiters(&["0w", "1w", "2w"]));
        assert!(!has_bound_waiters(&["0-1w", "0-1w"]), "each of the two has a PU of the mask");
    }

    #[test]
    fn waiters_are_bound_if_more_threads_are_bound_inside_their_mask_than_it_has_pus() {
        assert!(has_bound_waiters(&["0w", "0"]));
        assert!(has_bound_waiters(&["0-1w", "0-1", "0-1"]));
        assert!(has_bound_waiters(&["0-1w", "0", "1"]), "the masks of the others are parts of the mask");
        assert!(!has_bound_waiters(&["0-1w", "0", "2"]), "one of the others is bound outside of the mask");
        assert!(!has_bound_waiters(&["0-1w", "0", "1-2"]), "the mask of one of the others is wider");
    }

    #[test]
    fn threads_that_share_their_mask_and_do_not_wait_are_not_counted_as_waiters() {
        assert!(!has_bound_waiters(&["0", "0", "1w"]));
    }

    #[test]
    fn with_very_many_masks_only_threads_with_the_same_mask_are_counted() {
        let parts = ["0-1w", "0", "1", "0"];
        let others: Vec<String> = (2..2 + MAX_COMPARED_MASKS).map(|pu| pu.to_string()).collect();
        let others: Vec<&str> = others.iter().map(String::as_str).collect();
        assert!(has_bound_waiters(&parts));
        assert!(!has_bound_waiters(&[&parts[..], &others].concat()));
        assert!(has_bound_waiters(&[&["0-1w", "0-1", "0-1"], &others[..]].concat()));
    }
}
