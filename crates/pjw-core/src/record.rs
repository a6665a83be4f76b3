//! What the journal remembers, so that a restart finds the same grants and an undo finds the old masks.
//!
//! The state of the warden is the sum of its records ([`crate::state::WardenState::replay`]). Records are
//! written before the change they tell of: after a crash the journal may know of a change that was not made,
//! never the other way round.

use serde::{Deserialize, Serialize};

use crate::cpuset::CpuSet;
use crate::job::{Job, JobId};
use crate::membership::Evidence;
use crate::process::{ProcessId, ThreadId};
use crate::snapshot::Nanos;
use crate::wall::WallRecord;

/// One thing worth remembering.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Record {
    /// A job is new, or its request, grant or lifetime changed.
    Job(Job),
    /// A job ended: its members are members no more, and their masks are to be put back.
    Ended(JobId),
    /// A process became a member.
    Joined {
        /// The process.
        process: ProcessId,
        /// Its job.
        job: JobId,
        /// By what evidence.
        evidence: Evidence,
        /// See [`crate::state::Member::inherited`].
        inherited: Option<CpuSet>,
        /// See [`crate::state::Member::met`].
        #[serde(default)]
        met: Option<Nanos>,
    },
    /// A process has masks to be put back for a job that let go of it: one that was a member, or was born to one
    /// before that was done.
    Left {
        /// The process.
        process: ProcessId,
        /// The job that let go, which may be over, or another one of the same name by now.
        job: JobId,
        /// By what evidence it had been a member.
        evidence: Evidence,
        /// See [`crate::state::Member::inherited`].
        inherited: Option<CpuSet>,
        /// See [`crate::state::Member::met`].
        #[serde(default)]
        met: Option<Nanos>,
    },
    /// A thread's mask is about to change.
    Touched {
        /// The thread.
        thread: ThreadId,
        /// The mask to put back when the job lets go of it.
        before: CpuSet,
        /// The mask it is about to get.
        set: CpuSet,
        /// See [`crate::touch::Touch::since`].
        #[serde(default)]
        since: Nanos,
    },
    /// A thread has a mask of its own choice again: its old one, or one it chose inside the grant.
    Untouched(ThreadId),
    /// Something about the walls.
    Wall(WallRecord),
}
