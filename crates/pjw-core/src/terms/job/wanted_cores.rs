//! How many of its cores a job wants at present.

use serde::{Deserialize, Serialize};

use crate::basics::Nanos;

/// The number of cores that a job can use at present, as the owner of the job or a program in the job told pjw.
/// The number does not change the request of the job.
///
/// - A job of the class guaranteed keeps all its cores. pjw may lend the cores beyond this number to other
///   jobs.
/// - A job of the class besteffort borrows at most this number of cores.
/// - For a job of the class normal, the number is only displayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedCores {
    /// The number of cores, as it was given. It may be larger than the job may have:
    /// [`crate::terms::job::Job::wanted_core_count`] limits it.
    #[serde(rename = "given")]
    pub count: u32,
    /// The time at which the number was given, in ns since boot.
    #[serde(rename = "since")]
    pub given_at: Nanos,
}
