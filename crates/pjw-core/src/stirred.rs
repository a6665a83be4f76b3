//! What is planned anew in a cycle: a cycle in which little happened looks at little.
//!
//! A process that was looked at, that came or went, stirs itself: its threads are compared with what they should be, and
//! the running threads of its job are balanced. A job that changed is planned as a whole, and so is everything after a
//! wish, other rules or another machine, and in one rescan of eight. What was planned to be changed is looked at again in
//! the next round, until nothing is left to change.

use std::collections::{BTreeMap, BTreeSet};

use crate::job::JobId;
use crate::process::Pid;
use crate::state::{Member, WardenState};

/// What is to be planned anew.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stirred {
    everything: bool,
    jobs: BTreeMap<JobId, Part>,
}

/// How much of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// These processes, some of whom may be gone, and whoever runs.
    Processes(BTreeSet<Pid>),
}

impl Stirred {
    /// Everything.
    #[must_use]
    pub fn everything() -> Self {
        Self { everything: true, jobs: BTreeMap::new() }
    }

    /// Whether it is everything.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.everything
    }

    /// The parts of jobs, where it isn't everything.
    pub fn parts(&self) -> impl Iterator<Item = (&JobId, &Part)> {
        self.jobs.iter()
    }

    /// Adds a job as a whole.
    pub(crate) fn add_job(&mut self, job: &JobId) {
        self.jobs.insert(job.clone(), Part::Whole);
    }

    /// Adds one process of a job.
    pub(crate) fn add(&mut self, job: &JobId, pid: Pid) {
        if let Some(part) = self.jobs.get_mut(job) {
            if let Part::Processes(pids) = part {
                pids.insert(pid);
            }
            return;
        }
        self.jobs.insert(job.clone(), Part::Processes(BTreeSet::from([pid])));
    }

    /// Adds what another has.
    pub fn extend(&mut self, other: &Self) {
        self.everything |= other.everything;
        for (job, part) in &other.jobs {
            match part {
                Part::Whole => self.add_job(job),
                Part::Processes(pids) => pids.iter().for_each(|&pid| self.add(job, pid)),
            }
        }
    }

    /// The members of a job to be planned anew, `None` if there is no reason to look at the job at all.
    pub(crate) fn of<'a>(&self, state: &'a WardenState, job: &JobId) -> Option<Vec<&'a Member>> {
        match self.jobs.get(job) {
            _ if self.everything => {}
            None => return None,
            Some(Part::Whole) => {}
            Some(Part::Processes(pids)) => {
                let concerned: BTreeSet<Pid> =
                    pids.iter().copied().chain(state.members.awake_of(job)).collect();
                let members = concerned.iter().filter_map(|pid| state.members.get(pid));
                return Some(members.filter(|member| member.job == *job).collect());
            }
        }
        Some(state.members.of(job).collect())
    }
}
