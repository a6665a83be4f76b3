//! `pjwctl topology`: the machine as a tree; this one as the daemon sees it, or another from a file or made
//! up.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitCode, Stdio};

use anyhow::{Context, anyhow};
use pjw_ipc::wire::{Status, Topology};
use serde::Deserialize;

use super::{Nothing, Warden, daemon_program, status};
use crate::cli;
use crate::file;
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
        Some(source) => (from_program(source)?, None),
        None => {
            let mut client = warden.connect()?;
            let Reply { topology } = client.call("GetTopology", &Nothing {})?;
            let status::Reply { status } = client.call("GetStatus", &Nothing {})?;
            (topology, Some(status))
        }
    };
    match &what.svg {
        Some(file) => {
            let picture = render::picture::picture(&title(what, status.as_ref()), &topology, status.as_ref());
            if file.as_os_str() == "-" { output::print(&picture)? } else { file::write(file, &picture)? }
        }
        None if what.json.json => output::print_json(&topology)?,
        None => output::print(&render::topology::topology(&topology, status.as_ref(), output::page()))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What a drawing is called: after the machine, or after where it came from.
fn title(what: &cli::Topology, status: Option<&Status>) -> String {
    let file =
        what.input.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let host = status.map(|status| status.node.hostname.clone());
    file.or_else(|| what.synthetic.clone()).or(host).unwrap_or_default()
}

/// Has the daemon's program, which knows hwloc, read the machine.
///
/// hwloc is C code and the file may be anything: it reads in that process, not in this one, and whatever else it
/// prints there is not for the reader of ours.
fn from_program(source: OsString) -> anyhow::Result<Topology> {
    let mut pjwd = daemon_program::command()?;
    let shown =
        source.to_string_lossy().split_once('=').map(|(_, value)| value.to_owned()).unwrap_or_default();
    pjwd.env("HWLOC_HIDE_ERRORS", "2").env("HWLOC_XML_VERBOSE", "0");
    let output = pjwd.arg("--topology-json").arg(source).stdin(Stdio::inherit()).output();
    let program = || pjwd.get_program().to_string_lossy().into_owned();
    let output = output.map_err(|error| anyhow!("can't start {}: {error}", program()))?;
    if let Some(signal) = output.status.signal() {
        return Err(anyhow!(
            "hwloc died of signal {signal} while it read {shown}: the topology is damaged, or hwloc has a bug; \
             write it anew with: lstopo FILE.xml"
        ));
    }
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let own = said.lines().rev().find_map(|line| line.strip_prefix("pjwd: "));
        return match own {
            Some(why) => Err(anyhow!("{why}")),
            None => Err(anyhow!("{} can't read {shown}, and did not say why", program())),
        };
    }
    let topology = serde_json::from_slice(&output.stdout);
    topology
        .with_context(|| format!("{}'s answer can't be understood: is it of pjwctl's version?", program()))
}
