//! `pjwctl release`: returns the cores of a job, and restores the masks of its processes.

use std::process::ExitCode;

use pjw_ipc::call::JobParameter;

use super::connection::{DaemonAddress, NoParameters, call_for_field, call_persistently, parse_job_id};
use crate::{output, render};

/// Runs `pjwctl release`: releases the job `job`, so that its cores become free. If `job` is `None`, releases all jobs
/// that the user may release.
pub(super) fn run(daemon: &DaemonAddress, job: Option<&str>) -> anyhow::Result<ExitCode> {
    let job = job.map(parse_job_id).transpose()?.map(|job| JobParameter { job });
    let (_client, released): (_, Vec<String>) = call_persistently(daemon, |client| match &job {
        Some(job) => call_for_field(client, "Release", job, "released"),
        None => call_for_field(client, "ReleaseAll", &NoParameters {}, "released"),
    })?;
    output::print(&render::jobs::released_jobs_text(&released))?;
    Ok(ExitCode::SUCCESS)
}
