//! Short questions about the state that several phases ask.

use crate::basics::Pid;
use crate::state::{members::Member, warden::WardenState};
use crate::terms::{Grant, JobId, Process};

impl WardenState {
    /// Returns a process of the node, as the last scan read it. `None` if no process has this pid.
    #[must_use]
    pub fn process(&self, pid: Pid) -> Option<&Process> {
        self.processes.get(&pid).map(|known| &known.process)
    }

    /// Returns the grant of a job: the PUs that the job holds, and the reasons. `None` if the job holds no PUs, or
    /// does not exist.
    #[must_use]
    pub fn grant_of(&self, job: &JobId) -> Option<&Grant> {
        self.jobs.get(job)?.grant.as_ref()
    }

    /// The members of a job, and the processes that the job released and whose original masks are to be restored.
    pub(crate) fn tracked_of(&self, job: &JobId) -> impl Iterator<Item = &Member> {
        self.members.of_job(job).chain(self.restoring.values().filter(move |member| member.job == *job))
    }
}
