//! `pjwctl plan --defrag` and `pjwctl defrag`: show the jobs that would have to move so that larger requests fit
//! again, and move them.

use std::process::ExitCode;

use pjw_ipc::call::DefragReply;

use super::connection::{DaemonAddress, NoParameters};
use crate::{cli::JsonArg, output, render, render::defrag::DefragStage};

/// Runs `pjwctl plan --defrag`: prints the jobs that must move to other cores so that larger requests for cores fit.
/// Moves no job.
pub(super) fn plan(daemon: &DaemonAddress, json: JsonArg) -> anyhow::Result<ExitCode> {
    call(daemon, "PlanDefrag", DefragStage::Planned, json)
}

/// Runs `pjwctl defrag`: makes the daemon move jobs to other cores so that larger requests for cores fit. Prints the
/// moved jobs.
pub(super) fn run(daemon: &DaemonAddress, json: JsonArg) -> anyhow::Result<ExitCode> {
    call(daemon, "Defrag", DefragStage::Done, json)
}

fn call(daemon: &DaemonAddress, method: &str, stage: DefragStage, json: JsonArg) -> anyhow::Result<ExitCode> {
    let reply: DefragReply = daemon.connect()?.call(method, &NoParameters {})?;
    output::print_reply(json, &reply, |reply, term| render::defrag::defrag_text(reply, stage, term))
}
