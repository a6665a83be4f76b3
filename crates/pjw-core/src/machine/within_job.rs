//! Where the new processes of a job go if the job spans several NUMA nodes: the launch policies of mpsched(1) of HP-UX.

use alloc::collections::VecDeque;
use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::basics::{CpuSet, prelude::*};
use crate::machine::topology::{Topology, TopologyLevel};

/// The rule by which pjw chooses a NUMA node for each new process of a job that has PUs (logical CPUs) in several NUMA
/// nodes. The rule is the value of the option `--within-job` of `pjwctl assign`, `pjwctl run` and `pjwctl spawn`. With
/// the rule `Default`, pjw chooses no NUMA node. All other rules are launch policies of mpsched(1) of HP-UX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub enum NumaNodeRule {
    /// pjw chooses no NUMA node for the process. A hot thread (a thread that runs or waits for a PU most of the time)
    /// gets an idle PU in the NUMA node in which it runs, if there is one.
    #[default]
    #[serde(rename = "default")]
    Default,
    /// The NUMA nodes of the job in turn (round robin): each new process gets the next NUMA node.
    #[serde(rename = "rr")]
    RoundRobin,
    /// The NUMA node with the fewest hot threads per core of the job (least loaded).
    #[serde(rename = "ll")]
    LeastLoaded,
    /// The NUMA node of the parent process if this node has an idle core. Otherwise, the next NUMA node with an idle
    /// core.
    #[serde(rename = "fill")]
    Fill,
    /// The NUMA node of the parent process, even if this node has no idle core.
    #[serde(rename = "packed")]
    Packed,
}

/// The error for an invalid value of the option `--within-job`. The valid values are `default`, `rr`, `ll`,
/// `fill` and `packed` ([`NumaNodeRule`]).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is no rule for the processes of a job: use default, rr, ll, fill or packed")]
pub struct NumaNodeRuleError {
    /// The invalid text.
    pub text: String,
}

impl NumaNodeRule {
    /// All rules for the choice of a NUMA node, in the order in which they are shown to users.
    pub const ALL: [Self; 5] = [Self::Default, Self::RoundRobin, Self::LeastLoaded, Self::Fill, Self::Packed];

    /// Returns the name of the rule on the command line, in JSON, and in pjwd's journal files: `default`, `rr`, `ll`,
    /// `fill` or `packed`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::RoundRobin => "rr",
            Self::LeastLoaded => "ll",
            Self::Fill => "fill",
            Self::Packed => "packed",
        }
    }

    /// Returns a phrase for users that names the NUMA node on which this rule places a new process, such as `to the
    /// NUMA node of the parent`. `pjwctl explain` prints the phrase after the words `a new process with hot threads
    /// goes`. The rule `Default` places no process. Its phrase is `no NUMA node is chosen for it`, which `explain`
    /// prints alone.
    #[must_use]
    pub fn description(self) -> &'static str {
        match self {
            Self::Default => "no NUMA node is chosen for it",
            Self::RoundRobin => "to the NUMA nodes in turns",
            Self::LeastLoaded => "to the NUMA node with the fewest hot threads per core",
            Self::Fill => "to the NUMA node of the parent while it has an idle core, then to the next one",
            Self::Packed => "to the NUMA node of the parent",
        }
    }

    /// Returns whether this is the rule `Default`, with which no NUMA node is chosen.
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::Default
    }
}

impl fmt::Display for NumaNodeRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for NumaNodeRule {
    type Err = NumaNodeRuleError;

    fn from_str(text: &str) -> Result<Self, NumaNodeRuleError> {
        let rule = Self::ALL.into_iter().find(|rule| rule.name() == text);
        rule.ok_or_else(|| NumaNodeRuleError { text: text.to_owned() })
    }
}

