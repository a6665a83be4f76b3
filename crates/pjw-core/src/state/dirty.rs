//! The dirty set: the jobs and processes that the next cycle has to plan again.
//!
//! A process is added when it was scanned, started or exited: the masks of its threads are checked, and the
//! hot threads of its job are balanced. A job that changed is added as a whole. Everything is dirty after a
//! new configuration or a change of the machine, and in one full rescan of eight. Planned changes are checked
//! in the next round, until there is nothing left to change.

use crate::basics::{Pid, prelude::*};
use crate::terms::JobId;

/// The jobs and processes that changed, so that the next cycle of the daemon has to plan them again. The plan for all
/// others stays the same.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirtySet {
    everything: bool,
    jobs: BTreeMap<JobId, DirtyPart>,
}

/// The part of a changed job that the next cycle of the daemon has to plan again: the whole job, or some of its
/// processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DirtyPart {
    /// The whole job.
    Whole,
    /// These processes, of which some may have exited, and all hot threads of the job.
    Processes(BTreeSet<Pid>),
}

impl DirtySet {
    /// Makes the dirty set of all jobs and processes, so that the next cycle of the daemon plans everything again.
    #[must_use]
    pub fn everything() -> Self {
        Self { everything: true, jobs: BTreeMap::new() }
    }

    /// Whether all jobs and processes have to be planned again, not only those in the set.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.everything
    }

    /// Iterates over the changed jobs that have to be planned again, each with the part to plan. The list is not
    /// complete if [`DirtySet::is_everything`] is true: then every job is planned.
    pub fn dirty_parts(&self) -> impl Iterator<Item = (&JobId, &DirtyPart)> {
        self.jobs.iter()
    }

    /// Adds a whole job.
    pub fn add_job(&mut self, job: &JobId) {
        self.jobs.insert(job.clone(), DirtyPart::Whole);
    }

    /// Adds one process of a job.
    pub(crate) fn add(&mut self, job: &JobId, pid: Pid) {
        if let Some(part) = self.jobs.get_mut(job) {
            if let DirtyPart::Processes(pids) = part {
                pids.insert(pid);
            }
            return;
        }
        self.jobs.insert(job.clone(), DirtyPart::Processes(BTreeSet::from([pid])));
    }

    /// Adds the jobs and processes of another dirty set.
    pub fn extend(&mut self, other: &Self) {
        self.everything |= other.everything;
        for (job, part) in &other.jobs {
            match part {
                DirtyPart::Whole => self.add_job(job),
                DirtyPart::Processes(pids) => pids.iter().for_each(|&pid| self.add(job, pid)),
            }
        }
    }

    /// Returns the part of a job to plan again; `None` if the job is not dirty.
    pub(crate) fn part_of(&self, job: &JobId) -> Option<&DirtyPart> {
        if self.everything { Some(&WHOLE) } else { self.jobs.get(job) }
    }
}

static WHOLE: DirtyPart = DirtyPart::Whole;
