//! An exact search for the fewest domains that hold a request.
//!
//! Taking the largest hole first is optimal for one level, and nearly always for all levels together. Where
//! it is not (two other packages hold the request on fewer NUMA nodes), this search finds the optimum. The
//! cost of a choice is its number of domains, with larger levels more significant; the costs of parts add up.
//! For each part of the machine the search keeps only solutions that no other solution beats in both cost and
//! units (the Pareto frontier). Frontiers are combined two by two, so combinations of domains are never
//! enumerated.

use core::cmp::Reverse;

use crate::allocate::tree::{CoreGroup, FreeCore, cores_by_group, count_to_cover, total_units};
use crate::basics::prelude::*;

/// The number of bits of a cost for each level. 2^20 is more than the number of domains of any machine.
const BITS: usize = 20;

/// The cost of `count` domains at `depth`, on a machine with `level_count` levels.
fn cost(count: usize, depth: usize, level_count: usize) -> u64 {
    (count as u64) << (BITS * (level_count - 1 - depth))
}

/// A choice of domains in a part of the machine: the number of units (cores or logical CPUs) that the domains provide,
/// and the cost (the weighted number of the domains).
#[derive(Debug, Clone, Copy, Default)]
struct Solution {
    cost: u64,
    units: u32,
    /// The index of the solution for the earlier parts, in their frontier. Not used at the smallest level.
    earlier: usize,
    /// The index of the solution for the last part, in the frontier of that part. Not used at the smallest level.
    last: usize,
}

/// A domain or the whole machine, with the frontier of its solutions.
struct Part<'s> {
    depth: usize,
    inside: Contents<'s>,
    /// The solutions, by rising cost and rising units. The first solution is empty.
    frontier: Vec<Solution>,
}

enum Contents<'s> {
    /// The free cores, divided into the smallest domains.
    Holes(Vec<&'s FreeCore>),
    /// The smaller parts. Each has the combined frontier of itself and all parts before it.
    Parts(Vec<(Part<'s>, Vec<Solution>)>),
}

/// A part of the result of [`fewest_domains`]: some cores, and the number of units (cores or logical CPUs) to choose
/// from them.
pub(super) struct CoreShare<'s> {
    /// The cores to choose from.
    pub(super) free_cores: Vec<&'s FreeCore>,
    /// The number of units to choose.
    pub(super) units: u32,
    /// The index of the largest level whose domains still have to be chosen, in `Topology::levels`.
    pub(super) depth: usize,
}

/// Finds the fewest domains whose cores in `free_cores` have `n` units (cores or logical CPUs). A domain is a package,
/// a NUMA node or an L3 cache. A larger domain counts more than all smaller domains together. `level_count` is the
/// number of levels of domains on the machine.
///
/// Returns the cost and a list of shares. The cost is the weighted number of the domains. A share is a group of cores,
/// with the number of units that the caller is to choose from this group. The numbers of all shares together are `n`.
/// Returns `None` if `free_cores` have fewer than `n` units.
pub(super) fn fewest_domains<'s>(
    free_cores: &[&'s FreeCore],
    n: u32,
    level_count: usize,
) -> Option<(u64, Vec<CoreShare<'s>>)> {
    let all = build_part(free_cores.to_vec(), 0, level_count, n);
    let index = all.frontier.iter().position(|solution| solution.units >= n)?;
    let mut shares = Vec::new();
    all.add_shares(index, &mut shares);
    // Units beyond `n` are taken from the largest share.
    let sum: u32 = shares.iter().map(|share| share.units).sum();
    if let Some(largest) = shares.iter_mut().rev().max_by_key(|share| share.units) {
        largest.units = largest.units.saturating_sub(sum.saturating_sub(n));
    }
    Some((all.frontier[index].cost, shares))
}

/// Builds the tree of the domains that contain `free_cores`, and finds the best choices of domains. A domain is a
/// package, a NUMA node or an L3 cache.
///
/// - A solution is a choice of domains. It provides units (cores or logical CPUs), at most `n`. Its cost is the
///   weighted number of its domains.
/// - The frontier of each part has the solutions that no other solution beats in both cost and units.
/// - `depth` is the index in `Topology::levels` of the level into whose domains the cores are divided first. The next
///   smaller levels follow.
/// - `level_count` is the number of levels.
fn build_part<'s>(free_cores: Vec<&'s FreeCore>, depth: usize, level_count: usize, n: u32) -> Part<'s> {
    if depth + 1 >= level_count {
        let frontier = smallest_level_frontier(&free_cores, depth, level_count, n);
        return Part { depth, inside: Contents::Holes(free_cores), frontier };
    }
    let mut frontier = vec![Solution::default()];
    let mut parts = Vec::new();
    for (group, free_cores) in cores_by_group(&free_cores, depth) {
        let mut below = build_part(free_cores, depth + 1, level_count, n);
        let own_cost = cost(usize::from(group.is_domain()), depth, level_count);
        below.frontier.iter_mut().skip(1).for_each(|solution| solution.cost += own_cost);
        frontier = combine_frontiers(&frontier, &below.frontier, n);
        parts.push((below, frontier.clone()));
    }
    Part { depth, inside: Contents::Parts(parts), frontier }
}

