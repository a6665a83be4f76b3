//! `pjwctl plan --defrag` and `pjwctl defrag`: show the jobs that would have to move so that larger requests fit
//! again, and move them.

use std::process::ExitCode;

use pjw_ipc::call::DefragReply;

use super::connection::{DaemonAddress, NoParameters};
use crate::{cli::JsonArg, output, render, render::defrag::DefragStage};

/// Runs `pjwctl plan --defrag`: prints the jobs that must move to other cores so that larger requests for cores fit.
/// Moves no job.
pub(super) fn plan(warden: &DaemonAddress, json: JsonArg) -> anyhow::Result<ExitCode> {
    call(warden, "PlanDefrag", DefragStage::Planned, json)
}

/// Runs `pjwctl defrag`: makes the daemon move jobs to other cores so that larger requests for cores fit. Prints the
/// moved jobs.
pub(super) fn run(warden: &DaemonAddress, json: JsonArg) -> anyhow::Result<ExitCode> {
    call(warden, "Defrag", DefragStage::Done, json)
}

fn call(warden: &DaemonAddress, method: &str, stage: DefragStage, json: JsonArg) -> anyhow::Result<ExitCode> {
    let reply: DefragReply = warden.connect()?.call(method, &NoParameters {})?;
    output::print_reply(json, &reply, |reply, term| render::defrag::defrag_text(reply, stage, term))
}
