//! The invariants that the audit checks.

use thiserror::Error;

use crate::basics::prelude::*;
use crate::basics::{CpuSet, ProcessId, Pu, ThreadId};
use crate::terms::JobId;

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Violation {
    /// The pool and the machine have different PUs.
    #[error("the pool and the machine differ on PUs {cpus}")]
    PoolDiffersFromMachine {
        /// The PUs that are in only one of them.
        cpus: CpuSet,
    },
    /// The pool names a job that does not exist.
    #[error("PU {pu} is held by {job}, which does not exist: a core has leaked")]
    UnknownHolder {
        /// The PU.
        pu: Pu,
        /// The job that does not exist.
        job: JobId,
    },
    /// A grant differs from the PUs that the job holds in the pool.
    #[error("{job} was granted {granted} and holds in the pool {held}")]
    GrantDiffersFromPool {
        /// The job.
        job: JobId,
        /// The PUs of the grant.
        granted: CpuSet,
        /// The PUs that the job holds in the pool.
        held: CpuSet,
    },
    /// Two jobs hold the same PUs without sharing.
    #[error("{job} and {other} were both granted {cpus}")]
    TwoOwners {
        /// The first job.
        job: JobId,
        /// The second job.
        other: JobId,
        /// The PUs that both hold.
        cpus: CpuSet,
    },
    /// A job holds housekeeping PUs.
    #[error("{job} was granted {cpus}, which are housekeeping")]
    OnHousekeeping {
        /// The job.
        job: JobId,
        /// The housekeeping PUs.
        cpus: CpuSet,
    },
    /// A grant has no PU.
    #[error("{job} was granted no PU at all")]
    EmptyGrant {
        /// The job.
        job: JobId,
    },
    /// A grant has PUs that the machine does not have.
    #[error("{job} was granted {cpus}, none of which is on this machine")]
    OutsideTheMachine {
        /// The job.
        job: JobId,
        /// The PUs that the machine does not have.
        cpus: CpuSet,
    },
    /// A grant has some PUs of a core and not all.
    #[error("{job} was granted {cpus} of a core and not the rest of it")]
    SplitCore {
        /// The job.
        job: JobId,
        /// The PUs of the split core.
        cpus: CpuSet,
    },
    /// An action changes a thread that does not belong to the job.
    #[error("{kind} of thread {thread}: it is not a thread of {job}", thread = .thread.tid)]
    NotTheJobsThread {
        /// The job of the action.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
    },
    /// An action changes a process that no job can own: a kernel thread, process 1, or the warden itself.
    #[error("{kind} of thread {thread} for {job}: it belongs to the system", thread = .thread.tid)]
    SystemProcess {
        /// The job of the action.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
    },
    /// An action sets a mask that is not inside the grant.
    #[error("{kind} of thread {thread} to {to}, outside {grant} of {job}", thread = .thread.tid)]
    MaskOutsideGrant {
        /// The job.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
        /// The mask.
        to: CpuSet,
        /// The PUs of the grant.
        grant: CpuSet,
    },
    /// An action sets an empty mask, or pins a thread to several PUs.
    #[error("{kind} of thread {thread} of {job} to \"{to}\" is not a valid mask", thread = .thread.tid)]
    WrongMask {
        /// The job.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
        /// The mask.
        to: CpuSet,
    },
    /// Two actions change the same thread.
    #[error("thread {thread} of {job} is changed twice in one plan", thread = .thread.tid)]
    ChangedTwice {
        /// The job of the second action.
        job: JobId,
        /// The thread.
        thread: ThreadId,
    },
    /// An action sets the mask that the thread already has.
    #[error("{kind} of thread {thread} of {job} to the mask it has", thread = .thread.tid)]
    NoChange {
        /// The job.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
    },
    /// An action restores a mask that the warden never replaced.
    #[error("thread {thread} is put back to {to}, which is not what it had before {job}", thread = .thread.tid)]
    WrongRestore {
        /// The job.
        job: JobId,
        /// The thread.
        thread: ThreadId,
        /// The mask.
        to: CpuSet,
    },
    /// An action gives a cpuset PUs that are not in the job's grant.
    #[error("the cpuset of {path} would be {cpus}, and {job} was granted {granted}")]
    CpusetExceedsGrant {
        /// The job.
        job: JobId,
        /// The path of the cpuset cgroup.
        path: String,
        /// The PUs that the cpuset would have.
        cpus: CpuSet,
        /// The PUs that the warden granted to the job.
        granted: CpuSet,
    },
    /// An action changes a cgroup that is not a registered cpuset of the job.
    #[error("{path} is not a cpuset of {job}")]
    NotTheJobsCpuset {
        /// The job.
        job: JobId,
        /// The path of the cgroup.
        path: String,
    },
    /// An action moves a process that may not be moved for this job.
    #[error("process {process} may not be moved for {job}")]
    NotToBeMoved {
        /// The job.
        job: JobId,
        /// The process.
        process: ProcessId,
    },
    /// An action changes a mask without a record of how to restore the mask.
    #[error("{kind} of thread {thread} of {job} without its old mask in the journal", thread = .thread.tid)]
    NoUndo {
        /// The job.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
    },
}

impl Violation {
    /// Returns the job whose actions must be dropped; `None` if the whole plan must be dropped.
    #[must_use]
    pub fn job(&self) -> Option<&JobId> {
        match self {
            Violation::PoolDiffersFromMachine { .. } | Violation::UnknownHolder { .. } => None,
            Violation::GrantDiffersFromPool { job, .. }
            | Violation::TwoOwners { job, .. }
            | Violation::OnHousekeeping { job, .. }
            | Violation::EmptyGrant { job }
            | Violation::OutsideTheMachine { job, .. }
            | Violation::SplitCore { job, .. }
            | Violation::NotTheJobsThread { job, .. }
            | Violation::SystemProcess { job, .. }
            | Violation::MaskOutsideGrant { job, .. }
            | Violation::WrongMask { job, .. }
            | Violation::ChangedTwice { job, .. }
            | Violation::NoChange { job, .. }
            | Violation::WrongRestore { job, .. }
            | Violation::CpusetExceedsGrant { job, .. }
            | Violation::NotTheJobsCpuset { job, .. }
            | Violation::NotToBeMoved { job, .. }
            | Violation::NoUndo { job, .. } => Some(job),
        }
    }
}
