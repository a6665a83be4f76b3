//! `pjwctl topology`: the machine as a tree; this one as the daemon sees it, or another from a file or made
//! up.

use std::ffi::OsString;
use std::process::{ExitCode, Stdio};

use anyhow::{Context, anyhow};
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
        Some(source) => match from_program(source)? {
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

/// Has the daemon's program, which knows hwloc, read the machine; `None` if it said on stderr why it can't.
fn from_program(source: OsString) -> anyhow::Result<Option<Topology>> {
    let mut pjwd = daemon_program::command()?;
    let output = pjwd.arg("--topology-json").arg(source).stderr(Stdio::inherit()).output();
    let program = || pjwd.get_program().to_string_lossy().into_owned();
    let output = output.map_err(|error| anyhow!("can't start {}: {error}", program()))?;
    if !output.status.success() {
        return Ok(None);
    }
    let topology = serde_json::from_slice(&output.stdout);
    topology
        .map(Some)
        .with_context(|| format!("{}'s answer can't be understood: is it of pjwctl's version?", program()))
}
