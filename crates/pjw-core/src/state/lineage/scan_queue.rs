//! The processes that have to be scanned because of their process events, or because their environment was not read.

use crate::basics::{Nanos, Pid, prelude::*};

/// The number of scans of a process after the exit of its first thread, while other threads of the process still run.
const SCANS_AFTER_EXIT: u32 = 8;
/// The time from a scan that could not read the environment of a process to the next scan of the process, in ns. The
/// delay before each further scan is twice as long.
const FIRST_RETRY_DELAY_NS: u64 = 20_000_000;
/// The largest number of processes that are scanned again because of their environment. Without a limit, a user who
/// locks the memory of many processes would keep the daemon busy.
const MAX_ENVIRONMENT_RETRIES: usize = 256;

/// How soon the daemon must scan processes that had a process event (fork, exec or exit): at once, after a few
/// milliseconds, or after some tens of milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScanUrgency {
    /// At once. A process of a job forked a process, and the affinity mask of the new process is wrong or was
    /// not read yet.
    Immediate,
    /// Within a few milliseconds, in one scan with further processes. A process of a job had an event, but no
    /// mask is known to be wrong.
    Batched,
    /// Later than `Batched`. A process that belongs to no job executed a program, and may begin a job of a
    /// batch system.
    Deferred,
}

/// The processes that had a process event (fork, exec or exit) and that no scan has read since. The queue has four
/// lists, the most urgent list first:
///
/// 1. Forked processes of jobs whose affinity mask is wrong or was not read yet.
/// 2. Other processes of jobs.
/// 3. Processes outside of jobs that executed a program.
/// 4. Processes outside of jobs that were forked. The next periodic scan reads these.
///
/// The queue also has the processes whose environment could not be read, each with the time of its next scan.
#[derive(Debug, Clone, Default)]
pub struct ScanQueue {
    /// Forked processes of jobs whose affinity mask is wrong or was not read yet. Their scan is immediate.
    pub(super) forked: BTreeSet<Pid>,
    /// Other processes of jobs: they executed a program, exited, or were forked with the right mask.
    pub(super) of_jobs: BTreeSet<Pid>,
    /// Processes that belong to no job and executed a program.
    pub(super) executed: BTreeSet<Pid>,
    /// Processes that belong to no job and were forked since the last periodic scan.
    pub(super) unassigned: BTreeMap<Pid, UnscannedProcess>,
    /// Processes of jobs whose first thread has exited, with the number of scans that are left. When a process with
    /// several threads exits, the first thread may end before the others. The kernel reports no event of the process
    /// when the last one ends.
    exiting: BTreeMap<Pid, u32>,
    /// Processes whose environment the last scan could not read. A batch job whose number of cores is in its
    /// environment waits for this scan.
    environment_retries: BTreeMap<Pid, EnvironmentRetry>,
}

/// The next scan of a process whose environment could not be read.
#[derive(Debug, Clone, Copy)]
struct EnvironmentRetry {
    /// The time of the scan, since boot.
    due: Nanos,
    /// The delay between this scan and the one before, in ns.
    delay_ns: u64,
}

/// What process events (fork, exec or exit) reported about a process that belongs to no job and that no scan has read.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnscannedProcess {
    /// The process that forked this process.
    pub(super) parent: Pid,
    /// Whether the process has several threads. Such a process may continue after the exit of its first thread.
    pub(super) has_threads: bool,
}

impl ScanQueue {
    /// Records that the first thread of the process `pid` has exited. The scan of the process is no longer urgent. If
    /// the process belongs to no job and has no other threads, it leaves the queue.
    pub(super) fn record_exit(&mut self, pid: Pid) {
        self.lower_urgency(pid);
        if self.unassigned.get(&pid).is_some_and(|process| !process.has_threads) {
            self.unassigned.remove(&pid);
        }
    }

    /// Records that the first thread of the process `pid` of a job has exited. Other threads of the process may
    /// continue to run. So scans read the process until one finds that it has ended, but at most a few times.
    pub(super) fn record_job_process_exit(&mut self, pid: Pid) {
        self.of_jobs.insert(pid);
        self.exiting.insert(pid, SCANS_AFTER_EXIT);
    }

    /// Records that a scan has found the process `pid` running. If the first thread of the process has exited, the
    /// process is added to the queue again, so that a scan soon finds the end of the process.
    pub(crate) fn record_running(&mut self, pid: Pid) {
        let Some(scans_left) = self.exiting.get_mut(&pid) else { return };
        *scans_left -= 1;
        if *scans_left == 0 {
            self.exiting.remove(&pid);
        }
        self.of_jobs.insert(pid);
    }

    /// Records that the process `pid` has ended, or that a new process has its pid. Scans need no longer look for the
    /// end of the process, or read its environment.
    pub(crate) fn forget_process(&mut self, pid: Pid) {
        self.exiting.remove(&pid);
        self.environment_retries.remove(&pid);
    }

