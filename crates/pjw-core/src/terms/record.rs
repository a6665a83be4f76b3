//! The records of the journal. With them a restart finds the same grants, and a release finds the original masks.
//!
//! The state of pjw can be made again from its records ([`crate::state::warden::WardenState::apply_record`]). A
//! record is written before the change that it describes. So after a crash the journal may contain a change that was
//! not made. It never lacks a change that was made.
//!
//! A daemon reads the records of an earlier version. So a kind or a field that gets another name here keeps its stored
//! name by `serde(rename)`, and a new field has a default. `pjwd/src/store/journal/tests/records.jsonl` has an example
//! of each record.

use serde::{Deserialize, Serialize};

use crate::basics::{CpuSet, Nanos, Pid, ProcessId, ThreadId, Uid, prelude::*};
use crate::terms::job::{Job, JobId};
use crate::terms::{cpuset_group::JobCpuset, evidence::MembershipEvidence, usage::JobUsage};

/// A record about the cpuset of a job, in the journal (the file from which a restarted daemon restores its state):
///
/// - `Created`: pjw is about to create the cpuset, or to change its settings.
/// - `Moved`: pjw is about to move a process into the cpuset. The record has the cgroup from which the process comes.
/// - `Origin`: the cgroup to which pjw later moves the processes back that have no record `Moved`.
/// - `Unwanted`: pjw is about to remove the limits of the cpuset, and then the cpuset.
/// - `Removed`: the cpuset is gone, or pjw no longer manages it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CpusetRecord {
    /// pjw is about to create the cpuset or to change its settings. Contains the new settings.
    #[serde(rename = "raised")]
    Created(JobCpuset),
    /// No job needs the cpuset any longer. pjw is about to remove the limits of the cpuset, and then the cpuset.
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
    /// The cgroup from which pjw moved the first process into the cpuset. pjw moves a process back to this
    /// cgroup if the journal has no record `Moved` for the process or for one of its ancestors.
    Origin {
        /// The path of the cgroup of the cpuset.
        path: String,
        /// The path of the original cgroup.
        from: String,
    },
}

/// A process and its job: the content of the records [`Record::Joined`] and [`Record::Left`] in the journal (the file
/// from which a restarted daemon restores its state). Also has facts that a restarted daemon can't read again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobMembership {
    /// The process.
    pub process: ProcessId,
    /// The job.
    pub job: JobId,
    /// The evidence that the process belongs to the job.
    pub evidence: MembershipEvidence,
    /// The affinity mask with which the processes of the job began: the mask of the nearest ancestor process
    /// that belongs to no job. `None` if unknown. See [`crate::state::members::Member::inherited_mask`].
    #[serde(rename = "inherited")]
    pub inherited_mask: Option<CpuSet>,
    /// The time of the first scan that read the process, in ns since boot. `None` if the record does not
    /// contain the time. See [`crate::state::members::Member::first_seen`].
    #[serde(default, rename = "met")]
    pub first_seen: Option<Nanos>,
}

/// The affinity masks that pjw had given to the threads of a job before the job was released. A job is released
/// when it ends or when a command releases it. pjw then restores the original mask of each thread.
///
/// A process that is forked before pjw restores the mask of its parent inherits the mask that pjw had given to the
/// parent. Such a process may be found only by a later scan. By this list, pjw recognises the inherited mask, and
/// restores the original mask. pjw deletes the list when a full scan has shown that no process has any of these
/// masks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleasedJobMasks {
    /// The job that ended or was released.
    pub job: JobId,
    /// The user ids of the job's owner and of the processes of the job.
    #[serde(rename = "users")]
    pub user_ids: BTreeSet<Uid>,
    /// The masks that the threads of the job had from pjw, each with the original mask, which pjw restores.
    pub masks: BTreeSet<ReleasedJobMask>,
    /// The earliest time at which a process can have had one of these masks, in ns since boot. It is the time
    /// of the grant or the time of pjw's first mask request for the job, whichever is earlier.
    #[serde(rename = "since")]
    pub first_used_at: Nanos,
    /// The time at which the job ended or was released, in ns since boot.
    pub released_at: Nanos,
    /// The last time at which pjw had not yet restored the masks of all processes of the job, in ns since
    /// boot. Every fork that copied one of the masks to a child began before this time. `None` if the record
    /// was read from the journal and the daemon has made no decision since.
    #[serde(skip)]
    pub last_pending_restore_at: Option<Nanos>,
}

