//! Why a choice is as it is, in sentences with the kernel's CPU numbers.

use super::choose::Chooser;
use crate::cpuset::CpuSet;
use crate::topology::{Domain, Level, Topology};

/// From small to large: the order in which a domain that holds the request is looked for.
const LEVELS: [Level; 3] = [Level::L3, Level::NumaNode, Level::Package];

/// The reasons for a choice, and the second-best one.
pub(super) fn reasons(
    topology: &Topology,
    chooser: &Chooser<'_>,
    chosen: &CpuSet,
    present: &CpuSet,
    spread: bool,
) -> (Vec<String>, String) {
    let asked = topology.whole_cores_in(chosen).max(1);
    let mut because = Vec::new();
    if spread {
        because.push(format!("{chosen} are spread evenly over the machine, as asked"));
        return (because, String::new());
    }
    if !present.is_empty() && present != chosen {
        because.push(format!("{} were held before and kept", present.intersection(chosen)));
    }
    for level in LEVELS {
        let sizes = chooser.hole_sizes(level);
        let domains: Vec<&Domain> = topology.domains(level).collect();
        let holding = (0u32..).zip(&domains).find(|(_, domain)| chosen.is_subset(&domain.cpus));
        if let Some((index, domain)) = holding {
            let hole = sizes.get(&index).copied().unwrap_or(0);
            let left = hole.saturating_sub(asked);
            because.push(format!("{} has {hole} free cores; {chosen} leave {left}", domain.name()));
            return (because, second(&sizes, &domains, index, asked));
        }
        let largest = sizes.iter().max_by_key(|&(index, size)| (*size, std::cmp::Reverse(*index)));
        if let Some((&index, size)) = largest
            && let Some(domain) = domains.get(index as usize)
        {
            let kind = level.noun();
            because.push(format!(
                "no {kind} has {asked} free cores; the largest hole is {size} on {}",
                domain.name()
            ));
        }
    }
    because.push(format!("{chosen} touch the fewest domains that hold {asked} cores"));
    (because, String::new())
}

fn second(
    sizes: &std::collections::BTreeMap<u32, u32>,
    domains: &[&Domain],
    first: u32,
    asked: u32,
) -> String {
    let others = sizes.iter().filter(|&(&index, &size)| index != first && size >= asked);
    let next = others.min_by_key(|&(&index, &size)| (size, index));
    match next.and_then(|(&index, size)| Some((domains.get(index as usize)?, size))) {
        Some((domain, size)) => {
            format!("{}, which would be left with {} free cores", domain.name(), size - asked)
        }
        None => String::new(),
    }
}
