//! Many idle jobs of a private daemon: the load of the benches `jobs` and `commands`.

use crate::load::processes::{Activity, LoadProcesses};
use crate::programs::{daemon::PrivateWarden, interrupt::StopSignal};

/// The values of the key `enforcement` that the benches compare, each with the name of what keeps the jobs on their
/// cores.
pub const ENFORCEMENTS: [(&str, &str); 2] = [("auto", "cpusets"), ("affinity", "masks")];

/// Jobs of one core each, whose processes sleep. The processes end when this value is dropped.
#[derive(Debug, Default)]
pub struct IdleJobs(Vec<LoadProcesses>);

impl IdleJobs {
    /// The number of processes of each job.
    pub const PROCESSES_PER_JOB: usize = 10;

    /// Starts more idle jobs, until there are `jobs` of them.
    ///
    /// # Errors
    /// If a process can't be started, or the daemon refuses a job.
    pub fn grow(
        &mut self,
        warden: &PrivateWarden,
        jobs: usize,
        interrupt: &StopSignal,
    ) -> anyhow::Result<()> {
        while self.0.len() < jobs {
            let processes = LoadProcesses::start(Self::PROCESSES_PER_JOB, 1, Activity::Sleeping, interrupt)?;
            warden.assign_cores(&format!("idle-{}", self.0.len()), 1, &processes.pids())?;
            self.0.push(processes);
        }
        Ok(())
    }

    /// The pids of the processes of all jobs.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.0.iter().flat_map(LoadProcesses::pids).collect()
    }
}
