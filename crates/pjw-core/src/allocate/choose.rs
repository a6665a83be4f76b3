//! The choice among available cores, by number of cores in each domain.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::cpuset::CpuSet;
use crate::topology::{Level, Topology};

/// From large to small: the order in which a request that no domain holds is divided.
const LEVELS: [Level; 3] = [Level::Package, Level::NumaNode, Level::L3];

/// In no domain of this level nor of any above.
const NOWHERE: u32 = u32::MAX;
/// Marks the number of a domain above.
const ABOVE: u32 = 1 << 31;

/// The cores that a request may use, in the machine's order.
#[derive(Debug)]
pub(super) struct Chooser<'a> {
    topology: &'a Topology,
    /// What may be used; cores of which only a part may be are not among `seats`.
    available: CpuSet,
    seats: Vec<Seat>,
}

/// An available core.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seat {
    pus: CpuSet,
    kind: u32,
    /// The number of its domain at each of [`LEVELS`]. Cores that are in no domain of a level are together
    /// with those of the same domain above.
    place: [u32; 3],
}

impl<'a> Chooser<'a> {
    pub(super) fn new(topology: &'a Topology, available: &CpuSet, online: &CpuSet) -> Self {
        let mut places: BTreeMap<crate::cpuset::Pu, [u32; 3]> =
            topology.cpus().iter().map(|pu| (pu, [NOWHERE; 3])).collect();
        for (slot, level) in LEVELS.into_iter().enumerate() {
            for (index, domain) in (0..).zip(topology.domains(level)) {
                for pu in domain.cpus.iter() {
                    if let Some(place) = places.get_mut(&pu) {
                        place[slot] = index;
                    }
                }
            }
        }
        for place in places.values_mut() {
            for slot in 1..LEVELS.len() {
                if place[slot] == NOWHERE {
                    place[slot] = place[slot - 1] | ABOVE;
                }
            }
        }
        let seats = topology.cores().iter().filter_map(|core| {
            let pus = core.pus.intersection(online);
            let place = pus.first().and_then(|pu| places.get(&pu)).copied().unwrap_or([NOWHERE; 3]);
            (!pus.is_empty() && pus.is_subset(available)).then_some(Seat { pus, kind: core.kind, place })
        });
        Self { topology, available: available.clone(), seats: seats.collect() }
    }

    /// How many cores are available.
    pub(super) fn count(&self) -> u32 {
        number(self.seats.len())
    }

    /// Their PUs.
    pub(super) fn all(&self) -> CpuSet {
        union(self.seats.iter())
    }

    /// The most PUs that any core of the machine has.
    pub(super) fn pus_per_core(&self) -> u32 {
        self.topology.cores().iter().map(|core| number(core.pus.len())).max().unwrap_or(1)
    }

    /// The largest hole of a level.
    pub(super) fn largest(&self, level: Level) -> u32 {
        self.holes(level).values().map(|hole| number(hole.len())).max().unwrap_or(0)
    }

    /// The size of each hole of a level, by the domain's place in the list of its level.
    pub(super) fn hole_sizes(&self, level: Level) -> BTreeMap<u32, u32> {
        self.holes(level).into_iter().map(|(domain, hole)| (domain, number(hole.len()))).collect()
    }

    fn holes(&self, level: Level) -> BTreeMap<u32, Vec<&Seat>> {
        split(&self.seats.iter().collect::<Vec<_>>(), slot(level))
    }

    /// The fewest cores that have `n` PUs between them, if there are so many.
    pub(super) fn cores_for_pus(&self, n: u32) -> Option<u32> {
        let mut sizes: Vec<u32> = self.seats.iter().map(|seat| number(seat.pus.len())).collect();
        sizes.sort_unstable();
        // The smallest ones first: whichever cores are chosen, they have at least so many PUs.
        let mut covered = 0u32;
        for (count, size) in (1..).zip(sizes) {
            covered += size;
            if covered >= n {
                return Some(count);
            }
        }
        None
    }

    /// `n` cores: those of `present` kept, others near them, or the best fit if there are none.
    pub(super) fn cores(&self, n: u32, present: &CpuSet, spread: bool) -> Option<CpuSet> {
        let n = n as usize;
        if self.seats.len() < n {
            return None;
        }
        let (held, others): (Vec<&Seat>, Vec<&Seat>) =
            self.seats.iter().partition(|seat| seat.pus.is_subset(present));
        if held.len() >= n {
            return Some(union(best_fit(&held, n).into_iter()));
        }
        if !held.is_empty() {
            return Some(union(grow(&held, others, n).into_iter()));
        }
        let alike = one_kind(&others, n);
        let chosen = if spread { scatter(&alike, n) } else { best_fit(&alike, n) };
        Some(union(chosen.into_iter()))
    }

    /// Exactly `n` PUs: whole cores as far as they go, the rest from one core that is least whole already.
    pub(super) fn pus(&self, n: u32, present: &CpuSet) -> Option<CpuSet> {
        if self.available.len() < n as usize {
            return None;
        }
        let held = present.intersection(&self.available);
        if held.len() >= n as usize {
            return Some(self.topology.ordered(&held).into_iter().take(n as usize).collect());
        }
        let whole = (n / self.pus_per_core()).min(self.count());
        let mut chosen = held.union(&self.cores(whole, present, false).unwrap_or_default());
        while chosen.len() > n as usize {
            let last = self.topology.ordered(&chosen.difference(&held)).pop()?;
            chosen.remove(last);
        }
        let mut rest: Vec<(usize, usize, CpuSet)> = self
            .topology
            .cores()
            .iter()
            .enumerate()
            .map(|(index, core)| (index, core.pus.intersection(&self.available).difference(&chosen)))
            .filter(|(_, left)| !left.is_empty())
            .map(|(index, left)| (left.len(), index, left))
            .collect();
        rest.sort_unstable();
        for pu in rest.iter().flat_map(|(_, _, left)| left.iter()) {
            if chosen.len() < n as usize {
                chosen.insert(pu);
            }
        }
        (chosen.len() == n as usize).then_some(chosen)
    }
}

fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn slot(level: Level) -> usize {
    LEVELS.iter().position(|&other| other == level).unwrap_or(0)
}

fn union<'s>(seats: impl Iterator<Item = &'s Seat>) -> CpuSet {
    seats.flat_map(|seat| seat.pus.iter()).collect()
}

fn split<'s>(seats: &[&'s Seat], slot: usize) -> BTreeMap<u32, Vec<&'s Seat>> {
    let mut groups: BTreeMap<u32, Vec<&Seat>> = BTreeMap::new();
    for seat in seats {
        groups.entry(seat.place[slot]).or_default().push(seat);
    }
    groups
}

/// Those of one kind, the fastest, if there are enough of them; else all.
fn one_kind<'s>(seats: &[&'s Seat], n: usize) -> Vec<&'s Seat> {
    let mut kinds: Vec<u32> = seats.iter().map(|seat| seat.kind).collect();
    kinds.sort_unstable_by_key(|&kind| Reverse(kind));
    kinds.dedup();
    let of = |kind: u32| seats.iter().copied().filter(|seat| seat.kind == kind).collect::<Vec<_>>();
    kinds.into_iter().map(of).find(|alike| alike.len() >= n).unwrap_or_else(|| seats.to_vec())
}

/// The smallest domain that holds `n`, and in it the same again; else the fewest domains.
fn best_fit<'s>(seats: &[&'s Seat], n: usize) -> Vec<&'s Seat> {
    let mut around: [BTreeMap<u32, usize>; 3] = Default::default();
    for (slot, sizes) in around.iter_mut().enumerate() {
        sizes.extend(split(seats, slot).into_iter().map(|(domain, hole)| (domain, hole.len())));
    }
    for slot in (0..LEVELS.len()).rev() {
        let holes = split(seats, slot).into_iter().filter(|(_, hole)| hole.len() >= n);
        // The hole's own size first, then those of the domains around it, then its number.
        let best = holes.min_by_key(|(domain, hole)| {
            let place = hole.first().map_or([NOWHERE; 3], |seat| seat.place);
            let sizes = (0..slot).rev().map(|above| around[above].get(&place[above]).copied().unwrap_or(0));
            (hole.len(), sizes.collect::<Vec<_>>(), *domain)
        });
        if let Some((_, hole)) = best {
            return divide(&hole, n, slot + 1);
        }
    }
    divide(seats, n, 0)
}

/// `n` of these cores from the fewest domains of a level, and of each level below.
fn divide<'s>(seats: &[&'s Seat], n: usize, slot: usize) -> Vec<&'s Seat> {
    let mut chosen = Vec::with_capacity(n);
    if slot >= LEVELS.len() {
        chosen.extend(seats.iter().copied().take(n));
        return chosen;
    }
    let mut holes = split(seats, slot);
    while chosen.len() < n {
        let left = n - chosen.len();
        let fitting = holes.iter().filter(|(_, hole)| hole.len() >= left);
        let fitting = fitting.min_by_key(|(domain, hole)| (hole.len(), **domain)).map(|(&domain, _)| domain);
        let largest = || holes.iter().min_by_key(|(domain, hole)| (Reverse(hole.len()), **domain));
        let Some(domain) = fitting.or_else(|| largest().map(|(&domain, _)| domain)) else { break };
        let hole = holes.remove(&domain).unwrap_or_default();
        let take = left.min(hole.len());
        chosen.extend(divide(&hole, take, slot + 1));
    }
    chosen
}

/// Keeps what is held and adds the nearest: in the same L3s, then NUMA nodes, then packages, then anywhere.
fn grow<'s>(held: &[&'s Seat], mut others: Vec<&'s Seat>, n: usize) -> Vec<&'s Seat> {
    let mut chosen = held.to_vec();
    for slot in [Some(2), Some(1), Some(0), None] {
        let left = n - chosen.len();
        if left == 0 {
            break;
        }
        let (near, far): (Vec<&Seat>, Vec<&Seat>) = others.into_iter().partition(|seat| {
            slot.is_none_or(|slot| held.iter().any(|kept| kept.place[slot] == seat.place[slot]))
        });
        let added = if near.is_empty() { Vec::new() } else { best_fit(&near, left.min(near.len())) };
        others = far;
        others.extend(near.into_iter().filter(|seat| !added.contains(seat)));
        chosen.extend(added);
    }
    chosen
}

/// One after the other, each where the fewest were chosen so far.
fn scatter<'s>(seats: &[&'s Seat], n: usize) -> Vec<&'s Seat> {
    let mut taken: [BTreeMap<u32, usize>; 3] = Default::default();
    let mut left: Vec<(usize, &Seat)> = seats.iter().copied().enumerate().collect();
    let mut chosen = Vec::with_capacity(n);
    while chosen.len() < n {
        let crowd = |seat: &Seat| -> [usize; 3] {
            std::array::from_fn(|slot| taken[slot].get(&seat.place[slot]).copied().unwrap_or(0))
        };
        let best = (0..left.len()).min_by_key(|&at| (crowd(left[at].1), left[at].0));
        let Some(best) = best else { break };
        let (_, seat) = left.remove(best);
        for (slot, taken) in taken.iter_mut().enumerate() {
            *taken.entry(seat.place[slot]).or_default() += 1;
        }
        chosen.push(seat);
    }
    chosen
}
