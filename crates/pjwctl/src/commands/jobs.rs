//! `pjwctl jobs`: the table of jobs.

use std::process::ExitCode;

use jiff::Timestamp;
use pjw_ipc::wire::Job;
use serde::Deserialize;

use super::connection::{NoParameters, Warden, user_names};
use crate::cli::Json;
use crate::{output, render};

#[derive(Deserialize)]
struct Reply {
    jobs: Vec<Job>,
}

pub(super) fn run(warden: &Warden, json: Json) -> anyhow::Result<ExitCode> {
    let Reply { jobs } = warden.connect()?.call("ListJobs", &NoParameters {})?;
    if json.json {
        output::print_json(&jobs)?;
    } else {
        let names = user_names(jobs.iter().map(|job| job.owner));
        output::print(&render::jobs::jobs(&jobs, &names, Timestamp::now(), output::page()))?;
    }
    Ok(ExitCode::SUCCESS)
}
