//! The verbs, one file for each: it sends a request, and prints the reply as text or as JSON.

mod assign;
mod check_config;
mod completions;
mod connection;
mod daemon_program;
mod defrag;
mod doctor;
mod events;
mod explain;
mod hook;
mod jobs;
pub mod man;
mod plan;
mod release;
mod reload;
mod run;
mod show;
mod simulate;
mod status;
mod topology;

use std::process::ExitCode;

use crate::cli::{Cli, Verb};
use connection::Warden;

/// Executes the subcommand and returns the exit code. `pjwctl run` and job starters do not return: this process becomes
/// their command.
///
/// # Errors
/// If the daemon does not run or refuses the call, or if the output cannot be written. The message has the remedy.
pub fn execute(cli: Cli) -> anyhow::Result<ExitCode> {
    let warden = Warden { socket: cli.socket };
    match cli.verb {
        Verb::Status(json) => status::run(&warden, json),
        Verb::Jobs(json) => jobs::run(&warden, json),
        Verb::Show { job, json } => show::run(&warden, &job, json),
        Verb::Assign(request) => assign::run(&warden, &request),
        Verb::Release { job, .. } => release::run(&warden, job.as_deref()),
        Verb::Run(request) => run::run(&warden, &request),
        Verb::Explain { subject, json } => explain::run(&warden, &subject, json),
        Verb::Plan { defrag: false, json } => plan::run(&warden, json),
        Verb::Plan { defrag: true, json } => defrag::plan(&warden, json),
        Verb::Defrag(json) => defrag::run(&warden, json),
        Verb::Events { follow, json } => events::run(&warden, follow, json),
        Verb::Topology(what) => topology::run(&warden, &what),
        Verb::Simulate(what) => simulate::run(&what),
        Verb::Hook(request) => hook::run(warden.socket, request),
        Verb::Doctor(request) => doctor::run(&warden, &request),
        Verb::Reload => reload::run(&warden),
        Verb::CheckConfig { file } => check_config::run(&file),
        Verb::Completions { shell } => completions::run(shell),
        Verb::Man { dir } => man::run(dir.as_deref()),
    }
}
