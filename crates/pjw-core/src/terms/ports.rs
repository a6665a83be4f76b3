//! The two interfaces to the outside: the node, which is scanned and changed, and the journal.

use core::error::Error;

use crate::basics::{Pid, prelude::*};
use crate::terms::cpuset_group::{CpusetAction, CpusetOutcome, FoundCpuset};
use crate::terms::own_cgroups::OwnCgroups;
use crate::terms::plan::{MaskAction, MaskOutcome};
use crate::terms::snapshot::{EventBatch, ExpectedMask, MaskProbe, Snapshot};
use crate::terms::{record::Record, scan::ScanRequest};

/// The interface by which pjwd scans and changes the node, the machine on which the jobs run. `pjw-linux` implements
/// it for Linux, `pjw-sim` for a simulated machine.
pub trait Node {
    /// Scans the node as requested. A process or cgroup that vanishes during the scan is reported as
    /// [`crate::terms::snapshot::Observed::Gone`], not as an error.
    fn observe(&mut self, request: &ScanRequest) -> Snapshot;

    /// Reads the affinity masks of processes that were just forked, without any call that may block. The
    /// result leaves out processes that have the expected mask, have exited, or were forked longer ago than
    /// [`crate::basics::ids::ProcessId::MIN_PID_REUSE_TIME`].
    fn probe_masks(&mut self, expected: &BTreeMap<Pid, ExpectedMask>) -> MaskProbe;

    /// Reads the process events that came in since the last call, without waiting. Called after each scan: the fork event of every
    /// process that the scan saw is among the events then, unless events were lost.
    fn read_process_events(&mut self) -> EventBatch;

    /// Lists the cgroups in the places where this warden creates those of jobs, with the attributes that pjw wrote. Called
    /// when the daemon starts, and not in each cycle.
    fn list_job_cpusets(&mut self, own_cgroups: &OwnCgroups) -> Vec<FoundCpuset>;

    /// Carries out one mask change and reads the new mask back. If the thread of the action no longer exists,
    /// the result is [`MaskOutcome::Gone`], also if its number was reused.
    fn apply(&mut self, action: &MaskAction) -> MaskOutcome;

    /// Carries out one cpuset change and reads the result back.
    fn change_cpuset(&mut self, action: &CpusetAction) -> CpusetOutcome;
}

/// The journal: the file by which the state of pjwd survives a restart. A record is written before the change that it
/// describes is made.
pub trait Journal {
    /// The error of a failed write.
    type Fault: Error + Send + Sync + 'static;

    /// Appends records. A later reader sees either all of them or none.
    ///
    /// # Errors
    /// If the records could not be written. The changes that they describe must then not be made.
    fn append(&mut self, records: &[Record]) -> Result<(), Self::Fault>;

    /// Returns whether the file is still where a later daemon looks for it. If another program removed it, records must be
    /// written by [`Journal::rewrite`], which makes it again.
    fn is_in_place(&self) -> bool {
        true
    }

    /// Reserves space, so that the next call of [`Journal::append`] with up to `bytes` bytes of records does not fail for
    /// lack of space. Returns whether that is certain.
    fn reserve(&mut self, bytes: u64) -> bool;

    /// Replaces the content of the journal by these records, atomically.
    ///
    /// # Errors
    /// If the records could not be written. The old content is then still in place.
    fn rewrite(&mut self, records: &[Record]) -> Result<(), Self::Fault>;
}
