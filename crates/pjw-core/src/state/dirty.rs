//! The dirty set: the jobs and processes that the next cycle has to plan again.
//!
//! A process is added to the dirty set when a scan read it, and when it started or exited. The next cycle then checks
//! the masks of its threads, and distributes the hot threads of its job over the PUs again. A job that changed is added
//! as a whole. All jobs and processes are in the dirty set after a new configuration or a change of the machine, and in
//! one rescan of eight. Planned changes are checked in the next cycle, until there is nothing left to change.

use crate::basics::{Pid, prelude::*};
use crate::terms::JobId;

/// The jobs and processes that changed since the last decision of the daemon. The next decision must plan their
/// affinity masks and cpusets again. For all other jobs and processes, the earlier decision is still valid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirtySet {
    everything: bool,
    jobs: BTreeMap<JobId, DirtyScope>,
}

/// The part of a changed job for which the next decision of the daemon plans affinity masks: all processes of
/// the job, or only some.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DirtyScope {
    /// All processes of the job.
    Whole,
    /// Some processes of the job:
    ///
    /// - Each process whose pid is in this set, with all its threads. Some of these processes may have exited.
    /// - Each other process of the job that is active. A process is active if the smoothed CPU demand of at least one
    ///   of its threads is not 0, or if no scan has read its threads yet. If such a process has many threads, the next
    ///   decision may plan the masks of its active threads only.
    Processes(BTreeSet<Pid>),
}

impl DirtySet {
    /// Makes a set that contains all jobs and processes. The next decision of the daemon then plans the masks
    /// and cpusets of all of them.
    #[must_use]
    pub fn everything() -> Self {
        Self { everything: true, jobs: BTreeMap::new() }
    }

    /// Whether this set contains all jobs and all processes of the machine. The next decision of the daemon then plans
    /// the masks and cpusets of all of them again.
    #[must_use]
    pub fn contains_everything(&self) -> bool {
        self.everything
    }

    /// Iterates over the jobs that were added to this set individually, for example by [`DirtySet::add_job`]. The next
    /// decision of the daemon plans the masks and cpusets of these jobs again. Each item is a job, and which of its
    /// processes are in this set. Jobs that are in this set only because it contains everything
    /// ([`DirtySet::contains_everything`]) are not among the items.
    pub fn listed_jobs(&self) -> impl Iterator<Item = (&JobId, &DirtyScope)> {
        self.jobs.iter()
    }

    /// Adds the job `job` with all its processes to this set. The next decision of the daemon then plans the cpuset of
    /// the job and the masks of all its processes again.
    pub fn add_job(&mut self, job: &JobId) {
        self.jobs.insert(job.clone(), DirtyScope::Whole);
    }

    /// Adds the process `pid` of the job `job` to this set, together with the active processes of the job
    /// ([`DirtyScope::Processes`]). The next decision of the daemon then plans the cpuset of the job and the masks of
    /// these processes again. Has no effect if the whole job was added before ([`DirtySet::add_job`]).
    pub(crate) fn add_process(&mut self, job: &JobId, pid: Pid) {
        self.add_active(job);
        if let Some(DirtyScope::Processes(pids)) = self.jobs.get_mut(job) {
            pids.insert(pid);
        }
    }

    /// Adds the active processes of the job `job` to this set. A process is active if one of its threads recently ran
    /// or waited for a PU (logical CPU), or if no scan has read its threads yet. The next decision of the daemon then
    /// plans the cpuset of the job and the masks of these processes again.
    pub(crate) fn add_active(&mut self, job: &JobId) {
        if !self.jobs.contains_key(job) {
            self.jobs.insert(job.clone(), DirtyScope::Processes(BTreeSet::new()));
        }
    }

    /// Adds all jobs and processes in `other` to this set. The next decision of the daemon then plans them again.
    pub fn extend(&mut self, other: &Self) {
        self.everything |= other.everything;
        for (job, scope) in &other.jobs {
            match scope {
                DirtyScope::Whole => self.add_job(job),
                DirtyScope::Processes(pids) => {
                    self.add_active(job);
                    pids.iter().for_each(|&pid| self.add_process(job, pid));
                }
            }
        }
    }

    /// Returns which processes of the job `job` the next decision of the daemon must plan again. `None` if this set
    /// contains nothing of the job.
    pub(crate) fn dirty_scope_of(&self, job: &JobId) -> Option<&DirtyScope> {
        if self.everything { Some(&WHOLE) } else { self.jobs.get(job) }
    }
}

impl DirtyScope {
    /// Returns whether this scope contains all threads of the process `pid`, even if the process is idle. A scope is
    /// the part of a job for which the next decision of the daemon plans affinity masks. The result is true for
    /// [`DirtyScope::Whole`], and for [`DirtyScope::Processes`] if it has `pid`.
    ///
    /// If the result is false, the scope contains threads of the process only if the process is active. A process is
    /// active if one of its threads recently ran or waited for a PU (logical CPU), or if no scan has read its threads
    /// yet. Of an active process with many threads, the scope may contain only the active threads.
    #[must_use]
    pub fn contains_whole_process(&self, pid: Pid) -> bool {
        match self {
            DirtyScope::Whole => true,
            DirtyScope::Processes(pids) => pids.contains(&pid),
        }
    }
}

static WHOLE: DirtyScope = DirtyScope::Whole;
