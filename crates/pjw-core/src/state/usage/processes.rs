//! The CPU times of one process, as last read.

use crate::basics::{Nanos, Pid, StartTime};
use crate::terms::{JobId, ProcessCpuTimes};

/// The CPU times of one process of a job, as pjw last read them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessUsage {
    pub(crate) job: JobId,
    pub(super) start: StartTime,
    /// The real parent at the last reading: the process that waits for this one.
    pub(crate) parent: Pid,
    /// The time of the last reading, in ns since boot.
    read_at: Nanos,
    own_ns: u64,
    children_ns: u64,
    /// The time of ended children that was read while they lived, and that this process has not got from the kernel
    /// yet.
    pub(super) unclaimed_ns: u64,
    /// [`OutsideParent::other_children_ns`] of the parent at the last reading. `None` if the parent belongs to a job.
    pub(super) parent_before_ns: Option<i64>,
}

impl ProcessUsage {
    /// Makes the record of a process of the job `job`, from the first reading `times` of its CPU times. The time of
    /// the reading is `now`, in ns since boot.
    pub(super) fn first_read(
        job: JobId,
        start: StartTime,
        parent: Pid,
        times: &ProcessCpuTimes,
        now: Nanos,
    ) -> Self {
        let (own_ns, children_ns) = (times.own_ns, times.children_ns);
        Self {
            job,
            start,
            parent,
            read_at: now,
            own_ns,
            children_ns,
            unclaimed_ns: 0,
            parent_before_ns: None,
        }
    }

    /// Returns the CPU time of the process and of the ended children for which the process has waited (wait4(2)), in
    /// ns.
    pub(super) fn total_ns(&self) -> u64 {
        self.own_ns + self.children_ns
    }

    /// Returns the time of the last reading, in ns since boot.
    pub(super) fn read_at(&self) -> Nanos {
        self.read_at
    }

    /// Returns the part of the CPU time of this process, in ns, that a restarted daemon can read again for the job.
    /// `job_began_at` is the time at which the job began, in ns since boot. The result is 0 if the process is older
    /// than the job.
    pub(super) fn readable_again_ns(&self, job_began_at: Nanos) -> u64 {
        if may_have_started_after(self.start, job_began_at) { self.total_ns() } else { 0 }
    }

    /// Returns by how much the CPU time of the ended children of this process has grown since the last reading, in ns.
    /// `times` are the present CPU times of the process. `None` if `times` belong to another process with the same pid.
    pub(super) fn growth_of_children_ns(&self, times: &ProcessCpuTimes) -> Option<u64> {
        is_same_start(times.start, self.start).then(|| times.children_ns.saturating_sub(self.children_ns))
    }

    /// Stores the CPU times `times` of the process, as read at the time `now` (in ns since boot). Returns the CPU time
    /// that the process and its children used since the last reading, in ns. Time that was already counted for an ended
    /// child is left out.
    pub(super) fn read(&mut self, times: &ProcessCpuTimes, now: Nanos) -> u64 {
        self.read_at = now;
        let own_ns = times.own_ns.saturating_sub(self.own_ns);
        self.own_ns = self.own_ns.max(times.own_ns);
        own_ns + unread_growth(&mut self.children_ns, &mut self.unclaimed_ns, times.children_ns)
    }
}

/// The CPU times of a process that belongs to no job and is the parent of a process of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OutsideParent {
    pub(super) start: StartTime,
    /// The CPU time of all children that the parent has waited for, as last read.
    children_ns: u64,
    /// The CPU time of ended children that was added to their jobs or that no job gets. `children_ns` has the time of
    /// such a child only after the parent has waited for the child.
    of_jobs_ns: u64,
    /// Two readings that are at least [`MARK_INTERVAL_NS`] apart, the older first: each with its time and
    /// [`OutsideParent::other_children_ns`].
    marks: [(Nanos, i64); 2],
    /// The child whose end is not settled: the parent may not have waited for it yet.
    ended: Option<EndedChild>,
}

