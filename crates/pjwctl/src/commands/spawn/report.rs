//! The JSON that `pjwctl spawn --json` prints at the end: how the instances were started, and how each one ended.

use anyhow::anyhow;
use pjw_spawn::ExitStatus;
use serde::Serialize;

use super::group::InstanceGroup;
use super::instance::InstanceState;
use super::mode::StartMode;
use crate::cli::JsonArg;
use crate::output;

/// The result of `pjwctl spawn --json`. Scripts rely on the names.
#[derive(Debug, Serialize)]
struct Report<'a> {
    /// The job. `None` if no daemon knows one.
    job: Option<&'a str>,
    mode: &'static str,
    /// Why this mode was chosen.
    why: String,
    instances: Vec<InstanceReport>,
    /// From the creation of the first process until the last one has begun its program.
    started_us: u64,
}

/// One instance.
#[derive(Debug, Serialize)]
struct InstanceReport {
    rank: usize,
    pid: Option<u32>,
    cpus: String,
    exit: Option<i32>,
    signal: Option<i32>,
    /// The step that failed, with its errno.
    step: Option<&'static str>,
    errno: Option<String>,
}

/// Prints the result of `pjwctl spawn` as JSON. Prints nothing without the option `--json`. `mode` says how the
/// instances in `group` were started. `job` is the id of the job that holds their cores, if the daemon knows one.
pub(super) fn print_result(
    group: &InstanceGroup,
    mode: &StartMode,
    job: Option<&str>,
    json: JsonArg,
) -> anyhow::Result<()> {
    if !json.json {
        return Ok(());
    }
    let states = group.states.iter().enumerate();
    let instances = states.map(|(rank, state)| instance_report(rank, state)).collect();
    let started_us = u64::try_from(group.start_duration().as_micros()).unwrap_or(u64::MAX);
    let report = Report { job, mode: mode.name(), why: mode.reason(), instances, started_us };
    output::print_json(&report).map_err(|error| {
        if output::is_closed_pipe(&error) {
            return error;
        }
        anyhow!("the instances were started, and the result can't be printed: {error}")
    })
}

/// Returns the part of the JSON report about the instance with the rank `rank`.
fn instance_report(rank: usize, state: &InstanceState) -> InstanceReport {
    let (exit, signal) = match state.exit {
        Some(ExitStatus::Code(code)) => (Some(code), None),
        Some(ExitStatus::Signal(signal)) => (None, Some(signal)),
        None => (None, None),
    };
    InstanceReport {
        rank,
        pid: state.pid,
        cpus: state.cpus.to_string(),
        exit,
        signal,
        step: state.error.map(|error| error.step.name()),
        errno: state.error.map(|error| format!("{:?}", error.errno)),
    }
}
