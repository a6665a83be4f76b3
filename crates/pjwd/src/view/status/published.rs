//! The status as the event loop makes it. It shares its unchanged jobs, warnings and cores with the earlier status.

use std::sync::{Arc, OnceLock};

use pjw_ipc::wire;

/// The status of the daemon after a cycle (scan, decision and changes), as published to the control server. Shares
/// all unchanged jobs, warnings and cores with earlier statuses, so that publishing takes little time.
#[derive(Debug, Clone, Default)]
pub struct PublishedStatus {
    /// The status without its jobs, warnings and cores. The lists of jobs, warnings and cores in this value
    /// are empty. The other fields of [`PublishedStatus`] contain them.
    pub summary: wire::Status,
    /// The jobs, ordered by their ids.
    pub jobs: Vec<Arc<wire::Job>>,
    /// The warnings about conditions that may need the attention of an administrator.
    pub warnings: Vec<Arc<wire::Warning>>,
    /// All cores of the machine, ascending by hwloc logical index.
    pub cores: Arc<[wire::Core]>,
    /// The complete status that the first call of [`PublishedStatus::to_wire`] made.
    whole: OnceLock<Arc<wire::Status>>,
}

impl PublishedStatus {
    /// Makes a status from its parts. The lists of jobs, warnings and cores in `summary` must be empty.
    pub(super) fn new(
        summary: wire::Status,
        jobs: Vec<Arc<wire::Job>>,
        warnings: Vec<Arc<wire::Warning>>,
        cores: Arc<[wire::Core]>,
    ) -> Self {
        Self { summary, jobs, warnings, cores, whole: OnceLock::new() }
    }

    /// Returns the whole status in the form in which clients receive the status. The first call copies all jobs,
    /// warnings and cores. Later calls return the same shared value.
    pub fn to_wire(&self) -> Arc<wire::Status> {
        let whole = || {
            let jobs = self.jobs.iter().map(|job| wire::Job::clone(job)).collect();
            let warnings = self.warnings.iter().map(|warning| wire::Warning::clone(warning)).collect();
            Arc::new(wire::Status { jobs, warnings, cores: self.cores.to_vec(), ..self.summary.clone() })
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
