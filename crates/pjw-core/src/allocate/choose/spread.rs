//! Spreads the cores of a request evenly over the machine.

use core::cmp::Reverse;

use super::Allocator;
use crate::allocate::tree::{CoreGroup, FreeCore, cores_by_group, count_to_cover, total_units};
use crate::basics::prelude::*;

impl Allocator<'_> {
    /// Chooses new cores of `others`, spread evenly over the machine. The cores `held` and the new cores together
    /// have at least `n` units (cores or logical CPUs). Each domain of a level, such as each NUMA node, then has the
    /// same number of cores as far as possible. Returns only the new cores. Returns all of `others` if these are too
    /// few.
    pub(super) fn add_evenly<'s>(
        &self,
        held: &[&FreeCore],
        others: &[&'s FreeCore],
        n: u32,
    ) -> Vec<&'s FreeCore> {
        let mut sizes: Vec<u32> = others.iter().map(|free_core| free_core.size).collect();
        sizes.sort_unstable();
        // The number of cores is computed with the smallest cores, so the chosen cores are enough in any
        // case.
        let needed = count_to_cover(sizes, n.saturating_sub(total_units(held)));
        self.distribute_evenly(held, others, needed as usize, 0)
    }

    /// Chooses `count` cores of `others`, divided evenly among the domains of a level, such as NUMA nodes. The number
    /// of cores in a domain includes the cores of `held`. `depth` is the index of the level. The cores of each domain
    /// are divided evenly among its smaller domains too. Returns all of `others` if these are fewer than `count`.
    fn distribute_evenly<'s>(
        &self,
        held: &[&FreeCore],
        others: &[&'s FreeCore],
        count: usize,
        depth: usize,
    ) -> Vec<&'s FreeCore> {
        if depth >= self.levels.len() {
            return others.iter().copied().take(count).collect();
        }
        let held = cores_by_group(held, depth);
        let holes = cores_by_group(others, depth);
        // For each group: the number of its held and chosen cores, the number of cores left, the order among equal
        // groups. The first entry is the group that gets the next core.
        let mut filling: BTreeSet<_> = holes
            .iter()
            .map(|(group, hole)| {
                (held.get(group).map_or(0, Vec::len), Reverse(hole.len()), self.rank(*group), *group)
            })
            .collect();
        let mut counts: BTreeMap<CoreGroup, usize> = BTreeMap::new();
        for _ in 0..count {
            let Some((filled, Reverse(left), rank, group)) = filling.pop_first() else { break };
            *counts.entry(group).or_default() += 1;
            if left > 1 {
                filling.insert((filled + 1, Reverse(left - 1), rank, group));
            }
        }
        let mut chosen = Vec::new();
        for (group, count) in counts {
            let hole = holes.get(&group).map(Vec::as_slice).unwrap_or_default();
            let held = held.get(&group).map(Vec::as_slice).unwrap_or_default();
            chosen.extend(self.distribute_evenly(held, hole, count, depth + 1));
        }
        chosen
    }
}
