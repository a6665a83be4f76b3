//! The NUMA nodes of the processes of one job, by the rule that the job requested.

use crate::basics::{CpuSet, Pid, Pu, StartTime, prelude::*};
use crate::machine::{Level, NodeLoad, Topology, WithinJob, choose_node, nodes_of};

/// A process of a job with at least one busy thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BusyProcess {
    pub(crate) pid: Pid,
    pub(crate) start: StartTime,
    /// The NUMA node that was chosen for the process, by the kernel's number.
    pub(crate) numa_node: Option<u32>,
    /// The pids of the ancestors in the job, the parent first, each with the NUMA node that was chosen for it.
    pub(crate) ancestors: Vec<(Pid, Option<u32>)>,
    /// The busy threads. Each has the PUs to which it is restricted; the whole grant if it is not restricted.
    pub(crate) busy_threads: Vec<CpuSet>,
    /// The PU on which the first busy thread ran last.
    pub(crate) last_cpu: Pu,
}

/// Chooses NUMA nodes for the processes that have none in `grant`, in the order in which they started. `last` is the NUMA node
/// that was chosen last for a process of the job. Returns the chosen nodes in this order. A process whose busy threads are
/// all restricted to one NUMA node already gets this one.
pub(crate) fn choose_nodes(
    topology: &Topology,
    grant: &CpuSet,
    rule: WithinJob,
    mut processes: Vec<BusyProcess>,
    mut last: Option<u32>,
) -> Vec<(Pid, u32)> {
    let mut nodes = nodes_of(topology, grant);
    if rule == WithinJob::Default || nodes.len() < 2 {
        return Vec::new();
    }
    processes.sort_by_key(|process| (process.start, process.pid));
    let is_in_job = |number: &u32| nodes.iter().any(|node| node.number == *number);
    let (placed, new): (Vec<BusyProcess>, Vec<_>) =
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
            WithinJob::Packed => parent.or(last).or_else(|| node_of(topology, process.last_cpu)),
            _ => parent,
        };
        let own = own_node(topology, &process);
        let Some(node) = own.or_else(|| choose_node(rule, &nodes, last, parent)) else { continue };
        count_threads(topology, &mut nodes, &process, Some(node));
        last = Some(node);
        chosen.push((process.pid, node));
    }
    chosen
}

/// Counts the busy threads of a process where they are restricted to, and the others in the node of the process.
fn count_threads(topology: &Topology, nodes: &mut [NodeLoad], process: &BusyProcess, node: Option<u32>) {
    for mask in &process.busy_threads {
        let number = node_containing(topology, mask).or(node);
        nodes.iter_mut().filter(|node| Some(node.number) == number).for_each(|node| node.busy_threads += 1);
    }
}

/// The NUMA node to which all busy threads of a process are restricted.
fn own_node(topology: &Topology, process: &BusyProcess) -> Option<u32> {
    let mut nodes = process.busy_threads.iter().map(|mask| node_containing(topology, mask));
    let first = nodes.next()??;
    nodes.all(|node| node == Some(first)).then_some(first)
}

fn node_containing(topology: &Topology, cpus: &CpuSet) -> Option<u32> {
    let first = node_of(topology, cpus.first()?)?;
    cpus.iter().all(|pu| node_of(topology, pu) == Some(first)).then_some(first)
}

/// The kernel's number of the NUMA node of a PU.
pub(crate) fn node_of(topology: &Topology, pu: Pu) -> Option<u32> {
    topology.domain_of(Level::NumaNode, pu).map(|node| node.number)
}