impl ReleasedJobMasks {
    /// Makes an empty list of masks for `job`. `released_at` is the time at which the job is released, in ns since
    /// boot. A job is released when it ends or when a command releases it.
    #[must_use]
    pub fn new(job: JobId, released_at: Nanos) -> Self {
        let (user_ids, masks) = (BTreeSet::new(), BTreeSet::new());
        Self { job, user_ids, masks, first_used_at: released_at, released_at, last_pending_restore_at: None }
    }

    /// Adds `masks` to the list of the masks that pjw had given to the threads of the released job.
    pub(crate) fn extend(&mut self, masks: impl Iterator<Item = ReleasedJobMask>) {
        self.masks.extend(masks);
    }
}

/// An entry of [`ReleasedJobMasks`]: one affinity mask that pjw had given to threads of a job before the job was
/// released, with the original mask of these threads (the mask before pjw changed it). A job is released when it
/// ends or when a command releases it. pjw then restores the original mask.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ReleasedJobMask {
    /// The mask that the threads had at the release. It is the mask that pjw had requested, or only those PUs
    /// of the requested mask that the cpuset of the job contains.
    #[serde(rename = "set")]
    pub mask: CpuSet,
    /// The original mask, which pjw restores: the mask of the thread before pjw changed it.
    #[serde(rename = "before")]
    pub original_mask: CpuSet,
}

/// The affinity masks of unknown origin in one process. An earlier run of pjwd may have set these masks, but no record
/// in the journal (the file from which a restarted daemon restores its state) says so.
/// The journal record [`UnknownMaskRecord::Found`] contains at least one such mask.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnknownOriginMasks {
    /// The mask of the first thread. `None` if its mask is not of unknown origin.
    pub first_thread: Option<CpuSet>,
    /// The masks of the other threads that are of unknown origin.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub other_threads: BTreeSet<CpuSet>,
}

impl UnknownOriginMasks {
    /// Iterates over the masks in both fields: the mask of the first thread, then the masks of the other
    /// threads.
    pub(crate) fn masks(&self) -> impl Iterator<Item = &CpuSet> {
        self.first_thread.iter().chain(&self.other_threads)
    }

    /// Returns whether no thread of the process has a mask of unknown origin.
    pub(crate) fn is_empty(&self) -> bool {
        self.masks().next().is_none()
    }
}

/// A record about affinity masks of unknown origin ([`UnknownOriginMasks`]), in the journal (the file from which a
/// restarted daemon restores its state). An earlier run of pjwd may have set these masks, but no other record says so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnknownMaskRecord {
    /// Records of an earlier run of the daemon were lost. A search for masks that this earlier run may have set is
    /// pending.
    RecordsLost,
    /// A scan of all processes began the search. If the daemon restarts before the search is complete, it begins the
    /// search again, with the same list.
    SearchBegun {
        /// The processes that belonged to jobs according to the journal when the search first began. The search leaves
        /// them out, because the journal has their masks too.
        recorded: BTreeSet<ProcessId>,
    },
    /// The search is complete.
    Searched,
    /// The process has masks of unknown origin. Replaces an earlier record of the process.
    Found {
        /// The process.
        process: ProcessId,
        /// The masks of unknown origin of the process.
        mask: UnknownOriginMasks,
    },
    /// The process has ended, or no longer has a mask of unknown origin.
    Settled {
        /// The process.
        process: ProcessId,
    },
    /// pjw found the job by its cpuset, and the journal had no record of the job. A thread in this cpuset may have a
    /// mask of unknown origin that can't be detected, because the mask has exactly the PUs of the cpuset.
    CpusetFound {
        /// The job.
        job: JobId,
        /// The PUs of the cpuset.
        cpus: CpuSet,
    },
    /// The job of an earlier record `CpusetFound` has ended, and its processes have left the cpuset.
    CpusetLeft {
        /// The job.
        job: JobId,
    },
}

