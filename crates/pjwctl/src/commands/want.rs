//! `pjwctl want JOB N`: says how many cores a job can use at present.

use std::process::ExitCode;

use pjw_ipc::{call, wire::Job};

use super::connection::{DaemonAddress, call_for_field, call_persistently, parse_job_id};
use crate::cli::WantArgs;
use crate::{output, render};

/// Runs `pjwctl want`: tells the daemon how many cores a job can use at present. `request` contains the job and the
/// number.
pub(super) fn run(daemon: &DaemonAddress, request: &WantArgs) -> anyhow::Result<ExitCode> {
    let wanted = request.cores.0;
    let parameters = call::Want { job: parse_job_id(&request.job)?, cores: wanted };
    let (_client, job): (_, Job) =
        call_persistently(daemon, |client| call_for_field(client, "Want", &parameters, "job"))?;
    output::print_reply(request.json, &job, |job, _| render::jobs::wanted_cores_line(job, wanted))
}
