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
    /// The idle processes, which the scan checks without reading them. The scan reads an idle process only if
    /// the process used CPU time since the last check, or if one of its masks allows PUs outside the expected
    /// PUs. An idle process that is not in the snapshot is unchanged.
    pub idle_watch: Arc<IdleWatch>,
}

/// The processes that used no CPU time between their last two checks. A scan only checks whether such a
/// process used CPU time since the last check. The scan reads the process only if the process used CPU time,
/// or if one of its masks allows PUs outside the expected PUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdleWatch {
    /// The idle processes of jobs, in groups. Each process is in only one group. If the field `cgroup` of a
    /// group is set, this cgroup contains only processes of the job.
    pub groups: Vec<Arc<IdleGroup>>,
    /// The pids of the processes that belong to no job. If such a process used CPU time since the last check
    /// or has exited, the scan reads the process, but not its threads.
    pub unassigned_pids: Vec<Pid>,
    /// Whether a partial scan checks the masks of all idle processes of jobs. If false, each partial scan
    /// checks only some of them, in rotation.
    pub check_all_masks: bool,
}

/// Some idle processes of one job, which a scan checks together if they have a cgroup of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleGroup {
    /// The path of the cgroup that contains the processes of the group. If the whole cgroup used no CPU time
    /// since the last check, none of the processes ran. `None` if the processes are not in a cgroup of their
    /// job.
    pub cgroup: Option<String>,
    /// The PUs that the masks of all threads in the group should not exceed. Set if only the masks restrict
    /// the processes to the cores of the job, because another program may change a mask. `None` if a cpuset
    /// restricts the processes, or if the job holds no cores.
    pub expected_cpus: Option<CpuSet>,
    /// The pids of the processes in the group.
    pub pids: Vec<Pid>,
}
