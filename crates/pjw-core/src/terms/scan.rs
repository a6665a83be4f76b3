//! Scan requests: what a scan of the node is to read.

use alloc::sync::Arc;

use crate::basics::{CpuSet, Pid, prelude::*};

/// The processes that a scan reads: all processes of the node, or only those in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScanScope {
    /// Every process of the node.
    Full,
    /// Only these processes.
    Partial(BTreeSet<Pid>),
}

/// What the next scan of the node should read: the processes, the processes whose threads are read too, and the
/// cgroups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanRequest {
    /// Whether to read all processes of the node, or only some.
    pub scope: ScanScope,
    /// The processes of which all threads are read. A partial scan also reads all threads of the processes in its
    /// scope.
    pub threads_of: BTreeSet<Pid>,
    /// The cgroup directories to read, by path below the mount point. The node also reads each cgroup that it read before
    /// and that changed since.
    pub cgroups: BTreeSet<String>,
    /// The idle processes of jobs, and in some scans of others, that need only a quick check. Their threads are
    /// read only if the process ran since the last scan, or if a mask allows PUs that it should not. If an idle
    /// process is not in the snapshot, nothing has changed for it.
    pub idle_watch: Arc<IdleWatch>,
}

/// The idle processes of which a scan checks only whether they ran. Their threads are read only if they ran, or if an
/// affinity mask changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdleWatch {
    /// The idle processes of jobs, grouped by the cgroups of the jobs. A cgroup that a group names contains no
    /// other processes. Each process is listed once.
    pub groups: Vec<Arc<IdleGroup>>,
    /// Idle processes in no job. A process that ran since the last check, or has exited, is read without its
    /// threads.
    pub unassigned: Vec<Pid>,
    /// Whether a partial scan checks the masks of all idle processes of jobs, not only those of some in turn.
    pub all_masks: bool,
}

/// Idle processes of one job, which a scan checks together: processes that did not run since the last scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleGroup {
    /// The cgroup of the job. If the cgroup used no CPU time, none of the processes ran. `None` if the job
    /// has no cgroup of its own.
    pub cgroup: Option<String>,
    /// The PUs in which the masks of all threads of these processes are expected to lie, if masks alone keep the
    /// job on its cores: other programs may change masks. `None` if a cpuset keeps the job on its cores, or if the
    /// job holds no cores.
    pub expected_cpus: Option<CpuSet>,
    /// The pids of the processes in the group.
    pub pids: Vec<Pid>,
}
