//! The invariants that the audit checks.

use thiserror::Error;

use crate::basics::{CpuSet, ProcessId, Pu, ThreadId, Tid, prelude::*};
use crate::terms::JobId;

/// A violated invariant of pjw. The invariant is violated either by the planned changes of affinity masks and cpusets,
/// or by the state (the jobs and their logical CPUs) from which these changes were planned. Every violation is a bug of
/// pjw.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Violation {
    /// The pool (the list of all PUs with their holders) and the topology of the machine have different
    /// PUs.
    #[error("the pool and the machine differ on PUs {cpus}")]
    PoolDiffersFromMachine {
        /// The PUs that are only in the pool or only in the topology.
        cpus: CpuSet,
    },
    /// The pool says that a job holds a PU, but the job does not exist.
    #[error("PU {pu} is held by {job}, which does not exist: a core has leaked")]
    UnknownHolder {
        /// The PU that has the unknown holder.
        pu: Pu,
        /// The job that does not exist.
        job: JobId,
    },
    /// The pool says that a job borrows a PU, but the job does not exist.
    #[error("PU {pu} is borrowed by {job}, which does not exist: a core has leaked")]
    UnknownBorrower {
        /// The PU that has the unknown borrower.
        pu: Pu,
        /// The job that does not exist.
        job: JobId,
    },
    /// The PUs that were granted to a job differ from the PUs that the job holds in the pool (the list of
    /// all PUs with their holders).
    #[error("{job} was granted {granted} and holds in the pool {held}")]
    GrantDiffersFromPool {
        /// The job that holds the PUs.
        job: JobId,
        /// The PUs that were granted to the job, without PUs that the topology does not contain.
        granted: CpuSet,
        /// The PUs that the job holds in the pool.
        held: CpuSet,
    },
    /// Two jobs were granted the same PUs, although neither grant may be shared.
    #[error("{job} and {other} were both granted {cpus}")]
    TwoOwners {
        /// One of the two jobs.
        job: JobId,
        /// The other of the two jobs.
        other: JobId,
        /// The PUs that were granted to both jobs.
        cpus: CpuSet,
    },
    /// pjw granted housekeeping PUs (PUs that are reserved for the system) to a job.
    #[error("{job} was granted {cpus}, which are housekeeping")]
    HousekeepingGranted {
        /// The job that holds the housekeeping PUs.
        job: JobId,
        /// The housekeeping PUs that the job holds.
        cpus: CpuSet,
    },
    /// A job borrows PUs that are neither free nor owned by a job of the class guaranteed.
    #[error("{job} borrows {cpus}, whose owner does not lend")]
    BorrowedFromNonLender {
        /// The job that borrows the PUs.
        job: JobId,
        /// The borrowed PUs that are neither free nor owned by a job that may lend PUs.
        cpus: CpuSet,
    },
    /// A job has a grant that contains no PU.
    #[error("{job} was granted no PU at all")]
    EmptyGrant {
        /// The job that has the empty grant.
        job: JobId,
    },
    /// None of the PUs that were granted to a job is in the topology of the machine.
    #[error("{job} was granted {cpus}, none of which is on this machine")]
    GrantOutsideMachine {
        /// The job that has the grant.
        job: JobId,
        /// The PUs that were granted to the job.
        cpus: CpuSet,
    },
    /// A job was granted only some PUs of a core, and another job holds another PU of the same core,
    /// although neither job may share cores.
    #[error("{job} was granted {cpus} of a core and not the rest of it")]
    SplitCore {
        /// The job that was granted only some PUs of the core.
        job: JobId,
        /// The PUs of the core that were granted to `job`.
        cpus: CpuSet,
    },
    /// A planned change of a thread's affinity mask is wrong.
    #[error("{}", problem.text(job, kind, thread.tid))]
    InvalidMaskAction {
        /// The job for which the mask was to be changed.
        job: JobId,
        /// The purpose of the change, such as `confine` or `restore`.
        kind: &'static str,
        /// The thread whose mask was to be changed.
        thread: ThreadId,
        /// The reason why the change is wrong.
        problem: MaskActionProblem,
    },
    /// A planned cpuset of a job is empty, or contains PUs that pjw did not grant to the job.
    #[error("the cpuset of {path} would be {cpus}, and {job} was granted {granted}")]
    CpusetExceedsGrant {
        /// The job whose cpuset was to be written.
        job: JobId,
        /// The path of the cpuset's cgroup, below the mount point of the cgroup hierarchy.
        path: String,
        /// The PUs that the cpuset was to contain.
        cpus: CpuSet,
        /// The PUs that pjw granted to the job.
        granted: CpuSet,
    },
    /// A planned change concerns a cgroup that pjw must not change in this way. For example, the cgroup is
    /// not a recorded cpuset of the job, or the job still needs the cpuset that was to be removed.
    #[error("{path} is not a cpuset of {job}")]
    NotTheJobsCpuset {
        /// The job for which the cgroup was to be changed.
        job: JobId,
        /// The path of the cgroup, below the mount point of the cgroup hierarchy.
        path: String,
    },
    /// A planned move of a process into or out of a job's cpuset is not allowed. The process is a kernel
    /// thread, process 1 or pjw itself, or was to be moved into the cpuset of a job to which it does not
    /// belong.
    #[error("process {process} may not be moved for {job}")]
    ProcessNotMovable {
        /// The job whose cpuset the process was to enter or to leave.
        job: JobId,
        /// The process that was to be moved.
        process: ProcessId,
    },
}

