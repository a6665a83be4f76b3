//! How many of its cores a job wants at present.

use serde::{Deserialize, Serialize};

use crate::basics::Nanos;

/// The number of cores that a job can use at present. The owner of the job (`pjwctl want`) or a program in the job
/// reported this number to pjw. The number does not change the request of the job. Its effect depends on the class of
/// the job:
///
/// - Guaranteed: the job keeps all its cores. If it holds more cores than this number, pjw may lend the surplus.
/// - Besteffort (a job that only borrows cores): the job borrows at most this number of cores.
/// - Normal: the number is only displayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedCores {
    /// The number of cores, as it was reported. It may be larger than the number of cores that the job may have.
    /// [`crate::terms::job::Job::wanted_core_count`] returns the limited number.
    #[serde(rename = "given")]
    pub count: u32,
    /// The time at which the number was reported, in ns since boot.
    #[serde(rename = "since")]
    pub given_at: Nanos,
}
