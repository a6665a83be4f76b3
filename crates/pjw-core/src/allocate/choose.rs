//! The choice among available cores: best fit on the levels of the machine.
//!
//! A level divides the available cores into holes. Nothing here assumes that levels nest in a certain order:
//! [`Topology::levels`] tells how they lie on this machine, and a group of cores is divided by whatever
//! domains its cores are in. All searches are greedy; the longest one sorts the cores once per level.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use super::fewest::{Share, bound, fewest, price_of};
use super::tree::{Group, Pus, Seat, Unit, fill, sizes, split, split_cores, total, with_fewest_split};
use crate::cpuset::CpuSet;
use crate::topology::{Level, Topology};

/// What a request may use.
#[derive(Debug)]
pub(super) struct Chooser<'a> {
    topology: &'a Topology,
    unit: Unit,
    levels: &'a [Level],
    seats: Vec<Seat>,
}

/// What was chosen, and on what ground.
#[derive(Debug)]
pub(super) struct Choice {
    /// The PUs.
    pub(super) cpus: CpuSet,
    /// Why these.
    pub(super) ground: Ground,
    /// The only kind of core that was considered, if the machine has several and one has enough.
    pub(super) kind: Option<u32>,
}

/// Why a choice is as it is.
#[derive(Debug)]
pub(super) enum Ground {
    /// It is what the job holds.
    Unchanged,
    /// The job holds more: these of it are kept.
    Shrunk,
    /// The job holds less, and these were added to it.
    Grown {
        /// What was added.
        added: CpuSet,
    },
    /// The request was to be spread.
    Spread,
    /// Nothing was held.
    Fit(Trail),
}

/// How the best fit was found.
#[derive(Debug, Default)]
pub(super) struct Trail {
    /// The largest hole of each level that has none that is large enough, smallest level first.
    pub(super) too_small: Vec<Hole>,
    /// The hole that was taken; `None` if no domain holds the request.
    pub(super) taken: Option<Hole>,
    /// The second-best one.
    pub(super) second: Option<Hole>,
}

/// What is available in one domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hole {
    /// Its level's place in [`Topology::levels`].
    pub(super) depth: usize,
    /// Which of that level.
    pub(super) group: Group,
    /// In the request's unit.
    pub(super) size: u32,
}

impl<'a> Chooser<'a> {
    /// The cores of which all online PUs are available; where siblings may serve two jobs, the available part
    /// of every core. What lies in `present` is preferred to all else.
    pub(super) fn new(
        topology: &'a Topology,
        unit: Unit,
        available: &CpuSet,
        online: &CpuSet,
        present: &CpuSet,
    ) -> Self {
        let levels = topology.levels();
        let mut seats = Vec::new();
        for (position, (pus, core)) in (0..).zip(topology.pus_by_core().zip(topology.cores())) {
            let there = pus.iter().copied().filter(|&pu| online.contains(pu));
            let mut lit = 0;
            let open: Pus = there.inspect(|_| lit += 1).filter(|&pu| available.contains(pu)).collect();
            let whole = open.len() == lit;
            let Some(&first) = open.first() else { continue };
            let seat = |pus: Pus, held, whole| Seat {
                position,
                size: unit.size(&pus),
                pus,
                kind: core.kind,
                held,
                whole,
                groups: Group::of_pu(topology, first),
            };
            if unit == Unit::AnyPu {
                let (held, others): (Pus, Pus) = open.into_iter().partition(|&pu| present.contains(pu));
                let untouched = whole && held.is_empty();
                seats.extend((!held.is_empty()).then(|| seat(held, true, whole)));
                seats.extend((!others.is_empty()).then(|| seat(others, false, untouched)));
            } else if whole {
                let held = open.iter().any(|&pu| present.contains(pu));
                seats.push(seat(open, held, true));
            }
        }
        Self { topology, unit, levels, seats }
    }

