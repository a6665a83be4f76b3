//! Many idle jobs of a private daemon: the load of the benches `jobs` and `commands`.

use crate::load::processes::{Activity, LoadProcesses};
use crate::programs::{daemon::PrivateWarden, interrupt::StopSignal};

/// The ways to keep jobs on their cores that the benches compare. Each entry contains the value of the configuration
/// key `enforcement` of pjwd, and what then keeps the jobs on their cores.
pub const ENFORCEMENTS: [(&str, &str); 2] = [("auto", "cpusets"), ("affinity", "masks")];

/// Jobs of a private pjwd with one core each, whose processes only sleep. Dropping this value kills the processes.
#[derive(Debug, Default)]
pub struct IdleJobs(Vec<LoadProcesses>);

impl IdleJobs {
    /// The number of processes of each idle job.
    pub const PROCESSES_PER_JOB: usize = 10;

    /// Starts idle jobs until this value has `jobs` of them. The daemon `warden` grants one core to each job.
    ///
    /// # Errors
    /// If a process can't be started, if the daemon refuses a job, or if `interrupt` was set.
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

    /// Returns the process ids of all processes of the idle jobs.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.0.iter().flat_map(LoadProcesses::pids).collect()
    }
}
