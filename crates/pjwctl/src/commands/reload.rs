//! `pjwctl reload`: the daemon reads its configuration again.

use std::process::ExitCode;

use super::connection::{DaemonAddress, NoParameters, call_for_field};
use crate::{output, render};

/// Runs `pjwctl reload`: makes the daemon load its configuration again.
pub(super) fn run(daemon: &DaemonAddress) -> anyhow::Result<ExitCode> {
    let changes: Vec<String> = call_for_field(&mut daemon.connect()?, "Reload", &NoParameters {}, "changes")?;
    output::print(&render::text::sentence_lines("the configuration was read: nothing changed", &changes))?;
    Ok(ExitCode::SUCCESS)
}