/// Returns the frontier of a part of the machine that is divided only into domains of the smallest level. The
/// frontier has the solutions (choices of domains) that no other solution beats in both cost and units (cores or
/// logical CPUs).
///
/// - A group has the cores of `free_cores` in one domain, or cores of `free_cores` that are in no domain. The groups of
///   cores in no domain come first, because they cost nothing. Then the domains follow, those with the most units in
///   `free_cores` first.
/// - Solution `i` in the result uses the first `i` groups. Its units are counted up to `n`.
/// - The result ends at the first solution with `n` units, or at the solution that uses all groups.
/// - `depth` is the index of the smallest level, and `level_count` the number of levels.
fn smallest_level_frontier(
    free_cores: &[&FreeCore],
    depth: usize,
    level_count: usize,
    n: u32,
) -> Vec<Solution> {
    let mut sizes: Vec<(u64, u32)> = cores_by_group(free_cores, depth)
        .into_iter()
        .map(|(group, hole)| (cost(usize::from(group.is_domain()), depth, level_count), total_units(&hole)))
        .collect();
    sizes.sort_unstable_by_key(|&(cost, units)| (cost, Reverse(units)));
    let mut frontier = vec![Solution::default()];
    let (mut cost, mut units) = (0, 0u32);
    for (group_cost, group_units) in sizes {
        if units >= n {
            break;
        }
        cost += group_cost;
        units = units.saturating_add(group_units).min(n);
        frontier.push(Solution { cost, units, ..Solution::default() });
    }
    frontier
}

/// Returns the frontier of two parts of the machine together. `one` and `other` are the frontiers of the parts. A
/// frontier has the solutions (choices of domains) that no other solution beats in both cost and units (cores or
/// logical CPUs). Each solution of the result combines a solution of `one` with a solution of `other`, and counts at
/// most `n` units. The result also has the solution without units.
fn combine_frontiers(one: &[Solution], other: &[Solution], n: u32) -> Vec<Solution> {
    let max_units = |frontier: &[Solution]| frontier.last().map_or(0, |solution| solution.units);
    let length = max_units(one).saturating_add(max_units(other)).min(n) as usize + 1;
    let mut best: Vec<Option<Solution>> = vec![None; length];
    for (earlier, first) in one.iter().enumerate() {
        for (last, second) in other.iter().enumerate() {
            let units = first.units.saturating_add(second.units).min(n);
            let cost = first.cost + second.cost;
            let solution = &mut best[units as usize];
            if solution.is_none_or(|solution| cost < solution.cost) {
                *solution = Some(Solution { cost, units, earlier, last });
            }
        }
    }
    let mut frontier: Vec<Solution> = Vec::new();
    for solution in best.into_iter().rev().flatten() {
        // The empty solution is always kept: with it, the domain is not used.
        if solution.units == 0 || frontier.last().is_none_or(|larger| solution.cost < larger.cost) {
            frontier.push(solution);
        }
    }
    frontier.reverse();
    frontier
}

impl<'s> Part<'s> {
    /// Adds to `shares` the cores of the domains in a solution (a choice of domains). Each share has the number of
    /// units (cores or logical CPUs) that are to be chosen from its cores. `index` is the index of the solution in
    /// `frontier`. Adds nothing for a solution without units.
    fn add_shares(&self, index: usize, shares: &mut Vec<CoreShare<'s>>) {
        let units = self.frontier[index].units;
        if units == 0 {
            return;
        }
        match &self.inside {
            Contents::Holes(free_cores) => {
                shares.push(CoreShare { free_cores: free_cores.clone(), units, depth: self.depth });
            }
            Contents::Parts(parts) => {
                let mut index = index;
                for (part, frontier) in parts.iter().rev() {
                    part.add_shares(frontier[index].last, shares);
                    index = frontier[index].earlier;
                }
            }
        }
    }
}

/// Returns the cost of a choice of cores: the number of domains (packages, NUMA nodes and L3 caches) in which the cores
/// lie. The number is weighted: one domain of a larger level costs more than all domains of the smaller levels
/// together. `level_count` is the number of levels of domains on the machine.
pub(super) fn domain_cost(free_cores: &[&FreeCore], level_count: usize) -> u64 {
    let count = |depth: usize| {
        let mut groups: Vec<CoreGroup> = free_cores.iter().map(|free_core| free_core.groups[depth]).collect();
        // Neighbouring cores are mostly in the same group, so this leaves few groups to sort.
        groups.dedup();
        groups.sort_unstable();
        groups.dedup();
        groups.iter().filter(|group| group.is_domain()).count()
    };
    (0..level_count).map(|depth| cost(count(depth), depth, level_count)).sum()
}

/// Returns a cost that every choice of `n` units (cores or logical CPUs) reaches or exceeds. The cost is the weighted
/// number of domains (packages, NUMA nodes and L3 caches) of the choice. `sizes` has, for each level, the number of
/// available units in each domain. The bound assumes that each level uses only its largest domains.
pub(super) fn lower_bound(sizes: &[BTreeMap<CoreGroup, u32>], n: u32) -> u64 {
    let fewest = |holes: &BTreeMap<CoreGroup, u32>| {
        let (mut domains, mut outside_units) = (Vec::new(), 0u32);
        for (group, &units) in holes {
            if group.is_domain() { domains.push(units) } else { outside_units += units }
        }
        domains.sort_unstable_by_key(|&units| Reverse(units));
        count_to_cover(domains, n.saturating_sub(outside_units)) as usize
    };
    sizes.iter().enumerate().map(|(depth, holes)| cost(fewest(holes), depth, sizes.len())).sum()
}
