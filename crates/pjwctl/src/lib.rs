//! pjwctl sends requests to the warden and prints the replies. It decides nothing.
//!
//! [`cli`] is the one definition of the command line: help, completions and man pages come from it. A file in
//! [`commands`] sends requests, a file in [`render`] makes a text of the reply, [`output`] prints it. Exit codes: 0
//! done; 1 refused or failed, with one line on stderr; 2 usage. `run` becomes the command that it starts, so its exit
//! code is that of the command; `spawn` has the highest of its instances.
#![forbid(unsafe_code)]

pub mod cli;
pub mod commands;
pub mod file;
pub mod output;
pub mod render;
mod stack;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

/// Runs pjwctl with the command line of this process. Returns the exit code. An error is printed to standard error.
#[must_use]
pub fn main() -> ExitCode {
    // This call comes first. Until then, a SIGSEGV or SIGBUS that another process sends is lost in the handlers of
    // Rust's runtime, and `run` and `spawn` would start a command that was to be ended. The verb is not known yet, so
    // the call is made for all verbs. The other verbs lose only the runtime's message about a stack overflow.
    pjw_spawn::clear_fault_handlers();
    stack::with_enough_stack(execute_command_line)
}

/// Executes the command line of this process, and returns the exit code. Prints an error to standard error. If the
/// reader of standard output has closed its pipe, this counts as success.
fn execute_command_line() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let cli = match cli::Cli::parse_args(words.iter().cloned()) {
        Ok(cli) => cli,
        Err(error) => {
            return commands::handle_hook_usage_error(&words, &error)
                .unwrap_or_else(|| print_usage_error(&error));
        }
    };
    match commands::execute(cli) {
        Ok(code) => code,
        Err(error) if output::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::print_error(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

/// Prints an error of the command line, or the help that was requested.
fn print_usage_error(error: &clap::Error) -> ExitCode {
    match error.print().and_then(|()| std::io::stdout().flush()) {
        Err(write_error) if write_error.kind() != std::io::ErrorKind::BrokenPipe => {
            output::print_error(&format!("can't write the output: {write_error}"));
            ExitCode::FAILURE
        }
        _ => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)),
    }
}
