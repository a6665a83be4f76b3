//! `pjwctl plan`: what the next cycle would change.

use std::process::ExitCode;

use pjw_ipc::call::PlanReply;

use super::{Nothing, Warden};
use crate::cli::Json;
use crate::output;
use crate::render;

pub(super) fn run(warden: &Warden, json: Json) -> anyhow::Result<ExitCode> {
    let plan: PlanReply = warden.connect()?.call("Plan", &Nothing {})?;
    if json.json {
        output::print_json(&plan)?;
    } else {
        output::print(&render::plan::plan(&plan, output::page()))?;
    }
    Ok(ExitCode::SUCCESS)
}
