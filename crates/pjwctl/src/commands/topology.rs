//! `pjwctl topology`: the machine as a tree; this one as the daemon sees it, or another from a file or made
//! up.

use std::path::Path;
use std::process::ExitCode;

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
        Some(source) => (daemon_program::machine(&[source])?, None),
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
