//! The invariants that the audit checks.

use thiserror::Error;

use crate::basics::{CpuSet, ProcessId, Pu, ThreadId, Tid, prelude::*};
use crate::terms::JobId;

/// A violated invariant of pjw. The audit found it in a plan, or in the state from which the plan was made.
/// Every violation is a bug of pjw.
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
    /// An action on a thread is wrong.
    #[error("{}", problem.text(job, kind, thread.tid))]
    Action {
        /// The job of the action.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
        /// What is wrong.
        problem: ActionProblem,
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
        /// The PUs that pjw granted to the job.
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
}

/// The reason why the audit rejects a planned change of a thread's affinity mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ActionProblem {
    /// The thread does not belong to the job.
    NotTheJobsThread,
    /// No job can own the process: it is a kernel thread, process 1, or pjw itself.
    SystemProcess,
    /// The mask is not inside the grant.
    MaskOutsideGrant {
        /// The mask.
        mask: CpuSet,
        /// The PUs of the grant.
        grant: CpuSet,
    },
    /// The mask is empty, or pins a thread to several PUs.
    WrongMask(CpuSet),
    /// Another action changes the same thread.
    ChangedTwice,
    /// The thread already has the mask.
    NoChange,
    /// The restored mask is not the one that the thread had before pjw changed it.
    WrongRestore(CpuSet),
    /// The journal does not contain how to restore the mask.
    NoUndo,
}

impl ActionProblem {
    fn text(&self, job: &JobId, kind: &str, tid: Tid) -> String {
        match self {
            Self::NotTheJobsThread => format!("{kind} of thread {tid}: it is not a thread of {job}"),
            Self::SystemProcess => format!("{kind} of thread {tid} for {job}: it belongs to the system"),
            Self::MaskOutsideGrant { mask, grant } => {
                format!("{kind} of thread {tid} to {mask}, outside {grant} of {job}")
            }
            Self::WrongMask(mask) => {
                format!("{kind} of thread {tid} of {job} to \"{mask}\" is not a valid mask")
            }
            Self::ChangedTwice => format!("thread {tid} of {job} is changed twice in one plan"),
            Self::NoChange => format!("{kind} of thread {tid} of {job} to the mask it has"),
            Self::WrongRestore(mask) => {
                format!("thread {tid} is put back to {mask}, which is not what it had before {job}")
            }
            Self::NoUndo => format!("{kind} of thread {tid} of {job} without its old mask in the journal"),
        }
    }
}

impl Violation {
    /// Returns the job that the violation concerns: the planned changes for this job must not be carried out,
    /// all others may. `None` if the violation concerns no single job: then no change of the plan may be
    /// carried out.
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
            | Violation::Action { job, .. }
            | Violation::CpusetExceedsGrant { job, .. }
            | Violation::NotTheJobsCpuset { job, .. }
            | Violation::NotToBeMoved { job, .. } => Some(job),
        }
    }
}
