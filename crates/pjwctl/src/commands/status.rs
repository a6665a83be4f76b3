//! `pjwctl status`: the state of the whole machine.

use std::process::ExitCode;

use jiff::Timestamp;

use super::connection::{DaemonAddress, read_status, user_names};
use crate::{cli::JsonArg, output, render};

/// Runs `pjwctl status`: prints the machine, its core map, the jobs and the warnings of the daemon.
pub(super) fn run(daemon: &DaemonAddress, json: JsonArg) -> anyhow::Result<ExitCode> {
    let status = read_status(&mut daemon.connect()?)?;
    output::print_reply(json, &status, |status, term| {
        let names = user_names(status.jobs.iter().map(|job| job.owner));
        render::status::status_text(status, &names, Timestamp::now(), term)
    })
}