/// The reason why the audit rejects a planned change of a thread's affinity mask. There are three kinds of change:
///
/// - A confining change restricts a thread to PUs (logical CPUs) of its job. Pinning (to one PU) is also a confining
///   change.
/// - A restoring change gives a thread its original mask back: the mask that it had before pjw changed it.
/// - An excluding change keeps a thread that belongs to no job off the PUs that jobs hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MaskActionProblem {
    /// The change is not allowed for this thread:
    ///
    /// - A confining change (to the cores of a job): the thread does not belong to this job.
    /// - An excluding change (to PUs that no job holds): the process of the thread belongs to a job, or is
    ///   not in the list of processes whose original masks pjw must restore later.
    WrongThread,
    /// The thread belongs to a process whose masks pjw must never change: a kernel thread, process 1, or
    /// pjw itself.
    SystemProcess,
    /// The new mask contains PUs that are not allowed:
    ///
    /// - A confining change (to the cores of a job): the mask contains PUs that this job does not hold.
    /// - An excluding change (to PUs that no job holds): the mask contains PUs that a job holds.
    MaskOutsideGrant {
        /// The new mask.
        mask: CpuSet,
        /// For a confining change, the PUs that the job holds. For an excluding change, the PUs of one job
        /// that holds PUs of the new mask.
        grant: CpuSet,
    },
    /// The new mask is not valid. The value is this mask. The mask is empty, or the change pins the thread to
    /// one PU and the mask does not contain exactly one PU.
    InvalidMask(CpuSet),
    /// An earlier change in the same plan changes the mask of the same thread.
    ChangedTwice,
    /// The new mask equals the mask that the thread has already, so the change would have no effect.
    NoChange,
    /// pjw must not restore the mask of the thread. The value is the mask that the change would set. Either
    /// this mask is empty, or it is not the original mask of the thread, or the job of the thread still holds
    /// its cores.
    WrongRestore(CpuSet),
    /// The journal (the file from which a restarted daemon restores its state) has no record of the requested
    /// mask and of the thread's original mask. A restarted daemon could then not restore the original mask.
    NotJournaled,
}

impl MaskActionProblem {
    /// Returns the text of the problem for the log. The audit rejected a change of the affinity mask of the thread
    /// `tid` for the job `job`. `kind` is the name of the change, such as `pin`.
    fn text(&self, job: &JobId, kind: &str, tid: Tid) -> String {
        match self {
            Self::WrongThread => format!("{kind} of thread {tid}: it is not a thread of {job}"),
            Self::SystemProcess => format!("{kind} of thread {tid} for {job}: it belongs to the system"),
            Self::MaskOutsideGrant { mask, grant } => {
                format!("{kind} of thread {tid} to {mask}, outside {grant} of {job}")
            }
            Self::InvalidMask(mask) => {
                format!("{kind} of thread {tid} of {job} to \"{mask}\" is not a valid mask")
            }
            Self::ChangedTwice => format!("thread {tid} of {job} is changed twice in one plan"),
            Self::NoChange => format!("{kind} of thread {tid} of {job} to the mask it has"),
            Self::WrongRestore(mask) => {
                format!("thread {tid} is put back to {mask}, which is not what it had before {job}")
            }
            Self::NotJournaled => {
                format!("{kind} of thread {tid} of {job} without its old mask in the journal")
            }
        }
    }
}

impl Violation {
    /// Returns the job that the violation concerns. The caller must not carry out the planned changes for
    /// this job, and may carry out the changes for all other jobs.
    ///
    /// Returns `None` if the violation concerns no single job. The caller must then not carry out any
    /// change of the plan.
    #[must_use]
    pub fn concerned_job(&self) -> Option<&JobId> {
        match self {
            Violation::PoolDiffersFromMachine { .. } | Violation::UnknownHolder { .. } => None,
            Violation::GrantDiffersFromPool { job, .. }
            | Violation::UnknownBorrower { job, .. }
            | Violation::TwoOwners { job, .. }
            | Violation::HousekeepingGranted { job, .. }
            | Violation::BorrowedFromNonLender { job, .. }
            | Violation::EmptyGrant { job }
            | Violation::GrantOutsideMachine { job, .. }
            | Violation::SplitCore { job, .. }
            | Violation::InvalidMaskAction { job, .. }
            | Violation::CpusetExceedsGrant { job, .. }
            | Violation::NotTheJobsCpuset { job, .. }
            | Violation::ProcessNotMovable { job, .. } => Some(job),
        }
    }
}