    /// Records whether the scan at the time `scanned_at` (since boot) could read the environment of the process `pid`.
    /// If `is_unread` is true, the process must be scanned again: after 20 ms, after a further 40 ms, and so on with
    /// doubled delays, until a scan reads the environment. At most 256 processes are recorded. The environment of any
    /// other process is read by the next periodic scan of the process.
    pub(crate) fn record_environment(&mut self, pid: Pid, is_unread: bool, scanned_at: Nanos) {
        if !is_unread {
            self.environment_retries.remove(&pid);
        } else if self.environment_retries.len() < MAX_ENVIRONMENT_RETRIES {
            let due = Nanos(scanned_at.0.saturating_add(FIRST_RETRY_DELAY_NS));
            let first = EnvironmentRetry { due, delay_ns: FIRST_RETRY_DELAY_NS };
            self.environment_retries.entry(pid).or_insert(first);
        }
    }

    /// Returns the time at which the daemon must next scan a process again because its environment could not be read,
    /// in ns since boot. `None` if there is no such process. The daemon must call
    /// [`ScanQueue::queue_environment_retries`] before that scan.
    #[must_use]
    pub fn next_environment_retry(&self) -> Option<Nanos> {
        self.environment_retries.values().map(|retry| retry.due).min()
    }

    /// Adds processes whose environment could not be read to the processes that [`ScanQueue::take_urgent_pids`]
    /// returns. Each of these processes has a delay: the time from one scan of the process to the next. A process is
    /// added if at least three quarters of its delay have passed at the time `now`, in ns since boot. The last quarter
    /// is not awaited, so that one scan reads many processes. The delay of each added process is then doubled. The new
    /// delay applies if the next scan can't read the environment either.
    pub fn queue_environment_retries(&mut self, now: Nanos) {
        let is_due = |retry: &EnvironmentRetry| retry.due.0.saturating_sub(now.0) <= retry.delay_ns / 4;
        for (&pid, retry) in self.environment_retries.iter_mut().filter(|(_, retry)| is_due(retry)) {
            retry.delay_ns = retry.delay_ns.saturating_mul(2);
            retry.due = Nanos(now.0.saturating_add(retry.delay_ns));
            self.of_jobs.insert(pid);
        }
    }

    /// Records that a scan has read all processes. `is_running` says whether the scan found the process with a pid.
    /// Scans need no longer look for the end of the processes that this scan did not find, because these have ended.
    pub(crate) fn retain_exiting(&mut self, is_running: impl Fn(Pid) -> bool) {
        self.exiting.retain(|&pid, _| is_running(pid));
    }

    /// Returns how soon the daemon must scan the processes in the queue. `None` if no process must be scanned
    /// before the next periodic scan (config key `rescan_interval`).
    #[must_use]
    pub fn urgency(&self) -> Option<ScanUrgency> {
        if !self.forked.is_empty() {
            Some(ScanUrgency::Immediate)
        } else if !self.of_jobs.is_empty() {
            Some(ScanUrgency::Batched)
        } else if !self.executed.is_empty() {
            Some(ScanUrgency::Deferred)
        } else {
            None
        }
    }

    /// Returns the pids of the processes in the queue that the daemon must scan at once
    /// ([`ScanUrgency::Immediate`]). These processes were forked by processes of jobs. Their affinity masks
    /// are wrong or were not read yet.
    #[must_use]
    pub fn immediate_pids(&self) -> &BTreeSet<Pid> {
        &self.forked
    }

    /// Lowers the urgency of the scan of the forked process `pid` from [`ScanUrgency::Immediate`] to
    /// [`ScanUrgency::Batched`], because the affinity mask of the process is right or the process has exited.
    pub(crate) fn lower_urgency(&mut self, pid: Pid) {
        if self.forked.remove(&pid) {
            self.of_jobs.insert(pid);
        }
    }

    /// Returns the pids of the processes that must be scanned before the next periodic scan, and removes these pids
    /// from the queue. Forked processes that belong to no job stay in the queue: [`ScanQueue::take_unassigned_pids`]
    /// returns them. The result has these processes:
    ///
    /// - The processes of jobs that had a process event (fork, exec or exit).
    /// - The processes outside of jobs that executed a program.
    /// - The processes whose environment must be read again ([`ScanQueue::queue_environment_retries`]).
    pub fn take_urgent_pids(&mut self) -> BTreeSet<Pid> {
        let mut pids = core::mem::take(&mut self.of_jobs);
        pids.append(&mut self.forked);
        pids.append(&mut self.executed);
        pids
    }

    /// Removes and returns the pids of the forked processes that belong to no job and descend from a process in `pids`.
    pub(crate) fn take_descendants_of(&mut self, pids: &BTreeSet<Pid>) -> BTreeSet<Pid> {
        let mut children: BTreeMap<Pid, Vec<Pid>> = BTreeMap::new();
        for (&pid, process) in &self.unassigned {
            children.entry(process.parent).or_default().push(pid);
        }
        let mut found = BTreeSet::new();
        let mut unvisited: Vec<Pid> = pids.iter().copied().collect();
        // A user can make a chain of tens of thousands of processes, so each process is visited once.
        while let Some(pid) = unvisited.pop() {
            for child in children.remove(&pid).unwrap_or_default() {
                self.unassigned.remove(&child);
                found.insert(child);
                unvisited.push(child);
            }
        }
        found
    }

    /// Returns the pids of the forked processes that belong to no job, and removes these pids from the queue.
    /// The caller must add these processes to the next periodic scan (every `rescan_interval`), which also
    /// reads processes that belong to no job.
    pub fn take_unassigned_pids(&mut self) -> impl Iterator<Item = Pid> + use<> {
        core::mem::take(&mut self.unassigned).into_keys()
    }
}
