//! Scan requests: what a scan of the node is to read.

use alloc::sync::Arc;

use crate::basics::{CpuSet, Pid, prelude::*};

/// The processes that a scan reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScanScope {
    /// Every process of the node.
    Full,
    /// Only these processes.
    Partial(BTreeSet<Pid>),
}

/// A request to scan the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanRequest {
    /// The processes to read.
    pub scope: ScanScope,
    /// The processes whose threads are all read. In a partial scan, the threads of all named processes are
    /// read in addition.
    pub threads_of: BTreeSet<Pid>,
    /// The cgroup directories to read, by path below the mount point.
    pub cgroups: BTreeSet<String>,
    /// Idle processes. The node reads their threads only if the process ran since the last scan, or if a mask
    /// allows PUs that it should not. A full scan checks the masks of all idle processes, a partial scan
    /// those of some in turn. If an idle process is not in the snapshot, nothing has changed for it.
    pub idle_watch: Arc<IdleWatch>,
}

/// Idle processes, which are read again only after they ran.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdleWatch {
    /// Idle processes of jobs, grouped by job cgroup. No other processes are below these cgroups. Each
    /// process is listed once.
    pub groups: Vec<IdleGroup>,
    /// Idle processes in no job. A process that ran since the last check, or has exited, is read without its
    /// threads.
    pub unassigned: Vec<Pid>,
}

/// Idle processes of one job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleGroup {
    /// The cgroup of the job. If the cgroup used no CPU time, none of the processes ran. `None` if the job
    /// has no cgroup of its own.
    pub cgroup: Option<String>,
    /// The PUs that the masks of all their threads are expected to lie in, if the job is kept by masks alone:
    /// other programs may change these. `None` if a cpuset keeps the job on its cores, or if the job holds no
    /// cores.
    pub within: Option<CpuSet>,
    /// The pids.
    pub pids: Vec<Pid>,
}
