//! The entry point of the daemon. Everything else is in the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use pjwd::{options::DaemonOptions, startup};

fn main() -> ExitCode {
    startup::main(&DaemonOptions::parse())
}
