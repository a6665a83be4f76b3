//! `pjwctl simulate`: replays a job log on a machine that is described by a file or a text. Needs no daemon.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::process::ExitCode;

use anyhow::anyhow;
use pjw_core::{job::Placement, topology::Topology};
use pjw_sim::reference::ReferencePolicy;
use pjw_sim::replay::{CoreChooser, ProcessorUnit, ReplayOptions, replay};
use pjw_sim::swf::{self, JobLog};

use super::daemon_program;
use crate::cli::{self, ProcessorUnitArg, ReferencePolicyArg, SimulatePolicyArg};
use crate::output;
use crate::render::simulate::{SimulationResult, fragmentation_csv, per_job_csv, simulation_text};

/// The length of the longest line of a job log.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// The size of the largest job log.
const MAX_LOG_BYTES: u64 = 1 << 30;

pub(super) fn run(what: &cli::SimulateArgs) -> anyhow::Result<ExitCode> {
    let trace = trace(&what.job_log)?;
    let source = daemon_program::source_option(what.input.as_deref(), what.synthetic.as_deref());
    let arguments: Vec<OsString> = std::iter::once("--plain".into()).chain(source).collect();
    let topology: Topology = daemon_program::machine(&arguments)?;
    let rules = ReplayOptions {
        unit: match what.unit {
            ProcessorUnitArg::Core => ProcessorUnit::Core,
            ProcessorUnitArg::Pu => ProcessorUnit::Pu,
        },
        chooser: chooser(what),
        housekeeping_cpus: what.housekeeping.resolve(&topology)?,
    };
    let done = replay(&topology, &trace, &rules, |_| {});
    let simulation = SimulationResult::new(&done, &trace, &rules);
    if let Some(path) = &what.per_job_csv {
        write(path, &per_job_csv(&done))?;
    }
    if let Some(path) = &what.fragmentation_csv {
        write(path, &fragmentation_csv(&simulation))?;
    }
    output::print_reply(what.json, &simulation, simulation_text)
}

fn chooser(what: &cli::SimulateArgs) -> CoreChooser {
    match (what.reference_policy, what.policy) {
        (Some(ReferencePolicyArg::FirstFit), _) => CoreChooser::Reference(ReferencePolicy::FirstFit),
        (Some(ReferencePolicyArg::Kubelet), _) => CoreChooser::Reference(ReferencePolicy::Kubelet),
        (Some(ReferencePolicyArg::KubeletL3), _) => CoreChooser::Reference(ReferencePolicy::KubeletL3),
        (None, Some(SimulatePolicyArg::Spread)) => CoreChooser::Allocator(Placement::Spread),
        (None, Some(SimulatePolicyArg::Pack) | None) => CoreChooser::Allocator(Placement::Pack),
    }
}

fn trace(path: &Path) -> anyhow::Result<JobLog> {
    let (name, read) = if path == Path::new("-") {
        ("standard input".to_owned(), read_lines(&mut io::stdin().lock()))
    } else {
        (path.display().to_string(), fs::File::open(path).and_then(|mut file| read_lines(&mut file)))
    };
    let bytes = read.map_err(|error| anyhow!("can't read the log {name}: {error}"))?;
    swf::parse(&bytes).map_err(|error| anyhow!("{name}: {error}"))
}

/// Reads a text with lines of at most [`MAX_LINE_BYTES`], up to [`MAX_LOG_BYTES`]. So a device or a pipe without an end is
/// refused before it fills the memory.
fn read_lines(from: &mut dyn Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    loop {
        let known = bytes.len();
        from.take(MAX_LINE_BYTES).read_to_end(&mut bytes)?;
        let part = &bytes[known..];
        if (part.len() as u64) < MAX_LINE_BYTES {
            return Ok(bytes);
        }
        if !part.contains(&b'\n') {
            return Err(io::Error::other(
                "a line is longer than 1 MiB; give a log in the standard workload format",
            ));
        }
        if bytes.len() as u64 > MAX_LOG_BYTES {
            return Err(io::Error::other("it is larger than 1 GiB; give a part of it"));
        }
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).map_err(|error| anyhow!("can't write {}: {error}", path.display()))
}
