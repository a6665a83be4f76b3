//! pjwctl asks the warden and prints its answers; it decides nothing.
//!
//! [`cli`] is the one definition of the command line, from which help, completions and man pages come. A file
//! in [`commands`] asks, a file in [`render`] makes text of the answer, [`output`] prints it. Exit codes: 0
//! done, 1 refused or failed with one line on stderr, 2 usage; `run` becomes the command it starts, and so
//! has its code.
#![forbid(unsafe_code)]

pub mod cli;
pub mod commands;
pub mod file;
pub mod output;
pub mod render;

use std::process::ExitCode;

/// Reads the command line, does what it says, and tells how it went.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match cli::Cli::read(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => {
            // Where nobody reads the help any more, nothing is left to say.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    match commands::run(cli) {
        Ok(code) => code,
        Err(error) if output::is_closed(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::complain(&error.to_string());
            ExitCode::FAILURE
        }
    }
}
