//! Short constructors for tests.
#![allow(clippy::expect_used, reason = "a test may fail")]

use crate::basics::{CpuSet, Nanos, prelude::*};
use crate::machine::topology::{Regular, Topology};
use crate::terms::{Grant, GrantedBy, JobId};

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

/// The id of the job of an administrator with this number.
#[must_use]
pub fn numbered_job(number: usize) -> JobId {
    job(&format!("manual:{number}"))
}

/// A grant of these PUs by the warden, from before the first scan.
#[must_use]
pub fn grant(cpus: CpuSet) -> Grant {
    Grant {
        cpus,
        granted_by: GrantedBy::Warden,
        shared: false,
        smt_shared: false,
        since: Nanos(0),
        because: Vec::new(),
        runner_up: String::new(),
    }
}

/// A machine that has this number of each part in each part of the level above.
#[must_use]
pub fn shape(
    packages: u32,
    numa_per_package: u32,
    l3_per_numa: u32,
    cores_per_l3: u32,
    pus_per_core: u32,
) -> Topology {
    Topology::regular(Regular { packages, numa_per_package, l3_per_numa, cores_per_l3, pus_per_core })
}