    /// How many whole cores are available.
    pub(super) fn cores(&self) -> u32 {
        let whole: BTreeSet<u32> =
            self.seats.iter().filter(|seat| seat.whole).map(|seat| seat.position).collect();
        number(whole.len())
    }

    /// The PUs that are available.
    pub(super) fn cpus(&self) -> CpuSet {
        self.seats.iter().flat_map(|seat| seat.pus.iter().copied()).collect()
    }

    /// How many cores a request for `units` comes to: the fewest available ones that cover it and, if all of
    /// them don't, as many more of the largest core as are missing.
    pub(super) fn cores_for(&self, units: u32) -> u32 {
        let mut sizes: Vec<u32> = self.seats.iter().map(|seat| seat.size).collect();
        sizes.sort_unstable_by_key(|&size| Reverse(size));
        let mut left = units;
        for (count, size) in (1..).zip(&sizes) {
            left = left.saturating_sub(*size);
            if left == 0 {
                return count;
            }
        }
        let largest_core = self.topology.pus_by_core().map(<[_]>::len).max().unwrap_or(1);
        let largest = if self.unit == Unit::Core { 1 } else { number(largest_core) };
        number(sizes.len()).saturating_add(left.div_ceil(largest))
    }

    /// The most whole cores that are available in one domain of a level; where the machine has no such
    /// domain, of the next larger level that it has.
    pub(super) fn largest(&self, level: Level) -> u32 {
        let larger = [Level::L3, Level::NumaNode, Level::Package].into_iter().filter(|&other| other >= level);
        let depth = larger.filter_map(|level| self.levels.iter().position(|&other| other == level)).next();
        let Some(depth) = depth else { return self.cores() };
        let whole: Vec<&Seat> = self.seats.iter().filter(|seat| seat.whole).collect();
        let holes = split(&whole, depth).into_iter().filter(|(group, _)| group.is_domain());
        holes.map(|(_, hole)| number(hole.len())).max().unwrap_or(0)
    }

    /// At least `n` units (exactly `n` where PUs are given out one by one): those that are held are kept, the
    /// others are near them, or the best fit if there are none.
    pub(super) fn choose(&self, n: u32, spread: bool) -> Option<Choice> {
        let (held, others): (Vec<&Seat>, Vec<&Seat>) = self.seats.iter().partition(|seat| seat.held);
        let (held_units, all) = (total(&held), total(&held).saturating_add(total(&others)));
        if all < n {
            return None;
        }
        // Where cores are of unequal size, growing may have left less than a core too many: giving that back
        // would move the grant when the same request comes again.
        let largest = held.iter().map(|seat| seat.size).max().unwrap_or(1);
        let grain = if self.unit == Unit::AnyPu { 1 } else { largest };
        if held_units >= n && held_units - n < grain {
            return Some(self.seal(held, n, Ground::Unchanged, None));
        }
        if held_units >= n {
            let (kind, alike) = one_kind(held, n);
            let kept = if spread { self.spread(&[], &alike, n) } else { self.best_fit(&alike, n).0 };
            return Some(self.seal(kept, n, Ground::Shrunk, kind));
        }
        let (kind, alike) = match only_kind(&held) {
            Some(kind) => of_kind(others, kind, n - held_units),
            None => one_kind(others, n - held_units),
        };
        if spread {
            let added = self.spread(&held, &alike, n);
            let ground = if held.is_empty() { Ground::Spread } else { grown(&added) };
            return Some(self.seal(chain(held, added), n, ground, kind));
        }
        if held.is_empty() {
            let (mut chosen, trail) = self.best_fit(&alike, n);
            if self.unit == Unit::AnyPu {
                chosen = with_fewest_split(&alike, chosen, n);
            }
            return Some(self.seal(chosen, n, Ground::Fit(trail), kind));
        }
        let added = self.grow(&held, alike, n - held_units);
        let ground = grown(&added);
        Some(self.seal(chain(held, added), n, ground, kind))
    }

