//! `pjwctl release`: returns the cores of a job, and restores the masks of its processes.

use std::process::ExitCode;

use pjw_ipc::call::JobName;
use serde::Deserialize;

use super::connection::{NoParameters, Warden, job_id};
use crate::{output, render};

#[derive(Deserialize)]
struct Reply {
    released: Vec<String>,
}

/// Releases a job, or all jobs that the caller may change.
pub(super) fn run(warden: &Warden, job: Option<&str>) -> anyhow::Result<ExitCode> {
    let job = job.map(job_id).transpose()?;
    let mut client = warden.connect()?;
    let Reply { released } = match job {
        Some(job) => client.call("Release", &JobName { job })?,
        None => client.call("ReleaseAll", &NoParameters {})?,
    };
    output::print(&render::jobs::released(&released))?;
    Ok(ExitCode::SUCCESS)
}
