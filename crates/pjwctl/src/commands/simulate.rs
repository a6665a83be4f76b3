//! `pjwctl simulate`: replays a job log or a curve of demand on a machine that is described by a file or a text. Needs
//! no daemon.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::process::ExitCode;

use anyhow::anyhow;
use pjw_core::{job::Placement, policy::LendingPolicy, topology::Topology};
use pjw_sim::demand::curve;
use pjw_sim::demand::replay::{DemandReplayOptions, replay_demand};
use pjw_sim::reference::ReferencePolicy;
use pjw_sim::replay::{CoreChooser, ProcessorUnit, ReplayOptions, replay};
use pjw_sim::swf;

use super::daemon_program;
use crate::cli::{self, ProcessorUnitArg, ReferencePolicyArg, SimulatePolicyArg};
use crate::output;
use crate::render::demand::{LendingSimulationResult, demand_text};
use crate::render::simulate::{SimulationResult, fragmentation_csv, per_job_csv, simulation_text};

/// The length of the longest line of a job log or a curve.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// The size of the largest job log or curve.
const MAX_LOG_BYTES: u64 = 1 << 30;

/// Runs `pjwctl simulate`: replays a job log or a curve of CPU demand on a simulated machine, and prints the result.
/// `request` contains the command line options.
pub(super) fn run(request: &cli::SimulateArgs) -> anyhow::Result<ExitCode> {
    match (&request.demand, &request.job_log) {
        (Some(path), _) => replay_curve(request, path),
        (None, Some(path)) => replay_log(request, path),
        (None, None) => Err(anyhow!("there is nothing to replay: add --trace FILE or --demand FILE.csv")),
    }
}

/// Replays the job log in the file `path` on a simulated machine, and prints how the machine was used. Also writes the
/// files of the options `--per-job` and `--fragmentation`, if they are given. `request` contains the command line
/// options.
fn replay_log(request: &cli::SimulateArgs, path: &Path) -> anyhow::Result<ExitCode> {
    let (name, bytes) = read_input(path, "log", "give a log in the standard workload format")?;
    let trace = swf::parse(&bytes).map_err(|error| anyhow!("{name}: {error}"))?;
    let topology = load_machine(request)?;
    let options = ReplayOptions {
        unit: match request.unit {
            ProcessorUnitArg::Core => ProcessorUnit::Core,
            ProcessorUnitArg::Pu => ProcessorUnit::Pu,
        },
        chooser: chooser(request),
        housekeeping_cpus: request.housekeeping.select_housekeeping_cpus(&topology)?,
    };
    let outcome = replay(&topology, &trace, &options, |_| {});
    let simulation = SimulationResult::new(&outcome, &topology, &trace, &options);
    if let Some(path) = &request.per_job_csv {
        write_file(path, &per_job_csv(&outcome))?;
    }
    if let Some(path) = &request.fragmentation_csv {
        write_file(path, &fragmentation_csv(&simulation))?;
    }
    output::print_reply(request.json, &simulation, simulation_text)
}

/// Replays the curve of CPU demand in the file `path` twice on a simulated machine: without and with lending of cores.
/// Prints a comparison. `request` contains the command line options.
fn replay_curve(request: &cli::SimulateArgs, path: &Path) -> anyhow::Result<ExitCode> {
    let (name, bytes) = read_input(path, "curve", "give a line with a few numbers for each time")?;
    let curve = curve::parse(&bytes).map_err(|error| anyhow!("{name}: {error}"))?;
    let topology = load_machine(request)?;
    let defaults = LendingPolicy::default();
    let lending = LendingPolicy {
        buffer_cores: request.buffer_cores.unwrap_or(defaults.buffer_cores),
        lend_after: request.lend_after.unwrap_or(defaults.lend_after),
        cores_at_once: request.cores_at_once.unwrap_or(defaults.cores_at_once),
        ..defaults
    };
    let housekeeping_cpus = request.housekeeping.select_housekeeping_cpus(&topology)?;
    let simulate = |enabled| {
        let lending = LendingPolicy { enabled, ..lending.clone() };
        let options = DemandReplayOptions { housekeeping_cpus: housekeeping_cpus.clone(), lending };
        replay_demand(&topology, &curve, &options).map_err(|error| anyhow!("{name}: {error}"))
    };
    let result = LendingSimulationResult::new(&simulate(false)?, &simulate(true)?, &lending);
    output::print_reply(request.json, &result, demand_text)
}

