//! `pjwctl plan --defrag` and `pjwctl defrag`: show the jobs that would have to move so that larger requests fit
//! again, and move them.

use std::process::ExitCode;

use pjw_ipc::call::DefragReply;

use super::connection::{NoParameters, Warden};
use crate::cli::Json;
use crate::render::defrag::Stage;
use crate::{output, render};

/// Shows the moves and changes nothing.
pub(super) fn plan(warden: &Warden, json: Json) -> anyhow::Result<ExitCode> {
    call(warden, "PlanDefrag", Stage::Before, json)
}

/// Requests the moves.
pub(super) fn run(warden: &Warden, json: Json) -> anyhow::Result<ExitCode> {
    call(warden, "Defrag", Stage::After, json)
}

fn call(warden: &Warden, method: &str, stage: Stage, json: Json) -> anyhow::Result<ExitCode> {
    let reply: DefragReply = warden.connect()?.call(method, &NoParameters {})?;
    output::print_reply(json, &reply, |reply, page| render::defrag::defrag(reply, stage, page))
}
