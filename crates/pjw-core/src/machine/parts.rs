//! Divides the PUs of a job into parts, one for each instance of a group. Instance i gets part i, in turns.

use core::str::FromStr;

use thiserror::Error;

use crate::basics::cpuset::CpuListError;
use crate::basics::{CpuSet, Pu, prelude::*};
use crate::machine::topology::{Topology, TopologyLevel};

/// The rule by which [`divide_into_parts`] divides the PUs (logical CPUs) of a job into parts: the value of the option
/// `--map` of `pjwctl spawn`. `pjwctl spawn` starts several processes of one program (the instances), and gives one
/// part to each instance.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DivisionRule {
    /// Each part consists of cores that are neighbours in hwloc's logical order. The number of parts is the
    /// number of instances, or the number of cores if there are fewer cores than instances. The numbers of
    /// cores in two parts differ by at most one.
    #[default]
    Even,
    /// Each core of the job is one part.
    Core,
    /// Each PU of the job is one part.
    Pu,
    /// The PUs of the job that share an L3 cache form one part.
    L3,
    /// The PUs of the job in one NUMA node form one part.
    NumaNode,
    /// Each of these CPU lists is one part, even if it contains PUs that the job does not hold.
    Lists(Vec<CpuSet>),
}

/// The reason why a value of the option `--map` of `pjwctl spawn` is not valid. A valid value is `core`, `pu`,
/// `l3`, `numa`, or CPU lists with semicolons between them, such as `0-1;2-3` ([`DivisionRule`]).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MapOptionError {
    /// A part of the text (parts are separated by semicolons) is not a valid CPU list.
    #[error(
        "the part {part:?} of the map is no CPU list: {why}; write core, pu, l3, numa, or lists as in 0-1;2-3"
    )]
    InvalidList {
        /// The invalid part of the text.
        part: String,
        /// The reason why the part is not a valid CPU list.
        why: CpuListError,
    },
    /// A part of the text (parts are separated by semicolons) is empty.
    #[error("a part of the map {map:?} is empty: write core, pu, l3, numa, or lists as in 0-1;2-3")]
    EmptyPart {
        /// The whole text.
        map: String,
    },
}

impl FromStr for DivisionRule {
    type Err = MapOptionError;

    /// Parses `core`, `pu`, `l3`, `numa`, or lists of PUs with semicolons between them.
    fn from_str(text: &str) -> Result<Self, MapOptionError> {
        Ok(match text {
            "core" => Self::Core,
            "pu" => Self::Pu,
            "l3" => Self::L3,
            "numa" => Self::NumaNode,
            _ => Self::Lists(text.split(';').map(|part| parse_part(text, part)).collect::<Result<_, _>>()?),
        })
    }
}

/// Parses `part`, one of the CPU lists of `map`, the value of `--map`. An empty list is an error.
fn parse_part(map: &str, part: &str) -> Result<CpuSet, MapOptionError> {
    let cpus: CpuSet =
        part.trim().parse().map_err(|why| MapOptionError::InvalidList { part: part.to_owned(), why })?;
    if cpus.is_empty() { Err(MapOptionError::EmptyPart { map: map.to_owned() }) } else { Ok(cpus) }
}

/// Divides `cpus`, the PUs (logical CPUs) of a job, into parts by `rule`, and returns the parts. `pjwctl spawn` starts
/// several processes and gives one part to each. `instances` is the number of these processes. With
/// [`DivisionRule::Even`], there are at most this many parts. With other rules, `instances` has no effect.
///
/// The parts are in hwloc's logical order, and no part is empty. With [`DivisionRule::Lists`], the result is the lists
/// in the rule without any change, even if a list contains PUs outside `cpus`.
#[must_use]
pub fn divide_into_parts(
    topology: &Topology,
    cpus: &CpuSet,
    rule: &DivisionRule,
    instances: u32,
) -> Vec<CpuSet> {
    match rule {
        DivisionRule::Lists(lists) => lists.clone(),
        DivisionRule::Pu => topology.sort_in_logical_order(cpus).into_iter().map(CpuSet::from).collect(),
        DivisionRule::Core => topology.split_by_core(cpus).collect(),
        DivisionRule::L3 => split_by_domain(topology, cpus, TopologyLevel::L3),
        DivisionRule::NumaNode => split_by_domain(topology, cpus, TopologyLevel::NumaNode),
        DivisionRule::Even => {
            let cores: Vec<CpuSet> = topology.split_by_core(cpus).collect();
            let count = cores.len().min(usize::try_from(instances).unwrap_or(usize::MAX)).max(1);
            let mut parts = vec![CpuSet::new(); count];
            for (index, core) in cores.iter().enumerate() {
                let part = &mut parts[index * count / cores.len()];
                *part = part.union(core);
            }
            parts.retain(|part| !part.is_empty());
            parts
        }
    }
}

