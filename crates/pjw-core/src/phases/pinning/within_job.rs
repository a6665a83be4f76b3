//! The NUMA nodes of the processes of one job, by the rule that the job requested.

use crate::basics::{CpuSet, Pid, Pu, StartTime, prelude::*};
use crate::machine::{
    NumaNodeLoad, NumaNodeRule, Topology, TopologyLevel, choose_numa_node, numa_nodes_of_cpus,
};

/// A process of a job with at least one hot thread, as input for [`choose_nodes`]. A thread is hot if it runs or waits
/// for a PU (logical CPU) most of the time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HotProcess {
    pub(crate) pid: Pid,
    pub(crate) start: StartTime,
    /// The NUMA node that was chosen for the process, by the kernel's number. `None` if none was chosen.
    pub(crate) numa_node: Option<u32>,
    /// The pids of the ancestors in the job, the parent first, each with the NUMA node that was chosen for it.
    pub(crate) ancestors: Vec<(Pid, Option<u32>)>,
    /// For each hot thread, the PUs to which it is restricted. These are all PUs of the job if it is not restricted.
    pub(crate) hot_threads: Vec<CpuSet>,
    /// The PU on which the first hot thread ran last.
    pub(crate) last_cpu: Pu,
}

/// Chooses a NUMA node for each of `processes` that has no NUMA node of the job yet, by `rule`. Returns the pids of
/// these processes and the numbers of their nodes, in the order in which the processes started.
///
/// - `grant` has the PUs (logical CPUs) of the job. Only nodes with PUs in `grant` are chosen.
/// - `last` is the node that was chosen last for a process of the job. `None` if none was chosen yet.
/// - If all hot threads of a process (threads that run or wait for a PU most of the time) are restricted to one node,
///   the process gets this node, whatever the rule is.
///
/// The result is empty for the default rule, and if `grant` is in a single node.
pub(crate) fn choose_nodes(
    topology: &Topology,
    grant: &CpuSet,
    rule: NumaNodeRule,
    mut processes: Vec<HotProcess>,
    mut last: Option<u32>,
) -> Vec<(Pid, u32)> {
    let mut nodes = numa_nodes_of_cpus(topology, grant);
    if rule == NumaNodeRule::Default || nodes.len() < 2 {
        return Vec::new();
    }
    processes.sort_by_key(|process| (process.start, process.pid));
    let is_in_job = |number: &u32| nodes.iter().any(|node| node.number == *number);
    let (placed, new): (Vec<HotProcess>, Vec<_>) =
        processes.into_iter().partition(|process| process.numa_node.as_ref().is_some_and(is_in_job));
    for process in &placed {
        count_threads(topology, &mut nodes, process, process.numa_node);
    }
    let mut chosen: Vec<(Pid, u32)> = Vec::new();
    for process in new {
        let chosen_for = |pid: Pid| chosen.iter().find(|(known, _)| *known == pid).map(|&(_, node)| node);
        let parent = process.ancestors.iter().find_map(|&(pid, node)| chosen_for(pid).or(node));
        // The parent of the first ranks is a launcher that sleeps.
        let parent = match rule {
            NumaNodeRule::Packed => parent.or(last).or_else(|| numa_node_of_pu(topology, process.last_cpu)),
            _ => parent,
        };
        let own = own_node(topology, &process);
        let Some(node) = own.or_else(|| choose_numa_node(rule, &nodes, last, parent)) else { continue };
        count_threads(topology, &mut nodes, &process, Some(node));
        last = Some(node);
        chosen.push((process.pid, node));
    }
    chosen
}

/// Adds the hot threads of `process` to the load of the NUMA nodes in `nodes`. A thread that is restricted to one node
/// counts there. Each other thread counts in `node`, the node of the process, or nowhere if that is `None`.
fn count_threads(topology: &Topology, nodes: &mut [NumaNodeLoad], process: &HotProcess, node: Option<u32>) {
    for mask in &process.hot_threads {
        let number = node_containing(topology, mask).or(node);
        nodes.iter_mut().filter(|node| Some(node.number) == number).for_each(|node| node.hot_threads += 1);
    }
}

/// Returns the number of the NUMA node to which all hot threads of a process are restricted. `None` if a thread may run
/// on several nodes, or if the threads are restricted to different nodes.
fn own_node(topology: &Topology, process: &HotProcess) -> Option<u32> {
    let mut nodes = process.hot_threads.iter().map(|mask| node_containing(topology, mask));
    let first = nodes.next()??;
    nodes.all(|node| node == Some(first)).then_some(first)
}

/// Returns the kernel's number of the NUMA node that contains all PUs (logical CPUs) in `cpus`. `None` if the PUs are
/// in several nodes, or if `cpus` is empty.
pub(crate) fn node_containing(topology: &Topology, cpus: &CpuSet) -> Option<u32> {
    let first = numa_node_of_pu(topology, cpus.first()?)?;
    cpus.iter().all(|pu| numa_node_of_pu(topology, pu) == Some(first)).then_some(first)
}

