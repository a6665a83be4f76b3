//! The job in which each process is expected, by the replies to commands, the events of the daemon and the true descent
//! of the process.

use pjw_core::command::{Command, Reply};
use pjw_core::event::Event;
use pjw_core::ids::Pid;
use pjw_core::job::JobId;
use pjwd::warden::CycleReport;

use super::Run;

impl Run {
    /// Updates the expected jobs, and the totals of the replies, after a cycle with these commands.
    pub(super) fn update_expected_jobs(&mut self, commands: &[Command], report: &CycleReport) {
        let is_end = |event: &&Event| event.text.starts_with("its scheduler's cgroup is gone");
        for job in report.events.iter().filter(is_end).filter_map(|event| event.job.as_ref()) {
            self.clear_expected_job(job);
        }
        for (command, reply) in commands.iter().zip(&report.replies) {
            self.update_for_reply(command, reply.as_ref().ok());
        }
        self.expect_descendants();
    }

    /// Removes a job that has ended from its processes: they are expected in no job.
    fn clear_expected_job(&self, job: &JobId) {
        let name = job.to_string();
        for process in self.world.borrow_mut().processes.values_mut() {
            process.expected_job.take_if(|expected| *expected == name);
        }
    }

    /// After an assignment that was granted, its processes are expected in its job. After a release, the processes of
    /// the job are expected in no job.
    fn update_for_reply(&mut self, command: &Command, reply: Option<&Reply>) {
        let Some(reply) = reply else {
            self.totals.refusals += 1;
            return;
        };
        if let Reply::Moved(defragmentation) = reply {
            self.totals.moves += defragmentation.moves.len();
        }
        if let Reply::Released(jobs) = reply {
            // The job of a scheduler keeps its processes after a release.
            let stays_known =
                |job: &JobId| self.warden.state().jobs.get(job).is_some_and(|job| job.was_released);
            jobs.iter().filter(|job| !stays_known(job)).for_each(|job| self.clear_expected_job(job));
        }
        if let (Command::Provision(_), Reply::Assigned(_)) = (command, reply) {
            self.totals.provisions += 1;
        }
        if let (Command::Assign(request), Reply::Assigned(job)) = (command, reply) {
            self.totals.jobs += 1;
            if self.warden.state().members.members_of_job(&job.id).next().is_none() {
                // The job is new: the processes of an ended job with the same name do not belong to it.
                self.clear_expected_job(&job.id);
            }
            // The daemon assigns the process that its scan found. It may have ended since.
            for known in request.pids.iter().filter_map(|&pid| self.warden.state().process(pid)) {
                self.assigned.insert(known.id, job.id.clone());
                let mut world = self.world.borrow_mut();
                let assigned = world.processes.get_mut(&known.id.pid);
                if let Some(process) = assigned.filter(|process| process.id == known.id) {
                    process.expected_job = Some(job.id.to_string());
                }
            }
        }
    }

    /// A member of a job to which a command assigned one of its ancestors is expected in this job. A process that was
    /// born before the assignment follows its ancestor. This is also true for an orphan whose parent ended before a
    /// scan, because the fork events name the ancestor, and for a process that only a later scan found.
    fn expect_descendants(&self) {
        let members = &self.warden.state().members;
        let mut world = self.world.borrow_mut();
        let mut joined: Vec<(Pid, String)> = Vec::new();
        for id in world.processes.values().map(|process| process.id) {
            let Some(member) = members.get(&id.pid).filter(|member| member.id == id) else { continue };
            if world.lineage(id).any(|ancestor| self.assigned.get(&ancestor) == Some(&member.job)) {
                joined.push((id.pid, member.job.to_string()));
            }
        }
        for (pid, job) in joined {
            if let Some(process) = world.processes.get_mut(&pid) {
                process.expected_job = Some(job);
            }
        }
    }
}
