//! `pjwctl hook HOOK`: the commands that schedulers call before, in and after a job.
//!
//! A scheduler takes the failure or delay of a hook for a fault of the node: Slurm drains a node whose prolog fails or
//! hangs. So a separate thread does all the work, with a time limit. Any error is one line on standard error, and the
//! exit code is 0 unless `--strict` is given. A job starter executes the command of the job (execve(2)), also after an
//! error. No command of a scheduler is ever run. Every hook may run twice: the second run changes nothing.
//!
//! [`client`] sends requests to the daemon, [`variables`] computes the variables for a job. Each scheduler has a file
//! of its own, which reads the input of its hooks.

mod client;
mod condor;
mod context;
mod flux;
mod lsf;
mod pbs;
mod sge;
mod slurm;
mod variables;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use clap::ValueEnum;
use pjw_ipc::service_commands;

use crate::cli::{HookArgs, HookKind, value_name};
use crate::output;
use context::{HookInput, JobVariables, is_root};

/// Runs `pjwctl hook`, which a batch system calls at the start and at the end of a job. `socket` is the path of the
/// daemon's socket, if the command line contains a path.
///
/// - If the hook fails, prints the error, and returns the exit code 1 with `--strict`, or 0 without.
/// - A job starter (a hook that starts the command of the job) executes this command also after a failure. The
///   function then returns only if the command can't be executed.
pub(super) fn run(socket: Option<PathBuf>, request: HookArgs) -> anyhow::Result<ExitCode> {
    let (kind, strict, timeout) = (request.kind, request.strict, request.timeout);
    let deadline = Instant::now() + timeout;
    let arguments = request.arguments.clone();
    let work = move || run_hook(kind, &HookInput::from_arguments(socket, &request, deadline));
    let (variables, code) = match run_with_timeout(timeout, work) {
        Ok(variables) => (variables, ExitCode::SUCCESS),
        Err(error) => (Vec::new(), report_failure(kind, strict, &error.to_string(), "")),
    };
    if kind.is_job_starter() {
        return Ok(exec_job_command(&arguments, variables));
    }
    let lines = variables.iter().fold(String::new(), |mut lines, (name, value)| {
        let export = if kind == HookKind::SlurmTaskProlog { "export " } else { "" };
        let _ = writeln!(lines, "{export}{name}={value}");
        lines
    });
    if !lines.is_empty()
        && let Err(error) = output::print(&lines)
    {
        return Ok(report_failure(kind, strict, &error.to_string(), ""));
    }
    Ok(code)
}

/// Handles a mistake in the command line of `pjwctl hook HOOK`, such as an unknown option. `command_line` contains the
/// name of the program and all arguments, and `error` describes the mistake. Prints the mistake, and returns the exit
/// code 0, or 1 with `--strict`. With 0, the batch system starts the job despite the mistake.
///
/// A hook can be a job starter, which the batch system runs instead of the command of the job. In this case, executes
/// the command of the job (the arguments after `--`), and returns only if the command can't be executed.
///
/// Returns `None` if `command_line` does not contain the name of a hook, or if `error` is a request for help. The
/// caller must then print `error`.
pub fn handle_hook_usage_error(command_line: &[OsString], error: &clap::Error) -> Option<ExitCode> {
    let arguments = arguments_after_hook(command_line.get(1..)?).filter(|_| error.use_stderr())?;
    let (options, command) = match arguments.iter().position(|word| word == "--") {
        Some(end) => (&arguments[..end], &arguments[end + 1..]),
        None => (arguments, &[][..]),
    };
    let kind = options.iter().find_map(|word| HookKind::from_str(word.to_str()?, false).ok())?;
    let text = error.to_string();
    let mistake =
        text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect::<Vec<_>>().join(" ");
    let is_strict = options.iter().any(|word| word == "--strict");
    let code =
        report_failure(kind, is_strict, mistake.trim_start_matches("error: "), "; see pjwctl help hook");
    Some(if kind.is_job_starter() { exec_job_command(command, Vec::new()) } else { code })
}

