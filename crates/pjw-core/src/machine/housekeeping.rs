//! The housekeeping rule of the configuration: which PUs are kept for the system.
//!
//! A rule is nothing (the default), a CPU list (`0`, `0-1,8`), or a number of cores in every domain of a
//! level: `1/l3`, `2/numa`, `1/package`. Parsing a rule needs no topology, so a configuration file can be
//! checked on any machine. The daemon resolves the rule against the topology when it starts or reloads.

use core::fmt;
use core::str::FromStr;

use thiserror::Error;

use crate::basics::{CpuListError, CpuSet, Pu, prelude::*};
use crate::machine::topology::{Topology, TopologyLevel};

/// The rule in the configuration that selects the housekeeping PUs (logical CPUs) of a machine. Housekeeping PUs are
/// reserved for the system: pjw grants them to no job.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum HousekeepingRule {
    /// No housekeeping: every core is for jobs.
    #[default]
    None,
    /// The PUs in this list.
    List(CpuSet),
    /// The first cores, in hwloc's logical order, of every L3, of every NUMA node, or of every package.
    PerDomain {
        /// The number of housekeeping cores in each L3, NUMA node or package; at least 1.
        cores: u32,
        /// Whether the cores are counted by L3, by NUMA node or by package.
        level: TopologyLevel,
    },
}

/// The reason why the text of a housekeeping rule is invalid, or why the rule can't be applied to a machine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HousekeepingError {
    /// The text has none of the forms of a rule. The forms are a CPU list, and a number of cores for each L3,
    /// NUMA node or package such as `1/l3`. The value says why the text is not a CPU list.
    #[error(
        "the housekeeping rule is no CPU list: write one such as 0-1,8, or a share such \
         as 1/l3, or \"\" for none"
    )]
    InvalidList(#[source] CpuListError),
    /// The part of the text after the slash is not `l3`, `numa` or `package`.
    #[error(
        "{text:?} is not a part of a machine that housekeeping can be counted by: \
         write N/l3, N/numa or N/package"
    )]
    UnknownLevel {
        /// The part of the text after the slash, cut to 40 characters.
        text: String,
    },
    /// The part of the text before the slash is not a number of cores.
    #[error("{text:?} is not a number of cores: write one before the slash, as in 1/l3")]
    InvalidCount {
        /// The part of the text before the slash, cut to 40 characters.
        text: String,
    },
    /// The rule selects zero cores for each L3, NUMA node or package.
    #[error("0 cores of each {level} are no housekeeping: write \"\" for none, or at least 1")]
    ZeroCores {
        /// Whether the rule counts cores by L3, by NUMA node or by package.
        level: TopologyLevel,
    },
    /// The list contains PUs that the machine does not have.
    #[error("housekeeping PUs {cpus} are not on this machine, which has {machine}: name only those")]
    NoSuchPus {
        /// The PUs that the machine does not have.
        cpus: CpuSet,
        /// All PUs of the machine.
        machine: CpuSet,
    },
    /// The list contains some PUs of a core, but not all of them. Housekeeping PUs must form whole cores.
    #[error(
        "housekeeping PU {pu} shares its core with {siblings}, which the list leaves out: add {siblings}"
    )]
    SplitsCore {
        /// A PU in the list, on the core whose other PUs are missing in the list.
        pu: Pu,
        /// The other PUs of the same core that are not in the list.
        siblings: CpuSet,
    },
    /// The rule counts cores by L3, by NUMA node or by package, but the topology of the machine contains
    /// none of the named kind.
    #[error("this machine shows no {level}: count housekeeping by another part, or write a CPU list")]
    NoSuchLevel {
        /// Whether the rule counts cores by L3, by NUMA node or by package.
        level: TopologyLevel,
    },
    /// The rule selects every core of the machine, so that no core remains for jobs.
    #[error("housekeeping {rule:?} takes every core of this machine ({cores}): leave at least one for jobs")]
    NoCoreLeft {
        /// The rule, as text.
        rule: String,
        /// The number of cores of the machine.
        cores: u32,
    },
}

/// The names of the levels in a rule.
const LEVELS: [(&str, TopologyLevel); 3] =
    [("l3", TopologyLevel::L3), ("numa", TopologyLevel::NumaNode), ("package", TopologyLevel::Package)];

