//! A look by the kernel's task scan: all tasks of some processes, or of all, in one pass.
//!
//! What it tells of a process stands in the place of its files in /proc, and of its threads'. Which cgroups it is in, its
//! environment and its groups are still read there, but only if its program or its cgroup is another.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::cpuset::CpuSet;
use pjw_core::process::{Pid, Uid};
use pjw_core::snapshot::Thread;

use crate::bpf::{PassError, TaskRecord, TaskScan, Whom};

use super::acquaintance::Face;

/// With fewer threads to read, opening their files is quicker than a pass.
const FEWEST: usize = 32;
/// A pass walks all tasks of the machine. To pass over one costs so much less than to read a thread in /proc.
const TASKS_FOR_A_THREAD: usize = 24;

/// What passes told, by process.
#[derive(Debug, Default)]
pub(super) struct Told {
    processes: BTreeMap<Pid, ToldProcess>,
    /// How many tasks the machine has.
    pub(super) tasks: usize,
}

/// What a pass told of a process.
#[derive(Debug)]
pub(super) struct ToldProcess {
    pub(super) face: Face,
    pub(super) uid: Uid,
    pub(super) mask: CpuSet,
    /// The inode of its cgroup in the v2 hierarchy.
    pub(super) cgroup: u64,
    /// How many tasks of it were met.
    pub(super) tasks: usize,
    /// Its threads, if they were asked for.
    pub(super) threads: Option<Vec<Thread>>,
    /// Whether its first thread was met: before that, the facts are those of another of its threads.
    is_whole: bool,
}

/// Whether a pass is quicker than to read so many threads in /proc, on a machine with so many tasks.
pub(super) fn is_worth_a_pass(threads: usize, tasks: usize) -> bool {
    threads >= FEWEST && threads * TASKS_FOR_A_THREAD >= tasks
}

impl Told {
    /// What one pass tells; of whom `with_threads` says so, each thread.
    pub(super) fn by(
        scan: &mut TaskScan,
        whom: Whom<'_>,
        with_threads: impl Fn(Pid) -> bool,
    ) -> Result<Self, PassError> {
        let mut processes = Vec::<(Pid, ToldProcess)>::new();
        let mut places = BTreeMap::<Pid, usize>::new();
        let mut last = None;
        let summary = scan.pass(whom, &mut |task| {
            // Threads of a process were mostly made one after the other, and have numbers in a row.
            let place = match last {
                Some((pid, place)) if pid == task.process => place,
                _ => *places.entry(task.process).or_insert_with(|| {
                    let threads = with_threads(task.process).then(Vec::new);
                    processes.push((task.process, ToldProcess::begin(&task, threads)));
                    processes.len() - 1
                }),
            };
            last = Some((task.process, place));
            if let Some((_, process)) = processes.get_mut(place) {
                process.add(&task);
            }
        })?;
        processes.retain(|(_, process)| process.is_whole);
        let tasks = usize::try_from(summary.reported + summary.passed_over).unwrap_or(usize::MAX);
        Ok(Self { processes: processes.into_iter().collect(), tasks })
    }

    /// Who was told of.
    pub(super) fn pids(&self) -> BTreeSet<Pid> {
        self.processes.keys().copied().collect()
    }

    /// What was told of a process; `None` if it is to be looked up in /proc.
    pub(super) fn take(&mut self, pid: Pid) -> Option<ToldProcess> {
        self.processes.remove(&pid)
    }
}

impl ToldProcess {
    fn begin(task: &TaskRecord<'_>, threads: Option<Vec<Thread>>) -> Self {
        Self {
            face: Face::from(task),
            uid: task.uid,
            mask: CpuSet::new(),
            cgroup: 0,
            tasks: 0,
            threads,
            is_whole: false,
        }
    }

    fn add(&mut self, task: &TaskRecord<'_>) {
        self.tasks += 1;
        let allowed = task.allowed();
        if task.tid.0 == task.process.0 {
            self.is_whole = true;
            self.face = Face::from(task);
            self.uid = task.uid;
            self.cgroup = task.cgroup;
            self.mask = allowed.clone();
        }
        if let Some(threads) = &mut self.threads {
            threads.push(Thread {
                tid: task.tid,
                start: task.start,
                comm: task.comm,
                state: task.state,
                last_cpu: task.last_cpu,
                run_ns: task.run_ns,
                wait_ns: task.wait_ns.unwrap_or(0),
                allowed,
            });
        }
    }
}

impl From<&TaskRecord<'_>> for Face {
    fn from(task: &TaskRecord<'_>) -> Self {
        let &TaskRecord { start, parent, group, session, comm, kernel, state, stack, .. } = task;
        Self { start, parent, group, session, comm, kernel, state, stack }
    }
}

#[cfg(all(test, feature = "bpf"))]
mod tests;