/// A process of a job that has ended. Its parent belongs to no job.
#[derive(Debug, Clone, PartialEq, Eq)]
struct EndedChild {
    job: JobId,
    /// [`OutsideParent::other_children_ns`] when the child was last read. What the parent has more now is the rest of
    /// the time of the child.
    before_ns: i64,
    /// The same value some seconds ago, if that is later. Since its last reading, an idle child has used nothing, but
    /// the parent may have waited for other children.
    recent_ns: i64,
    /// Whether the last CPU times of the child are unknown.
    is_unread: bool,
    /// The time since which the child may have used CPU time that was not read.
    unread_since: Nanos,
    /// Whether no job gets the rest. The parent has one sum of the times of its children, so this is the case if
    /// children of several jobs ended unread, or if the job of a child ended before the parent had waited for the
    /// child.
    is_of_no_job: bool,
    /// Whether the parent must be read to find out the rest. False if the job of the child has ended: the next reading
    /// of the parent for another child then settles the end.
    is_expected: bool,
}

impl EndedChild {
    /// Joins this child and a child that ended later to one record. The parent has only one sum of the times of both.
    fn joined(self, later: Self) -> Self {
        let are_both_unread = self.is_unread && later.is_unread;
        Self {
            before_ns: self.before_ns.min(later.before_ns),
            recent_ns: self.recent_ns.min(later.recent_ns),
            is_unread: self.is_unread || later.is_unread,
            unread_since: self.unread_since.min(later.unread_since),
            is_of_no_job: self.is_of_no_job || (are_both_unread && self.job != later.job),
            is_expected: true,
            job: if later.is_unread { later.job } else { self.job },
        }
    }
}

/// The CPU times of a process, as read right after the exit of this process or of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExitTimes {
    pub(super) times: ProcessCpuTimes,
    /// Whether the process itself had exited, so that its times no longer grow.
    pub(super) is_final: bool,
    /// A time just before the reading, in ns since boot. `None` if it is unknown.
    pub(super) read_from: Option<Nanos>,
}

/// The CPU time of an ended process of a job that was read from the parent of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LateTime {
    pub(super) job: JobId,
    /// The time, in ns.
    pub(super) ns: u64,
    /// The time since which the process may have used it, in ns since boot.
    pub(super) unread_since: Nanos,
}

/// The maximum rounding error, in ns, of the growth of a CPU time that is the sum of user time and system time. The
/// kernel reports each of the two in ticks of 10 ms, rounded down.
pub(super) const MAX_ROUNDING_NS: i64 = 20_000_000;
/// The longest time, in ns, after which the end of a child is found: the daemon may be behind on a busy machine.
const MARK_INTERVAL_NS: u64 = 2_000_000_000;

impl OutsideParent {
    /// Makes the record of a process that belongs to no job and is the parent of a process of a job. `times` is the
    /// first reading of its CPU times, made at the time `now` (in ns since boot).
    pub(super) fn first_read(times: &ProcessCpuTimes, now: Nanos) -> Self {
        let mark = (now, times.children_ns.cast_signed());
        Self {
            start: times.start,
            children_ns: times.children_ns,
            of_jobs_ns: 0,
            marks: [mark; 2],
            ended: None,
        }
    }

    /// Returns the CPU time of the ended children for which the parent has waited (wait4(2)), in ns, without the time
    /// that was already added to jobs. When a child of a job ends, the value is too small until the parent has waited
    /// for this child.
    pub(super) fn other_children_ns(&self) -> i64 {
        self.children_ns.cast_signed().saturating_sub(self.of_jobs_ns.cast_signed())
    }

    /// Returns by how much the CPU time of the ended children of this process has grown since the last reading, in ns.
    /// `times` are the present CPU times of the process. `None` if `times` belong to another process with the same pid.
    pub(super) fn growth_of_children_ns(&self, times: &ProcessCpuTimes) -> Option<u64> {
        (times.start == self.start).then(|| times.children_ns.saturating_sub(self.children_ns))
    }

