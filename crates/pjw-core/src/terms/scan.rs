//! Scan requests: what a scan of the node is to read.

use alloc::sync::Arc;

use crate::basics::{CpuSet, Pid, prelude::*};

/// The processes that a scan reads: all processes of the machine, or only the listed processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScanScope {
    /// All processes of the machine.
    Full,
    /// Only the processes with these pids.
    Partial(BTreeSet<Pid>),
}

/// A request for a scan of the machine: the processes to read, the processes whose threads to read too, and
/// the cgroups to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanRequest {
    /// The processes to read: all processes of the machine, or only the listed processes.
    pub scope: ScanScope,
    /// The pids of the processes whose threads the scan reads. If the scope is partial, the scan also reads
    /// the threads of all processes in the scope.
    pub threads_of: BTreeSet<Pid>,
    /// The paths of the cgroups to read, relative to the mount point of the cgroup hierarchy. The scan also
    /// reads each cgroup that an earlier scan read and that has changed since.
    pub cgroups: BTreeSet<String>,
    /// The processes that the scan first only checks: idle processes of jobs, and processes that belong to no
    /// job. [`IdleWatch`] says when the scan reads such a process. A process that is not in the snapshot of a
    /// partial scan is unchanged.
    pub idle_watch: Arc<IdleWatch>,
}

/// The processes that a scan first only checks, in order to save time: idle processes of jobs, and processes
/// that belong to no job. A partial scan reads such a process in each of the cases below. A full scan reads
/// every process, but the threads of an idle process of a job only in these cases:
///
/// - The process used CPU time since the last check, was never checked before, or has exited.
/// - The process is in a group with [`IdleGroup::expected_cpus`], the scan checked its masks, and one mask
///   contains other PUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdleWatch {
    /// The idle processes of jobs, in groups. A process is idle if the smoothed CPU demand of all its threads
    /// is 0. All processes of a group belong to the same job, and each process is in only one group. If a
    /// group has a `cgroup`, this cgroup contains only processes of this job.
    pub groups: Vec<Arc<IdleGroup>>,
    /// The pids of processes that belong to no job, whether idle or not. If such a process used CPU time
    /// since the last check or has exited, the scan reads the process, but not its threads.
    pub unassigned_pids: Vec<Pid>,
    /// Whether a partial scan checks the masks of all processes in groups with [`IdleGroup::expected_cpus`].
    /// If false, each partial scan checks only some of them, in rotation. A full scan always checks all of
    /// them.
    pub check_all_masks: bool,
}

/// Some idle processes of one job, which a scan checks together if they have a cgroup of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleGroup {
    /// The path of the cgroup that contains the processes of the group. If the whole cgroup used no CPU time
    /// since the last check, none of the processes ran. `None` if the processes are not in a cgroup of their
    /// job.
    pub cgroup: Option<String>,
    /// The PUs that the job holds, if only affinity masks keep the processes of the group on these PUs.
    /// Another program can change a mask, so the scan checks whether a mask contains other PUs. `None` if
    /// nothing is checked: a cpuset restricts the processes, their masks already contain other PUs, or the
    /// job holds no PUs.
    pub expected_cpus: Option<CpuSet>,
    /// The pids of the processes in the group.
    pub pids: Vec<Pid>,
}
