//! `pjwctl plan --defrag` and `pjwctl defrag`: which jobs would move so that larger requests fit again; and moving them.

use std::process::ExitCode;

use pjw_ipc::call::DefragReply;

use super::{Nothing, Warden};
use crate::cli::Json;
use crate::output;
use crate::render;
use crate::render::defrag::Told;

/// Shows the moves; changes nothing.
pub(super) fn plan(warden: &Warden, json: Json) -> anyhow::Result<ExitCode> {
    ask(warden, "PlanDefrag", Told::Before, json)
}

/// Has them done.
pub(super) fn run(warden: &Warden, json: Json) -> anyhow::Result<ExitCode> {
    ask(warden, "Defrag", Told::After, json)
}

fn ask(warden: &Warden, method: &str, told: Told, json: Json) -> anyhow::Result<ExitCode> {
    let healing: DefragReply = warden.connect()?.call(method, &Nothing {})?;
    if json.json {
        output::print_json(&healing)?;
    } else {
        output::print(&render::defrag::defrag(&healing, told, output::page()))?;
    }
    Ok(ExitCode::SUCCESS)
}