    /// Drops what isn't needed: whole cores beyond `n` units, and single PUs of the last core beyond it.
    fn seal(&self, mut chosen: Vec<&Seat>, n: u32, ground: Ground, kind: Option<u32>) -> Choice {
        let mut spare = total(&chosen).saturating_sub(n);
        if self.unit != Unit::Core && spare > 0 {
            let keep_held = !matches!(ground, Ground::Shrunk);
            chosen.retain(|seat| {
                let needed = (keep_held && seat.held) || seat.size > spare;
                spare -= if needed { 0 } else { seat.size };
                needed
            });
        }
        let mut pus: Vec<_> = chosen.iter().flat_map(|seat| seat.pus.iter().copied()).collect();
        if self.unit == Unit::AnyPu {
            pus.truncate(n as usize);
        }
        let several = self.topology.cores().iter().any(|core| Some(core.kind) != kind);
        Choice { cpus: pus.into_iter().collect(), ground, kind: kind.filter(|_| several) }
    }

    /// The smallest domain that holds `n`, and in it the same again; else the fewest domains.
    fn best_fit<'s>(&self, seats: &[&'s Seat], n: u32) -> (Vec<&'s Seat>, Trail) {
        let sizes: SmallVec<[BTreeMap<Group, u32>; 3]> =
            (0..self.levels.len()).map(|depth| sizes(seats, depth)).collect();
        let mut trail = Trail::default();
        // The domains of the smallest level that has one that holds the request, the best first.
        let mut rivals: Vec<Vec<&Seat>> = Vec::new();
        for depth in (0..self.levels.len()).rev() {
            // Where PUs are given out one by one, the fewest cores that are shared with others; then the hole's
            // own size, then those of the domains around it, then its number.
            let mut fitting: Vec<_> = split(seats, depth)
                .into_iter()
                .filter(|(group, _)| sizes[depth].get(group).is_some_and(|&size| size >= n))
                .map(|(group, hole)| {
                    let around = |depth: usize| {
                        hole.first()
                            .and_then(|seat| sizes[depth].get(&seat.groups[depth]))
                            .copied()
                            .unwrap_or(0)
                    };
                    let split = if self.unit == Unit::AnyPu { split_cores(&hole, n) } else { 0 };
                    let key: SmallVec<[u32; 4]> =
                        std::iter::once(split).chain((0..=depth).rev().map(around)).collect();
                    (key, self.rank(group), group, hole)
                })
                .collect();
            fitting.sort_unstable_by(|a, b| (&a.0, a.1, a.2).cmp(&(&b.0, b.1, b.2)));
            let hole = |group| Hole { depth, group, size: sizes[depth].get(&group).copied().unwrap_or(0) };
            if let Some(first) = trail.taken {
                let around = seats.iter().find(|seat| seat.groups[first.depth] == first.group);
                let around = around.map(|seat| seat.groups[depth]);
                let next = fitting.iter().find(|(_, _, group, _)| Some(*group) != around);
                trail.second = trail.second.or(next.map(|(_, _, group, _)| hole(*group)));
            } else if let [(_, _, group, _), others @ ..] = fitting.as_slice() {
                trail.taken = Some(hole(*group));
                trail.second = others.first().map(|(_, _, group, _)| hole(*group));
                rivals = fitting.into_iter().map(|(_, _, _, seats)| seats).collect();
            } else {
                let largest = sizes[depth]
                    .iter()
                    .min_by_key(|&(group, size)| (Reverse(size), self.rank(*group), *group));
                trail.too_small.extend(largest.map(|(&group, _)| hole(group)));
            }
        }
        if rivals.is_empty() {
            rivals.push(seats.to_vec());
        }
        let below = trail.taken.map_or(0, |hole| hole.depth + 1);
        let chosen = self.divide(&rivals[0], n, below);
        let bound = bound(&sizes, n);
        match self.fewer(&rivals, n, &chosen, bound) {
            Some(fewer) => {
                self.correct(&mut trail, &fewer, &sizes);
                (fewer, trail)
            }
            None => (chosen, trail),
        }
    }

    /// A choice from one of these sets that touches fewer domains than what was chosen from the first, if there is
    /// any; of equals the one from the earliest set. Nearly always a glance tells that there is none: `bound` is
    /// what no choice can go below.
    fn fewer<'s>(
        &self,
        rivals: &[Vec<&'s Seat>],
        n: u32,
        chosen: &[&'s Seat],
        bound: u64,
    ) -> Option<Vec<&'s Seat>> {
        let mut price = price_of(chosen, self.levels.len());
        let mut best = None;
        for seats in rivals {
            if price <= bound {
                break;
            }
            let (less, shares) = fewest(seats, n, self.levels.len())?;
            if less < price {
                price = less;
                best = Some(shares);
            }
        }
        let divide = |share: &Share<'s>| self.divide(&share.seats, share.units, share.depth);
        best.map(|shares| shares.iter().flat_map(divide).collect())
    }

    /// What was taken instead, and that the first choice came second.
    fn correct(&self, trail: &mut Trail, chosen: &[&Seat], sizes: &[BTreeMap<Group, u32>]) {
        let around = |depth: usize| {
            let group = chosen.first()?.groups[depth];
            let one = chosen.iter().all(|seat| seat.groups[depth] == group);
            one.then(|| Hole { depth, group, size: sizes[depth].get(&group).copied().unwrap_or(0) })
        };
        let taken = (0..self.levels.len()).rev().find_map(around);
        if taken != trail.taken {
            trail.second = trail.taken;
            trail.taken = taken;
        }
    }

    /// `n` units of these from the fewest domains of a level, and of each level below. Of equals the nearest
    /// to what was chosen before, so that two domains are neighbours if they can be.
    fn divide<'s>(&self, seats: &[&'s Seat], n: u32, depth: usize) -> Vec<&'s Seat> {
        if depth >= self.levels.len() {
            return fill(seats, n);
        }
        let mut holes: BTreeMap<Group, (u32, Vec<&Seat>)> =
            split(seats, depth).into_iter().map(|(group, hole)| (group, (total(&hole), hole))).collect();
        let mut chosen: Vec<&Seat> = Vec::new();
        let mut left = n;
        while left > 0 {
            let near = chosen.last().map(|seat| seat.position);
            let order = |group: &Group, hole: &[&Seat]| {
                let first = hole.first().map(|seat| seat.position);
                let far = near.zip(first).map_or(0, |(near, first)| near.abs_diff(first));
                (far, self.rank(*group), *group)
            };
            let fitting = holes.iter().filter(|(_, (size, _))| *size >= left);
            let fitting = fitting.min_by_key(|(group, (size, hole))| (*size, order(group, hole)));
            let largest =
                || holes.iter().min_by_key(|(group, (size, hole))| (Reverse(*size), order(group, hole)));
            let Some(group) = fitting.or_else(largest).map(|(&group, _)| group) else { break };
            let Some((size, hole)) = holes.remove(&group) else { break };
            chosen.extend(self.divide(&hole, left.min(size), depth + 1));
            left = left.saturating_sub(size);
        }
        chosen
    }

    /// The nearest to what is held: in the same L3s, then the same nodes and packages, then anywhere.
    fn grow<'s>(&self, held: &[&Seat], mut others: Vec<&'s Seat>, n: u32) -> Vec<&'s Seat> {
        let mut added: Vec<&Seat> = Vec::new();
        let mut left = n;
        for depth in (0..self.levels.len()).rev().map(Some).chain([None]) {
            if left == 0 {
                break;
            }
            let homes: BTreeSet<Group> = held.iter().filter_map(|seat| Some(seat.groups[depth?])).collect();
            let (near, far): (Vec<&Seat>, Vec<&Seat>) = others
                .into_iter()
                .partition(|seat| depth.is_none_or(|depth| homes.contains(&seat.groups[depth])));
            others = far;
            let take = left.min(total(&near));
            let chosen = if take == 0 { Vec::new() } else { self.best_fit(&near, take).0 };
            left = left.saturating_sub(total(&chosen));
            added.extend(chosen);
        }
        added
    }

    /// As many of `others` as bring `held` to `n` units, the same number in each domain of each level as far
    /// as there are enough.
    fn spread<'s>(&self, held: &[&Seat], others: &[&'s Seat], n: u32) -> Vec<&'s Seat> {
        let mut sizes: Vec<u32> = others.iter().map(|seat| seat.size).collect();
        sizes.sort_unstable();
        // The smallest ones first: whichever are chosen in the end, they are enough.
        let mut left = n.saturating_sub(total(held));
        let needed = sizes.iter().take_while(|&&size| {
            let more = left > 0;
            left = left.saturating_sub(size);
            more
        });
        let needed = needed.count();
        self.level_out(held, others, needed, 0)
    }

    fn level_out<'s>(
        &self,
        held: &[&Seat],
        others: &[&'s Seat],
        count: usize,
        depth: usize,
    ) -> Vec<&'s Seat> {
        if depth >= self.levels.len() {
            return others.iter().copied().take(count).collect();
        }
        let held = split(held, depth);
        let holes = split(others, depth);
        // How full, how many are left, the order of equals.
        let mut filling: BTreeSet<_> = holes
            .iter()
            .map(|(group, hole)| {
                (held.get(group).map_or(0, Vec::len), Reverse(hole.len()), self.rank(*group), *group)
            })
            .collect();
        let mut counts: BTreeMap<Group, usize> = BTreeMap::new();
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
            chosen.extend(self.level_out(held, hole, count, depth + 1));
        }
        chosen
    }

    /// The order of equal domains: by number, those that are none last.
    fn rank(&self, group: Group) -> (u32, u32) {
        match group {
            Group::Domain(place) => {
                (0, self.topology.domain_at(place).map_or(u32::MAX, |domain| domain.number))
            }
            Group::Outside(place) => (1, place.unwrap_or(u32::MAX)),
        }
    }
}

fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn chain<'s>(held: Vec<&'s Seat>, added: Vec<&'s Seat>) -> Vec<&'s Seat> {
    held.into_iter().chain(added).collect()
}

fn grown(added: &[&Seat]) -> Ground {
    Ground::Grown { added: added.iter().flat_map(|seat| seat.pus.iter().copied()).collect() }
}

/// The kind of all of these, if it is one.
fn only_kind(seats: &[&Seat]) -> Option<u32> {
    let kind = seats.first()?.kind;
    seats.iter().all(|seat| seat.kind == kind).then_some(kind)
}

/// Those of one kind, if they have `n` units between them; else of one of the other kinds; else all.
fn of_kind(seats: Vec<&Seat>, kind: u32, n: u32) -> (Option<u32>, Vec<&Seat>) {
    let alike: Vec<&Seat> = seats.iter().copied().filter(|seat| seat.kind == kind).collect();
    if total(&alike) >= n { (Some(kind), alike) } else { one_kind(seats, n) }
}

/// Those of the fastest kind that has `n` units; all if none has: a job on cores of two kinds runs at the
/// pace of the slower one.
fn one_kind(seats: Vec<&Seat>, n: u32) -> (Option<u32>, Vec<&Seat>) {
    let mut units: BTreeMap<u32, u32> = BTreeMap::new();
    for seat in &seats {
        *units.entry(seat.kind).or_default() += seat.size;
    }
    let kind = units.into_iter().rev().find(|&(_, units)| units >= n).map(|(kind, _)| kind);
    (kind, seats.into_iter().filter(|seat| kind.is_none_or(|kind| seat.kind == kind)).collect())
}
