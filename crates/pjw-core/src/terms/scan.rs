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
    /// The processes to read.
    pub scope: ScanScope,
    /// The processes whose threads are all read. In a partial scan, the threads of all named processes are
    /// read in addition.
    pub threads_of: BTreeSet<Pid>,
    /// The cgroup directories to read, by path below the mount point. The node also reads each cgroup that it read before
    /// and that changed since.
    pub cgroups: BTreeSet<String>,
    /// Idle processes. The node reads their threads only if the process ran since the last scan, or if a mask
    /// allows PUs that it should not. A full scan checks the masks of all idle processes, a partial scan
    /// those of some in turn. If an idle process is not in the snapshot, nothing has changed for it.
    pub idle_watch: Arc<IdleWatch>,
}

/// The idle processes of which a scan checks only whether they ran. Their threads are read only if they ran, or if an
/// affinity mask changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdleWatch {
    /// Idle processes of jobs, grouped by job cgroup. No other processes are below these cgroups. Each
    /// process is listed once.
    pub groups: Vec<Arc<IdleGroup>>,
    /// Idle processes in no job. A process that ran since the last check, or has exited, is read without its
    /// threads.
    pub unassigned: Vec<Pid>,
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
    pub within: Option<CpuSet>,
    /// The pids of the processes.
    pub pids: Vec<Pid>,
}
