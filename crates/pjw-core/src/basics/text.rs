//! Text helpers: sets of PUs in sentences.

use crate::basics::{cpuset::CpuSet, prelude::*};

/// Formats a set of PUs (logical CPUs) for use in a sentence: `CPU 0`, `CPUs 0-3,8`, or `no CPU` for the empty set.
/// Without the word `CPU`, a reader could mistake the CPU number 0 for a count of CPUs.
#[must_use]
pub fn cpus_text(cpus: &CpuSet) -> String {
    match cpus.len() {
        0 => "no CPU".to_owned(),
        1 => format!("CPU {cpus}"),
        _ => format!("CPUs {cpus}"),
    }
}

/// Formats a set of PUs (logical CPUs) and the verb `is` or `are`, for use in a sentence: `CPU 0 is`, `CPUs 0-3 are`.
pub(crate) fn cpus_with_is_are(cpus: &CpuSet) -> String {
    format!("{} {}", cpus_text(cpus), if cpus.len() == 1 { "is" } else { "are" })
}

/// Formats a set of PUs (logical CPUs) and the verb `was` or `were`, for use in a sentence: `CPU 0 was`, `CPUs 0-3
/// were`.
pub(crate) fn cpus_with_was_were(cpus: &CpuSet) -> String {
    format!("{} {}", cpus_text(cpus), if cpus.len() == 1 { "was" } else { "were" })
}
