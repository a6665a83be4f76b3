//! The reasons for a choice, as sentences with the kernel's CPU numbers.

use crate::allocate::choose::{ChoiceReason, FitTrace, Hole, PuChoice};
use crate::allocate::tree::{AllocationUnit, CoreGroup};
use crate::basics::{CpuSet, cpus_text, prelude::*};
use crate::machine::{Topology, TopologyDomain, TopologyLevel};

/// The maximum number of domains that a sentence lists by name. More domains are only counted.
const MAX_LISTED: usize = 4;

/// Returns texts for users: the reasons why `choice` was made, the most important reason first, and a description of
/// the second-best choice (empty if there is none). The request was for `asked` units; `unit` says whether a unit is a
/// core or a PU (logical CPU).
pub(super) fn choice_reasons(
    topology: &Topology,
    unit: AllocationUnit,
    asked: u32,
    choice: &PuChoice,
) -> (Vec<String>, String) {
    let text = ReasonText { topology, unit, asked, taken: count_units(topology, unit, &choice.cpus) };
    let cpus = &choice.cpus;
    let mut second_best = String::new();
    let mut reasons = match &choice.reason {
        ChoiceReason::Unchanged => vec![format!("the job keeps {}, which it holds already", cpus_text(cpus))],
        ChoiceReason::Shrunk => vec![format!("of what the job held it keeps {}", cpus_text(cpus))],
        ChoiceReason::Grown { added } => vec![
            format!("the job keeps {}, which it held", cpus_text(&cpus.difference(added))),
            format!(
                "it gets {} on {}, the nearest that could be had",
                cpus_text(added),
                text.domains_text(added)
            ),
        ],
        ChoiceReason::Spread => {
            vec![format!("the job gets {}, spread evenly over the machine as it asked", cpus_text(cpus))]
        }
        ChoiceReason::Fit(trace) => {
            second_best = trace.second.map(|hole| text.hole_text(hole)).unwrap_or_default();
            text.best_fit_reasons(trace, cpus)
        }
    };
    if let Some(kind) = choice.kind {
        reasons.push(format!("only cores of kind {kind} were considered: there are enough of one kind"));
    }
    (reasons, second_best)
}

/// Returns the number of units in `cpus`: PUs, or cores with at least one PU in `cpus`.
fn count_units(topology: &Topology, unit: AllocationUnit, cpus: &CpuSet) -> u32 {
    let pus = topology.pus_by_core().map(|pus| pus.iter().filter(|&&pu| cpus.contains(pu)).count());
    let units = pus.map(|pus| if unit == AllocationUnit::Core { pus.min(1) } else { pus });
    u32::try_from(units.sum::<usize>()).unwrap_or(u32::MAX)
}

struct ReasonText<'a> {
    topology: &'a Topology,
    unit: AllocationUnit,
    asked: u32,
    /// The number of units that the job got.
    taken: u32,
}

impl ReasonText<'_> {
    /// Returns the reasons for a choice by best fit, as texts for users. The first reason names the chosen domain (L3
    /// cache, NUMA node or package). If no single domain has enough units, the first reason names the domains of
    /// `cpus`, the chosen PUs. Each further reason names a level without a sufficient domain, and the largest domain
    /// of this level.
    fn best_fit_reasons(&self, trace: &FitTrace, cpus: &CpuSet) -> Vec<String> {
        let first = match trace.chosen {
            Some(hole) => self.hole_text(hole),
            None => format!(
                "the job gets {} on {}, the fewest parts that hold {}",
                cpus_text(cpus),
                self.domains_text(cpus),
                self.count_text(self.asked)
            ),
        };
        let too_small = trace.too_small.iter().map(|hole| {
            let level = self.level_of(*hole);
            let (asked, size) = (self.count_text(self.asked), hole.size);
            format!("no {level} has {asked}; the largest hole is {size} on {}", self.hole_name(*hole))
        });
        core::iter::once(first).chain(too_small).collect()
    }

    /// Returns a text for users: how many free cores the domain of `hole` has, and how many of them would stay free if
    /// the job got its cores there.
    fn hole_text(&self, hole: Hole) -> String {
        let left = match hole.size.saturating_sub(self.taken) {
            0 => "none".to_owned(),
            left => left.to_string(),
        };
        let (name, free) = (self.hole_name(hole), self.count_text(hole.size));
        format!("{name} has {free}, of which {left} would stay free")
    }

    fn count_text(&self, units: u32) -> String {
        let noun = if self.unit == AllocationUnit::Core { "core" } else { "PU" };
        format!("{units} free {noun}{}", if units == 1 { "" } else { "s" })
    }

    /// Returns the name of the domain (L3 cache, NUMA node or package) in which the free cores `hole` are. If the
    /// cores are in no domain of the level, the result names the next larger domain: `the part of X outside any L3`.
    fn hole_name(&self, hole: Hole) -> String {
        match hole.group {
            CoreGroup::Domain(index) => {
                self.topology.domain_by_index(index).map(|domain| self.full_name(domain)).unwrap_or_default()
            }
            CoreGroup::Outside(around) => {
                let around = around.and_then(|index| self.topology.domain_by_index(index));
                let around = around.map_or("the machine".to_owned(), |domain| self.full_name(domain));
                format!("the part of {around} outside any {}", self.level_of(hole))
            }
        }
    }

    fn level_of(&self, hole: Hole) -> TopologyLevel {
        self.topology.levels().get(hole.depth).copied().unwrap_or(TopologyLevel::Machine)
    }

    /// Returns the name of a domain, with its package if the machine has several.
    fn full_name(&self, domain: &TopologyDomain) -> String {
        let mut packages = self.topology.domains(TopologyLevel::Package);
        let around = packages.find(|package| domain.cpus.is_subset(&package.cpus));
        match around {
            Some(package)
                if domain.level != TopologyLevel::Package
                    && self.topology.domains(TopologyLevel::Package).count() > 1 =>
            {
                format!("{} of {}", domain.name(), package.name())
            }
            _ => domain.name(),
        }
    }

    /// Returns the names of the domains (L3 caches, NUMA nodes or packages) that contain the PUs `cpus`. Uses the
    /// smallest level at which there are at most [`MAX_LISTED`] such domains. If each level has more, returns the
    /// number of these domains at the largest level. Returns `the machine` if the PUs are in no domain.
    fn domains_text(&self, cpus: &CpuSet) -> String {
        let domains_at = |level: TopologyLevel| {
            let mut indices: Vec<u32> =
                cpus.iter().filter_map(|pu| self.topology.domain_index(level, pu)).collect();
            indices.sort_unstable();
            indices.dedup();
            indices
        };
        let mut fallback = "the machine".to_owned();
        for &level in self.topology.levels().iter().rev() {
            let indices = domains_at(level);
            if (1..=MAX_LISTED).contains(&indices.len()) {
                let domains = indices.into_iter().filter_map(|index| self.topology.domain_by_index(index));
                return domains.map(|domain| self.full_name(domain)).collect::<Vec<_>>().join(", ");
            }
            if !indices.is_empty() {
                fallback = format!("{} {level}s", indices.len());
            }
        }
        fallback
    }
}
