//! The active threads of members with many threads: scans read only these for a while.
//!
//! A process with thousands of threads of which two run need not be read as a whole in each scan. As long as the same
//! threads are active, the scans between two readings of all threads read only the active ones, up to
//! `MAX_SCANS_PER_FULL_READING` - 1 of them. The node reads all threads nevertheless if another thread of the process
//! ran. So all threads of an active process are read as often as those of an idle process that only masks confine.

use crate::basics::{Nanos, Tid, prelude::*};

/// The minimum number of threads of a process for which a scan may read only the active threads. A thread is active if
/// it recently ran or waited for a PU (logical CPU). If a process has fewer threads, every scan reads all of them.
pub const MIN_THREADS_FOR_PARTIAL_READING: usize = 256;
/// A scan may read only the active threads of a process if the process has at least this many threads for each active
/// one.
const MIN_THREADS_PER_ACTIVE: usize = 16;
/// The number of successive readings of all threads with the same active threads, after which such readings become
/// half as frequent ([`MAX_SCANS_PER_FULL_READING`] is the limit).
const READINGS_PER_STEP: u32 = 4;
/// At least every fourth scan of a process reads all threads of the process. If the process has many threads, the scans
/// in between (at most three) may read only the active threads. A thread is active if it recently ran or waited for a
/// PU (logical CPU).
pub const MAX_SCANS_PER_FULL_READING: u32 = 4;

/// The active threads of one process of a job that has many threads. A thread is active if its smoothed CPU
/// demand is not 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ActiveThreads {
    pub(super) tids: BTreeSet<Tid>,
    /// The number of threads at the last reading of all threads.
    all: usize,
    /// The number of consecutive readings of all threads that found the same active threads.
    same_readings: u32,
    /// The number of scans before the next reading of all threads.
    scans_left: u32,
    /// The time of the last scan that read only the active threads. `None` if all threads were read since.
    read_alone_at: Option<Nanos>,
}

impl ActiveThreads {
    /// Makes the list of the active threads of a process after a scan has read all its threads. `all` is the number of
    /// all threads, and `active` has the ids of the active threads. `before` is the list that was valid before this
    /// scan.
    ///
    /// Returns `None` if the next scan must read all threads too: the process has fewer than
    /// [`MIN_THREADS_FOR_PARTIAL_READING`] threads, no thread is active, or too many threads are active.
    pub(super) fn new(all: usize, active: impl Iterator<Item = Tid>, before: Option<Self>) -> Option<Self> {
        if all < MIN_THREADS_FOR_PARTIAL_READING {
            return None;
        }
        let tids: BTreeSet<Tid> = active.collect();
        if tids.is_empty() || tids.len() * MIN_THREADS_PER_ACTIVE > all {
            return None;
        }
        let same = before.filter(|before| before.tids == tids && before.all == all);
        let same_readings = same.map_or(0, |before| before.same_readings.saturating_add(1));
        let period = (1 << (same_readings / READINGS_PER_STEP).min(8)).min(MAX_SCANS_PER_FULL_READING);
        Some(Self { tids, all, same_readings, scans_left: period - 1, read_alone_at: None })
    }

    /// Returns whether the next scan may read only the active threads of the process.
    pub(super) fn can_be_read_alone(&self) -> bool {
        self.scans_left > 0
    }

    /// Returns the time of the last scan that read only the active threads, in ns since boot. `None` if a later scan
    /// read all threads.
    pub(super) fn read_alone_at(&self) -> Option<Nanos> {
        self.read_alone_at
    }

    /// Makes the next scan read all threads of the process. Also sets the number of successive full readings with the
    /// same active threads to 0.
    pub(super) fn force_full_reading(&mut self) {
        (self.scans_left, self.same_readings) = (0, 0);
    }

    /// Records that a scan at the time `at` (in ns since boot) read only the active threads. Removes the threads for
    /// which `is_active` is false. Returns whether a thread was removed.
    pub(super) fn record_partial_reading(&mut self, is_active: impl Fn(&Tid) -> bool, at: Nanos) -> bool {
        let before = self.tids.len();
        self.tids.retain(is_active);
        self.scans_left = self.scans_left.saturating_sub(1);
        self.read_alone_at = Some(at);
        self.tids.len() < before
    }
}