/// Returns those of `arguments` that follow the subcommand `hook`. `None` for another subcommand.
fn arguments_after_hook(arguments: &[OsString]) -> Option<&[OsString]> {
    match arguments {
        [first, rest @ ..] if first == "hook" => Some(rest),
        [first, _, rest @ ..] if first == "--socket" => arguments_after_hook(rest),
        [first, rest @ ..] if first.as_bytes().starts_with(b"--socket=") => arguments_after_hook(rest),
        _ => None,
    }
}

/// Prints the failure `error` of a hook, and returns the exit code: 1 with `--strict`, otherwise 0. `hint` is the end
/// of the line.
///
/// Slurm discards the output of a successful prolog. So the line of a hook that root runs also goes to the system log.
/// The hooks of other users do not write there.
fn report_failure(kind: HookKind, is_strict: bool, error: &str, hint: &str) -> ExitCode {
    let goes_on =
        if is_strict && !kind.is_job_starter() { "refused, as --strict says" } else { "the job goes on" };
    let text = format!("hook {}: {error}; {goes_on}{hint}", value_name(&kind));
    output::print_error(&text);
    if is_root() {
        output::log_warning(Path::new(output::SYSTEM_LOG), &text);
    }
    if is_strict { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs `work` in a new thread, and returns its result. Waits for at most `timeout`.
///
/// # Errors
/// The error of `work`. Also if no thread can be started, or if `work` takes longer than `timeout`. After this time,
/// `work` still continues until this process ends or executes another program.
fn run_with_timeout<T: Send + 'static>(
    timeout: Duration,
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let (sender, receiver) = mpsc::channel();
    let worker = std::thread::Builder::new().spawn(move || sender.send(work()));
    worker.map_err(|error| {
        anyhow!("no thread can be started: {error}; check the limit on the number of processes")
    })?;
    receiver.recv_timeout(timeout).unwrap_or_else(|_| {
        bail!(
            "not done within {timeout:?}: pjwd hangs or the node is overloaded; see pjwd's log, or restart it with: {}",
            service_commands::pjwd_restart_commands()
        )
    })
}

/// Runs the hook `kind` of a batch system. Returns the environment variables that the hook sets for the programs of the
/// job. Empty if the hook sets none.
///
/// # Errors
/// If the hook fails, for example because pjwd can't be reached or refuses the job.
fn run_hook(kind: HookKind, context: &HookInput) -> anyhow::Result<JobVariables> {
    match kind {
        HookKind::SlurmProlog => slurm::prolog(context),
        HookKind::SlurmEpilog => slurm::epilog(context),
        HookKind::SlurmTaskProlog => slurm::task_prolog(context),
        HookKind::LsfPreExec => lsf::pre_exec(context),
        HookKind::LsfPostExec => lsf::post_exec(context),
        HookKind::LsfJobStarter => lsf::job_starter(context),
        HookKind::PbsBegin => pbs::execjob_begin(context),
        HookKind::TorqueBegin => pbs::torque_prologue(context),
        HookKind::PbsEnd | HookKind::TorqueEnd => pbs::job_end(context),
        HookKind::PbsLaunch => pbs::execjob_launch(context),
        HookKind::SgeProlog => sge::prolog(context),
        HookKind::SgeEpilog => sge::epilog(context),
        HookKind::SgeStarter => sge::starter_method(context),
        HookKind::CondorPrepare => condor::hook_prepare_job(context),
        HookKind::CondorExit => condor::hook_job_exit(context),
        HookKind::CondorJobWrapper => condor::user_job_wrapper(context),
        HookKind::FluxProlog => flux::prolog(context),
        HookKind::FluxEpilog => flux::epilog(context),
    }
}

/// Replaces this process by the job's command. Returns only if the command cannot be executed.
fn exec_job_command(arguments: &[OsString], variables: JobVariables) -> ExitCode {
    let Some((program, arguments)) = arguments.split_first() else {
        output::print_error("no command was given: put the job's command after --");
        return ExitCode::from(2);
    };
    let error = Command::new(program).args(arguments).envs(variables).exec();
    super::run::report_exec_failure(program, &error)
}