/// A NUMA node in which a job has cores, as input for [`choose_numa_node`]: the number of the job's cores there, and
/// the number of the job's hot threads there. A thread is hot if it runs or waits for a PU (logical CPU) most of the
/// time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumaNodeLoad {
    /// The kernel's number of the NUMA node.
    pub number: u32,
    /// The number of the job's cores in the NUMA node. At least 1.
    pub cores: usize,
    /// The number of the job's hot threads in the NUMA node.
    pub hot_threads: usize,
}

impl NumaNodeLoad {
    fn has_idle_core(&self) -> bool {
        self.hot_threads < self.cores
    }
}

/// Returns the NUMA nodes that contain PUs (logical CPUs) of `cpus`, in hwloc's logical order. Each entry has the
/// number of cores of the NUMA node that have a PU in `cpus`. The number of hot threads is 0 in each entry: the caller
/// sets this number.
#[must_use]
pub fn numa_nodes_of_cpus(topology: &Topology, cpus: &CpuSet) -> Vec<NumaNodeLoad> {
    let load = |number, pus: &CpuSet| {
        let cores = usize::try_from(topology.overlapping_core_count(pus)).unwrap_or(usize::MAX);
        (cores > 0).then_some(NumaNodeLoad { number, cores, hot_threads: 0 })
    };
    let nodes = topology.domains(TopologyLevel::NumaNode);
    nodes.filter_map(|node| load(node.number, &topology.cpus_belonging_to(node).intersection(cpus))).collect()
}

/// Chooses a NUMA node for a new process of a job by `rule`, and returns the kernel's number of the NUMA node. Returns
/// `None` if the rule is `Default`, or if `nodes` has fewer than two NUMA nodes.
///
/// - `nodes` lists the NUMA nodes of the job, each with the number of the job's cores and of its hot threads there. A
///   thread is hot if it runs or waits for a PU (logical CPU) most of the time.
/// - `last_chosen` is the NUMA node that was chosen last for any process of the job. `None` if no NUMA node was chosen
///   yet.
/// - `parent_node` is the NUMA node that was chosen for the parent of the process, or else for its nearest ancestor
///   with a chosen NUMA node. `None` if there is no such ancestor: the first of `nodes` then takes its place.
///
/// The rules choose these NUMA nodes:
///
/// - `RoundRobin`: the NUMA node after `last_chosen` in `nodes`. The first of `nodes` follows the last. If
///   `last_chosen` is `None`, the first of `nodes` is chosen.
/// - `LeastLoaded`: the NUMA node with the fewest hot threads per core. If several have the fewest, the first of these.
/// - `Packed`: `parent_node`.
/// - `Fill`: the first NUMA node with fewer hot threads than cores, in the order of `nodes` beginning at `parent_node`.
///   If there is no such NUMA node, `Fill` chooses like `LeastLoaded`.
#[must_use]
pub fn choose_numa_node(
    rule: NumaNodeRule,
    nodes: &[NumaNodeLoad],
    last_chosen: Option<u32>,
    parent_node: Option<u32>,
) -> Option<u32> {
    if nodes.len() < 2 {
        return None;
    }
    let index_of = |number: Option<u32>| nodes.iter().position(|node| Some(node.number) == number);
    let least_loaded = || choose_least_loaded(nodes).and_then(|index| nodes.get(index));
    let node = match rule {
        NumaNodeRule::Default => None,
        NumaNodeRule::RoundRobin => {
            nodes.get(index_of(last_chosen).map_or(0, |index| (index + 1) % nodes.len()))
        }
        NumaNodeRule::LeastLoaded => least_loaded(),
        NumaNodeRule::Packed => nodes.get(index_of(parent_node).unwrap_or(0)),
        NumaNodeRule::Fill => {
            let mut in_turn = nodes.iter().cycle().skip(index_of(parent_node).unwrap_or(0)).take(nodes.len());
            in_turn.find(|node| node.has_idle_core()).or_else(least_loaded)
        }
    };
    node.map(|node| node.number)
}