    /// Records that the process `child`, a child of this parent, has ended.
    ///
    /// - `is_unread` is true if pjw could not read the final CPU times of the child.
    /// - `idle_until` is a time in ns since boot. The child is known not to have run between the last reading of its
    ///   CPU times and this time. `None` if the child may have run at any time since the last reading.
    pub(super) fn record_ended_child(
        &mut self,
        child: ProcessUsage,
        is_unread: bool,
        idle_until: Option<Nanos>,
    ) {
        let pending_ns = self.ended.as_ref().map(|ended| ended.before_ns);
        let before_ns = child.parent_before_ns.or(pending_ns).unwrap_or_else(|| self.other_children_ns());
        self.of_jobs_ns += child.total_ns() + child.unclaimed_ns;
        let ended = EndedChild {
            before_ns,
            recent_ns: before_ns.max(self.marks[0].1),
            is_unread,
            unread_since: child.read_at.max(idle_until.unwrap_or_default()),
            is_of_no_job: false,
            is_expected: true,
            job: child.job,
        };
        self.ended = Some(match self.ended.take() {
            Some(earlier) => earlier.joined(ended),
            None => ended,
        });
    }

    /// Returns whether pjw must read the parent again, because the parent has probably not yet got the whole CPU time
    /// of an ended child from the kernel. The child belonged to a job.
    pub(super) fn is_time_expected(&self) -> bool {
        self.ended.as_ref().is_some_and(|ended| ended.is_expected)
    }

    /// Returns the job of an ended child whose CPU time the parent has not yet got completely from the kernel. `None`
    /// if there is no such child.
    pub(super) fn job_of_ended_child(&self) -> Option<&JobId> {
        self.ended.as_ref().map(|ended| &ended.job)
    }

    /// Records that pjw can no longer learn the CPU time of ended children from the parent.
    pub(super) fn forget_ended_child(&mut self) {
        self.ended = None;
    }

    /// Records that the job of the parent's ended child has ended too. The missing CPU time of the child is then
    /// added to no job.
    pub(super) fn end_job_of_child(&mut self) {
        if let Some(ended) = &mut self.ended {
            (ended.is_of_no_job, ended.is_expected) = (true, false);
        }
    }

    /// Stores the CPU times `times` of the parent, as read at the time `now` (in ns since boot). A child may have
    /// ended whose last CPU times are unknown. When the parent has waited for this child (wait4(2)), the times of the
    /// parent contain the missing CPU time of the child. The function then returns the missing time. Returns `None`
    /// if no such time was found, or if no job can get it.
    pub(super) fn read(&mut self, times: &ProcessCpuTimes, now: Nanos) -> Option<LateTime> {
        self.children_ns = self.children_ns.max(times.children_ns);
        let other_ns = self.other_children_ns();
        let rest_of = |ended: &EndedChild| {
            let recent_ns = other_ns.saturating_sub(ended.recent_ns);
            // If the end was found late, the recent value already has the time of the child.
            if recent_ns >= -MAX_ROUNDING_NS { recent_ns } else { other_ns.saturating_sub(ended.before_ns) }
        };
        let ended = self.ended.take_if(|ended| rest_of(ended) >= -MAX_ROUNDING_NS);
        let rest_ns = u64::try_from(ended.as_ref().map_or(0, rest_of)).unwrap_or(0);
        let unread = ended.filter(|ended| ended.is_of_no_job || ended.is_unread);
        let late_time = unread.filter(|_| rest_ns > 0).and_then(|ended| {
            // What no job gets is not the time of the next child either.
            self.of_jobs_ns += rest_ns;
            let late = LateTime { job: ended.job, ns: rest_ns, unread_since: ended.unread_since };
            (!ended.is_of_no_job).then_some(late)
        });
        if now.0.saturating_sub(self.marks[1].0.0) >= MARK_INTERVAL_NS {
            self.marks = [self.marks[1], (now, self.other_children_ns())];
        }
        late_time
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

/// Returns whether `one` and `other` can be start times of the same process. They may differ by one clock tick, because
/// a start time that pjw estimated from a fork event is not exact.
pub(crate) fn is_same_start(one: StartTime, other: StartTime) -> bool {
    one.0.abs_diff(other.0) <= 1
}

/// Returns whether a process with the start time `start` may have started after the time `job_start` (in ns since
/// boot), at which a job began.
pub(super) fn may_have_started_after(start: StartTime, job_start: Nanos) -> bool {
    start.latest_time() > job_start
}
