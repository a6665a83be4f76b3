//! What the BPF programs report, and the scope of a pass.

use std::collections::BTreeSet;

use pjw_core::ids::{Pid, Tid, Uid};
use pjw_core::{cpuset::CpuSet, snapshot::AffinityRequest};

use crate::proc::procfs::Stat;

/// Maximum number of processes that one task scan can name in its [`TaskScope`].
pub const MAX_SCANNED_PROCESSES: u32 = 131_072;

/// The processes whose tasks (threads) a task scan reports.
#[derive(Debug, Clone, Copy)]
pub enum TaskScope<'a> {
    /// The first thread of every process, including kernel threads, and all threads of these processes.
    AllProcesses(&'a BTreeSet<Pid>),
    /// All threads of these processes, at most [`MAX_SCANNED_PROCESSES`]. Ended processes are missing from the result.
    Only(&'a BTreeSet<Pid>),
}

/// The state of a task (a thread) at the moment when the task scan reached it: its ids, its CPU time, its
/// cgroup and its affinity mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskRecord<'a> {
    /// The thread id (tid) of the task.
    pub tid: Tid,
    /// The pid of the process to which the task (thread) belongs (its thread group id).
    pub pid: Pid,
    /// The same fields as in `/proc/PID/task/TID/stat`, with three exceptions. /proc extends the names of some
    /// kernel threads. Here the stack address is 0 if the process has no memory map, and the ticks are
    /// computed from `run_ns`.
    pub stat: Stat,
    /// The time for which the task has run on a PU since its start, in ns, as in `schedstat`.
    pub run_ns: u64,
    /// The time for which the task has waited on a run queue since its start, in ns, as in `schedstat`. `None` if
    /// the kernel does not record it (`CONFIG_SCHED_INFO`).
    pub wait_ns: Option<u64>,
    /// The real user id of the process.
    pub uid: Uid,
    /// The effective user id of the process, which decides about permissions.
    pub effective_uid: Uid,
    /// The inode number of the task's cgroup v2 directory, even if cgroup v2 is not mounted. 0 on a kernel without
    /// cgroups.
    pub cgroup_inode: u64,
    /// A number that changes when the process moves to another cgroup. Only the first thread of a process has
    /// it. It is 0 for all other threads, and on a kernel without cgroups. A move in a v1 hierarchy without
    /// controllers leaves the number unchanged in rare cases. Every other move changes it.
    pub cgroup_fingerprint: u64,
    /// The effective affinity mask, as [`crate::sys::affinity::get_mask`] returns it, in 64-bit words. The
    /// word with the lowest PU numbers comes first. Zero words at the end are left out.
    pub mask_words: &'a [u64],
}

impl TaskRecord<'_> {
    /// Returns the effective affinity mask of the task: the PUs on which it may run.
    #[must_use]
    pub fn allowed_pus(&self) -> CpuSet {
        CpuSet::from_words(self.mask_words)
    }

    /// Returns whether the effective affinity mask of the task is a subset of `pus`. Never allocates memory.
    /// [`TaskRecord::allowed_pus`] does so on machines with more than 128 PUs.
    #[must_use]
    pub fn is_allowed_within(&self, pus: &CpuSet) -> bool {
        let others = pus.words().iter().copied().chain(std::iter::repeat(0));
        self.mask_words.iter().zip(others).all(|(word, pus)| word & !pus == 0)
    }
}

/// How many tasks (threads) one task scan reported, and how many it skipped because they are outside of its
/// [`TaskScope`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TaskScanSummary {
    /// The number of tasks that the scan reported to its caller.
    pub reported_tasks: u64,
    /// The number of tasks that the scan did not report, because they are outside of its [`TaskScope`].
    pub skipped_tasks: u64,
}

/// The reported calls of sched_setaffinity(2) since the last call of
/// [`AffinityMonitor::drain_requests`](super::AffinityMonitor::drain_requests), which returns this value.
#[derive(Debug, Default)]
pub struct DrainedRequests {
    /// The reported calls, in the order in which the kernel reported them. Of the calls that the kernel
    /// refused, only those are included whose mask has no PU in common with the thread's cpuset.
    pub requests: Vec<AffinityRequest>,
    /// The number of calls that were not reported because the ring buffer was full.
    pub lost_count: u64,
}
