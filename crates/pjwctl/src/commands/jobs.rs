//! `pjwctl jobs`: the table of jobs.

use std::process::ExitCode;

use jiff::Timestamp;
use pjw_ipc::wire::Job;

use super::connection::{DaemonAddress, NoParameters, call_for_field, user_names};
use crate::{cli::JsonArg, output, render};

/// Runs `pjwctl jobs`: prints a table of all jobs that the daemon knows.
pub(super) fn run(daemon: &DaemonAddress, json: JsonArg) -> anyhow::Result<ExitCode> {
    let jobs: Vec<Job> = call_for_field(&mut daemon.connect()?, "ListJobs", &NoParameters {}, "jobs")?;
    output::print_reply(json, &jobs, |jobs, term| {
        let names = user_names(jobs.iter().map(|job| job.owner));
        render::jobs::jobs_text(jobs, &names, Timestamp::now(), term)
    })
}
