//! Samples the threads of each address space for a moment, to find threads that wait for one another to map and unmap
//! memory.
//!
//! Only the threads of address spaces with several threads are sampled. If fewer than two of these threads are active
//! in the first rounds, no more rounds follow. So a job whose processes sleep, or have one thread each, costs nothing
//! or little.

use std::collections::{BTreeMap, BTreeSet};
use std::thread::sleep;
use std::time::{Duration, Instant};

use pjw_core::diagnosis::map_lock::{MmapLockSamples, MmapLockWaits};
use pjw_core::ids::{Pid, Tid};
use pjw_linux::proc::map_lock::ThreadActivity;
use pjw_linux::proc::procfs::ProcDir;

use super::progress::ReadingProgress;
use super::spaces::LiveProcess;

/// The number of rounds, and the time between two of them: 200 ms in all. A round takes one sample of each thread.
const ROUNDS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(2);
/// The number of rounds after which threads that were never active are no longer sampled.
const FIRST_ROUNDS: u32 = 10;
/// The longest time for all rounds. This thread has a low priority, so it may wait for a CPU between two rounds.
const MAX_TIME: Duration = Duration::from_secs(2);
/// The largest number of threads that are sampled: the first ones of each job.
const MAX_THREADS: usize = 1024;

/// A thread that is sampled.
#[derive(Debug)]
struct SampledThread {
    /// The index of its address space.
    space: usize,
    pid: Pid,
    tid: Tid,
    was_active: bool,
    samples: u32,
    blocked_samples: u32,
    first: Option<ThreadActivity>,
    last: Option<ThreadActivity>,
}

/// Observes the threads of `processes` for up to a few seconds, to find threads that wait for one another to map or
/// unmap memory. Returns the address spaces with such threads. `spaces` has the number of the address space of each
/// process, `None` if unknown. If [`ReadingProgress::is_wanted`] returns false, ends early and returns what was found
/// so far.
pub(super) fn find_map_lock_waits(
    proc: &mut ProcDir,
    processes: &[LiveProcess],
    spaces: &[Option<u32>],
    progress: &dyn ReadingProgress,
) -> Vec<MmapLockWaits> {
    let mut threads = threads_to_sample(proc, processes, spaces);
    let begin = Instant::now();
    for round in 1..=ROUNDS {
        if threads.is_empty() || !progress.is_wanted() || begin.elapsed() > MAX_TIME {
            break;
        }
        threads.retain_mut(|thread| thread.take_sample(proc));
        if round == FIRST_ROUNDS {
            keep_active(&mut threads);
        }
        sleep(PAUSE);
    }
    keep_active(&mut threads);
    let mut by_space: BTreeMap<usize, MmapLockSamples> = BTreeMap::new();
    for thread in &threads {
        thread.add_to(by_space.entry(thread.space).or_default());
    }
    by_space.values().filter_map(MmapLockSamples::finding).collect()
}

/// Returns the threads to observe: those of all address spaces with more than one thread, but at most
/// [`MAX_THREADS`]. `spaces` has the number of the address space of each process. A process with the number `None`
/// counts as an address space of its own.
fn threads_to_sample(
    proc: &mut ProcDir,
    processes: &[LiveProcess],
    spaces: &[Option<u32>],
) -> Vec<SampledThread> {
    // The key of an address space is its number, or the pid of the process if the number is unknown.
    let key = |(process, space): (&LiveProcess, &Option<u32>)| space.ok_or(process.id.pid);
    let keys: Vec<Result<u32, Pid>> = processes.iter().zip(spaces).map(key).collect();
    let mut counts: BTreeMap<Result<u32, Pid>, usize> = BTreeMap::new();
    for (process, key) in processes.iter().zip(&keys) {
        *counts.entry(*key).or_default() += process.threads.max(1);
    }
    let with_several_threads: Vec<Result<u32, Pid>> =
        counts.into_iter().filter(|&(_, count)| count > 1).map(|(key, _)| key).collect();
    let mut threads = Vec::new();
    for (process, key) in processes.iter().zip(&keys) {
        let Ok(space) = with_several_threads.binary_search(key) else { continue };
        let pid = process.id.pid;
        // A process that has ended has no threads.
        let tids = proc.tids(pid).unwrap_or_default().into_iter();
        let left = MAX_THREADS.saturating_sub(threads.len());
        threads.extend(tids.take(left).map(|tid| SampledThread {
            space,
            pid,
            tid,
            was_active: false,
            samples: 0,
            blocked_samples: 0,
            first: None,
            last: None,
        }));
    }
    threads
}

/// Drops the threads that were never active, and those of address spaces with only one active thread.
fn keep_active(threads: &mut Vec<SampledThread>) {
    threads.retain(|thread| thread.was_active);
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    threads.iter().for_each(|thread| *counts.entry(thread.space).or_default() += 1);
    let alone: BTreeSet<usize> =
        counts.into_iter().filter(|&(_, count)| count < 2).map(|(space, _)| space).collect();
    threads.retain(|thread| !alone.contains(&thread.space));
}

impl SampledThread {
    /// Takes one sample of the thread. Returns false if the thread has ended.
    fn take_sample(&mut self, proc: &mut ProcDir) -> bool {
        let Ok(activity) = proc.thread_activity(self.pid, self.tid) else { return false };
        self.was_active |= activity.is_active;
        self.samples += 1;
        self.blocked_samples += u32::from(activity.waits_for_map_lock);
        self.first.get_or_insert(activity);
        self.last = Some(activity);
        true
    }

    fn add_to(&self, sum: &mut MmapLockSamples) {
        let Some((first, last)) = self.first.zip(self.last) else { return };
        sum.pids.insert(self.pid);
        sum.threads += 1;
        sum.samples += self.samples;
        sum.blocked_samples += self.blocked_samples;
        sum.cpu_ticks += last.cpu_ticks.saturating_sub(first.cpu_ticks);
        sum.system_ticks += last.system_ticks.saturating_sub(first.system_ticks);
    }
}
