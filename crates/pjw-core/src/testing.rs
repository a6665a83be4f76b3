//! Short constructors for tests.
#![allow(clippy::expect_used, reason = "a test may fail")]

use crate::basics::cpuset::CpuSet;
use crate::machine::topology::{Regular, Topology};
use crate::terms::job::JobId;

/// The set of a CPU list, such as `0-3,8`.
///
/// # Panics
/// If `list` is no CPU list.
#[must_use]
#[track_caller]
pub fn set(list: &str) -> CpuSet {
    list.parse().expect("a CPU list")
}

/// A job id, such as `slurm:7`, or `a` for `manual:a`.
///
/// # Panics
/// If `text` is no job id.
#[must_use]
#[track_caller]
pub fn job(text: &str) -> JobId {
    text.parse().expect("a job id")
}

/// A machine of `packages` packages with one L3 cache and four cores each, and `pus_per_core` PUs for each core.
#[must_use]
pub fn machine_of(packages: u32, pus_per_core: u32) -> Topology {
    Topology::regular(Regular {
        packages,
        numa_per_package: 1,
        l3_per_numa: 1,
        cores_per_l3: 4,
        pus_per_core,
    })
}
