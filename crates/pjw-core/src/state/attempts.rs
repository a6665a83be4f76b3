//! Affinity attempts that were already reported: calls of sched_setaffinity(2) for PUs outside the caller's
//! job.

use crate::basics::{Nanos, ProcessId, Tid, prelude::*};

/// Threads of members whose masks may change because of a sched_setaffinity(2) call that was already
/// reported. The call may come from the thread itself or from another thread.
pub(crate) type AffinityRequesters = BTreeSet<(ProcessId, Tid)>;

/// The number of attempts of one job that were reported in the current minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ReportedCount {
    /// When the minute began, since boot.
    pub(crate) since: Nanos,
    /// The number of reported attempts.
    pub(crate) count: u32,
}
