//! Chooses among the available cores: best fit on the levels of the machine.
//!
//! The available cores in one domain are a *hole*. The code assumes no order of levels: [`Topology::levels`]
//! returns the order on this machine, and cores are grouped by the domains that they are in. All searches are
//! greedy. The slowest one sorts the cores once per level.

mod spread;

use core::cmp::Reverse;

use smallvec::SmallVec;

use crate::allocate::fewest::{CoreShare, domain_cost, fewest_domains, lower_bound};
use crate::allocate::groups::split_at_groups;
use crate::allocate::kinds::{common_core_kind, fastest_sufficient_kind, prefer_core_kind};
use crate::allocate::tree::{
    AllocationUnit, CoreGroup, CorePus, FreeCore, cores_by_group, count_split_cores, count_to_cover,
    take_cores, total_units, units_by_group, with_fewest_split_cores,
};
use crate::basics::{CpuSet, prelude::*};
use crate::machine::{Topology, TopologyLevel};

/// Chooses PUs (logical CPUs) for one request of a job, from the cores that are available for the request.
#[derive(Debug)]
pub(super) struct Allocator<'a> {
    topology: &'a Topology,
    unit: AllocationUnit,
    levels: &'a [TopologyLevel],
    free_cores: Vec<FreeCore>,
    /// The PUs of groups of threads that are not to be divided.
    groups: &'a [CpuSet],
}

/// The PUs (logical CPUs) that [`Allocator::choose`] chose for a request, and the reason for the choice.
#[derive(Debug)]
pub(super) struct PuChoice {
    /// The chosen PUs.
    pub(super) cpus: CpuSet,
    /// The reason for the choice.
    pub(super) reason: ChoiceReason,
    /// The only kind of core that was considered, if the machine has several kinds and one kind has enough
    /// cores.
    pub(super) kind: Option<u32>,
}

/// The reason why [`Allocator::choose`] chose certain PUs (logical CPUs). For example, the job keeps the PUs that it
/// holds.
#[derive(Debug)]
pub(super) enum ChoiceReason {
    /// The job keeps the PUs that it holds.
    Unchanged,
    /// The job holds more than requested and keeps these PUs.
    Shrunk,
    /// The job holds less than requested and gets more PUs.
    Grown {
        /// The PUs that were added.
        added: CpuSet,
    },
    /// The request is for PUs spread over the machine.
    Spread,
    /// The job holds nothing, and the best fit was chosen.
    Fit(FitTrace),
}

/// The result of the best-fit search, from which pjw explains to users why certain cores were chosen. A hole is the set
/// of available cores of one domain (an L3 cache, a NUMA node or a package).
#[derive(Debug, Default)]
pub(super) struct FitTrace {
    /// For each level without a hole of sufficient size, the largest hole, smallest level first.
    pub(super) too_small: Vec<Hole>,
    /// The chosen hole; `None` if no domain has enough cores.
    pub(super) chosen: Option<Hole>,
    /// The second-best hole.
    pub(super) second: Option<Hole>,
}

/// The available cores of one domain (an L3 cache, a NUMA node or a package). "Hole" is the term of best-fit allocation
/// for a free range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hole {
    /// The index of the level in [`Topology::levels`].
    pub(super) depth: usize,
    /// The domain within the level.
    pub(super) group: CoreGroup,
    /// The size, in the unit of the request.
    pub(super) size: u32,
}

