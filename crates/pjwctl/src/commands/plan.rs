//! `pjwctl plan`: the changes that the next cycle would make.

use std::process::ExitCode;

use pjw_ipc::call::PlanReply;

use super::connection::{NoParameters, Warden};
use crate::cli::Json;
use crate::{output, render};

pub(super) fn run(warden: &Warden, json: Json) -> anyhow::Result<ExitCode> {
    let plan: PlanReply = warden.connect()?.call("Plan", &NoParameters {})?;
    output::print_reply(json, &plan, render::plan::plan)
}
