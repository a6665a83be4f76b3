//! `pjwctl plan`: the changes that the next cycle would make.

use std::process::ExitCode;

use pjw_ipc::call::PlanReply;

use super::connection::{NoParameters, Warden};
use crate::{cli::JsonOption, output, render};

pub(super) fn run(warden: &Warden, json: JsonOption) -> anyhow::Result<ExitCode> {
    let plan: PlanReply = warden.connect()?.call("Plan", &NoParameters {})?;
    output::print_reply(json, &plan, render::plan::plan)
}
