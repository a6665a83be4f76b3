//! The records of the journal. With them a restart finds the same grants, and a release finds the original masks.
//!
//! The state of pjw can be made again from its records ([`crate::state::warden::WardenState::apply_record`]). A
//! record is written before the change that it describes. So after a crash the journal may contain a change that was
//! not made. It never lacks a change that was made.

use serde::{Deserialize, Serialize};

use crate::basics::{CpuSet, Nanos, ProcessId, ThreadId, Uid, prelude::*};
use crate::terms::job::{Job, JobId};
use crate::terms::{cpuset_group::JobCpuset, evidence::Evidence};

/// A journal record about the cpuset of a job. Most of these records announce a change that pjw is about to
/// make: a change of the cpuset, or a move of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CpusetRecord {
    /// pjw is about to create the cpuset or to change its settings. Contains the new settings.
    #[serde(rename = "raised")]
    Created(JobCpuset),
    /// No job needs the cpuset any longer. pjw is about to widen and remove the cpuset.
    Unwanted {
        /// The path of the cgroup of the cpuset.
        path: String,
    },
    /// The cpuset no longer exists, or pjw no longer controls the cpuset.
    #[serde(rename = "razed")]
    Removed {
        /// The path of the cgroup of the cpuset.
        path: String,
    },
    /// pjw is about to move a process into the cgroup of a job's cpuset, or the process was born in this
    /// cgroup.
    Moved {
        /// The process that is moved.
        process: ProcessId,
        /// The path of the cgroup to which the process is moved back later.
        from: String,
        /// The path of the cgroup of the cpuset.
        to: String,
    },
    /// The cgroup to which pjw moves a process back if neither the process nor an ancestor has a `Moved`
    /// record. It is the cgroup from which pjw moved the first process into the cpuset.
    Origin {
        /// The path of the cgroup of the cpuset.
        path: String,
        /// The path of the original cgroup.
        from: String,
    },
}

/// The facts of a journal record about a process that belongs or belonged to a job: the process, the job, the
/// evidence, and facts that a restarted daemon could not read again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// The process that belongs or belonged to the job.
    pub process: ProcessId,
    /// The job to which the process belongs or belonged.
    pub job: JobId,
    /// The evidence that the process belongs to the job.
    pub evidence: Evidence,
    /// The affinity mask that the job inherited from outside. See
    /// [`crate::state::members::Member::inherited_mask`].
    #[serde(rename = "inherited")]
    pub inherited_mask: Option<CpuSet>,
    /// The time of the first scan that read the process, in ns since boot. See
    /// [`crate::state::members::Member::first_seen`].
    #[serde(default, rename = "met")]
    pub first_seen: Option<Nanos>,
}

/// The affinity masks that threads of a job had because of pjw at the moment when the job ended or a command
/// released the job. A process that was forked before the mask of its parent was restored, and that no scan
/// has read, may still have such a mask.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleasedMasks {
    /// The job that ended or was released.
    pub job: JobId,
    /// The user ids of the job's owner and of the processes of the job.
    pub users: BTreeSet<Uid>,
    /// The masks that the threads of the job had because of pjw. Each is paired with the mask that pjw restores
    /// in its place.
    pub masks: BTreeSet<ReleasedMask>,
    /// The earliest time at which a process can have had one of these masks, in ns since boot. It is the time
    /// of the grant, or the time of pjw's first mask request if that is earlier.
    pub since: Nanos,
    /// The time at which the job ended or was released, in ns since boot.
    pub released_at: Nanos,
    /// The time of the last decision for which a process of the job was still to be restored, in ns since boot. A fork that
    /// copied one of the masks began before that. `None` before the first decision of a daemon that read the record.
    #[serde(skip)]
    pub restored_at: Option<Nanos>,
}

impl ReleasedMasks {
    /// Makes an empty set of masks for a job that ends or is released at the time `released_at`.
    #[must_use]
    pub fn new(job: JobId, released_at: Nanos) -> Self {
        let (users, masks) = (BTreeSet::new(), BTreeSet::new());
        Self { job, users, masks, since: released_at, released_at, restored_at: None }
    }

    /// Adds masks.
    pub(crate) fn extend(&mut self, masks: impl Iterator<Item = ReleasedMask>) {
        self.masks.extend(masks);
    }
}

/// An affinity mask that threads of a job had because of pjw when the job ended or was released.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ReleasedMask {
    /// The mask at the release: the mask that pjw had requested, or the PUs to which the cpuset of the job
    /// had reduced the requested mask.
    pub set: CpuSet,
    /// The original mask, which pjw restores: the mask of the thread before pjw changed it.
    pub before: CpuSet,
}

/// A record of the journal, from which a restarted daemon restores its state. It describes one change: of a
/// job, of the membership of a process in a job, of an affinity mask, or of a cpuset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Record {
    /// A job is new, or one of its fields changed, such as its request or its grant. Contains the whole job.
    Job(Job),
    /// The job ended. Its processes no longer belong to the job, and pjw is to restore their original
    /// affinity masks.
    Ended(JobId),
    /// The process belongs to the job from now on.
    Joined(Membership),
    /// The process does not belong to the job, and pjw is to restore the original affinity masks of the
    /// process. Written for these processes:
    ///
    /// - A process that belonged to the job.
    /// - A child that was forked before pjw had restored the mask of its parent, which had belonged to the
    ///   job.
    /// - A process of no job that pjw keeps off the cores of all jobs. The job is then one of the jobs of its
    ///   user.
    ///
    /// The job may have ended since, and another job may have the same id now.
    Left(Membership),
    /// pjw is about to set the affinity mask of a thread, or to store the present mask of a thread in the
    /// journal.
    #[serde(rename = "touched")]
    MaskSet {
        /// The thread whose mask is set.
        thread: ThreadId,
        /// The original mask of the thread, which pjw restores when the job ends or is released.
        before: CpuSet,
        /// The mask that is about to be requested.
        set: CpuSet,
        /// The time since which the journal has contained the original mask of the thread, in ns since boot.
        #[serde(default)]
        since: Nanos,
        /// The time of the request, in ns since boot. `None` in records of earlier versions of pjw; the time
        /// is then `since`.
        #[serde(default)]
        at: Option<Nanos>,
    },
    /// The journal no longer needs the original mask of the thread. The mask was restored, or the program of
    /// the thread requested a mask inside the grant of its job.
    #[serde(rename = "untouched")]
    MaskReleased(ThreadId),
    /// A job is about to end, or a command is about to release the job. Descendants of its processes that no
    /// scan has read may retain the masks in this record.
    ReleasedMasks(ReleasedMasks),
    /// No process has a mask of the last [`Record::ReleasedMasks`] of this job any more, as a full scan has
    /// shown.
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
