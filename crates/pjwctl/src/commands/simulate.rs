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
/// `what` contains the command line options.
pub(super) fn run(what: &cli::SimulateArgs) -> anyhow::Result<ExitCode> {
    match (&what.demand, &what.job_log) {
        (Some(path), _) => replay_curve(what, path),
        (None, Some(path)) => replay_log(what, path),
        (None, None) => Err(anyhow!("there is nothing to replay: add --trace FILE or --demand FILE.csv")),
    }
}

/// Replays the job log in the file `path` on a simulated machine, and prints how the machine was used. Also writes the
/// files of the options `--per-job` and `--fragmentation`, if they are given. `what` contains the command line options.
fn replay_log(what: &cli::SimulateArgs, path: &Path) -> anyhow::Result<ExitCode> {
    let (name, bytes) = read_input(path, "log", "give a log in the standard workload format")?;
    let trace = swf::parse(&bytes).map_err(|error| anyhow!("{name}: {error}"))?;
    let topology = machine(what)?;
    let rules = ReplayOptions {
        unit: match what.unit {
            ProcessorUnitArg::Core => ProcessorUnit::Core,
            ProcessorUnitArg::Pu => ProcessorUnit::Pu,
        },
        chooser: chooser(what),
        housekeeping_cpus: what.housekeeping.select_housekeeping_cpus(&topology)?,
    };
    let done = replay(&topology, &trace, &rules, |_| {});
    let simulation = SimulationResult::new(&done, &topology, &trace, &rules);
    if let Some(path) = &what.per_job_csv {
        write(path, &per_job_csv(&done))?;
    }
    if let Some(path) = &what.fragmentation_csv {
        write(path, &fragmentation_csv(&simulation))?;
    }
    output::print_reply(what.json, &simulation, simulation_text)
}

/// Replays the curve of CPU demand in the file `path` twice on a simulated machine: without and with lending of cores.
/// Prints a comparison. `what` contains the command line options.
fn replay_curve(what: &cli::SimulateArgs, path: &Path) -> anyhow::Result<ExitCode> {
    let (name, bytes) = read_input(path, "curve", "give a line with a few numbers for each time")?;
    let curve = curve::parse(&bytes).map_err(|error| anyhow!("{name}: {error}"))?;
    let topology = machine(what)?;
    let defaults = LendingPolicy::default();
    let lending = LendingPolicy {
        buffer_cores: what.buffer_cores.unwrap_or(defaults.buffer_cores),
        lend_after: what.lend_after.unwrap_or(defaults.lend_after),
        cores_at_once: what.cores_at_once.unwrap_or(defaults.cores_at_once),
        ..defaults
    };
    let housekeeping_cpus = what.housekeeping.select_housekeeping_cpus(&topology)?;
    let replayed = |enabled| {
        let lending = LendingPolicy { enabled, ..lending.clone() };
        let options = DemandReplayOptions { housekeeping_cpus: housekeeping_cpus.clone(), lending };
        replay_demand(&topology, &curve, &options).map_err(|error| anyhow!("{name}: {error}"))
    };
    let result = LendingSimulationResult::new(&replayed(false)?, &replayed(true)?, &lending);
    output::print_reply(what.json, &result, demand_text)
}

fn machine(what: &cli::SimulateArgs) -> anyhow::Result<Topology> {
    let source = daemon_program::topology_source_option(what.input.as_deref(), what.synthetic.as_deref());
    let arguments: Vec<OsString> = std::iter::once("--plain".into()).chain(source).collect();
    daemon_program::load_topology_from_pjwd(&arguments)
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

/// Reads all bytes of `from`. Bounds the memory use, because `from` may be a device or a pipe without an end.
///
/// # Errors
/// If a line is longer than [`MAX_LINE_BYTES`]: this error contains the advice `remedy`. If the text is longer than
/// [`MAX_LOG_BYTES`], or can't be read.
fn read_limited(from: &mut dyn Read, remedy: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    loop {
        let known = bytes.len();
        from.take(MAX_LINE_BYTES).read_to_end(&mut bytes)?;
        let part = &bytes[known..];
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

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).map_err(|error| {
        anyhow!("can't write {}: {error}; name a file in a directory that you may write to", path.display())
    })
}
