//! How many of its cores a job wants at present.

use serde::{Deserialize, Serialize};

use crate::basics::Nanos;

/// The number of cores that the owner of a job, or a program in the job, says the job can use at present. It is no
/// request: the grant of the job stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedCores {
    /// The number as it was given. It may be more than the job may have: see [`crate::terms::job::Job::wanted_core_count`].
    #[serde(rename = "given")]
    pub count: u32,
    /// The time at which the number was given, in ns since boot.
    #[serde(rename = "since")]
    pub given_at: Nanos,
}
