//! How many of its cores a job wants at present.

use serde::{Deserialize, Serialize};

use crate::basics::Nanos;
use crate::machine::Topology;
use crate::terms::job::{Job, PriorityClass};

/// The number of cores that the owner of a job, or a program in the job, says the job can use at present. It is no
/// request: the grant of the job stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedCores {
    /// The number as it was given. It may be more than the job may have: see [`Job::wanted_core_count`].
    pub given: u32,
    /// The time at which the number was given, in ns since boot.
    pub since: Nanos,
}

impl Job {
    /// Returns the largest number of cores that the job may want on the machine with this topology. A job of class
    /// `Besteffort` may want all cores of the machine. Any other job may want the cores that it requested, or the cores of
    /// its grant if these are more. `None` if the job has neither a request nor a grant.
    #[must_use]
    pub fn wanted_cores_limit(&self, topology: &Topology) -> Option<u32> {
        let all = || u32::try_from(topology.cores().len()).unwrap_or(u32::MAX);
        let requested = self.request.as_ref().map(|request| match request.class {
            PriorityClass::Besteffort => all(),
            PriorityClass::Guaranteed | PriorityClass::Normal => request.cpu_request.core_count(topology),
        });
        let granted = self.grant.as_ref().map(|grant| topology.overlapping_core_count(&grant.cpus));
        requested.max(granted)
    }

    /// Returns how many cores the job wants at present: the number that was given last, but at most
    /// [`Job::wanted_cores_limit`]. `None` if no number was given, so that the job wants what it was granted.
    #[must_use]
    pub fn wanted_core_count(&self, topology: &Topology) -> Option<u32> {
        let given = self.wanted_cores?.given;
        Some(self.wanted_cores_limit(topology).map_or(given, |limit| given.min(limit)))
    }
}