/// A record of the journal, from which a restarted daemon restores its state. A record describes one change: of
/// a job, of the membership of a process in a job, of an affinity mask, or of a cpuset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Record {
    /// A job is new, or one of its fields changed, such as its request or its grant. Contains the whole job.
    Job(Job),
    /// The job ended. Its processes no longer belong to the job, and pjw is to restore their original
    /// affinity masks.
    Ended(JobId),
    /// The process belongs to the job from now on.
    Joined(JobMembership),
    /// The process does not belong to the job, and pjw is going to restore the original affinity masks of the
    /// process (the masks before pjw changed them). Written for these processes:
    ///
    /// - A process that belonged to the job until this record.
    /// - A process that was forked by a process that had belonged to the job, before pjw had restored the
    ///   mask of the parent.
    /// - A process that belongs to no job and that pjw keeps off the cores of all jobs. The job in the record
    ///   is then one of the jobs of the user of the process.
    ///
    /// The job may have ended since the record was written, and another job may have the same id.
    Left(JobMembership),
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
        /// The time from which the journal has contained the original mask of the thread, in ns since boot.
        #[serde(default)]
        since: Nanos,
        /// The time of the request, in ns since boot. `None` in records of earlier versions of pjw; the time
        /// is then `since`.
        #[serde(default)]
        at: Option<Nanos>,
    },
    /// pjw is about to set the affinity mask of a newly forked process before it decides about the process. The process
    /// has one thread. The records [`Record::Joined`] and [`Record::MaskSet`] of the decision follow.
    #[serde(rename = "forked")]
    ForkMaskSet {
        /// The process.
        process: ProcessId,
        /// The nearest ancestor that belongs to a job. The process belongs to the same job.
        ancestor: Pid,
        /// The original mask of the process, which pjw restores when the job ends or is released.
        before: CpuSet,
        /// The mask that is about to be requested.
        set: CpuSet,
        /// The time from which the journal has contained the original mask, in ns since boot.
        since: Nanos,
        /// The time of the request, in ns since boot.
        at: Nanos,
    },
    /// The journal no longer needs the original mask of the thread. Either pjw restored this mask, or the program of
    /// the thread requested a mask inside the PUs that are granted to its job.
    #[serde(rename = "untouched")]
    MaskReleased(ThreadId),
    /// A job is about to end, or a command is about to release the job. Contains the masks that pjw set for
    /// its threads. A descendant of the job's processes that no scan has read may have inherited one of these
    /// masks.
    ReleasedMasks(ReleasedJobMasks),
    /// A scan of all processes has shown that no process has any of the masks in the last record
    /// [`Record::ReleasedMasks`] of this job.
    ReleaseSettled(JobId),
    /// A record about the cpuset of a job.
    #[serde(rename = "wall")]
    Cpuset(CpusetRecord),
    /// A record about affinity masks whose origin no other record explains.
    UnknownMasks(UnknownMaskRecord),
    /// The CPU time, the memory and the cores that a running job has used so far. Written from time to time, so that a
    /// restarted daemon can continue the sums.
    Usage {
        /// The id of the job.
        job: JobId,
        /// The CPU time, the memory and the cores that the job used since its start.
        usage: Box<JobUsage>,
    },
}

impl Record {
    /// Returns the process that becomes a member of a job by this record ([`Record::Joined`]), or the process whose
    /// original affinity masks pjw is going to restore ([`Record::Left`]). `None` for all other records.
    pub(crate) fn joined_or_left_process(&self) -> Option<ProcessId> {
        match self {
            Record::Joined(membership) | Record::Left(membership) => Some(membership.process),
            _ => None,
        }
    }
}
