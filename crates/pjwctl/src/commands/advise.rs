//! `pjwctl advise`: how many items a farm needs so that its cores are used. Needs no daemon.

use std::process::ExitCode;

use anyhow::Context;
use nix::unistd::getpid;
use pjw_core::ids::Tid;
use pjw_linux::sys::affinity;
use pjw_spawn::farm::advise::FarmCosts;

use crate::cli;
use crate::output;
use crate::render::advise::{FarmAdvice, advice_text};

/// Runs `pjwctl advise`: prints how many items a farm needs so that its cores are well used. A farm is a group of
/// worker processes that compute numbered work items. `request` contains the command line options.
pub(super) fn run(request: &cli::AdviseArgs) -> anyhow::Result<ExitCode> {
    let workers = match request.workers {
        Some(workers) => workers,
        None => own_cpus().context("can't read the CPUs of this process; give --workers N")?,
    };
    let costs = FarmCosts { serial: request.serial, item: request.item, workers };
    output::print_reply(request.json, &FarmAdvice::new(&costs, request.items), advice_text)
}

/// The number of CPUs that this process may use.
fn own_cpus() -> anyhow::Result<u32> {
    let mask = affinity::get_mask(Tid(getpid().as_raw().unsigned_abs()))?;
    Ok(u32::try_from(mask.len())?)
}
