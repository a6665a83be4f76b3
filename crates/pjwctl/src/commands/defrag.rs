//! `pjwctl plan --defrag` and `pjwctl defrag`: show the jobs that would have to move so that larger requests fit
//! again, and move them.

use std::process::ExitCode;

use pjw_ipc::call::DefragReply;

use super::connection::{NoParameters, Warden};
use crate::{cli::JsonArg, output, render, render::defrag::DefragStage};

/// Shows the moves of jobs that would make free cores contiguous. Changes nothing.
pub(super) fn plan(warden: &Warden, json: JsonArg) -> anyhow::Result<ExitCode> {
    call(warden, "PlanDefrag", DefragStage::Planned, json)
}

/// Requests from the daemon the moves of jobs that make free cores contiguous.
pub(super) fn run(warden: &Warden, json: JsonArg) -> anyhow::Result<ExitCode> {
    call(warden, "Defrag", DefragStage::Done, json)
}

fn call(warden: &Warden, method: &str, stage: DefragStage, json: JsonArg) -> anyhow::Result<ExitCode> {
    let reply: DefragReply = warden.connect()?.call(method, &NoParameters {})?;
    output::print_reply(json, &reply, |reply, term| render::defrag::defrag_text(reply, stage, term))
}
