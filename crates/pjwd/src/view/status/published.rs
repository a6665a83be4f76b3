//! The status as the event loop makes it: it shares what did not change with the status before it.

use std::sync::{Arc, OnceLock};

use pjw_ipc::wire;

/// A published status. Its jobs, warnings and cores are shared with earlier ones, so that it costs little to make.
#[derive(Debug, Clone, Default)]
pub struct PublishedStatus {
    /// The status without jobs, warnings and cores.
    pub head: wire::Status,
    /// The jobs, by id.
    pub jobs: Vec<Arc<wire::Job>>,
    /// The conditions that an administrator should know.
    pub warnings: Vec<Arc<wire::Warning>>,
    /// Every core, in the machine's order.
    pub cores: Arc<[wire::Core]>,
    /// The whole status, once it was asked for.
    whole: OnceLock<Arc<wire::Status>>,
}

impl PublishedStatus {
    /// Makes a status from its parts. `head` has no jobs, warnings and cores.
    pub(super) fn new(
        head: wire::Status,
        jobs: Vec<Arc<wire::Job>>,
        warnings: Vec<Arc<wire::Warning>>,
        cores: Arc<[wire::Core]>,
    ) -> Self {
        Self { head, jobs, warnings, cores, whole: OnceLock::new() }
    }

    /// Returns the whole status, as it is sent to clients. The first call copies each job.
    pub fn to_wire(&self) -> Arc<wire::Status> {
        let whole = || {
            let jobs = self.jobs.iter().map(|job| wire::Job::clone(job)).collect();
            let warnings = self.warnings.iter().map(|warning| wire::Warning::clone(warning)).collect();
            Arc::new(wire::Status { jobs, warnings, cores: self.cores.to_vec(), ..self.head.clone() })
        };
        Arc::clone(self.whole.get_or_init(whole))
    }
}

impl From<wire::Status> for PublishedStatus {
    fn from(mut status: wire::Status) -> Self {
        let jobs = std::mem::take(&mut status.jobs).into_iter().map(Arc::new).collect();
        let warnings = std::mem::take(&mut status.warnings).into_iter().map(Arc::new).collect();
        let cores = std::mem::take(&mut status.cores).into();
        Self::new(status, jobs, warnings, cores)
    }
}
