//! Affinity attempts that were already reported: calls of sched_setaffinity(2) for PUs outside the caller's
//! job.

use crate::basics::{Nanos, ProcessId, Tid, prelude::*};

/// The threads of jobs whose affinity mask may change because of a sched_setaffinity(2) call for PUs (logical CPUs)
/// outside the job. pjw has already reported the call. Each thread is given by its process and its thread id. The
/// thread itself or another thread made the call.
pub(crate) type ReportedAffinityTargets = BTreeSet<(ProcessId, Tid)>;

/// The number of sched_setaffinity(2) calls for PUs (logical CPUs) outside one job that pjw has reported in the current
/// minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ReportedAttemptCount {
    /// The beginning of the minute, in ns since boot.
    pub(crate) since: Nanos,
    /// The number of reported attempts.
    pub(crate) count: u32,
}
