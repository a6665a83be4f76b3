//! The entry point of the daemon. Everything else is in the library.
#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use pjwd::{options::DaemonOptions, startup};

fn main() -> ExitCode {
    match DaemonOptions::try_parse() {
        Ok(options) => startup::main(&options),
        Err(error) => match error.print().and_then(|()| std::io::stdout().flush()) {
            Ok(()) => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)),
            Err(_) => ExitCode::FAILURE,
        },
    }
}
