//! The result of one task scan, by process.
//!
//! The result replaces the files in `/proc` for a process and its threads. The names of its cgroups, its
//! environment and its groups are still read in `/proc`, but only if its program or its cgroup fingerprint
//! changed.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use pjw_core::ids::{Pid, Uid};
use pjw_core::{cpuset::CpuSet, snapshot::Thread};

use crate::bpf::{TaskRecord, TaskScan, TaskScanError, TaskScope};
use crate::proc::procfs::Stat;

/// For fewer threads, reading `/proc` is faster than a task scan.
const MIN_THREADS: usize = 32;
/// The number of tasks that a task scan can skip in the time in which one thread is read in `/proc`. A task scan
/// iterates over all tasks of the machine.
const TASKS_PER_PROC_READ: usize = 24;

/// What one task scan reported about processes. A task scan is a run of the BPF program that reports the state of
/// threads.
#[derive(Debug, Default)]
pub(super) struct TaskScanResult {
    pub(super) processes: BTreeMap<Pid, ScannedProcess>,
    /// The number of tasks (threads) on the machine.
    pub(super) tasks: usize,
}

/// What a task scan (a run of the BPF program that reports the state of threads) reported about one process and its
/// threads.
#[derive(Debug)]
pub(super) struct ScannedProcess {
    /// The state of the first thread, with the values of `/proc/PID/task/TID/stat`.
    pub(super) stat: Stat,
    /// The real user id of the process.
    pub(super) uid: Uid,
    /// The effective affinity mask of the first thread.
    pub(super) mask: CpuSet,
    /// A hash of the cgroups of the process, which changes when the process moves to another cgroup:
    /// [`TaskRecord::cgroup_fingerprint`].
    pub(super) fingerprint: u64,
    /// The address space of the process. `None` for a kernel thread and for a process that has exited.
    pub(super) address_space: Option<ScannedSpace>,
    /// The number of threads. `None` if the task scan reported only the first thread, because the process is not in the
    /// set of processes in the [`TaskScope`].
    pub(super) thread_count: Option<usize>,
    /// Whether the affinity mask of a thread has PUs outside the planned mask. False if no mask is planned for the
    /// process.
    pub(super) is_outside: bool,
    /// The threads. `None` if only their masks were compared with a planned mask, or if the process is not in the set
    /// of processes in the [`TaskScope`].
    pub(super) threads: Option<Vec<Thread>>,
    /// Whether the first thread was reported. Until then, `stat` and `uid` are those of another thread.
    has_first_thread: bool,
}

/// What a task scan (a run of the BPF program that reports the state of threads) reported about the address space of
/// a process: its number, and whether the process is a child of vfork(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ScannedSpace {
    /// The number of the address space.
    pub(super) number: NonZeroU64,
    /// Whether the process is a child of vfork(2).
    pub(super) is_in_vfork: bool,
}

/// Returns whether a task scan (a run of the BPF program that reports the state of threads) is faster than reading
/// the state of `threads` threads in `/proc`. `tasks` is the number of all threads on the machine, through which the
/// task scan iterates.
pub(super) fn is_task_scan_faster(threads: usize, tasks: usize) -> bool {
    threads >= MIN_THREADS && threads * TASKS_PER_PROC_READ >= tasks
}

impl TaskScanResult {
    /// Runs the task scan `scan` (a BPF program that reports the state of threads) for the processes in `scope`, and
    /// returns what it reported. `within` returns the planned affinity mask of a process whose masks are only
    /// compared with the planned mask. The threads of such a process are not in the result. For other processes,
    /// `within` returns `None`.
    ///
    /// # Errors
    /// The error of the task scan.
    pub(super) fn from_scan<'a>(
        scan: &mut TaskScan,
        scope: TaskScope<'_>,
        within: impl Fn(Pid) -> Option<&'a CpuSet>,
    ) -> Result<Self, TaskScanError> {
        let (TaskScope::AllProcessesAndThreadsOf(in_scope) | TaskScope::ThreadsOf(in_scope)) = scope;
        let mut processes = Vec::<(Pid, ScannedProcess)>::new();
        let mut indexes = BTreeMap::<Pid, usize>::new();
        let mut last = None::<(Pid, usize, Option<&CpuSet>)>;
        let summary = scan.for_each_task(scope, &mut |task| {
            // Threads of a process mostly have consecutive ids.
            let (index, within) = match last {
                Some((pid, index, within)) if pid == task.pid => (index, within),
                _ => {
                    let index = *indexes.entry(task.pid).or_insert_with(|| {
                        let is_in_scope = in_scope.contains(&task.pid);
                        let wanted = is_in_scope && within(task.pid).is_none();
                        let threads = wanted.then(Vec::new);
                        processes.push((task.pid, ScannedProcess::new(&task, is_in_scope, threads)));
                        processes.len() - 1
                    });
                    (index, within(task.pid))
                }
            };
            last = Some((task.pid, index, within));
            if let Some((_, process)) = processes.get_mut(index) {
                process.is_outside |= within.is_some_and(|within| !task.is_mask_subset_of(within));
                process.add_thread(&task);
            }
        })?;
        processes.retain(|(_, process)| process.has_first_thread);
        let tasks = usize::try_from(summary.reported_tasks + summary.skipped_tasks).unwrap_or(usize::MAX);
        Ok(Self { processes: processes.into_iter().collect(), tasks })
    }
}

impl ScannedProcess {
    /// Makes a value for the process of the thread `task`, the first thread of this process that was reported. Does
    /// not add the thread itself ([`ScannedProcess::add_thread`]). `is_in_scope` says whether the threads of the
    /// process are counted. `threads` is the empty list of its threads, or `None` if the threads are not stored.
    fn new(task: &TaskRecord<'_>, is_in_scope: bool, threads: Option<Vec<Thread>>) -> Self {
        Self {
            stat: task.stat,
            uid: task.uid,
            mask: CpuSet::new(),
            fingerprint: 0,
            address_space: None,
            thread_count: is_in_scope.then_some(0),
            is_outside: false,
            threads,
            has_first_thread: false,
        }
    }

    /// Adds what the task scan reported about the thread `task` of this process.
    fn add_thread(&mut self, task: &TaskRecord<'_>) {
        self.thread_count = self.thread_count.map(|count| count + 1);
        if task.tid.0 == task.pid.0 {
            self.has_first_thread = true;
            self.stat = task.stat;
            self.uid = task.uid;
            self.fingerprint = task.cgroup_fingerprint;
            self.mask = task.allowed_pus();
        }
        // The first thread has no address space if it has exited before the others.
        if let Some(number) = task.address_space.filter(|_| self.address_space.is_none()) {
            self.address_space = Some(ScannedSpace { number, is_in_vfork: task.is_in_vfork });
        }
        if let Some(threads) = &mut self.threads {
            threads.push(Thread {
                tid: task.tid,
                start: task.stat.start,
                comm: task.stat.comm,
                state: task.stat.state,
                last_cpu: task.stat.last_cpu,
                run_ns: task.run_ns,
                wait_ns: task.wait_ns.unwrap_or(0),
                effective_mask: task.allowed_pus(),
            });
        }
    }
}

#[cfg(feature = "bpf")]
#[cfg(test)]
mod tests;
