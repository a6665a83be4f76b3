//! The CPU times of one process, as last read.

use crate::basics::{Nanos, Pid, StartTime};
use crate::terms::{JobId, ProcessTimes};

/// The CPU times of a process of a job, as last read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessUsage {
    pub(crate) job: JobId,
    pub(super) start: StartTime,
    /// The real parent at the last reading: the process that waits for this one.
    pub(crate) parent: Pid,
    own_ns: u64,
    children_ns: u64,
    /// The time of ended children that was read while they lived, and that this process has not got from the kernel yet.
    pub(super) unclaimed_ns: u64,
}

impl ProcessUsage {
    pub(super) fn first_read(job: JobId, start: StartTime, parent: Pid, times: &ProcessTimes) -> Self {
        let (own_ns, children_ns) = (times.own_ns, times.children_ns);
        Self { job, start, parent, own_ns, children_ns, unclaimed_ns: 0 }
    }

    /// What the process and the children that it waited for used.
    pub(super) fn total_ns(&self) -> u64 {
        self.own_ns + self.children_ns
    }

    /// The part of the job's time that a restarted daemon reads again in this process. It counts a process that is older
    /// than the job only from its first reading on.
    pub(super) fn readable_again_ns(&self, job_began_at: Nanos) -> u64 {
        if is_born_since(self.start, job_began_at) { self.total_ns() } else { 0 }
    }

    /// Takes over a reading. Returns the time that is new for the job.
    pub(super) fn read(&mut self, times: &ProcessTimes) -> u64 {
        let own_ns = times.own_ns.saturating_sub(self.own_ns);
        self.own_ns = self.own_ns.max(times.own_ns);
        own_ns + unread_growth(&mut self.children_ns, &mut self.unclaimed_ns, times.children_ns)
    }
}

/// A process that belongs to no job and is the parent of a process of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OutsideParent {
    pub(super) start: StartTime,
    children_ns: u64,
    /// See [`ProcessUsage::unclaimed_ns`].
    pub(super) unclaimed_ns: u64,
    /// The job of a child that ended since the last reading and whose last times are unknown.
    pub(super) ended_unread: Option<JobId>,
    /// The job of the child that ended last.
    pub(super) last_ended: Option<JobId>,
}

impl OutsideParent {
    pub(super) fn first_read(times: &ProcessTimes) -> Self {
        let (start, children_ns) = (times.start, times.children_ns);
        Self { start, children_ns, unclaimed_ns: 0, ended_unread: None, last_ended: None }
    }

    /// Whether the parent has not yet got all the time of its ended children from the kernel, as far as that is known.
    pub(super) fn is_time_expected(&self) -> bool {
        self.ended_unread.is_some() || self.unclaimed_ns > 0
    }

    pub(super) fn expect_nothing(&mut self) {
        (self.unclaimed_ns, self.ended_unread) = (0, None);
    }

    /// Takes over a reading. Returns the job of a child that ended unread, with the time that was not read of it.
    pub(super) fn read(&mut self, times: &ProcessTimes) -> Option<(JobId, u64)> {
        let unread_ns = unread_growth(&mut self.children_ns, &mut self.unclaimed_ns, times.children_ns);
        if unread_ns == 0 {
            // The parent has not waited for the child yet.
            return None;
        }
        // What other children are still to claim is not known.
        self.unclaimed_ns = 0;
        Some((self.ended_unread.take()?, unread_ns))
    }
}

/// The growth of the time of children, except what was read while they lived.
fn unread_growth(children_ns: &mut u64, unclaimed_ns: &mut u64, now_ns: u64) -> u64 {
    let growth = now_ns.saturating_sub(*children_ns);
    *children_ns = (*children_ns).max(now_ns);
    let claimed = growth.min(*unclaimed_ns);
    *unclaimed_ns -= claimed;
    growth - claimed
}

/// Whether a process with this start time was born in a job that began at the time `began_at`.
pub(super) fn is_born_since(start: StartTime, began_at: Nanos) -> bool {
    start.latest_time() > began_at
}