fn load_machine(request: &cli::SimulateArgs) -> anyhow::Result<Topology> {
    let source =
        daemon_program::topology_source_option(request.input.as_deref(), request.synthetic.as_deref());
    let arguments: Vec<OsString> = std::iter::once("--plain".into()).chain(source).collect();
    daemon_program::load_topology_from_pjwd(&arguments)
}

fn chooser(request: &cli::SimulateArgs) -> CoreChooser {
    match (request.reference_policy, request.policy) {
        (Some(ReferencePolicyArg::FirstFit), _) => CoreChooser::Reference(ReferencePolicy::FirstFit),
        (Some(ReferencePolicyArg::Kubelet), _) => CoreChooser::Reference(ReferencePolicy::Kubelet),
        (Some(ReferencePolicyArg::KubeletL3), _) => CoreChooser::Reference(ReferencePolicy::KubeletL3),
        (None, Some(SimulatePolicyArg::Spread)) => CoreChooser::Allocator(Placement::Spread),
        (None, Some(SimulatePolicyArg::Pack) | None) => CoreChooser::Allocator(Placement::Pack),
    }
}

/// Reads the file `path`, or standard input if `path` is `-`. Returns the name of the file for messages, and its
/// content. The last two parameters are for error messages: `kind` is the kind of the file, such as `log`, and
/// `remedy` is the advice if a line is too long.
fn read_input(path: &Path, kind: &str, remedy: &str) -> anyhow::Result<(String, Vec<u8>)> {
    let (name, read) = if path == Path::new("-") {
        ("standard input".to_owned(), read_limited(&mut io::stdin().lock(), remedy))
    } else {
        let read = fs::File::open(path).and_then(|mut file| read_limited(&mut file, remedy));
        (path.display().to_string(), read)
    };
    let bytes = read.map_err(|error| {
        // The errors of a wrong content have a remedy already.
        let remedy = match error.kind() {
            io::ErrorKind::Other => "",
            io::ErrorKind::PermissionDenied => "; run pjwctl as a user that may read it",
            _ => "; give the path of a text file, or - for standard input",
        };
        anyhow!("can't read the {kind} {name}: {error}{remedy}")
    })?;
    Ok((name, bytes))
}

/// Reads all bytes of `input`. Bounds the memory use, because `input` may be a device or a pipe without an end.
///
/// # Errors
/// If a line is longer than [`MAX_LINE_BYTES`]: this error contains the advice `remedy`. If the text is longer than
/// [`MAX_LOG_BYTES`], or can't be read.
fn read_limited(input: &mut dyn Read, remedy: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    loop {
        let length_before = bytes.len();
        input.take(MAX_LINE_BYTES).read_to_end(&mut bytes)?;
        let part = &bytes[length_before..];
        if (part.len() as u64) < MAX_LINE_BYTES {
            return Ok(bytes);
        }
        if !part.contains(&b'\n') {
            return Err(io::Error::other(format!("a line is longer than 1 MiB; {remedy}")));
        }
        if bytes.len() as u64 > MAX_LOG_BYTES {
            return Err(io::Error::other("it is larger than 1 GiB; give a part of it"));
        }
    }
}

fn write_file(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).map_err(|error| {
        anyhow!("can't write {}: {error}; name a file in a directory that you may write to", path.display())
    })
}