impl<'a> Allocator<'a> {
    /// Makes the allocator for one request of a job.
    ///
    /// - `unit` says whether the request counts cores or PUs (logical CPUs), and whether single PUs are given out.
    /// - `available` has the PUs that the job may get. A core is available if all its online PUs are in `available`.
    ///   If single PUs are given out, a part of a core is available too.
    /// - `present` has the PUs that are preferred, such as the PUs that the job already holds.
    pub(super) fn new(
        topology: &'a Topology,
        unit: AllocationUnit,
        available: &CpuSet,
        online: &CpuSet,
        present: &CpuSet,
    ) -> Self {
        let levels = topology.levels();
        let mut free_cores = Vec::new();
        for (position, (pus, core)) in (0..).zip(topology.pus_by_core().zip(topology.cores())) {
            let online_pus: CorePus = pus.iter().copied().filter(|&pu| online.contains(pu)).collect();
            let available_pus: CorePus =
                online_pus.iter().copied().filter(|&pu| available.contains(pu)).collect();
            let whole = available_pus.len() == online_pus.len();
            let Some(&first) = available_pus.first() else { continue };
            let free_core = |pus: CorePus, held, whole| FreeCore {
                position,
                size: unit.count_in_core(&pus),
                pus,
                kind: core.kind_index,
                held,
                whole,
                groups: CoreGroup::groups_of_pu(topology, first),
            };
            if unit == AllocationUnit::AnyPu {
                let (held, unheld): (CorePus, CorePus) =
                    available_pus.into_iter().partition(|&pu| present.contains(pu));
                let untouched = whole && held.is_empty();
                if !held.is_empty() {
                    free_cores.push(free_core(held, true, whole));
                }
                if !unheld.is_empty() {
                    free_cores.push(free_core(unheld, false, untouched));
                }
            } else if whole {
                let held = available_pus.iter().any(|&pu| present.contains(pu));
                free_cores.push(free_core(available_pus, held, true));
            }
        }
        Self { topology, unit, levels, free_cores, groups: &[] }
    }

    /// Sets the groups of PUs (logical CPUs) that the job keeps together, if possible, when it gets fewer PUs than it
    /// holds. Threads with a common address space run on the PUs of each group. Each group lies in one L3 cache or one
    /// NUMA node.
    pub(super) fn with_groups(self, groups: &'a [CpuSet]) -> Self {
        Self { groups, ..self }
    }

    /// Returns the number of available cores, or of available PUs (logical CPUs) if single PUs are given out.
    pub(super) fn available_amount(&self) -> u32 {
        self.amount_of(self.free_cores.iter())
    }

    /// Returns the number of available cores if the request counts cores. Otherwise, returns the number of their PUs
    /// (logical CPUs).
    pub(super) fn available_units(&self) -> u32 {
        total_units(&self.free_cores.iter().collect::<Vec<_>>())
    }

