//! `pjwctl status`: the state of the whole machine.

use std::process::ExitCode;

use jiff::Timestamp;
use pjw_ipc::wire::Status;
use serde::Deserialize;

use super::connection::{NoParameters, Warden, user_names};
use crate::cli::Json;
use crate::{output, render};

/// The reply to `GetStatus`.
#[derive(Deserialize)]
pub(super) struct Reply {
    pub(super) status: Status,
}

pub(super) fn run(warden: &Warden, json: Json) -> anyhow::Result<ExitCode> {
    let Reply { status } = warden.connect()?.call("GetStatus", &NoParameters {})?;
    if json.json {
        output::print_json(&status)?;
    } else {
        let names = user_names(status.jobs.iter().map(|job| job.owner));
        output::print(&render::status::status(&status, &names, Timestamp::now(), output::page()))?;
    }
    Ok(ExitCode::SUCCESS)
}
