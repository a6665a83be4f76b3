//! The decisions of a cycle: the changes to the node, and warnings about changes that were not made.

use crate::basics::{CpuSet, Pid, ThreadId, prelude::*};
use crate::terms::{cpuset_group::CpusetAction, job::JobId};

/// The changes to affinity masks and cpusets that pjw has decided to make after one scan of the machine. The
/// changes of cpusets are made first, then the changes of affinity masks, each in the order of its list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// The changes of cpusets, in the order in which they must be made. They are made before the changes of
    /// masks, because a mask can be restored only when the cpuset allows it.
    pub cpuset_actions: Vec<CpusetAction>,
    /// The changes of affinity masks, in the order in which they must be made.
    pub mask_actions: Vec<MaskAction>,
}

/// A planned change of the affinity mask of one thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskAction {
    /// The purpose of the change, such as to confine or to restore.
    pub kind: MaskActionKind,
    /// The job for which the mask changes:
    ///
    /// - Usually the job to which the thread belongs.
    /// - If pjw restores the original mask, the job to which the thread belongs or belonged.
    /// - If pjw keeps a thread of no job off the cores of all jobs, one of the jobs of the user of the
    ///   thread.
    pub job: JobId,
    /// The thread whose mask changes.
    pub thread: ThreadId,
    /// The effective mask of the thread before the change, as the last scan read it.
    pub current_mask: CpuSet,
    /// The effective mask that the thread should have after the change.
    pub target_mask: CpuSet,
    /// The mask to pass to sched_setaffinity(2). Usually, it equals `target_mask`. It is every PU of the
    /// machine if `target_mask` is the whole cpuset of the job or contains every online PU. The kernel then
    /// reduces the mask to `target_mask`. If the cpuset or the online PUs change later, the kernel adapts the
    /// effective mask of the thread by itself.
    pub requested_mask: CpuSet,
    /// The mask that the program of the thread had requested, if it has PUs that the job does not hold, and the change
    /// replaces it by PUs of the job. Only changes of the kinds [`MaskActionKind::Confine`] and
    /// [`MaskActionKind::Repair`] have it. `None` if the program had not bound the thread.
    pub program_request: Option<CpuSet>,
    /// The reason for the change, in one sentence for users.
    pub reason: String,
}

impl MaskAction {
    /// Makes the planned change of the affinity mask of `thread` to `target_mask`. When the change is carried out,
    /// exactly this mask is passed to sched_setaffinity(2): [`MaskAction::requested_mask`] equals `target_mask`. The
    /// field [`MaskAction::program_request`] is `None`: the result names no mask that a program had set before.
    ///
    /// - `kind` is the purpose of the change, and `job` the job for which the mask changes.
    /// - `current_mask` is the effective mask of the thread, as the last scan read it.
    /// - `reason` is the reason for the change, in one sentence for users.
    #[must_use]
    pub fn with_exact_mask(
        kind: MaskActionKind,
        job: &JobId,
        thread: ThreadId,
        current_mask: &CpuSet,
        target_mask: CpuSet,
        reason: String,
    ) -> Self {
        let (job, current_mask) = (job.clone(), current_mask.clone());
        let requested_mask = target_mask.clone();
        Self { kind, job, thread, current_mask, target_mask, requested_mask, program_request: None, reason }
    }
}

/// The purpose of a planned change of an affinity mask. For example, `Confine` restricts a thread to the PUs (logical
/// CPUs) of its job, and `Restore` gives the thread its original mask back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum MaskActionKind {
    /// A thread that may run outside the grant of its job (the PUs granted to the job) is restricted to the
    /// grant. The thread is new in the job, or the grant changed.
    Confine,
    /// A thread that pjw had restricted to the grant of its job, and that then requested other PUs, is restricted
    /// again.
    Repair,
    /// A hot thread (a thread that runs or waits for a PU most of the time) is restricted to one PU of the grant of its
    /// job.
    Pin,
    /// A pinned thread is no longer restricted to one PU, and may use all PUs of the grant of its job again.
    Float,
    /// pjw gives a hot thread other PUs of the grant than the PUs to which its program bound the thread. The
    /// reason is that too many hot threads are bound to the same PUs while other PUs of the grant are idle.
    Unbind,
    /// pjw gives a thread the PUs of the grant instead of the PUs to which its program bound the thread, because the
    /// policy lifts every binding ([`BindingPolicy::Override`](crate::terms::policy::BindingPolicy::Override)).
    Override,
    /// A binding that pjw lifted ([`MaskActionKind::Unbind`]) is put in force again: the thread waited for a PU as long
    /// as before.
    Rebind,
    /// A thread that belongs to no job is kept off the cores of jobs.
    KeepOff,
    /// A thread gets back its original mask: the mask that it had before pjw changed it.
    Restore,
}

impl MaskActionKind {
    /// Returns the name of the kind, as in `pjwctl plan --json` and in logs, such as `confine`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A warning for users: a change that pjw does not make, or a state that needs attention. A warning contains
/// the reason and a remedy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Warning {
    /// The job that the warning is about. `None` if the warning is about no job or about several jobs.
    pub job: Option<JobId>,
    /// The process that the warning is about. `None` if the warning is about no process or about several
    /// processes.
    pub pid: Option<Pid>,
    /// The stable short name of this kind of warning, for scripts, such as `unknown-count`, `stray` or
    /// `no-wall`.
    pub code: &'static str,
    /// The text of the warning, in one sentence for users: what is wrong or what pjw does not do, and the
    /// reason.
    pub text: String,
    /// The remedy that is proposed to the user. Empty if the user need not do anything.
    pub remedy: String,
}

impl Warning {
    /// Makes a warning that names no job or process. `code` is the short name of the kind of warning. `text`
    /// is the text of the warning. `remedy` says what the user can do; it is empty if there is nothing to do.
    #[must_use]
    pub fn new(code: &'static str, text: String, remedy: impl Into<String>) -> Self {
        Self { job: None, pid: None, code, text, remedy: remedy.into() }
    }
}

/// The result of carrying out a [`MaskAction`] (a change of a thread's affinity mask). The mask was set, the
/// thread has ended, or the kernel refused the change.
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
        /// The usual cause of this error, and the remedy, in one sentence for users.
        reason: String,
    },
}