impl FromStr for HousekeepingRule {
    type Err = HousekeepingError;

    fn from_str(text: &str) -> Result<Self, HousekeepingError> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self::None);
        }
        let Some((count, name)) = text.split_once('/') else {
            return text.parse().map(Self::List).map_err(HousekeepingError::InvalidList);
        };
        let level = LEVELS.into_iter().find(|(known, _)| *known == name).map(|(_, level)| level);
        let level = level.ok_or_else(|| HousekeepingError::UnknownLevel { text: shorten(name) })?;
        let has_only_digits = !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit());
        match count.parse() {
            Ok(0) => Err(HousekeepingError::ZeroCores { level }),
            Ok(cores) if has_only_digits => Ok(Self::PerDomain { cores, level }),
            _ => Err(HousekeepingError::InvalidCount { text: shorten(count) }),
        }
    }
}

/// Prints the form that `from_str` parses.
impl fmt::Display for HousekeepingRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => Ok(()),
            Self::List(cpus) => cpus.fmt(f),
            Self::PerDomain { cores, level } => {
                let name = LEVELS.into_iter().find(|(_, known)| known == level).map_or("machine", |(n, _)| n);
                write!(f, "{cores}/{name}")
            }
        }
    }
}

impl HousekeepingRule {
    /// Returns the housekeeping PUs (logical CPUs that are reserved for the system) that the rule selects on
    /// the machine with this topology. The result consists of whole cores. The result is empty for
    /// [`HousekeepingRule::None`].
    ///
    /// # Errors
    /// - If the rule lists a PU that the machine does not have.
    /// - If the rule lists some PUs of a core, but not all of them.
    /// - If the rule selects cores of each L3 cache, but the machine has no L3 cache. The same applies to a
    ///   rule for each NUMA node and to a rule for each package.
    /// - If the rule selects every core of the machine, so that no core remains for jobs.
    pub fn select_housekeeping_cpus(&self, topology: &Topology) -> Result<CpuSet, HousekeepingError> {
        let cpus = match self {
            Self::None => return Ok(CpuSet::new()),
            Self::List(cpus) => whole_cores(cpus, topology)?,
            Self::PerDomain { cores, level } => first_cores_of_each(*cores, *level, topology)?,
        };
        if topology.cpus().is_subset(&cpus) {
            let cores = u32::try_from(topology.cores().len()).unwrap_or(u32::MAX);
            return Err(HousekeepingError::NoCoreLeft { rule: self.to_string(), cores });
        }
        Ok(cpus)
    }
}

/// Returns `cpus` if these PUs are whole cores of the machine. Returns an error if the machine lacks one of the PUs, or
/// if the PUs are only a part of a core.
fn whole_cores(cpus: &CpuSet, topology: &Topology) -> Result<CpuSet, HousekeepingError> {
    let absent = cpus.difference(topology.cpus());
    if !absent.is_empty() {
        return Err(HousekeepingError::NoSuchPus { cpus: absent, machine: topology.cpus().clone() });
    }
    for pu in cpus.iter() {
        let siblings = topology.core_cpus(pu).difference(cpus);
        if !siblings.is_empty() {
            return Err(HousekeepingError::SplitsCore { pu, siblings });
        }
    }
    Ok(cpus.clone())
}

/// Returns the PUs of the first `cores` cores of each domain of the level `level`, such as each NUMA node. If a
/// domain has fewer cores, returns all PUs of this domain. Returns an error if the machine has no such level.
fn first_cores_of_each(
    cores: u32,
    level: TopologyLevel,
    topology: &Topology,
) -> Result<CpuSet, HousekeepingError> {
    if !topology.levels().contains(&level) {
        return Err(HousekeepingError::NoSuchLevel { level });
    }
    let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
    let mut chosen = CpuSet::new();
    for core in topology.pus_by_core() {
        let Some(domain) = core.first().and_then(|&pu| topology.domain_index(level, pu)) else { continue };
        let count = counts.entry(domain).or_default();
        if *count < cores {
            *count += 1;
            chosen.extend(core.iter().copied());
        }
    }
    Ok(chosen)
}

