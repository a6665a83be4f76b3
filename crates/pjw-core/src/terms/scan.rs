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

/// A request for a scan of the machine. The request says which processes the scan reads, for which of these
/// processes the scan also reads the threads, and which cgroups the scan reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanRequest {
    /// The processes to read: all processes of the machine, or only the listed processes.
    pub scope: ScanScope,
    /// The pids of the processes whose threads the scan reads. If the scope is partial, the scan also reads
    /// the threads of all processes in the scope.
    pub pids_to_read_threads_of: BTreeSet<Pid>,
    /// The processes of which a partial scan reads only the active threads, each with the ids of these threads. They
    /// are processes in the scope that have many threads, of which few are active. The scan nevertheless reads all
    /// threads of such a process in each of these cases:
    ///
    /// - An active thread has ended.
    /// - The other threads of the process used more than a few milliseconds of CPU time since the last scan.
    /// - The set of online PUs changed a moment ago.
    pub active_threads: BTreeMap<Pid, BTreeSet<Tid>>,
    /// The paths of the cgroups to read, relative to the mount point of the cgroup hierarchy. The scan also
    /// reads each cgroup that an earlier scan read and that has changed since.
    pub cgroups: BTreeSet<String>,
    /// The processes that the scan checks before it decides whether to read them: idle processes of jobs, and
    /// processes that belong to no job. [`WatchedProcesses`] says in which cases the scan then reads such a process.
    /// A process that a partial scan does not read is unchanged since the last scan.
    pub idle_watch: Arc<WatchedProcesses>,
}

impl ScanRequest {
    /// Returns whether the scan covers every process that belongs to a job. True for a scan that reads all processes of
    /// the machine ([`ScanScope::Full`]). Also true for a scan that reads the active processes of jobs, and checks
    /// whether any idle process of a job used CPU time ([`WatchedProcesses::has_all_groups`]). False for a scan of only
    /// some processes, which follows a process event or a command.
    #[must_use]
    pub fn covers_all_job_processes(&self) -> bool {
        self.scope == ScanScope::Full || self.idle_watch.has_all_groups
    }
}

/// The processes that a scan checks before it decides whether to read them: idle processes of jobs, and processes that
/// belong to no job. A process is idle if none of its threads recently ran or waited for a PU (logical CPU). The check
/// is cheaper than reading the process. The check finds a change in each of these cases:
///
/// - The process has exited, has used CPU time since the last check, or was never checked before.
/// - The process is an idle process of a job, and one of its affinity masks has a PU outside
///   [`IdleProcessGroup::expected_cpus`]. [`WatchedProcesses::check_all_masks`] says which masks are checked.
///
/// A partial scan reads a process if the check finds a change, or if the scope of the scan lists the process. A full
/// scan reads every process, but reads the threads of an idle process of a job only if the check finds a change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WatchedProcesses {
    /// The idle processes of jobs, in groups. A process is idle if the smoothed CPU demand of all its threads
    /// is 0. All processes of a group belong to the same job, and each process is in only one group. If a
    /// group has a `cgroup`, this cgroup contains only processes of this job.
    pub groups: Vec<Arc<IdleProcessGroup>>,
    /// Whether `groups` has all idle processes of jobs. There may be none.
    pub has_all_groups: bool,
    /// The pids of processes that belong to no job, whether idle or not. If such a process used CPU time
    /// since the last check or has exited, the scan reads the process, but not its threads.
    pub unassigned_pids: Vec<Pid>,
    /// Whether a partial scan checks the affinity masks of all processes in groups with
    /// [`IdleProcessGroup::expected_cpus`]. If false, each partial scan checks a part of these processes, and
    /// several scans together check all of them. A full scan always checks all of them.
    pub check_all_masks: bool,
}

/// A group of idle processes of one job. A process is idle if none of its threads recently ran or waited for a PU
/// (logical CPU). If the processes are in a cgroup of the job, a scan checks the CPU time of this cgroup. If the cgroup
/// used no CPU time since the last check, the scan need not check each process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleProcessGroup {
    /// The path of the cgroup of the job, which contains all processes of the group. If this cgroup used no
    /// CPU time since the last check, none of the processes ran, and the scan need not check each process.
    /// `None` if the processes are not in a cgroup of their job.
    pub cgroup: Option<String>,
    /// The PUs that the job holds, if affinity masks alone keep the processes of the group on these PUs. A
    /// scan checks whether another program has added other PUs to a mask. `None` in each of these cases, in
    /// which the scan does not check the masks:
    ///
    /// - A cpuset restricts the processes.
    /// - The masks of the processes already contain other PUs.
    /// - The job holds no PUs.
    pub expected_cpus: Option<CpuSet>,
    /// The pids of the processes in the group.
    pub pids: Vec<Pid>,
}
