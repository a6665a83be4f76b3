//! What the BPF programs report, and the scope of a task scan.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::time::Duration;

use pjw_core::ids::{Pid, Tid, Uid};
use pjw_core::{
    cpuset::{CpuSet, Pu},
    snapshot::AffinityRequest,
};

use crate::proc::procfs::Stat;

/// The maximum number of processes whose threads one task scan can report. If the set in a [`TaskScope`] has
/// more processes, [`TaskScan::for_each_task`](super::TaskScan::for_each_task) returns an error.
pub const MAX_SCANNED_PROCESSES: u32 = 131_072;

/// Selects the tasks (threads) that one task scan reports. A task scan is a run of the BPF program
/// [`TaskScan`](super::TaskScan). Both variants contain a set of processes, and the scan reports all threads of these
/// processes. With [`TaskScope::AllProcessesAndThreadsOf`], the scan also reports the first thread of every other
/// process.
#[derive(Debug, Clone, Copy)]
pub enum TaskScope<'a> {
    /// The first thread of every process on the machine, including kernel threads. In addition, all threads
    /// of the processes in this set, which has at most [`MAX_SCANNED_PROCESSES`] elements.
    AllProcessesAndThreadsOf(&'a BTreeSet<Pid>),
    /// All threads of the processes in this set, and no others. The set has at most [`MAX_SCANNED_PROCESSES`]
    /// elements. Processes that have ended are not reported.
    ThreadsOf(&'a BTreeSet<Pid>),
}

/// For how long the owner of a lent PU (logical CPU) has run on this PU, and whether it runs there now. The owner is
/// the job that lends the PU to another job. A thread of the owner also counts as running while it waits on the PU for
/// a thread at idle priority that preempted it. The time counts since the PU was lent, or since the last call of
/// [`LentCpuMonitor::report_again`](super::LentCpuMonitor::report_again) for the PU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnerRunTime {
    /// The lent PU.
    pub pu: Pu,
    /// For how long threads of the owner have run on the PU, or have waited for a thread at idle priority there.
    pub run_time: Duration,
    /// Whether a thread of the owner runs on the PU now, or waits there for a thread at idle priority.
    pub is_running: bool,
}

/// The state of one task (a thread): its ids, its CPU time, its cgroup and its affinity mask. A task scan, a run of the
/// BPF program [`TaskScan`](super::TaskScan), reports one record for each task. The record shows the state at the
/// moment when the program reached this task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskRecord<'a> {
    /// The thread id (tid) of the task.
    pub tid: Tid,
    /// The id of the process to which the task belongs (its thread group id).
    pub pid: Pid,
    /// The same values as in `/proc/PID/task/TID/stat`, with these differences:
    ///
    /// - The name of a kernel thread may be shorter than in the file.
    /// - The stack address is 0 if the process has no memory map.
    /// - [`Stat::run_ticks`] is computed from [`TaskRecord::run_ns`].
    pub stat: Stat,
    /// The time for which the task has run on a PU since its start, in ns, as in
    /// `/proc/PID/task/TID/schedstat`.
    pub run_ns: u64,
    /// The time for which the task has waited on a run queue since its start, in ns, as in
    /// `/proc/PID/task/TID/schedstat`. `None` if the kernel was built without `CONFIG_SCHED_INFO`.
    pub wait_ns: Option<u64>,
    /// The real user id of the process.
    pub uid: Uid,
    /// The effective user id of the process, which decides about permissions.
    pub effective_uid: Uid,
    /// The inode number of the task's cgroup v2 directory. It is valid even if cgroup v2 is not mounted. 0 on
    /// a kernel without cgroups.
    pub cgroup_inode: u64,
    /// A hash of the cgroups of the process. If the hash differs from the hash in an earlier scan, the process has
    /// moved to another cgroup. If the hash is the same, the process has very probably not moved. Except: a move in a
    /// v1 hierarchy without controllers can leave the hash unchanged. The hash is 0 for every thread except the first
    /// thread of a process, and on a kernel without cgroups.
    pub cgroup_fingerprint: u64,
    /// A number of the address space of the process. Two tasks that exist at the same time have the same number exactly
    /// if they have the same address space (clone(2), `CLONE_VM`). The number is computed from the address of the
    /// kernel's `mm_struct` and from random keys, which are chosen when the program is loaded. So the address does not
    /// follow from the number. `None` for a kernel thread and for a task that has exited.
    pub address_space: Option<NonZeroU64>,
    /// Whether the task is a child of vfork(2) that still uses the address space of its parent, while its
    /// parent waits. Also true for a child of posix_spawn(3). False as soon as the child executes a program or
    /// exits.
    pub is_in_vfork: bool,
    /// The effective affinity mask, as [`crate::sys::affinity::get_mask`] reads it, in 64-bit words. The
    /// first word has the PUs 0 to 63. Trailing zero words are omitted.
    pub mask_words: &'a [u64],
}

impl TaskRecord<'_> {
    /// Returns the effective affinity mask of this task (a thread): the PUs (logical CPUs) on which the task
    /// can run.
    #[must_use]
    pub fn allowed_pus(&self) -> CpuSet {
        CpuSet::from_words(self.mask_words)
    }

    /// Returns whether the effective affinity mask of this task (a thread) is a subset of `pus`, so that the
    /// task can run on no other PU (logical CPU). Unlike [`TaskRecord::allowed_pus`], never allocates memory.
    #[must_use]
    pub fn is_mask_subset_of(&self, pus: &CpuSet) -> bool {
        let pu_words = pus.words().iter().copied().chain(std::iter::repeat(0));
        self.mask_words.iter().zip(pu_words).all(|(mask_word, pu_word)| mask_word & !pu_word == 0)
    }
}

/// How many tasks (threads) a task scan reported, and how many tasks the scan skipped because they are not in its
/// [`TaskScope`]. A task scan is a run of the BPF program [`TaskScan`](super::TaskScan), which iterates over the
/// threads of the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TaskScanSummary {
    /// The number of tasks that the scan passed to its caller.
    pub reported_tasks: u64,
    /// The number of tasks that the scan did not report, because they are outside its [`TaskScope`].
    pub skipped_tasks: u64,
}

/// The affinity requests (calls of sched_setaffinity(2)) that one call of
/// [`AffinityMonitor::drain_requests`](super::AffinityMonitor::drain_requests) returns. A BPF program has
/// reported these requests since the previous call of `drain_requests`. Also contains the number of requests
/// that were lost.
#[derive(Debug, Default)]
pub struct DrainedRequests {
    /// The reported calls of sched_setaffinity(2), in the order of the reports. These are the successful
    /// calls and the calls that the kernel refused with `EINVAL`. For example, the kernel refuses a mask that
    /// has no PU of the thread's cpuset. Calls that failed with another error are not reported. Calls by pjwd
    /// itself are not reported either.
    pub requests: Vec<AffinityRequest>,
    /// The number of calls of sched_setaffinity(2) that are missing in [`DrainedRequests::requests`], because
    /// the ring buffer of the BPF program was full.
    pub lost_count: u64,
}
