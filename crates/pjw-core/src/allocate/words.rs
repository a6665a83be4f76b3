//! Why a choice is as it is, in sentences with the kernel's CPU numbers.

use super::choose::{Choice, Ground, Hole, Trail};
use super::tree::{Group, Unit};
use crate::cpuset::CpuSet;
use crate::explain::named;
use crate::topology::{Domain, Level, Topology};

/// How many domains a sentence lists before it only counts them.
const LISTED: usize = 4;

/// The reasons for a choice of `asked` units, the most telling first, and the second-best choice.
pub(super) fn reasons(topology: &Topology, unit: Unit, asked: u32, choice: &Choice) -> (Vec<String>, String) {
    let words = Words { topology, unit, asked, taken: size(topology, unit, &choice.cpus) };
    let cpus = &choice.cpus;
    let mut runner_up = String::new();
    let mut because = match &choice.ground {
        Ground::Unchanged => vec![format!("the job keeps {}, which it holds already", named(cpus))],
        Ground::Shrunk => vec![format!("of what the job held it keeps {}", named(cpus))],
        Ground::Grown { added } => vec![
            format!("the job keeps {}, which it held", named(&cpus.difference(added))),
            format!("it gets {} on {}, the nearest that could be had", named(added), words.places(added)),
        ],
        Ground::Spread => {
            vec![format!("the job gets {}, spread evenly over the machine as it asked", named(cpus))]
        }
        Ground::Fit(trail) => {
            runner_up = trail.second.map(|hole| words.keeps(hole)).unwrap_or_default();
            words.fit(trail, cpus)
        }
    };
    if let Some(kind) = choice.kind {
        because.push(format!("only cores of kind {kind} were considered: there are enough of one kind"));
    }
    (because, runner_up)
}

fn size(topology: &Topology, unit: Unit, cpus: &CpuSet) -> u32 {
    let pus = topology.pus_by_core().map(|pus| pus.iter().filter(|&&pu| cpus.contains(pu)).count());
    let units = pus.map(|pus| if unit == Unit::Core { pus.min(1) } else { pus });
    u32::try_from(units.sum::<usize>()).unwrap_or(u32::MAX)
}

struct Words<'a> {
    topology: &'a Topology,
    unit: Unit,
    asked: u32,
    /// How many units were given.
    taken: u32,
}

impl Words<'_> {
    fn fit(&self, trail: &Trail, cpus: &CpuSet) -> Vec<String> {
        let first = match trail.taken {
            Some(hole) => self.keeps(hole),
            None => format!(
                "the job gets {} on {}, the fewest parts that hold {}",
                named(cpus),
                self.places(cpus),
                self.count(self.asked)
            ),
        };
        let too_small = trail.too_small.iter().map(|hole| {
            let level = self.topology.levels().get(hole.depth).copied().unwrap_or(Level::Machine);
            let (asked, size) = (self.count(self.asked), hole.size);
            format!("no {level} has {asked}; the largest hole is {size} on {}", self.name(*hole))
        });
        std::iter::once(first).chain(too_small).collect()
    }

    fn keeps(&self, hole: Hole) -> String {
        let left = hole.size.saturating_sub(self.taken);
        format!("{} holds {} and would keep {left}", self.name(hole), self.count(hole.size))
    }

    fn count(&self, units: u32) -> String {
        let noun = if self.unit == Unit::Core { "core" } else { "PU" };
        format!("{units} free {noun}{}", if units == 1 { "" } else { "s" })
    }

    fn name(&self, hole: Hole) -> String {
        match hole.group {
            Group::Domain(place) => self.topology.domain_at(place).map(|domain| self.full_name(domain)),
            Group::Outside(around) => {
                let level = self.topology.levels().get(hole.depth).copied().unwrap_or(Level::Machine);
                let around = around.and_then(|place| self.topology.domain_at(place));
                let around = around.map_or("the machine".to_owned(), |domain| self.full_name(domain));
                Some(format!("the part of {around} outside any {level}"))
            }
        }
        .unwrap_or_default()
    }

    /// A domain's name, with its package where the machine has several.
    fn full_name(&self, domain: &Domain) -> String {
        let mut packages = self.topology.domains(Level::Package);
        let around = packages.find(|package| domain.cpus.is_subset(&package.cpus));
        match around {
            Some(package)
                if domain.level != Level::Package && self.topology.domains(Level::Package).count() > 1 =>
            {
                format!("{} of {}", domain.name(), package.name())
            }
            _ => domain.name(),
        }
    }

    /// The domains of the smallest level of which these PUs touch few, by name.
    fn places(&self, cpus: &CpuSet) -> String {
        let touched = |level: Level| {
            let mut places: Vec<u32> = cpus.iter().filter_map(|pu| self.topology.place(level, pu)).collect();
            places.sort_unstable();
            places.dedup();
            places
        };
        let mut counted = "the machine".to_owned();
        for &level in self.topology.levels().iter().rev() {
            let places = touched(level);
            if (1..=LISTED).contains(&places.len()) {
                let domains = places.into_iter().filter_map(|place| self.topology.domain_at(place));
                return domains.map(|domain| self.full_name(domain)).collect::<Vec<_>>().join(", ");
            }
            if !places.is_empty() {
                counted = format!("{} {level}s", places.len());
            }
        }
        counted
    }
}
