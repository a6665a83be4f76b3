//! What a cycle decided: actions that leave nothing to choose, and what was not done, and why.

use crate::cpuset::CpuSet;
use crate::job::JobId;
use crate::process::{Pid, ThreadId, Tid};
use crate::wall::WallAction;

/// An ordered list of changes to the node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Changes to walls: they come first, for a mask can only be put back where the wall is open.
    pub walls: Vec<WallAction>,
    /// Changes to masks, in the order in which they are to be done.
    pub actions: Vec<Action>,
}

/// One change to the node: the mask of one thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Action {
    /// What kind of change.
    pub kind: ActionKind,
    /// For which job.
    pub job: JobId,
    /// The thread whose mask changes.
    pub thread: ThreadId,
    /// The mask it was seen with.
    pub from: CpuSet,
    /// The mask it gets.
    pub to: CpuSet,
    /// Whether the thread's cgroup holds it on its job's cores already: it may as well be allowed everything, and
    /// then follows its cpuset.
    pub walled: bool,
    /// Why, in one sentence.
    pub why: String,
}

/// The kinds of change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ActionKind {
    /// A thread outside its job's grant is put inside, for the first time or because the grant changed.
    Confine,
    /// A thread that left its grant after it had been put inside is put back.
    Repair,
    /// A hot thread gets one PU.
    Pin,
    /// A pinned thread gets the whole grant again.
    Float,
    /// A thread of a stray is kept off the cores of jobs.
    KeepOff,
    /// A thread gets back the mask it had before the warden touched it.
    Restore,
}

impl ActionKind {
    /// Its name in `plan --json` and in logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ActionKind::Confine => "confine",
            ActionKind::Repair => "repair",
            ActionKind::Pin => "pin",
            ActionKind::Float => "float",
            ActionKind::KeepOff => "keep-off",
            ActionKind::Restore => "restore",
        }
    }
}

/// Something that was not done, and why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Abstained {
    /// For which job.
    pub job: Option<JobId>,
    /// For which process.
    pub pid: Option<Pid>,
    /// For which thread.
    pub tid: Option<Tid>,
    /// A short name for scripts, as in the warnings of `status`: `unknown-count`, `stray`, `own-binding`, ….
    pub code: &'static str,
    /// What and why, in one sentence.
    pub why: String,
    /// What a person can do about it; empty if nothing needs doing.
    pub remedy: String,
}

/// What became of an action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Done; the mask as read back afterwards.
    Done {
        /// What the kernel made of it.
        effective: CpuSet,
    },
    /// The thread is gone: the world moved on.
    Gone,
    /// The kernel said no.
    Refused {
        /// The error's number, errno(3).
        errno: i32,
        /// What that usually means here, and what to do.
        hint: String,
    },
}
