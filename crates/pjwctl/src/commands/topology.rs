//! `pjwctl topology`: the machine as a tree; this one as the daemon sees it, or another from a file or made
//! up.

use std::process::ExitCode;

use pjw_ipc::wire::Topology;
use serde::Deserialize;

use super::{Nothing, Warden, daemon_program, status};
use crate::cli;
use crate::output;
use crate::render;

#[derive(Deserialize)]
struct Reply {
    topology: Topology,
}

pub(super) fn run(warden: &Warden, what: &cli::Topology) -> anyhow::Result<ExitCode> {
    let source = match (&what.input, &what.synthetic) {
        (Some(file), _) => Some(daemon_program::option("--input", file.as_os_str())),
        (None, Some(words)) => Some(daemon_program::option("--synthetic", words.as_ref())),
        (None, None) => None,
    };
    let (topology, status) = match source {
        Some(source) => match daemon_program::machine(&[source])? {
            Some(topology) => (topology, None),
            None => return Ok(ExitCode::FAILURE),
        },
        None => {
            let mut client = warden.connect()?;
            let Reply { topology } = client.call("GetTopology", &Nothing {})?;
            let status::Reply { status } = client.call("GetStatus", &Nothing {})?;
            (topology, Some(status))
        }
    };
    if what.json.json {
        output::print_json(&topology)?;
    } else {
        output::print(&render::topology::topology(&topology, status.as_ref(), output::page()))?;
    }
    Ok(ExitCode::SUCCESS)
}
