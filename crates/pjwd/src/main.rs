//! The daemon's command line; everything else is in the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use pjwd::daemon::{self, Options};

fn main() -> ExitCode {
    daemon::main(&Options::parse())
}
