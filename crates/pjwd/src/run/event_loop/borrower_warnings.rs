//! The warnings about borrowers that the event loop keeps from one cycle to the next.

use std::collections::BTreeMap;

use pjw_core::job::JobId;
use pjw_core::plan::Warning;

/// The warnings about borrowers: jobs of the class besteffort, which run on cores that other jobs lend. There are two
/// kinds: a borrower has a real-time priority, or pjwd could not send a borrower the signal before a core was taken
/// back.
#[derive(Debug, Default)]
pub(super) struct BorrowerWarnings {
    /// The borrowers with a real-time priority, as of the last scan of the processes of jobs.
    pub(super) realtime: Vec<Warning>,
    /// The borrowers of which a process did not get the revocation signal, as of the last revocation of each.
    pub(super) unsignalled: BTreeMap<JobId, Warning>,
    /// Whether the frozen jobs were thawed since pjwd has the mode observe.
    pub(super) is_thawed_in_observe: bool,
    /// Whether another program had ended the idle priority of the borrowers at the last rescan.
    pub(super) had_lost_idle_priority: bool,
}

impl BorrowerWarnings {
    /// Returns the warnings of both kinds about borrowers (jobs that run on cores that other jobs lend).
    pub(super) fn iter(&self) -> impl Iterator<Item = &Warning> {
        self.realtime.iter().chain(self.unsignalled.values())
    }
}
