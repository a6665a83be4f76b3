//! The records of the journal. With them a restart finds the same grants, and a release finds the original masks.
//!
//! The state of pjw can be made again from its records ([`crate::state::warden::WardenState::replay`]). A
//! record is written before the change that it describes. So after a crash the journal may contain a change that was
//! not made. It never lacks a change that was made.

use serde::{Deserialize, Serialize};

use crate::basics::{CpuSet, Nanos, ProcessId, ThreadId, Uid, prelude::*};
use crate::terms::job::{Job, JobId};
use crate::terms::{cpuset_group::JobCpuset, evidence::Evidence};

/// A journal record about a job's cpuset. Most records say that a change of the cpuset, or a move of a
/// process, is about to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CpusetRecord {
    /// A cpuset is about to be created or changed.
    #[serde(rename = "raised")]
    Created(JobCpuset),
    /// No job needs the cpuset any longer: pjw is about to widen and remove it.
    Unwanted {
        /// The cgroup of the cpuset.
        path: String,
    },
    /// A cpuset was removed, or has its original content again.
    #[serde(rename = "razed")]
    Removed {
        /// The cgroup of the cpuset.
        path: String,
    },
    /// A process is about to be moved into the cgroup of a job's cpuset.
    Moved {
        /// The process.
        process: ProcessId,
        /// The cgroup of the process before the move.
        from: String,
        /// The cgroup of the cpuset.
        to: String,
    },
    /// The cgroup from which the first process was moved into the cgroup of a job's cpuset. Written if that
    /// process has ended, or if the cgroup into which it was moved was removed.
    Origin {
        /// The cgroup of the cpuset.
        path: String,
        /// The original cgroup of the first process.
        from: String,
    },
}

/// The facts of a journal record about a process that belongs or belonged to a job: the job, the evidence,
/// and facts that a restarted daemon could not read again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// The process that belongs or belonged to the job.
    pub process: ProcessId,
    /// The job to which the process belongs or belonged.
    pub job: JobId,
    /// The evidence that the process belongs to the job.
    pub evidence: Evidence,
    /// The affinity mask that the processes of the job inherited from outside the job. See
    /// [`crate::state::members::Member::inherited_mask`].
    #[serde(rename = "inherited")]
    pub inherited_mask: Option<CpuSet>,
    /// The time of the first scan that found the process, in ns since boot. See
    /// [`crate::state::members::Member::first_seen`].
    #[serde(default, rename = "met")]
    pub first_seen: Option<Nanos>,
}

/// The masks that the processes of a job had because of pjw when it was released. A child that was born before the masks of
/// its parent were restored, and that no scan has found, has one of these masks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleasedMasks {
    /// The job that was released.
    pub job: JobId,
    /// The users of the processes.
    pub users: BTreeSet<Uid>,
    /// Each mask, with the original mask of the thread.
    pub masks: BTreeSet<ReleasedMask>,
    /// The time since when processes may have had these masks, in ns since boot.
    pub since: Nanos,
    /// The time of the release, in ns since boot.
    pub released_at: Nanos,
}

impl ReleasedMasks {
    /// No masks of a job that is released at this time.
    #[must_use]
    pub fn new(job: JobId, released_at: Nanos) -> Self {
        Self { job, users: BTreeSet::new(), masks: BTreeSet::new(), since: released_at, released_at }
    }

    /// Adds masks.
    pub(crate) fn extend(&mut self, masks: impl Iterator<Item = ReleasedMask>) {
        self.masks.extend(masks);
    }
}

/// A mask that processes of a job had because of pjw when the job was released.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ReleasedMask {
    /// The mask that pjw requested, or that the cpuset of the job left.
    pub set: CpuSet,
    /// The original mask: the mask that a release restores.
    pub before: CpuSet,
}

/// A record of the journal. It describes one change: of a job, of the membership of a process, of an affinity
/// mask, or of a cpuset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Record {
    /// A job is new, or its request, grant or lifetime changed.
    Job(Job),
    /// A job ended: its processes are no longer members, and their original masks are to be restored.
    Ended(JobId),
    /// A process became a member of a job.
    Joined(Membership),
    /// A job released a process, and pjw is to restore the original masks of the process. The process was a
    /// member of the job, or was forked by a member before the masks of that member were restored. The job
    /// may have ended since, and another job may have the same id now.
    Left(Membership),
    /// pjw is about to set the mask of a thread.
    #[serde(rename = "touched")]
    MaskSet {
        /// The thread.
        thread: ThreadId,
        /// The original mask, which a release restores.
        before: CpuSet,
        /// The mask that is about to be requested.
        set: CpuSet,
        /// The time at which pjw began to change or keep the mask, since boot.
        #[serde(default)]
        since: Nanos,
        /// The time of the request, in ns since boot. `None` in records of earlier versions of pjw: the time
        /// is then `since`.
        #[serde(default)]
        at: Option<Nanos>,
    },
    /// pjw no longer sets the mask of a thread. Its original mask was restored, or its program requested a
    /// mask inside the grant.
    #[serde(rename = "untouched")]
    MaskReleased(ThreadId),
    /// A job is about to be released: descendants of its processes that no scan has found may keep these masks.
    ReleasedMasks(ReleasedMasks),
    /// A full scan after the release of a job found that no process has a mask of it any more.
    ReleaseSettled(JobId),
    /// A record about the cpuset of a job.
    #[serde(rename = "wall")]
    Cpuset(CpusetRecord),
}

impl Record {
    /// The process that the record makes a member, or a process whose original masks are to be restored.
    pub(crate) fn tracked_process(&self) -> Option<ProcessId> {
        match self {
            Record::Joined(membership) | Record::Left(membership) => Some(membership.process),
            _ => None,
        }
    }
}
