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
    let daemon = DaemonAddress { socket: cli.socket };
    match cli.command {
        CliCommand::Status(json) => status::run(&daemon, json),
        CliCommand::Jobs(JobsArgs { ended: false, json }) => jobs::run(&daemon, json),
        CliCommand::Jobs(JobsArgs { ended: true, json }) => report::print_ended_jobs(&daemon, None, json),
        CliCommand::Report(request) => report::run(&daemon, &request),
        CliCommand::Show(request) => show::run(&daemon, &request),
        CliCommand::Assign(request) => assign::run(&daemon, &request),
        CliCommand::Release { job, .. } => release::run(&daemon, job.as_deref()),
        CliCommand::Want(request) => want::run(&daemon, &request),
        CliCommand::Provision(request) => provision::run(&daemon, &request),
        CliCommand::Unprovision { name } => provision::unprovision(&daemon, &name),
        CliCommand::Run(request) => run::run(&daemon, &request),
        CliCommand::Spawn(request) => spawn::run(&daemon, &request),
        CliCommand::Explain { subject, json } => explain::run(&daemon, &subject, json),
        CliCommand::Plan { defrag: false, json } => plan::run(&daemon, json),
        CliCommand::Plan { defrag: true, json } => defrag::plan(&daemon, json),
        CliCommand::Defrag(json) => defrag::run(&daemon, json),
        CliCommand::Events { follow, json } => events::run(&daemon, follow, json),
        CliCommand::Topology(what) => topology::run(&daemon, &what),
        CliCommand::Simulate(what) => simulate::run(&what),
        CliCommand::Advise(what) => advise::run(&what),
        CliCommand::Hook(request) => hook::run(daemon.socket, request),
        CliCommand::Doctor(request) => doctor::run(&daemon, &request),
        CliCommand::Reload => reload::run(&daemon),
        CliCommand::CheckConfig { file } => check_config::run(&file),
        CliCommand::Completions { shell } => completions::run(shell),
        CliCommand::Man { dir } => man::run(dir.as_deref()),
    }
}
