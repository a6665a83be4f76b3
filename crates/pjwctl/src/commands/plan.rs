//! `pjwctl plan`: the changes that the next cycle would make.

use std::process::ExitCode;

use pjw_ipc::call::PlanReply;

use super::connection::{DaemonAddress, NoParameters};
use crate::{cli::JsonArg, output, render};

/// Runs `pjwctl plan`: prints the changes of affinity masks and cpusets that the daemon would make next. Makes no
/// changes.
pub(super) fn run(daemon: &DaemonAddress, json: JsonArg) -> anyhow::Result<ExitCode> {
    let plan: PlanReply = daemon.connect()?.call("Plan", &NoParameters {})?;
    output::print_reply(json, &plan, render::plan::plan_text)
}
