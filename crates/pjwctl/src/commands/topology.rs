//! `pjwctl topology`: the machine as a tree. It is this machine as the daemon sees it, or one that is described by a
//! file or a text.

use std::path::Path;
use std::process::ExitCode;

use pjw_ipc::wire::{Status, Topology};

use super::connection::{DaemonAddress, NoParameters, call_for_field, read_status};
use super::daemon_program;
use crate::{cli, file, output, render};

/// Runs `pjwctl topology`: prints the packages, NUMA nodes, caches and cores of the machine as a tree or as a drawing.
/// `request` contains the command line options.
pub(super) fn run(daemon: &DaemonAddress, request: &cli::TopologyArgs) -> anyhow::Result<ExitCode> {
    let source =
        daemon_program::topology_source_option(request.input.as_deref(), request.synthetic.as_deref());
    let (topology, status): (Topology, _) = match source {
        Some(source) => (daemon_program::load_topology_from_pjwd(&[source])?, None),
        None => {
            let mut client = daemon.connect()?;
            let topology = call_for_field(&mut client, "GetTopology", &NoParameters {}, "topology")?;
            (topology, Some(read_status(&mut client)?))
        }
    };
    let Some(file) = &request.svg_file else {
        let text =
            |topology: &Topology, term| render::topology::topology_text(topology, status.as_ref(), term);
        return output::print_reply(request.json, &topology, text);
    };
    let diagram = render::diagram::svg_drawing(&title(request, status.as_ref()), &topology, status.as_ref());
    match file.to_str() {
        Some("-") => output::print(&diagram)?,
        _ => file::write_atomically(file, &diagram)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The title of a drawing: the name of the machine, or the source of its description.
fn title(request: &cli::TopologyArgs, status: Option<&Status>) -> String {
    let file =
        request.input.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let host = status.map(|status| status.node.hostname.clone());
    file.or_else(|| request.synthetic.clone()).or(host).unwrap_or_default()
}