/// Sorts `parts` by `rule`, and returns the sorted list. Each part is a set of PUs (logical CPUs) of a job.
/// `pjwctl spawn` starts several processes of one program: the first process gets the first part, the second process
/// the second part, and so on. A part belongs to the NUMA node of its first PU.
///
/// - `Default` does not change the order.
/// - `Fill` and `Packed` list all parts of one NUMA node before the parts of the next NUMA node.
/// - `RoundRobin` takes one part from each NUMA node in turn.
/// - `LeastLoaded` mixes the parts of the NUMA nodes in proportion to their numbers. Example: one NUMA node has four
///   parts and another has two. The list then has two parts of the first NUMA node for each part of the second.
///
/// The parts of one NUMA node keep their order.
#[must_use]
pub fn sort_parts(topology: &Topology, parts: Vec<CpuSet>, rule: NumaNodeRule) -> Vec<CpuSet> {
    if rule.is_default() {
        return parts;
    }
    let node_of = |part: &CpuSet| {
        part.first().and_then(|pu| topology.domain_of(TopologyLevel::NumaNode, pu)).map(|node| node.number)
    };
    let mut by_node: Vec<(Option<u32>, VecDeque<CpuSet>)> = Vec::new();
    let count = parts.len();
    for part in parts {
        let node = node_of(&part);
        match by_node.iter_mut().find(|(known, _)| *known == node) {
            Some((_, parts)) => parts.push_back(part),
            None => by_node.push((node, VecDeque::from([part]))),
        }
    }
    match rule {
        NumaNodeRule::Default | NumaNodeRule::Fill | NumaNodeRule::Packed => {
            by_node.into_iter().flat_map(|(_, parts)| parts).collect()
        }
        NumaNodeRule::RoundRobin => {
            let turn = |_| by_node.iter_mut().filter_map(|(_, parts)| parts.pop_front()).collect::<Vec<_>>();
            (0..count).flat_map(turn).collect()
        }
        NumaNodeRule::LeastLoaded => {
            let load = |(number, (_, parts)): (u32, &(_, VecDeque<CpuSet>))| NumaNodeLoad {
                number,
                cores: parts.len(),
                hot_threads: 0,
            };
            let mut loads: Vec<NumaNodeLoad> = (0..).zip(&by_node).map(load).collect();
            let mut next = |_| {
                let index = choose_least_loaded(&loads)?;
                loads.get_mut(index)?.hot_threads += 1;
                by_node.get_mut(index)?.1.pop_front()
            };
            (0..count).filter_map(&mut next).collect()
        }
    }
}

