//! The two interfaces to the outside: the node, which is scanned and changed, and the journal.

use core::error::Error;

use crate::basics::{Pid, prelude::*};
use crate::terms::cpuset_group::{CpusetAction, CpusetOutcome, FoundCpuset};
use crate::terms::own_cgroups::OwnCgroupNames;
use crate::terms::plan::{MaskAction, MaskOutcome};
use crate::terms::snapshot::{EventBatch, ExpectedMask, MaskProbe, Snapshot};
use crate::terms::{record::Record, scan::ScanRequest};

/// The interface to the node (the machine on which the jobs run), by which pjwd scans and changes it.
/// `pjw-linux` implements the interface for Linux, `pjw-sim` for a simulated machine.
pub trait Node {
    /// Scans the node as requested. A process or cgroup that vanishes during the scan is reported as
    /// [`crate::terms::snapshot::Observed::Gone`], not as an error.
    fn observe(&mut self, request: &ScanRequest) -> Snapshot;

    /// Reads the affinity masks of processes that were just forked, without a call that may block. `expected`
    /// has the processes and their expected masks. The result lists the processes with another mask. It does
    /// not include processes that have exited, or that were forked longer ago than
    /// [`crate::basics::ids::ProcessId::MIN_PID_REUSE_TIME`].
    fn probe_masks(&mut self, expected: &BTreeMap<Pid, ExpectedMask>) -> MaskProbe;

    /// Reads the process events that the kernel has sent since the last call, without waiting. Called after
    /// each scan. The result then has the fork event of every process that the scan found, unless events were
    /// lost.
    fn read_process_events(&mut self) -> EventBatch;

    /// Lists the cgroups that exist where this daemon creates cgroups for jobs, each with the facts that pjw
    /// stored in its attributes. Called only when the daemon starts.
    fn list_job_cpusets(&mut self, own_cgroups: &OwnCgroupNames) -> Vec<FoundCpuset>;

    /// Carries out one change of a mask, and reads the new mask back. Returns [`MaskOutcome::Gone`] if the
    /// thread of the action no longer exists, even if another thread has its number now.
    fn apply(&mut self, action: &MaskAction) -> MaskOutcome;

    /// Carries out one change of a cpuset, and reads the new state back.
    fn change_cpuset(&mut self, action: &CpusetAction) -> CpusetOutcome;
}

/// The interface to the journal, the file from which pjwd restores its state after a restart. A record must
/// be written before the change that it describes is made.
pub trait Journal {
    /// The error of a failed write.
    type Fault: Error + Send + Sync + 'static;

    /// Appends records. A later reader sees either all of them or none.
    ///
    /// # Errors
    /// If the records could not be written. The changes that they describe must then not be made.
    fn append(&mut self, records: &[Record]) -> Result<(), Self::Fault>;

    /// Whether the journal file is still at its path, so that a later daemon finds it. If another program
    /// removed or replaced the file, the caller must write all records by [`Journal::rewrite`], which makes a
    /// new file.
    fn is_in_place(&self) -> bool {
        true
    }

    /// Reserves disk space for the next call of [`Journal::append`], for up to `bytes` bytes of records.
    /// Returns true if that call certainly can't fail for lack of space.
    fn reserve(&mut self, bytes: u64) -> bool;

    /// Replaces the content of the journal by these records, atomically.
    ///
    /// # Errors
    /// If the records could not be written. The old content is then still in place.
    fn rewrite(&mut self, records: &[Record]) -> Result<(), Self::Fault>;
}
