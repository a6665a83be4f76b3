//! What the event loop keeps about borrowers from one cycle to the next: warnings, and what it has thawed or found.

use std::collections::BTreeMap;

use pjw_core::job::JobId;
use pjw_core::plan::Warning;

/// What the event loop keeps about borrowers: jobs of the class besteffort, which run on cores that other jobs lend.
/// There are two kinds of warnings: a borrower has a real-time priority, or pjwd could not send a borrower the signal
/// before a core was taken back.
#[derive(Debug, Default)]
pub(super) struct BorrowerRecords {
    /// The borrowers with a real-time priority, as of the last scan of the processes of jobs.
    pub(super) realtime: Vec<Warning>,
    /// The borrowers of which a process did not get the revocation signal, as of the last revocation of each.
    pub(super) unsignalled: BTreeMap<JobId, Warning>,
    /// Whether the frozen jobs were thawed since pjwd has the mode observe.
    pub(super) is_thawed_in_observe: bool,
    /// Whether another program had ended the idle priority of the borrowers at the last rescan.
    pub(super) had_lost_idle_priority: bool,
}

impl BorrowerRecords {
    /// Returns the warnings of both kinds about borrowers (jobs that run on cores that other jobs lend).
    pub(super) fn warnings(&self) -> impl Iterator<Item = &Warning> {
        self.realtime.iter().chain(self.unsignalled.values())
    }
}
