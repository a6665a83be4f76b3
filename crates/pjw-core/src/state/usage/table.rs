//! The processes of jobs whose CPU time was read, by pid and by job.

use super::processes::ProcessUsage;
use crate::basics::{Pid, prelude::*};
use crate::terms::JobId;

/// The CPU times of the processes of all jobs. The processes of one job are found without a visit to the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ProcessTable {
    processes: BTreeMap<Pid, ProcessUsage>,
    /// The pids of the `processes` of each job that has one.
    pids: BTreeMap<JobId, BTreeSet<Pid>>,
}

impl ProcessTable {
    /// Returns the process with the pid `pid`. `None` if the table has no such process.
    pub(super) fn get(&self, pid: Pid) -> Option<&ProcessUsage> {
        self.processes.get(&pid)
    }

    /// Returns the process with the pid `pid`, so that the caller can change its times. The caller must not change its
    /// job. `None` if the table has no such process.
    pub(super) fn get_mut(&mut self, pid: Pid) -> Option<&mut ProcessUsage> {
        self.processes.get_mut(&pid)
    }

    /// Iterates over the processes of the job `job`, each with its pid.
    pub(super) fn of_job(&self, job: &JobId) -> impl Iterator<Item = (Pid, &ProcessUsage)> {
        let pids = self.pids.get(job).into_iter().flatten();
        pids.filter_map(|&pid| Some((pid, self.processes.get(&pid)?)))
    }

    /// Adds the process with the pid `pid`. Returns the process that had this pid before.
    pub(super) fn insert(&mut self, pid: Pid, process: ProcessUsage) -> Option<ProcessUsage> {
        let before = self.remove(pid);
        self.pids.entry(process.job.clone()).or_default().insert(pid);
        self.processes.insert(pid, process);
        before
    }

    /// Removes the process with the pid `pid`, and returns it. `None` if the table has no such process.
    pub(super) fn remove(&mut self, pid: Pid) -> Option<ProcessUsage> {
        let removed = self.processes.remove(&pid)?;
        if let Some(pids) = self.pids.get_mut(&removed.job) {
            pids.remove(&pid);
            if pids.is_empty() {
                self.pids.remove(&removed.job);
            }
        }
        Some(removed)
    }
}
