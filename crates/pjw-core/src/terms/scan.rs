//! Scan requests: what a scan of the node is to read.

use alloc::sync::Arc;

use crate::basics::{CpuSet, Pid, prelude::*};

/// The processes that a scan reads: all processes of the node, or only the listed ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScanScope {
    /// Every process of the node.
    Full,
    /// Only these processes.
    Partial(BTreeSet<Pid>),
}

/// A request for a scan of the node: the processes to read, the processes of which to read the threads too,
/// and the cgroups to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanRequest {
    /// The processes to read: all processes of the node, or only the listed ones.
    pub scope: ScanScope,
    /// The pids of the processes of which the scan reads all threads. If the scope is partial, it also reads
    /// all threads of the processes in the scope.
    pub threads_of: BTreeSet<Pid>,
    /// The paths of the cgroups to read, below the mount point. The scan also reads every cgroup that an
    /// earlier scan read and that has changed since.
    pub cgroups: BTreeSet<String>,
    /// The idle processes. For each, the scan checks only whether the process ran since the last check. The
    /// scan reads the process if it did, or if a mask allows PUs outside the expected ones. If an idle
    /// process is not in the snapshot, it is unchanged.
    pub idle_watch: Arc<IdleWatch>,
}

/// The processes that were idle at the last scans. For each, a scan checks only whether the process used CPU
/// time since the last check. The scan reads the process if it did, or if a mask of the process is outside
/// the expected PUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdleWatch {
    /// The idle processes of jobs, in groups. A process is in one group only. If a group names a cgroup, this
    /// cgroup contains only processes of the job.
    pub groups: Vec<Arc<IdleGroup>>,
    /// The pids of idle processes that belong to no job. If such a process ran since the last check or has
    /// exited, the scan reads it, but not its threads.
    pub unassigned: Vec<Pid>,
    /// Whether a partial scan checks the masks of all idle processes of jobs. If false, each partial scan
    /// checks only some of them, in rotation.
    pub check_all_masks: bool,
}

/// A group of idle processes of one job. A scan checks the group as a whole where that is possible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleGroup {
    /// The path of the cgroup that contains the processes of the group. If this cgroup used no CPU time since
    /// the last check, none of the processes ran. `None` if the processes are not in a cgroup of their job.
    pub cgroup: Option<String>,
    /// The PUs that the masks of all threads in the group should not exceed. Set only if masks alone restrict
    /// the processes to the cores of the job: another program may then have changed a mask. `None` if a
    /// cpuset restricts the processes, or if the job holds no cores.
    pub expected_cpus: Option<CpuSet>,
    /// The pids of the processes in the group.
    pub pids: Vec<Pid>,
}
