//! Scan requests: what a scan of the node is to read.

use alloc::sync::Arc;

use crate::basics::{CpuSet, Pid, Tid, prelude::*};

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
    pub pids_to_read_threads_of: BTreeSet<Pid>,
    /// Processes in the scope with many threads of which few are busy, each with the busy threads. Of these
    /// processes, a partial scan reads only the busy threads. It reads all threads in each of these cases:
    ///
    /// - A busy thread has ended.
    /// - Other threads of the process used CPU time since the last scan, more than a few milliseconds.
    /// - The online PUs changed a moment ago.
    pub busy_threads: BTreeMap<Pid, BTreeSet<Tid>>,
    /// The paths of the cgroups to read, relative to the mount point of the cgroup hierarchy. The scan also
    /// reads each cgroup that an earlier scan read and that has changed since.
    pub cgroups: BTreeSet<String>,
    /// The processes that the scan only checks at first, without reading them: idle processes of jobs, and
    /// processes that belong to no job. [`IdleWatch`] says in which cases the scan then reads such a process.
    /// If the scan is partial and does not read such a process, the process is unchanged since the last scan.
    pub idle_watch: Arc<IdleWatch>,
}

/// The processes that a scan only checks at first, without reading them, in order to save time: idle
/// processes of jobs, and processes that belong to no job. After the check, a partial scan reads such a
/// process only in the cases below. A full scan reads every process, but reads the threads of an idle process
/// of a job only in the cases below:
///
/// - The process used CPU time since the last check, was never checked before, or has exited.
/// - The process is in a group with [`IdleGroup::expected_cpus`], the scan checked the affinity masks of the
///   process, and one of the masks contains a PU outside `expected_cpus`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdleWatch {
    /// The idle processes of jobs, in groups. A process is idle if the smoothed CPU demand of all its threads
    /// is 0. All processes of a group belong to the same job, and each process is in only one group. If a
    /// group has a `cgroup`, this cgroup contains only processes of this job.
    pub groups: Vec<Arc<IdleGroup>>,
    /// The pids of processes that belong to no job, whether idle or not. If such a process used CPU time
    /// since the last check or has exited, the scan reads the process, but not its threads.
    pub unassigned_pids: Vec<Pid>,
    /// Whether a partial scan checks the affinity masks of all processes in groups with
    /// [`IdleGroup::expected_cpus`]. If false, each partial scan checks the masks of some of these processes,
    /// and several scans together check the masks of all of them. A full scan always checks the masks of all
    /// of these processes.
    pub check_all_masks: bool,
}

/// Some idle processes of one job, which a scan checks together if they have a cgroup of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleGroup {
    /// The path of the cgroup of the job, which contains all processes of the group. If this cgroup used no
    /// CPU time since the last check, none of the processes ran, and the scan need not check each process.
    /// `None` if the processes are not in a cgroup of their job.
    pub cgroup: Option<String>,
    /// The PUs that the job holds, if only affinity masks, and no cpuset, keep the processes of the group on
    /// these PUs. A scan checks whether another program has changed a mask to contain other PUs. `None` in
    /// each of these cases, in which masks are not checked:
    ///
    /// - A cpuset restricts the processes.
    /// - The masks of the processes already contain other PUs.
    /// - The job holds no PUs.
    pub expected_cpus: Option<CpuSet>,
    /// The pids of the processes in the group.
    pub pids: Vec<Pid>,
}