/// The index of the node with the fewest hot threads for each core. Of several, the first.
fn choose_least_loaded(nodes: &[NumaNodeLoad]) -> Option<usize> {
    // Of the loads a/b and c/d, the first is lower if a*d < c*b.
    let order = |(_, a): &(usize, &NumaNodeLoad), (_, b): &(usize, &NumaNodeLoad)| {
        a.hot_threads.saturating_mul(b.cores).cmp(&b.hot_threads.saturating_mul(a.cores))
    };
    nodes.iter().enumerate().min_by(order).map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::topology::RegularShape;

    /// Two NUMA nodes of 4 cores of one PU: node 0 has the PUs 0-3.
    fn machine() -> Topology {
        Topology::from_shape(RegularShape {
            packages: 2,
            numa_nodes_per_package: 1,
            l3s_per_numa_node: 1,
            cores_per_l3: 4,
            pus_per_core: 1,
        })
    }

    /// Returns the NUMA nodes that `rule` chooses for `count` processes, one after the other. Each process has one
    /// thread, and all have the parent node `parent`.
    fn choices(rule: NumaNodeRule, cpus: &str, parent: Option<u32>, count: usize) -> Vec<u32> {
        let mut nodes = numa_nodes_of_cpus(&machine(), &cpus.parse().unwrap());
        let mut chosen = Vec::new();
        for _ in 0..count {
            let Some(number) = choose_numa_node(rule, &nodes, chosen.last().copied(), parent) else { break };
            chosen.push(number);
            nodes.iter_mut().filter(|node| node.number == number).for_each(|node| node.hot_threads += 1);
        }
        chosen
    }

    #[test]
    fn round_robin_takes_the_nodes_in_turns() {
        assert_eq!(choices(NumaNodeRule::RoundRobin, "0-7", None, 5), [0, 1, 0, 1, 0]);
        let chosen = choices(NumaNodeRule::RoundRobin, "0-7", Some(1), 3);
        assert_eq!(chosen, [0, 1, 0], "the parent has no effect");
    }

    #[test]
    fn least_loaded_takes_the_node_with_the_fewest_threads_per_core() {
        assert_eq!(choices(NumaNodeRule::LeastLoaded, "0-7", None, 4), [0, 1, 0, 1]);
        // Four cores in node 0, two in node 1.
        assert_eq!(choices(NumaNodeRule::LeastLoaded, "0-5", None, 6), [0, 1, 0, 0, 1, 0]);
    }

    #[test]
    fn fill_uses_the_cores_of_a_node_before_those_of_the_next() {
        assert_eq!(choices(NumaNodeRule::Fill, "0-7", None, 10), [0, 0, 0, 0, 1, 1, 1, 1, 0, 1]);
        assert_eq!(choices(NumaNodeRule::Fill, "2-7", Some(1), 6), [1, 1, 1, 1, 0, 0]);
    }

    #[test]
    fn packed_takes_the_node_of_the_parent() {
        assert_eq!(choices(NumaNodeRule::Packed, "0-7", Some(1), 6), [1; 6]);
        assert_eq!(choices(NumaNodeRule::Packed, "0-7", None, 3), [0; 3]);
        let chosen = choices(NumaNodeRule::Packed, "0-7", Some(9), 1);
        assert_eq!(chosen, [0], "no node of the job has this number");
    }

    #[test]
    fn no_node_is_chosen_in_one_node_or_by_default() {
        for rule in NumaNodeRule::ALL {
            assert_eq!(choices(rule, "4-7", None, 2), [0; 0], "{rule}");
        }
        assert_eq!(choices(NumaNodeRule::Default, "0-7", None, 2), [0; 0]);
    }

    fn arranged(rule: NumaNodeRule, parts: &[&str]) -> Vec<String> {
        let parts = parts.iter().map(|part| part.parse().unwrap()).collect();
        sort_parts(&machine(), parts, rule).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_instances_of_spawn_get_the_parts_in_the_order_of_the_rule() {
        let parts = ["1", "2", "3", "4", "5", "6"];
        assert_eq!(arranged(NumaNodeRule::RoundRobin, &parts), ["1", "4", "2", "5", "3", "6"]);
        assert_eq!(arranged(NumaNodeRule::LeastLoaded, &parts), ["1", "4", "2", "5", "3", "6"]);
        assert_eq!(arranged(NumaNodeRule::LeastLoaded, &["0", "1", "4"]), ["0", "4", "1"]);
        let mixed = ["4", "0", "5", "1"];
        assert_eq!(arranged(NumaNodeRule::Fill, &mixed), ["4", "5", "0", "1"]);
        assert_eq!(arranged(NumaNodeRule::Packed, &mixed), ["4", "5", "0", "1"]);
        assert_eq!(arranged(NumaNodeRule::Default, &mixed), mixed);
        for rule in NumaNodeRule::ALL {
            let mut all = arranged(rule, &["0", "4", "5", "6-7"]);
            all.sort();
            assert_eq!(all, ["0", "4", "5", "6-7"], "{rule}: each part is given out once");
            assert!(arranged(rule, &[]).is_empty());
        }
    }

    #[test]
    fn rules_print_and_parse() {
        for rule in NumaNodeRule::ALL {
            assert_eq!(rule.to_string().parse(), Ok(rule));
        }
        let error = "rrr".parse::<NumaNodeRule>().unwrap_err().to_string();
        assert!(error.contains("\"rrr\"") && error.contains("rr, ll, fill or packed"), "{error}");
    }
}
