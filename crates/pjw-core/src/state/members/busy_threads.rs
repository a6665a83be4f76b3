//! The busy threads of members with many threads: scans read only these for a while.
//!
//! A process with thousands of threads of which two run need not be read as a whole in each scan. As long as the same
//! threads are busy, the scans between two readings of all threads read only the busy ones, up to
//! `MAX_SCANS_PER_READING` - 1 of them. The node reads all threads nevertheless if another thread of the process ran.
//! So all threads of a busy process are read as often as those of an idle process that only masks confine.

use crate::basics::{Nanos, Tid, prelude::*};

/// A process with fewer threads is always read as a whole.
pub const MIN_THREADS: usize = 256;
/// At most one thread of so many is busy. Otherwise, all threads are read.
const MIN_THREADS_PER_BUSY: usize = 16;
/// After each this many readings of all threads with the same busy threads, fewer scans read all threads.
const READINGS_PER_STEP: u32 = 4;
/// At least one scan of so many reads all threads.
pub const MAX_SCANS_PER_READING: u32 = 4;

/// The busy threads of one member: those with a smoothed CPU demand that is not 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BusyThreads {
    pub(super) tids: BTreeSet<Tid>,
    /// The number of threads at the last reading of all threads.
    all: usize,
    /// The number of consecutive readings of all threads that found the same busy threads.
    same_readings: u32,
    /// The number of scans before the next reading of all threads.
    scans_left: u32,
    /// The time of the last scan that read only the busy threads. `None` if all threads were read since.
    read_alone_at: Option<Nanos>,
}

impl BusyThreads {
    /// The busy threads after `all` threads were read, of which these are busy. `None` if the next scans read all threads
    /// again.
    pub(super) fn new(all: usize, busy: impl Iterator<Item = Tid>, before: Option<Self>) -> Option<Self> {
        if all < MIN_THREADS {
            return None;
        }
        let tids: BTreeSet<Tid> = busy.collect();
        if tids.is_empty() || tids.len() * MIN_THREADS_PER_BUSY > all {
            return None;
        }
        let same = before.filter(|before| before.tids == tids && before.all == all);
        let same_readings = same.map_or(0, |before| before.same_readings.saturating_add(1));
        let period = (1 << (same_readings / READINGS_PER_STEP).min(8)).min(MAX_SCANS_PER_READING);
        Some(Self { tids, all, same_readings, scans_left: period - 1, read_alone_at: None })
    }

    /// Whether the next scan may read only these threads.
    pub(super) fn suffice(&self) -> bool {
        self.scans_left > 0
    }

    /// The time until which no other thread had a demand worth noticing. `None` if all threads were read last.
    pub(super) fn read_alone_at(&self) -> Option<Nanos> {
        self.read_alone_at
    }

    /// Lets the next scan read all threads.
    pub(super) fn expire(&mut self) {
        (self.scans_left, self.same_readings) = (0, 0);
    }

    /// Records that a scan read only these threads. Returns whether a thread is no longer busy. It is removed.
    pub(super) fn note_reading(&mut self, is_busy: impl Fn(&Tid) -> bool, at: Nanos) -> bool {
        let before = self.tids.len();
        self.tids.retain(is_busy);
        self.scans_left = self.scans_left.saturating_sub(1);
        self.read_alone_at = Some(at);
        self.tids.len() < before
    }
}
