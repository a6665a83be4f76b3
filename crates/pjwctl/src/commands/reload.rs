//! `pjwctl reload`: the daemon reads its configuration again.

use std::process::ExitCode;

use serde::Deserialize;

use super::connection::{NoParameters, Warden};
use crate::{output, render};

#[derive(Deserialize)]
struct Reply {
    changes: Vec<String>,
}

pub(super) fn run(warden: &Warden) -> anyhow::Result<ExitCode> {
    let Reply { changes } = warden.connect()?.call("Reload", &NoParameters {})?;
    output::print(&render::text::sentences("the configuration was read: nothing changed", &changes))?;
    Ok(ExitCode::SUCCESS)
}