/// Divides `cpus`, the PUs (logical CPUs) of a job, into parts by `rule` for `tasks` processes that share one address
/// space. If possible, the first `tasks` parts are in one L3 cache, or else in one NUMA node. Otherwise, the result is
/// the same as that of [`divide_into_parts`].
///
/// - [`DivisionRule::Even`]: each task should get the number of cores in `cpus` divided by `tasks`, rounded down, but
///   at least one core. If one L3 cache or NUMA node has enough cores for this, only its cores are divided.
/// - [`DivisionRule::Core`], [`DivisionRule::Pu`]: if one L3 cache or NUMA node contains at least `tasks` parts, its
///   parts come first.
/// - Other rules: no difference to [`divide_into_parts`].
///
/// If several L3 caches or NUMA nodes are suitable, the first one in hwloc's logical order is chosen.
#[must_use]
pub fn divide_for_tasks(topology: &Topology, cpus: &CpuSet, rule: &DivisionRule, tasks: u32) -> Vec<CpuSet> {
    let count = usize::try_from(tasks).unwrap_or(usize::MAX).max(1);
    match rule {
        DivisionRule::Even => {
            let cores: Vec<CpuSet> = topology.split_by_core(cpus).collect();
            let needed = (cores.len() / count).max(1).saturating_mul(count);
            let cpus = match first_domain_with(topology, &cores, needed) {
                Some(domain) => domain.intersection(cpus),
                None => cpus.clone(),
            };
            divide_into_parts(topology, &cpus, rule, tasks)
        }
        DivisionRule::Core | DivisionRule::Pu => {
            let mut parts = divide_into_parts(topology, cpus, rule, tasks);
            if let Some(domain) = first_domain_with(topology, &parts, count) {
                parts.sort_by_key(|part| !part.is_subset(domain));
            }
            parts
        }
        DivisionRule::L3 | DivisionRule::NumaNode | DivisionRule::Lists(_) => {
            divide_into_parts(topology, cpus, rule, tasks)
        }
    }
}

/// The PUs of the first L3 cache, or else of the first NUMA node, that contains at least `count` of these sets.
fn first_domain_with<'t>(topology: &'t Topology, sets: &[CpuSet], count: usize) -> Option<&'t CpuSet> {
    let contained = |cpus: &CpuSet| sets.iter().filter(|set| set.is_subset(cpus)).count();
    [TopologyLevel::L3, TopologyLevel::NumaNode].into_iter().find_map(|level| {
        topology.domains(level).map(|domain| &domain.cpus).find(|cpus| contained(cpus) >= count)
    })
}

/// Returns the kernel's number of the NUMA node that contains all of `cpus`. `None` if no single NUMA node
/// contains all of them, or if `cpus` is empty. Also `None` if the machine has only one NUMA node: the caller
/// then has no choice between NUMA nodes.
#[must_use]
pub fn numa_node_containing(topology: &Topology, cpus: &CpuSet) -> Option<u32> {
    let has_several = topology.domains(TopologyLevel::NumaNode).nth(1).is_some();
    let node = |pu: Pu| topology.domain_of(TopologyLevel::NumaNode, pu).map(|node| node.number);
    let first = node(cpus.first()?)?;
    (has_several && cpus.iter().all(|pu| node(pu) == Some(first))).then_some(first)
}

