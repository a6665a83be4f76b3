//! `pjwctl release`: returns the cores of a job, and restores the masks of its processes.

use std::process::ExitCode;

use pjw_ipc::call::JobParameter;

use super::connection::{DaemonAddress, NoParameters, call_for_field, parse_job_id};
use crate::{output, render};

/// Runs `pjwctl release`: releases the job `job`, so that its cores become free. If `job` is `None`, releases all jobs
/// that the user may release.
pub(super) fn run(daemon: &DaemonAddress, job: Option<&str>) -> anyhow::Result<ExitCode> {
    let job = job.map(parse_job_id).transpose()?;
    let mut client = daemon.connect()?;
    let released: Vec<String> = match job {
        Some(job) => call_for_field(&mut client, "Release", &JobParameter { job }, "released")?,
        None => call_for_field(&mut client, "ReleaseAll", &NoParameters {}, "released")?,
    };
    output::print(&render::jobs::released_jobs_text(&released))?;
    Ok(ExitCode::SUCCESS)
}
