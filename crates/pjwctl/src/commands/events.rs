//! `pjwctl events`: the events, one line for each.

use std::process::ExitCode;

use pjw_ipc::{call::Events, wire::Event};
use serde::Deserialize;

use super::connection::DaemonAddress;
use crate::{output, render};

#[derive(Deserialize)]
struct Reply {
    event: Event,
}

/// Runs `pjwctl events`: prints the latest events of the daemon. If `follow` is true, waits for new events and prints
/// them too, until the user interrupts pjwctl. If `json` is true, prints JSON.
pub(super) fn run(daemon: &DaemonAddress, follow: bool, json: bool) -> anyhow::Result<ExitCode> {
    let mut client = daemon.connect()?;
    if follow {
        output::exit_when_stdout_reader_closes();
    }
    let term = output::stdout_properties();
    let mut written = Ok(());
    client.stream_replies("Events", &Events { follow: Some(follow) }, |Reply { event }| {
        written = if json {
            output::print_json_line(&event)
        } else {
            output::print(&render::events::event_line(&event, term))
        };
        written.is_ok()
    })?;
    written.map(|()| ExitCode::SUCCESS)
}