/// Returns the first 40 characters of a text, so that an error message stays short.
fn shorten(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;
    use crate::machine::topology::Core;
    use crate::machine::topology::TopologyDomain;
    use crate::testing::regular_topology;
    use std::vec::Vec;

    fn machine() -> Topology {
        regular_topology(2, 1, 2, 2, 2)
    }

    fn resolve(rule: &str, topology: &Topology) -> Result<String, String> {
        let words = |error: HousekeepingError| match error.source() {
            Some(cause) => format!("{error}: {cause}"),
            None => error.to_string(),
        };
        let rule: HousekeepingRule = rule.parse().map_err(words)?;
        rule.select_housekeeping_cpus(topology).map(|cpus| cpus.to_string()).map_err(words)
    }

    #[test]
    fn a_rule_is_nothing_a_list_or_a_share_of_domains() {
        for (rule, cpus) in [
            ("", ""),
            (" ", ""),
            ("0,8", "0,8"),
            ("0-1,8-9", "0-1,8-9"),
            ("1/l3", "0,2,4,6,8,10,12,14"),
            ("1/numa", "0,4,8,12"),
            ("2/package", "0-1,4-5,8-9,12-13"),
        ] {
            assert_eq!(resolve(rule, &machine()).as_deref(), Ok(cpus), "{rule:?}");
        }
    }

    #[test]
    fn a_wrong_rule_gives_an_error_with_the_correct_form() {
        for (rule, expected) in [
            ("0-3,2", "PU 2 stands twice"),
            ("cpu0", "neither a number nor a range"),
            ("1/l4", "\"l4\" is not a part of a machine"),
            ("1/", "\"\" is not a part"),
            ("/l3", "\"\" is not a number of cores"),
            ("+1/l3", "\"+1\" is not a number"),
            ("-1/l3", "\"-1\" is not a number"),
            ("99999999999/l3", "is not a number"),
            ("0/l3", "0 cores of each L3 are no housekeeping"),
            ("0", "housekeeping PU 0 shares its core with 8, which the list leaves out: add 8"),
            ("0,8,16-17", "PUs 16-17 are not on this machine, which has 0-15"),
            ("0-15", "housekeeping \"0-15\" takes every core"),
            ("2/l3", "housekeeping \"2/l3\" takes every core of this machine (8): leave at least one"),
            ("4000000000/package", "takes every core"),
        ] {
            let error = resolve(rule, &machine()).unwrap_err();
            assert!(error.contains(expected), "{rule}: {error}");
        }
        let error = resolve(&format!("1/{}", "x".repeat(10_000)), &machine()).unwrap_err();
        assert!(error.len() < 200, "{error}");
    }

    #[test]
    fn a_small_domain_gives_all_its_cores_and_an_empty_node_none() {
        let core = |pus: &str| Core { pus: pus.parse().unwrap(), kind_index: 0 };
        let node = |number, cpus: &str| TopologyDomain {
            level: TopologyLevel::NumaNode,
            number,
            cpus: cpus.parse().unwrap(),
            memory_bytes: 1,
        };
        let cores = ["0-1", "2-3", "4", "5", "6"].map(core).to_vec();
        let nodes = vec![node(0, "0-3"), node(1, "4"), node(2, "5-6"), node(3, "")];
        let machine = Topology::new(cores, nodes).unwrap();
        assert_eq!(resolve("1/numa", &machine).as_deref(), Ok("0-1,4-5"));
        let error = resolve("1/l3", &machine).unwrap_err();
        assert_eq!(
            error,
            "this machine shows no L3: count housekeeping by another part, or write a CPU list"
        );
    }

    #[test]
    fn a_machine_of_one_core_has_no_housekeeping() {
        let one = Topology::new(vec![Core { pus: Pu(0).into(), kind_index: 0 }], Vec::new()).unwrap();
        assert!(resolve("0", &one).unwrap_err().contains("takes every core"));
    }

    #[test]
    fn rules_print_in_the_form_that_is_parsed() {
        for text in ["", "0-1,8", "1/l3", "2/numa", "3/package"] {
            assert_eq!(text.parse::<HousekeepingRule>().unwrap().to_string(), text);
        }
    }
}