/// Returns the kernel's number of the NUMA node that contains the PU (logical CPU) `pu`. `None` if `pu` is in no NUMA
/// node.
pub(crate) fn numa_node_of_pu(topology: &Topology, pu: Pu) -> Option<u32> {
    topology.domain_of(TopologyLevel::NumaNode, pu).map(|node| node.number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::regular_topology;
    use proptest::prelude::*;

    /// Two NUMA nodes of four PUs: node 0 has the PUs 0-3.
    fn machine() -> Topology {
        regular_topology(2, 1, 1, 4, 1)
    }

    /// A process with a thread for each mask, in the order of the pids.
    fn process(pid: u32, masks: &[&str]) -> HotProcess {
        HotProcess {
            pid: Pid(pid),
            start: StartTime(u64::from(pid)),
            numa_node: None,
            ancestors: Vec::new(),
            hot_threads: masks.iter().map(|mask| mask.parse().unwrap()).collect(),
            last_cpu: Pu(0),
        }
    }

    fn chosen(rule: NumaNodeRule, processes: &[HotProcess], last: Option<u32>) -> Vec<(u32, u32)> {
        let grant = "0-7".parse().unwrap();
        let chosen = choose_nodes(&machine(), &grant, rule, processes.to_vec(), last);
        chosen.into_iter().map(|(pid, node)| (pid.0, node)).collect()
    }

    #[test]
    fn a_process_that_is_pinned_in_one_node_keeps_this_node() {
        // As after a restart of the daemon: the pins are known, the choices are not.
        let processes = [process(1, &["5"]), process(2, &["6", "7"]), process(3, &["0-7"])];
        assert_eq!(chosen(NumaNodeRule::RoundRobin, &processes, None), [(1, 1), (2, 1), (3, 0)]);
        assert_eq!(chosen(NumaNodeRule::RoundRobin, &[process(1, &["0", "5"])], Some(0)), [(1, 1)]);
    }

    #[test]
    fn the_threads_of_processes_that_were_placed_before_are_counted() {
        let placed = HotProcess { numa_node: Some(0), ..process(1, &["0-7", "0-7"]) };
        let processes = [placed, process(2, &["0-7"]), process(3, &["0-7"]), process(4, &["0-7"])];
        assert_eq!(chosen(NumaNodeRule::LeastLoaded, &processes, Some(0)), [(2, 1), (3, 1), (4, 0)]);
    }

    #[test]
    fn packed_follows_the_nearest_ancestor_then_the_last_choice_then_the_pu() {
        let child = HotProcess { ancestors: vec![(Pid(9), None), (Pid(8), Some(1))], ..process(2, &["0-7"]) };
        assert_eq!(chosen(NumaNodeRule::Packed, std::slice::from_ref(&child), Some(0)), [(2, 1)]);
        assert_eq!(chosen(NumaNodeRule::Packed, &[process(2, &["0-7"])], Some(1)), [(2, 1)]);
        let on_node_1 = HotProcess { last_cpu: Pu(6), ..process(2, &["0-7"]) };
        assert_eq!(chosen(NumaNodeRule::Packed, &[on_node_1], None), [(2, 1)]);
        // The parent gets its node in the same call.
        let parent = HotProcess { last_cpu: Pu(6), ..process(1, &["0-7"]) };
        let child = HotProcess { ancestors: vec![(Pid(1), None)], ..process(2, &["0-7"]) };
        assert_eq!(chosen(NumaNodeRule::Packed, &[child, parent], None), [(1, 1), (2, 1)]);
    }

    #[test]
    fn a_node_that_the_job_lost_is_chosen_again() {
        let lost = HotProcess { numa_node: Some(7), ..process(1, &["0-7"]) };
        assert_eq!(chosen(NumaNodeRule::RoundRobin, &[lost], Some(7)), [(1, 0)]);
    }

    fn any_process() -> impl Strategy<Value = HotProcess> {
        let masks = proptest::collection::vec(1u64..256, 1..4);
        (1u32..50, proptest::option::of(0u32..3), masks, 0u32..8).prop_map(|(pid, numa_node, masks, last)| {
            HotProcess {
                numa_node,
                hot_threads: masks.iter().map(|mask| CpuSet::from_words(&[*mask])).collect(),
                last_cpu: Pu(last),
                ..process(pid, &[])
            }
        })
    }

    proptest! {
        #[test]
        fn each_new_process_gets_one_node_of_the_grant_whatever_the_order(
            processes in proptest::collection::vec(any_process(), 0..12),
            grant in 1u64..256,
            rule in proptest::sample::select(NumaNodeRule::ALL.to_vec()),
            last in proptest::option::of(0u32..3),
        ) {
            let by_pid: BTreeMap<Pid, HotProcess> =
                processes.into_iter().map(|process| (process.pid, process)).collect();
            let grant = CpuSet::from_words(&[grant]);
            let choose = |processes| choose_nodes(&machine(), &grant, rule, processes, last);
            let chosen = choose(by_pid.values().cloned().collect());
            prop_assert_eq!(&choose(by_pid.values().rev().cloned().collect()), &chosen);
            let numbers: Vec<u32> = numa_nodes_of_cpus(&machine(), &grant).iter().map(|node| node.number).collect();
            let new: Vec<Pid> = by_pid
                .values()
                .filter(|process| process.numa_node.is_none_or(|node| !numbers.contains(&node)))
                .map(|process| process.pid)
                .collect();
            let is_active = rule != NumaNodeRule::Default && numbers.len() > 1;
            prop_assert_eq!(chosen.iter().map(|(pid, _)| *pid).collect::<Vec<_>>(), if is_active { new } else { vec![] });
            let is_bound_elsewhere = |pid: &Pid| own_node(&machine(), &by_pid[pid]).is_some();
            prop_assert!(chosen.iter().all(|(pid, node)| numbers.contains(node) || is_bound_elsewhere(pid)));
            // A second call with the choices chooses nothing.
            let placed = by_pid.values().map(|process| {
                let node = chosen.iter().find(|(pid, _)| *pid == process.pid).map(|&(_, node)| node);
                HotProcess { numa_node: node.or(process.numa_node), ..process.clone() }
            });
            let again = choose(placed.collect());
            prop_assert!(again.iter().all(|(pid, _)| is_bound_elsewhere(pid)), "{:?}", again);
        }
    }
}
