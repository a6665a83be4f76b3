//! `pjwctl reload`: the daemon reads its configuration again.

use std::process::ExitCode;

use super::connection::{NoParameters, Warden, call_for};
use crate::{output, render};

/// Runs `pjwctl reload`: makes the daemon load its configuration again.
pub(super) fn run(warden: &Warden) -> anyhow::Result<ExitCode> {
    let changes: Vec<String> = call_for(&mut warden.connect()?, "Reload", &NoParameters {}, "changes")?;
    output::print(&render::text::sentence_lines("the configuration was read: nothing changed", &changes))?;
    Ok(ExitCode::SUCCESS)
}
