//! The calls of sched_setaffinity(2) by processes of jobs: whose masks they may have changed, and how many calls for
//! PUs outside the caller's job were reported.

use crate::basics::{Nanos, ProcessId, Tid, prelude::*};

/// Threads of jobs whose affinity mask may change because of a sched_setaffinity(2) call. Each thread is given by its
/// process and its thread id. The thread itself or another thread made the call.
pub(crate) type AffinityTargets = BTreeSet<(ProcessId, Tid)>;

/// The number of sched_setaffinity(2) calls for PUs (logical CPUs) outside one job that pjw has reported in the current
/// minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ReportedAttemptCount {
    /// The beginning of the minute, in ns since boot.
    pub(crate) since: Nanos,
    /// The number of reported attempts.
    pub(crate) count: u32,
}
