//! Whether the kernel gives this process memory of each NUMA node that a placement prefers. For any other node,
//! set_mempolicy(2) would fail when the instance starts.

use std::collections::HashSet;
use std::fs;
use std::sync::Arc;

use pjw_core::cpuset::{CpuSet, Pu};

use super::error::CheckError;
use crate::instance::Instance;
use crate::own_policy::own_memory_nodes;

const ONLINE: &str = "/sys/devices/system/node/online";
const WITH_MEMORY: &str = "/sys/devices/system/node/has_memory";

/// Checks the preferred NUMA node in the placement of each instance: the node must have memory, and the calling thread
/// must be allowed to use it. A placement that several instances share is checked once. Checks nothing if the kernel
/// does not report the nodes.
pub(super) fn check_nodes(instances: &[Instance]) -> Result<(), CheckError> {
    // Read only if an instance has a preferred node.
    let mut allowed = None;
    let mut checked = HashSet::new();
    for instance in instances {
        if !checked.insert(Arc::as_ptr(&instance.placement)) {
            continue;
        }
        let Some(node) = instance.placement.preferred_numa_node else { continue };
        let allowed = allowed.get_or_insert_with(allowed_nodes);
        let Some(allowed) = allowed else { return Ok(()) };
        if let Some(why) = node_error_text(node, allowed, nodes_in) {
            let (rank, allowed) = (instance.rank, allowed.clone());
            return Err(CheckError::InvalidNumaNode { rank, node, why, allowed });
        }
    }
    Ok(())
}

/// Returns whether processes that the caller starts can have `node` as their preferred NUMA node. This is possible if
/// the node has memory, and the calling thread may use this memory. Also returns true if the kernel does not report
/// the nodes whose memory the thread may use.
#[must_use]
pub fn can_prefer_numa_node(node: u32) -> bool {
    allowed_nodes().is_none_or(|allowed| allowed.contains(Pu(node)))
}

/// Returns the NUMA nodes from which the calling thread can have memory. `None` if the kernel does not report them.
fn allowed_nodes() -> Option<CpuSet> {
    own_memory_nodes().or_else(|| nodes_in(WITH_MEMORY))
}

/// Reads a list of NUMA nodes, which has the form of a list of CPUs, from `file`. `None` if the file can't be read.
fn nodes_in(file: &str) -> Option<CpuSet> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Returns the reason why a process can't get memory of the NUMA node `node`: there is no such node, the node has no
/// memory, or this process may not use its memory. `None` if the node is in `allowed`. `nodes_in` reads a list of nodes
/// from a file, and is called only if the node is not in `allowed`.
fn node_error_text(
    node: u32,
    allowed: &CpuSet,
    nodes_in: impl Fn(&str) -> Option<CpuSet>,
) -> Option<&'static str> {
    let is_in = |nodes: &CpuSet| nodes.contains(Pu(node));
    let is_missing_in = |file| nodes_in(file).is_some_and(|nodes| !is_in(&nodes));
    if is_in(allowed) {
        None
    } else if is_missing_in(ONLINE) {
        Some("there is no such node")
    } else if is_missing_in(WITH_MEMORY) {
        Some("this node has no memory")
    } else {
        Some("this process may not use the memory of this node (cpuset.mems)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the text of the error on a machine with the nodes 0 to 3, of which node 3 has no memory.
    fn why(node: u32, allowed: &str) -> Option<&'static str> {
        let nodes_in = |file: &str| if file == ONLINE { "0-3".parse().ok() } else { "0-2".parse().ok() };
        node_error_text(node, &allowed.parse().unwrap(), nodes_in)
    }

    #[test]
    fn a_node_whose_memory_this_process_may_use_is_accepted() {
        assert_eq!(why(1, "0-2"), None);
        assert_eq!(node_error_text(1, &"0-2".parse().unwrap(), |_| None), None);
    }

    #[test]
    fn of_the_nodes_of_this_machine_one_can_be_preferred_and_a_missing_one_can_not() {
        if let Some(node) = allowed_nodes().and_then(|nodes| nodes.first()) {
            assert!(can_prefer_numa_node(node.0) && !can_prefer_numa_node(1000));
        }
    }

    #[test]
    fn what_is_wrong_with_another_node_is_named() {
        assert_eq!(why(4, "0-2"), Some("there is no such node"));
        assert_eq!(why(u32::MAX, "0-2"), Some("there is no such node"));
        assert_eq!(why(3, "0-2"), Some("this node has no memory"));
        let forbidden = Some("this process may not use the memory of this node (cpuset.mems)");
        assert_eq!(why(2, "0-1"), forbidden);
        assert_eq!(node_error_text(2, &"0-1".parse().unwrap(), |_| None), forbidden);
    }
}