    /// Returns the number of `free_cores`. If single PUs of any core are given out, returns the number of their PUs
    /// instead.
    fn amount_of<'s>(&self, free_cores: impl Iterator<Item = &'s FreeCore>) -> u32 {
        match self.unit {
            AllocationUnit::AnyPu => free_cores.map(|free_core| free_core.size).sum(),
            AllocationUnit::Core | AllocationUnit::Pu => saturating_u32(free_cores.count()),
        }
    }

    /// Returns the number of available cores that the job does not hold, and the PUs (logical CPUs) of these cores. If
    /// single PUs are given out, the number is the number of these PUs.
    pub(super) fn available_unheld(&self) -> (u32, CpuSet) {
        let others = || self.free_cores.iter().filter(|free_core| !free_core.held);
        let cpus = others().flat_map(|free_core| free_core.pus.iter().copied()).collect();
        (self.amount_of(others()), cpus)
    }

    /// Returns how many cores a request for `units` units needs. A unit is a core or a PU (logical CPU), as the
    /// request counts. The available cores with the most units are counted first. If all available cores have too few
    /// units, each missing core is assumed to be as large as the largest core of the machine. If single PUs are given
    /// out, returns `units`.
    pub(super) fn needed_amount(&self, units: u32) -> u32 {
        let largest = match self.unit {
            AllocationUnit::AnyPu => return units,
            AllocationUnit::Core => 1,
            AllocationUnit::Pu => {
                saturating_u32(self.topology.pus_by_core().map(<[_]>::len).max().unwrap_or(1))
            }
        };
        let mut sizes: Vec<u32> = self.free_cores.iter().map(|free_core| free_core.size).collect();
        sizes.sort_unstable_by_key(|&size| Reverse(size));
        let available = sizes.iter().fold(0u32, |sum, &size| sum.saturating_add(size));
        let missing = units.saturating_sub(available).div_ceil(largest);
        count_to_cover(sizes, units).saturating_add(missing)
    }

    /// Returns the largest number of available cores in one domain of the level `level`. A domain is an L3 cache, a
    /// NUMA node or a package. Counts PUs (logical CPUs) instead if single PUs are given out. If the machine lacks
    /// `level`, uses the next larger level. If the machine lacks all larger levels too, returns the number on the
    /// whole machine.
    pub(super) fn largest_in_one_domain(&self, level: TopologyLevel) -> u32 {
        let depth = [TopologyLevel::L3, TopologyLevel::NumaNode, TopologyLevel::Package]
            .into_iter()
            .filter(|&other| other >= level)
            .find_map(|level| self.levels.iter().position(|&other| other == level));
        let Some(depth) = depth else { return self.available_amount() };
        let free_cores: Vec<&FreeCore> = self.free_cores.iter().collect();
        let holes = cores_by_group(&free_cores, depth).into_iter().filter(|(group, _)| group.is_domain());
        holes.map(|(_, hole)| self.amount_of(hole.into_iter())).max().unwrap_or(0)
    }

    /// Chooses PUs (logical CPUs) for the job. The request is for `n` units: cores, or PUs if the request counts PUs.
    ///
    /// - The choice has whole cores, and so may have more than `n` PUs. If single PUs are given out, it has exactly
    ///   `n` PUs.
    /// - The PUs that the job holds are preferred. New PUs are near the held ones.
    /// - If the job holds nothing, the choice is the best fit ([`Allocator::best_fit`]).
    /// - If `spread` is true, the PUs are spread evenly over the machine instead.
    ///
    /// Returns `None` if fewer than `n` units are available.
    pub(super) fn choose(&self, n: u32, spread: bool) -> Option<PuChoice> {
        let (held, others): (Vec<&FreeCore>, Vec<&FreeCore>) =
            self.free_cores.iter().partition(|free_core| free_core.held);
        let held_units = total_units(&held);
        if held_units.saturating_add(total_units(&others)) < n {
            return None;
        }
        // If cores have different sizes, growing may leave a surplus of less than one core. Giving the
        // surplus back would change the grant when the same request is repeated.
        let largest = held.iter().map(|free_core| free_core.size).max().unwrap_or(1);
        let min_surplus = if self.unit == AllocationUnit::AnyPu { 1 } else { largest };
        if held_units >= n && held_units - n < min_surplus {
            return Some(self.trim_to_request(held, n, ChoiceReason::Unchanged, None));
        }
        if held_units >= n {
            let (kind, same_kind) = fastest_sufficient_kind(held, n);
            let (kept, others) = split_at_groups(self.groups, same_kind, n, self.unit);
            let more = if spread {
                self.add_evenly(&kept, &others, n)
            } else {
                self.add_nearest(&kept, others, n.saturating_sub(total_units(&kept)))
            };
            // `trim_to_request` drops cores at the beginning of the list first, so `kept` comes last.
            return Some(self.trim_to_request(chain(more, kept), n, ChoiceReason::Shrunk, kind));
        }
        let (kind, same_kind) = match common_core_kind(&held) {
            Some(kind) => prefer_core_kind(others, kind, n - held_units),
            None => fastest_sufficient_kind(others, n - held_units),
        };
        if spread {
            let added = self.add_evenly(&held, &same_kind, n);
            let reason = if held.is_empty() { ChoiceReason::Spread } else { grown(&added) };
            return Some(self.trim_to_request(chain(held, added), n, reason, kind));
        }
        if held.is_empty() {
            let (mut chosen, trace) = self.best_fit(&same_kind, n);
            if self.unit == AllocationUnit::AnyPu {
                chosen = with_fewest_split_cores(&same_kind, chosen, n);
            }
            return Some(self.trim_to_request(chosen, n, ChoiceReason::Fit(trace), kind));
        }
        let added = self.add_nearest(&held, same_kind, n - held_units);
        let reason = grown(&added);
        Some(self.trim_to_request(chain(held, added), n, reason, kind))
    }

    /// Makes the choice from the cores in `chosen`, and drops the cores that are not needed. The request is for `n`
    /// units (cores or logical CPUs).
    ///
    /// - Cores at the beginning of the list are dropped first.
    /// - Cores that the job already holds are dropped only if `reason` is [`ChoiceReason::Shrunk`].
    /// - If single PUs are given out, all PUs after the first `n` are dropped too.
    ///
    /// `kind` is the only kind of core (CPU core type) that was considered. `None` if all kinds were considered.
    fn trim_to_request(
        &self,
        mut chosen: Vec<&FreeCore>,
        n: u32,
        reason: ChoiceReason,
        kind: Option<u32>,
    ) -> PuChoice {
        let mut spare = total_units(&chosen).saturating_sub(n);
        if self.unit != AllocationUnit::Core && spare > 0 {
            let keep_held = !matches!(reason, ChoiceReason::Shrunk);
            chosen.retain(|free_core| {
                let needed = (keep_held && free_core.held) || free_core.size > spare;
                spare -= if needed { 0 } else { free_core.size };
                needed
            });
        }
        let mut pus: Vec<_> = chosen.iter().flat_map(|free_core| free_core.pus.iter().copied()).collect();
        if self.unit == AllocationUnit::AnyPu {
            pus.truncate(n as usize);
        }
        let has_other_kinds = self.topology.cores().iter().any(|core| Some(core.kind_index) != kind);
        PuChoice { cpus: pus.into_iter().collect(), reason, kind: kind.filter(|_| has_other_kinds) }
    }

    /// Chooses `n` units (cores or logical CPUs) of `free_cores` by best fit: from the smallest domain that has
    /// enough. A domain is an L3 cache, a NUMA node or a package. Inside the chosen domain, chooses as few smaller
    /// domains as possible. If no domain has `n` units, chooses as few domains as possible. Returns the chosen cores,
    /// and the trace (the domains that were considered), from which pjw explains the choice to users.
    fn best_fit<'s>(&self, free_cores: &[&'s FreeCore], n: u32) -> (Vec<&'s FreeCore>, FitTrace) {
        let sizes: SmallVec<[BTreeMap<CoreGroup, u32>; 3]> =
            (0..self.levels.len()).map(|depth| units_by_group(free_cores, depth)).collect();
        let mut trace = FitTrace::default();
        // The domains with enough cores, of the smallest level that has such domains, best domain first.
        let mut candidates: Vec<Vec<&FreeCore>> = Vec::new();
        for depth in (0..self.levels.len()).rev() {
            // The sort key: the number of cores that would be shared with other jobs (if PUs are given out
            // one by one), the size of the hole, the sizes of the larger holes around it, the number of the
            // domain.
            let mut fitting: Vec<_> = cores_by_group(free_cores, depth)
                .into_iter()
                .filter(|(group, _)| sizes[depth].get(group).is_some_and(|&size| size >= n))
                .map(|(group, hole)| {
                    let units_around = |depth: usize| {
                        let group = hole.first().map(|free_core| free_core.groups[depth]);
                        group.and_then(|group| sizes[depth].get(&group)).copied().unwrap_or(0)
                    };
                    let split =
                        if self.unit == AllocationUnit::AnyPu { count_split_cores(&hole, n) } else { 0 };
                    let key: SmallVec<[u32; 4]> =
                        core::iter::once(split).chain((0..=depth).rev().map(units_around)).collect();
                    ((key, self.rank(group), group), hole)
                })
                .collect();
            fitting.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
            let hole = |group| Hole { depth, group, size: sizes[depth].get(&group).copied().unwrap_or(0) };
            if let Some(chosen) = trace.chosen {
                let core = free_cores.iter().find(|free_core| free_core.groups[chosen.depth] == chosen.group);
                let group_around_chosen = core.map(|free_core| free_core.groups[depth]);
                let next = fitting.iter().find(|((_, _, group), _)| Some(*group) != group_around_chosen);
                trace.second = trace.second.or(next.map(|((_, _, group), _)| hole(*group)));
            } else if let [((_, _, group), _), others @ ..] = fitting.as_slice() {
                trace.chosen = Some(hole(*group));
                trace.second = others.first().map(|((_, _, group), _)| hole(*group));
                candidates = fitting.into_iter().map(|(_, free_cores)| free_cores).collect();
            } else {
                let largest = sizes[depth]
                    .iter()
                    .min_by_key(|&(group, size)| (Reverse(size), self.rank(*group), *group));
                trace.too_small.extend(largest.map(|(&group, _)| hole(group)));
            }
        }
        if candidates.is_empty() {
            candidates.push(free_cores.to_vec());
        }
        let below = trace.chosen.map_or(0, |hole| hole.depth + 1);
        let chosen = self.choose_from_domains(&candidates[0], n, below);
        let bound = lower_bound(&sizes, n);
        match self.with_fewer_domains(&candidates, n, &chosen, bound) {
            Some(fewer) => {
                self.update_trace(&mut trace, &fewer, &sizes);
                (fewer, trace)
            }
            None => (chosen, trace),
        }
    }

    /// Returns a choice of `n` units (cores or logical CPUs) that lies in fewer domains than the cores `chosen`. A
    /// domain is an L3 cache, a NUMA node or a package. Returns `None` if there is no such choice.
    ///
    /// - `candidates` has sets of cores. The choice takes all units from one set. Each set has at least `n` units. If
    ///   several sets have an equally good choice, the first of these sets is used.
    /// - `bound` is a lower limit for the cost of all choices ([`lower_bound`]). The search ends when a choice has
    ///   this cost. So most calls need no search.
    fn with_fewer_domains<'s>(
        &self,
        candidates: &[Vec<&'s FreeCore>],
        n: u32,
        chosen: &[&'s FreeCore],
        bound: u64,
    ) -> Option<Vec<&'s FreeCore>> {
        let mut cost = domain_cost(chosen, self.levels.len());
        let mut best = None;
        for free_cores in candidates {
            if cost <= bound {
                break;
            }
            let (lower, shares) = fewest_domains(free_cores, n, self.levels.len())?;
            if lower < cost {
                cost = lower;
                best = Some(shares);
            }
        }
        let divide =
            |share: &CoreShare<'s>| self.choose_from_domains(&share.free_cores, share.units, share.depth);
        best.map(|shares| shares.iter().flat_map(divide).collect())
    }

    /// Updates `trace`, from which pjw explains the choice to users, after the cores `chosen` replaced the first
    /// choice. The smallest domain (L3 cache, NUMA node or package) that contains all of `chosen` becomes the chosen
    /// domain. If no domain contains all of them, there is no chosen domain. The former chosen domain becomes the
    /// second-best one. Has no effect if the chosen domain stays the same. `sizes` has the available units of each
    /// domain, by level.
    fn update_trace(&self, trace: &mut FitTrace, chosen: &[&FreeCore], sizes: &[BTreeMap<CoreGroup, u32>]) {
        let common_hole = |depth: usize| {
            let group = chosen.first()?.groups[depth];
            let contains_all = chosen.iter().all(|free_core| free_core.groups[depth] == group);
            contains_all.then(|| Hole { depth, group, size: sizes[depth].get(&group).copied().unwrap_or(0) })
        };
        let smallest = (0..self.levels.len()).rev().find_map(common_hole);
        if smallest != trace.chosen {
            trace.second = trace.chosen;
            trace.chosen = smallest;
        }
    }

    /// Chooses `n` units (cores or logical CPUs) from as few domains as possible. The domains are those of the level
    /// with the index `depth`, such as NUMA nodes. Inside each domain, chooses from the next smaller level in the
    /// same way. The next domain is the smallest one that has all missing units. If no domain has all missing units,
    /// the next domain is the largest one. Among equally large domains, the one nearest to the previous domain is
    /// chosen. Returns all of `free_cores` if these have fewer than `n` units.
    fn choose_from_domains<'s>(
        &self,
        free_cores: &[&'s FreeCore],
        n: u32,
        depth: usize,
    ) -> Vec<&'s FreeCore> {
        if depth >= self.levels.len() {
            return take_cores(free_cores, n);
        }
        let mut holes: BTreeMap<CoreGroup, (u32, Vec<&FreeCore>)> = cores_by_group(free_cores, depth)
            .into_iter()
            .map(|(group, hole)| (group, (total_units(&hole), hole)))
            .collect();
        let mut chosen: Vec<&FreeCore> = Vec::new();
        let mut left = n;
        while left > 0 {
            let previous = chosen.last().map(|free_core| free_core.position);
            let order = |group: &CoreGroup, hole: &[&FreeCore]| {
                let first = hole.first().map(|free_core| free_core.position);
                let distance = previous.zip(first).map_or(0, |(previous, first)| previous.abs_diff(first));
                (distance, self.rank(*group), *group)
            };
            let fitting = holes.iter().filter(|(_, (size, _))| *size >= left);
            let fitting = fitting.min_by_key(|(group, (size, hole))| (*size, order(group, hole)));
            let largest =
                || holes.iter().min_by_key(|(group, (size, hole))| (Reverse(*size), order(group, hole)));
            let Some(group) = fitting.or_else(largest).map(|(&group, _)| group) else { break };
            let Some((size, hole)) = holes.remove(&group) else { break };
            chosen.extend(self.choose_from_domains(&hole, left.min(size), depth + 1));
            left = left.saturating_sub(size);
        }
        chosen
    }

    /// Chooses `n` units (cores or logical CPUs) from `others` as near as possible to the cores `held`. First chooses
    /// in the domains of the smallest level that contain cores of `held`, such as L3 caches. Then chooses in such
    /// domains of the larger levels, then anywhere. Returns only the new cores. Returns all of `others` if these have
    /// fewer than `n` units.
    fn add_nearest<'s>(
        &self,
        held: &[&FreeCore],
        mut others: Vec<&'s FreeCore>,
        n: u32,
    ) -> Vec<&'s FreeCore> {
        let mut added: Vec<&FreeCore> = Vec::new();
        let mut left = n;
        for depth in (0..self.levels.len()).rev().map(Some).chain([None]) {
            if left == 0 {
                break;
            }
            let held_groups: BTreeSet<CoreGroup> =
                held.iter().filter_map(|free_core| Some(free_core.groups[depth?])).collect();
            let (near, far): (Vec<&FreeCore>, Vec<&FreeCore>) = others.into_iter().partition(|free_core| {
                depth.is_none_or(|depth| held_groups.contains(&free_core.groups[depth]))
            });
            others = far;
            let take = left.min(total_units(&near));
            let chosen = if take == 0 { Vec::new() } else { self.best_fit(&near, take).0 };
            left = left.saturating_sub(total_units(&chosen));
            added.extend(chosen);
        }
        added
    }

    /// Returns the sort key of `group` among equal groups: domains by their number, then groups that are no domain.
    fn rank(&self, group: CoreGroup) -> (u32, u32) {
        match group {
            CoreGroup::Domain(index) => {
                (0, self.topology.domain_by_index(index).map_or(u32::MAX, |domain| domain.number))
            }
            CoreGroup::Outside(around) => (1, around.unwrap_or(u32::MAX)),
        }
    }
}

fn saturating_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn chain<'s>(first: Vec<&'s FreeCore>, second: Vec<&'s FreeCore>) -> Vec<&'s FreeCore> {
    first.into_iter().chain(second).collect()
}

/// Returns the reason that the job keeps its cores and also gets `added`.
fn grown(added: &[&FreeCore]) -> ChoiceReason {
    ChoiceReason::Grown { added: added.iter().flat_map(|free_core| free_core.pus.iter().copied()).collect() }
}
