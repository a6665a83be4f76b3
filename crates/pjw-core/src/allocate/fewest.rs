//! The fewest domains that hold a request, exactly.
//!
//! Taking the largest hole first is right for one level and nearly always for all of them together. Where it isn't
//! (two packages hold the request, but another two hold it on fewer NUMA nodes), this finds what is. The price of a
//! choice is its number of domains, those of the largest level first; prices of parts add up. For each part of the
//! machine only those offers are kept that no other beats in both price and units, so a row is about as long as the
//! part has domains, and rows are joined two by two: no combination of domains is tried exhaustively.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::tree::{Group, Seat, split, total};

/// Bits of a price for each level: more domains than a machine can have PUs.
const BITS: usize = 20;

/// The price of `count` domains at a depth of so many.
fn price(count: usize, depth: usize, depths: usize) -> u64 {
    (count as u64) << (BITS * (depths - 1 - depth))
}

/// What a part of the machine can give for a price, and how.
#[derive(Debug, Clone, Copy)]
struct Deal {
    price: u64,
    units: u32,
    /// The place of the deal with the parts before in their row.
    before: usize,
    /// The place of the deal with the last part in its row; of the smallest domains, how many.
    with: usize,
}

/// A part of the machine that has parts, and what it can give.
struct Part<'s> {
    depth: usize,
    inside: Inside<'s>,
    /// By rising price and rising units, beginning with nothing.
    row: Vec<Deal>,
}

enum Inside<'s> {
    /// Its parts are the smallest domains.
    Holes(Vec<&'s Seat>),
    /// The row of the first part, of the first two, of the first three, …
    Parts(Vec<(Part<'s>, Vec<Deal>)>),
}

/// So many units of these cores, divided among their domains from this depth on.
pub(super) struct Share<'s> {
    pub(super) seats: Vec<&'s Seat>,
    pub(super) units: u32,
    pub(super) depth: usize,
}

/// How `n` units are shared between parts of the machine so that the fewest domains are touched, and the price of
/// that; `None` if there are fewer units.
pub(super) fn fewest<'s>(seats: &[&'s Seat], n: u32, depths: usize) -> Option<(u64, Vec<Share<'s>>)> {
    let all = part(seats.to_vec(), 0, depths, n);
    let at = all.row.iter().position(|deal| deal.units >= n)?;
    let mut shares = Vec::new();
    all.collect(at, &mut shares);
    // What is too much is left in the largest share.
    let sum: u32 = shares.iter().map(|share| share.units).sum();
    if let Some(largest) = shares.iter_mut().rev().max_by_key(|share| share.units) {
        largest.units = largest.units.saturating_sub(sum.saturating_sub(n));
    }
    Some((all.row[at].price, shares))
}

fn part<'s>(seats: Vec<&'s Seat>, depth: usize, depths: usize, n: u32) -> Part<'s> {
    if depth + 1 >= depths {
        let row = holes(&seats, depth, depths, n);
        return Part { depth, inside: Inside::Holes(seats), row };
    }
    let mut row = vec![Deal { price: 0, units: 0, before: 0, with: 0 }];
    let mut parts = Vec::new();
    for (group, seats) in split(&seats, depth) {
        let mut below = part(seats, depth + 1, depths, n);
        let own = price(usize::from(group.is_domain()), depth, depths);
        below.row.iter_mut().skip(1).for_each(|deal| deal.price += own);
        row = join(&row, &below.row, n);
        parts.push((below, row.clone()));
    }
    Part { depth, inside: Inside::Parts(parts), row }
}

/// The deals with the smallest domains: what is in none costs nothing, then the largest hole first.
fn holes(seats: &[&Seat], depth: usize, depths: usize, n: u32) -> Vec<Deal> {
    let mut sizes: Vec<(u64, u32)> = split(seats, depth)
        .into_iter()
        .map(|(group, hole)| (price(usize::from(group.is_domain()), depth, depths), total(&hole)))
        .collect();
    sizes.sort_unstable_by_key(|&(price, units)| (price, Reverse(units)));
    let mut row = vec![Deal { price: 0, units: 0, before: 0, with: 0 }];
    let (mut price, mut units) = (0, 0u32);
    for (count, (more, size)) in (1..).zip(sizes) {
        if units >= n {
            break;
        }
        price += more;
        units = units.saturating_add(size).min(n);
        row.push(Deal { price, units, before: 0, with: count });
    }
    row
}

/// The deals with both, without those that another one beats.
fn join(one: &[Deal], other: &[Deal], n: u32) -> Vec<Deal> {
    let most = |row: &[Deal]| row.last().map_or(0, |deal| deal.units);
    let length = most(one).saturating_add(most(other)).min(n) as usize + 1;
    let mut best: Vec<Option<Deal>> = vec![None; length];
    for (before, first) in one.iter().enumerate() {
        for (with, second) in other.iter().enumerate() {
            let units = first.units.saturating_add(second.units).min(n);
            let price = first.price + second.price;
            let deal = &mut best[units as usize];
            if deal.is_none_or(|deal| price < deal.price) {
                *deal = Some(Deal { price, units, before, with });
            }
        }
    }
    let mut row: Vec<Deal> = Vec::new();
    for deal in best.into_iter().rev().flatten() {
        // Nothing at all is always a deal: with it, the domain itself isn't touched.
        if deal.units == 0 || row.last().is_none_or(|larger| deal.price < larger.price) {
            row.push(deal);
        }
    }
    row.reverse();
    row
}

impl<'s> Part<'s> {
    /// The shares of the deal at this place of the row.
    fn collect(&self, at: usize, shares: &mut Vec<Share<'s>>) {
        match &self.inside {
            _ if self.row[at].units == 0 => {}
            Inside::Holes(seats) => {
                let units = self.row[at].units;
                shares.push(Share { seats: seats.clone(), units, depth: self.depth });
            }
            Inside::Parts(parts) => {
                let mut at = at;
                for (part, row) in parts.iter().rev() {
                    part.collect(row[at].with, shares);
                    at = row[at].before;
                }
            }
        }
    }
}

/// How many domains of each level these touch, as a price.
pub(super) fn price_of(seats: &[&Seat], depths: usize) -> u64 {
    let count = |depth: usize| {
        let mut groups: Vec<Group> = seats.iter().map(|seat| seat.groups[depth]).collect();
        groups.dedup();
        groups.sort_unstable();
        groups.dedup();
        groups.iter().filter(|group| group.is_domain()).count()
    };
    (0..depths).map(|depth| price(count(depth), depth, depths)).sum()
}

/// What no choice of `n` units can go below, given the size of every hole of each level: the price if each level could
/// take its largest holes whatever the others do.
pub(super) fn bound(sizes: &[BTreeMap<Group, u32>], n: u32) -> u64 {
    let least = |holes: &BTreeMap<Group, u32>| {
        let of = |domain: bool| holes.iter().filter(move |(group, _)| group.is_domain() == domain);
        let mut left = n.saturating_sub(of(false).map(|(_, &size)| size).sum());
        let mut domains: Vec<u32> = of(true).map(|(_, &size)| size).collect();
        domains.sort_unstable_by_key(|&size| Reverse(size));
        let needed = domains.iter().take_while(|&&size| {
            let more = left > 0;
            left = left.saturating_sub(size);
            more
        });
        needed.count()
    };
    sizes.iter().enumerate().map(|(depth, holes)| price(least(holes), depth, sizes.len())).sum()
}
