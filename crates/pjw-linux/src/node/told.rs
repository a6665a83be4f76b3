//! A look by the kernel's task scan: all tasks of some processes, or of all, in one pass.
//!
//! What it tells of a process stands in the place of its files in /proc, and of its threads'. Which cgroups it is in, its
//! environment and its groups are still read there, but only if its program or its cgroup is another.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::cpuset::CpuSet;
use pjw_core::process::{Pid, Uid};
use pjw_core::snapshot::Thread;

use super::acquaintance::Face;
use crate::bpf::{PassError, TaskRecord, TaskScan, Whom};

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
    /// Another number as soon as it is in another cgroup: [`TaskRecord::place`].
    pub(super) place: u64,
    /// How many threads it has, if it was asked for them.
    pub(super) thread_count: Option<usize>,
    /// Whether a thread of it may run elsewhere than where all of them are to be.
    pub(super) is_outside: bool,
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
    /// What one pass tells. `within` is where all threads of a process are to be whose threads are not wanted for more.
    pub(super) fn by<'a>(
        scan: &mut TaskScan,
        whom: Whom<'_>,
        within: impl Fn(Pid) -> Option<&'a CpuSet>,
    ) -> Result<Self, PassError> {
        let (Whom::Everybody(of_whom) | Whom::These(of_whom)) = whom;
        let mut processes = Vec::<(Pid, ToldProcess)>::new();
        let mut places = BTreeMap::<Pid, usize>::new();
        let mut last = None::<(Pid, usize, Option<&CpuSet>)>;
        let summary = scan.pass(whom, &mut |task| {
            // Threads of a process were mostly made one after the other, and have numbers in a row.
            let (place, within) = match last {
                Some((pid, place, within)) if pid == task.process => (place, within),
                _ => {
                    let place = *places.entry(task.process).or_insert_with(|| {
                        let is_asked = of_whom.contains(&task.process);
                        let wanted = is_asked && within(task.process).is_none();
                        let threads = wanted.then(Vec::new);
                        processes.push((task.process, ToldProcess::begin(&task, is_asked, threads)));
                        processes.len() - 1
                    });
                    (place, within(task.process))
                }
            };
            last = Some((task.process, place, within));
            if let Some((_, process)) = processes.get_mut(place) {
                process.is_outside |= within.is_some_and(|within| !task.is_within(within));
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

    /// Whether a process has a thread outside of where all are to be; `None` if nothing was told of it.
    pub(super) fn is_outside(&self, pid: Pid) -> Option<bool> {
        self.processes.get(&pid).map(|process| process.is_outside)
    }

    /// What was told of a process; `None` if it is to be looked up in /proc.
    pub(super) fn take(&mut self, pid: Pid) -> Option<ToldProcess> {
        self.processes.remove(&pid)
    }
}

impl ToldProcess {
    fn begin(task: &TaskRecord<'_>, is_asked: bool, threads: Option<Vec<Thread>>) -> Self {
        Self {
            face: Face::from(task),
            uid: task.uid,
            mask: CpuSet::new(),
            place: 0,
            thread_count: is_asked.then_some(0),
            is_outside: false,
            threads,
            is_whole: false,
        }
    }

    fn add(&mut self, task: &TaskRecord<'_>) {
        self.thread_count = self.thread_count.map(|count| count + 1);
        if task.tid.0 == task.process.0 {
            self.is_whole = true;
            self.face = Face::from(task);
            self.uid = task.uid;
            self.place = task.place;
            self.mask = task.allowed();
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
                allowed: task.allowed(),
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

#[cfg(feature = "bpf")]
#[cfg(test)]
mod tests;