/// Returns the PUs of each domain of the level `level` (such as each L3 cache) that are in `cpus`, without empty sets.
/// PUs of `cpus` that are in no domain of the level form a set of their own, the last one.
fn split_by_domain(topology: &Topology, cpus: &CpuSet, level: TopologyLevel) -> Vec<CpuSet> {
    let inside = topology.domains(level).map(|domain| topology.cpus_belonging_to(domain).intersection(cpus));
    let mut parts: Vec<CpuSet> = inside.filter(|part| !part.is_empty()).collect();
    let others = parts.iter().fold(cpus.clone(), |others, part| others.difference(part));
    parts.extend((!others.is_empty()).then_some(others));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::topology::RegularShape;

    /// 2 NUMA nodes with 2 L3 each, with 2 cores of 2 PUs each: 16 PUs.
    fn machine() -> Topology {
        Topology::from_shape(RegularShape {
            packages: 2,
            numa_nodes_per_package: 1,
            l3s_per_numa_node: 2,
            cores_per_l3: 2,
            pus_per_core: 2,
        })
    }

    fn texts(cpus: &CpuSet, map: &str, instances: u32) -> Vec<String> {
        divide_into_parts(&machine(), cpus, &map.parse().unwrap(), instances)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn maps_divide_by_the_parts_of_the_machine() {
        let machine = machine();
        let all = machine.cpus();
        for (map, level) in [("l3", TopologyLevel::L3), ("numa", TopologyLevel::NumaNode)] {
            let expected: Vec<_> = machine.domains(level).map(|domain| domain.cpus.to_string()).collect();
            assert_eq!(texts(all, map, 3), expected, "{map}");
        }
        assert_eq!(texts(all, "core", 1).len(), 8);
        assert_eq!(texts(all, "pu", 1).len(), 16);
    }

    #[test]
    fn parts_contain_only_the_pus_of_the_job() {
        let machine = machine();
        let cpus: CpuSet = machine.pus_in_logical_order()[3..7].iter().copied().collect();
        for map in ["core", "pu", "l3", "numa"] {
            let parts = divide_into_parts(&machine, &cpus, &map.parse().unwrap(), 4);
            let all = parts.iter().fold(CpuSet::new(), |all, part| all.union(part));
            assert_eq!(all, cpus, "{map}");
            assert_eq!(parts.iter().map(CpuSet::len).sum::<usize>(), cpus.len(), "{map}");
        }
    }

    #[test]
    fn the_even_map_deals_neighbouring_cores_and_makes_no_more_parts_than_cores() {
        let machine = machine();
        let even = |instances| divide_into_parts(&machine, machine.cpus(), &DivisionRule::Even, instances);
        assert_eq!(even(2).iter().map(CpuSet::len).collect::<Vec<_>>(), [8, 8]);
        assert_eq!(even(3).iter().map(CpuSet::len).collect::<Vec<_>>(), [6, 6, 4]);
        assert_eq!(even(100).len(), 8);
        assert_eq!(even(0).len(), 1);
        assert!(divide_into_parts(&machine, &CpuSet::new(), &DivisionRule::Even, 4).is_empty());
    }

    /// The parts of the tasks, and whether all of them are in one domain of the level.
    fn task_parts(cpus: &str, map: &str, tasks: u32, level: TopologyLevel) -> (Vec<String>, bool) {
        let machine = machine();
        let rule = if map == "even" { DivisionRule::Even } else { map.parse().unwrap() };
        let mut parts = divide_for_tasks(&machine, &cpus.parse().unwrap(), &rule, tasks);
        parts.truncate(tasks as usize);
        let all = parts.iter().fold(CpuSet::new(), |all, part| all.union(part));
        let is_in_one = machine.domains(level).any(|domain| all.is_subset(&domain.cpus));
        (parts.iter().map(ToString::to_string).collect(), is_in_one)
    }

    #[test]
    fn tasks_get_parts_in_one_l3_or_numa_node_where_they_fit() {
        // Core 0 has the PUs 0 and 8. Node 0 has the cores 0-3, its first L3 cache the cores 0-1.
        for (cores, tasks, level, is_in_one, why) in [
            ("2-7,10-15", 4, TopologyLevel::NumaNode, true, "two cores in node 0 and four in node 1"),
            ("2-6,10-14", 2, TopologyLevel::NumaNode, false, "each gets two of five cores: node 1 has three"),
            ("0-2,8-10", 2, TopologyLevel::L3, true, "each gets one of three cores"),
            ("0-7,8-15", 4, TopologyLevel::NumaNode, false, "each gets two cores, as requested"),
            ("0-7,8-15", 2, TopologyLevel::NumaNode, false, "each gets four cores"),
            ("0-3,8-11", 2, TopologyLevel::NumaNode, true, "all are in one node"),
        ] {
            let (parts, is_in_one_domain) = task_parts(cores, "even", tasks, level);
            assert_eq!((parts.len(), is_in_one_domain), (tasks as usize, is_in_one), "{why}: {parts:?}");
        }
        assert_eq!(task_parts("0-15", "even", 100, TopologyLevel::L3).0.len(), 8, "a core for several tasks");
        assert!(divide_for_tasks(&machine(), &CpuSet::new(), &DivisionRule::Even, 4).is_empty());
    }

    #[test]
    fn tasks_get_the_cores_or_pus_of_one_domain_first() {
        for (map, tasks, level) in [
            ("core", 2, TopologyLevel::L3),
            ("core", 4, TopologyLevel::NumaNode),
            ("pu", 3, TopologyLevel::L3),
            ("pu", 7, TopologyLevel::NumaNode),
        ] {
            let (parts, is_in_one) = task_parts("2-7,10-15", map, tasks, level);
            assert!(is_in_one && parts.len() == tasks as usize, "{map} {tasks}: {parts:?}");
        }
        let all = divide_for_tasks(&machine(), machine().cpus(), &DivisionRule::Pu, 3);
        assert_eq!(all.len(), 16, "no part is lost");
        assert!(!task_parts("0-15", "core", 5, TopologyLevel::NumaNode).1, "five cores are in no node");
        assert_eq!(task_parts("0-15", "12;3", 2, TopologyLevel::NumaNode).0, ["12", "3"], "lists are kept");
    }

    #[test]
    fn lists_are_parsed_and_kept() {
        assert_eq!(texts(&CpuSet::new(), "0-1;7", 4), ["0-1", "7"]);
        assert!(matches!("0-1;;2".parse::<DivisionRule>(), Err(MapOptionError::EmptyPart { .. })));
        assert!(matches!("cores".parse::<DivisionRule>(), Err(MapOptionError::InvalidList { .. })));
    }

    #[test]
    fn a_part_in_one_of_several_nodes_has_that_node() {
        let machine = machine();
        let node = machine.domains(TopologyLevel::NumaNode).nth(1).unwrap();
        assert_eq!(numa_node_containing(&machine, &node.cpus), Some(node.number));
        assert_eq!(numa_node_containing(&machine, machine.cpus()), None);
        assert_eq!(numa_node_containing(&machine, &CpuSet::new()), None);
    }
}
