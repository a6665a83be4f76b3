//! The decisions of a cycle: the changes to the node, and warnings about changes that were not made.

use crate::basics::{CpuSet, Pid, ThreadId, prelude::*};
use crate::terms::{cpuset_group::CpusetAction, job::JobId};

/// The plan of one cycle of the daemon: all changes to the node that were decided. Changes of cpusets are made first,
/// then those of affinity masks, in the order of the lists.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Changes to cpusets. They come before `actions`, because a mask can only be restored after the cpuset allows
    /// it.
    pub cpusets: Vec<CpusetAction>,
    /// Changes to affinity masks, in the order in which they are to be made.
    pub actions: Vec<MaskAction>,
}

/// A planned change of the affinity mask of one thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskAction {
    /// What the change is for, such as to confine or to restore.
    pub kind: MaskActionKind,
    /// The job because of which the mask changes.
    pub job: JobId,
    /// The thread whose mask changes.
    pub thread: ThreadId,
    /// The effective mask of the thread before the change, as the last scan read it.
    pub current: CpuSet,
    /// The effective mask that the thread is to have after the change.
    pub target: CpuSet,
    /// The mask for sched_setaffinity(2). If a request for every PU of the machine has the effective mask `target`, every
    /// PU is requested: then the thread follows its cpuset, and runs on PUs that come online later.
    pub requested: CpuSet,
    /// The reason for the change, in one sentence for users.
    pub why: String,
}

/// The purpose of a planned change of an affinity mask: confine, repair, pin, float, unbind, keep off or
/// restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum MaskActionKind {
    /// A thread outside the grant of its job is restricted to the grant, for the first time or because the grant
    /// changed.
    Confine,
    /// A thread that left the grant after it had been restricted to the grant is restricted again.
    Repair,
    /// A hot thread gets one PU.
    Pin,
    /// A pinned thread gets the whole grant again.
    Float,
    /// A hot thread that its program bound to some PUs of the grant gets other PUs of the grant, because too many hot
    /// threads are bound there while other PUs of the grant idle.
    Unbind,
    /// An unassigned thread is kept off the cores of jobs.
    KeepOff,
    /// A thread gets back its original mask: the mask that it had before pjw changed it.
    Restore,
}

impl MaskActionKind {
    /// Returns the name of the kind in `pjwctl plan --json` and in logs, such as `confine`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A warning for users: something that pjw did not do, the reason, and what the user can do.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Warning {
    /// The job that the warning is about. `None` if it is about no single job.
    pub job: Option<JobId>,
    /// The process that the warning is about. `None` if it is about no single process.
    pub pid: Option<Pid>,
    /// The kind of warning, as a short name that scripts can rely on: `unknown-count`, `stray`, `own-binding`, ….
    pub code: &'static str,
    /// What was not done and the reason, in one sentence.
    pub why: String,
    /// What the user can do about the warning. Empty if there is nothing to do.
    pub remedy: String,
}

impl Warning {
    /// Makes a warning that names no job or process. `code` is the name of the warning for scripts, `why` the reason,
    /// and `remedy` what the user can do (empty if nothing).
    #[must_use]
    pub fn new(code: &'static str, why: String, remedy: impl Into<String>) -> Self {
        Self { job: None, pid: None, code, why, remedy: remedy.into() }
    }
}

/// The result of carrying out a [`MaskAction`] (a change of a thread's affinity mask): the mask was set, the thread
/// has ended, or the kernel refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MaskOutcome {
    /// The mask was set.
    Done {
        /// The effective mask, read after the change.
        effective: CpuSet,
    },
    /// The thread has ended since the scan.
    Gone,
    /// The kernel refused the change.
    Refused {
        /// The error number, see errno(3).
        errno: i32,
        /// The usual cause of this error here, and what to do.
        reason: String,
    },
}
