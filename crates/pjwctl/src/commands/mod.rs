//! The verbs (subcommands) of pjwctl, one file for each. Most verbs send a request to the daemon, and print the reply
//! as text or as JSON.

mod advise;
mod assign;
mod check_config;
mod completions;
mod connection;
mod daemon_program;
mod defrag;
mod doctor;
mod elf;
mod events;
mod explain;
mod hook;
mod interpreter;
mod jobs;
pub mod man;
mod plan;
mod provision;
mod release;
mod reload;
mod report;
mod run;
mod show;
mod simulate;
mod spawn;
mod status;
mod topology;
mod want;

use std::process::ExitCode;

use crate::cli::{Cli, CliCommand, JobsArgs};
use connection::DaemonAddress;
pub use hook::handle_hook_usage_error;

/// Executes the subcommand of the parsed command line `cli`, and returns the exit code of pjwctl. If `pjwctl run` or
/// a job starter (`pjwctl hook …-starter`) succeeds, the function does not return, because the process then executes
/// the command of the job.
///
/// # Errors
/// If the daemon does not run or refuses the request, or if the output cannot be written. The message names the
/// remedy.
pub fn execute(cli: Cli) -> anyhow::Result<ExitCode> {
    let warden = DaemonAddress { socket: cli.socket };
    match cli.command {
        CliCommand::Status(json) => status::run(&warden, json),
        CliCommand::Jobs(JobsArgs { ended: false, json }) => jobs::run(&warden, json),
        CliCommand::Jobs(JobsArgs { ended: true, json }) => report::print_ended_jobs(&warden, None, json),
        CliCommand::Report(request) => report::run(&warden, &request),
        CliCommand::Show(request) => show::run(&warden, &request),
        CliCommand::Assign(request) => assign::run(&warden, &request),
        CliCommand::Release { job, .. } => release::run(&warden, job.as_deref()),
        CliCommand::Want(request) => want::run(&warden, &request),
        CliCommand::Provision(request) => provision::run(&warden, &request),
        CliCommand::Unprovision { name } => provision::unprovision(&warden, &name),
        CliCommand::Run(request) => run::run(&warden, &request),
        CliCommand::Spawn(request) => spawn::run(&warden, &request),
        CliCommand::Explain { subject, json } => explain::run(&warden, &subject, json),
        CliCommand::Plan { defrag: false, json } => plan::run(&warden, json),
        CliCommand::Plan { defrag: true, json } => defrag::plan(&warden, json),
        CliCommand::Defrag(json) => defrag::run(&warden, json),
        CliCommand::Events { follow, json } => events::run(&warden, follow, json),
        CliCommand::Topology(what) => topology::run(&warden, &what),
        CliCommand::Simulate(what) => simulate::run(&what),
        CliCommand::Advise(what) => advise::run(&what),
        CliCommand::Hook(request) => hook::run(warden.socket, request),
        CliCommand::Doctor(request) => doctor::run(&warden, &request),
        CliCommand::Reload => reload::run(&warden),
        CliCommand::CheckConfig { file } => check_config::run(&file),
        CliCommand::Completions { shell } => completions::run(shell),
        CliCommand::Man { dir } => man::run(dir.as_deref()),
    }
}
