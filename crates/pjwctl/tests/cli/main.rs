//! The program `pjwctl`, without a daemon and with a daemon of the test.
#![allow(clippy::unwrap_used, clippy::panic, reason = "this is how a test fails")]

mod answers;
mod assign;
mod daemon;
mod doctor;
mod reports;
mod run;
mod simulate;
mod spawn;
mod stack;
mod usage;
mod waiting;

use std::path::Path;
use std::process::{Command, Output};

/// `pjwctl` with these arguments and the socket at `socket`.
fn pjwctl(socket: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pjwctl"));
    command.env("PJW_SOCKET", socket).env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE").args(arguments);
    command
}

/// The output and the exit status of a command.
#[derive(Debug, PartialEq)]
struct CommandOutput {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Runs a command to its end.
fn answer(command: &mut Command) -> CommandOutput {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    CommandOutput { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}

/// Asserts that a command was refused: exit code 1, nothing on stdout, the reason on one line of stderr.
#[track_caller]
fn assert_refused(answer: &CommandOutput, reason: &str) {
    assert_eq!((answer.code, answer.stdout.as_str()), (Some(1), ""), "{answer:?}");
    assert!(answer.stderr.starts_with("pjwctl: ") && answer.stderr.contains(reason), "{answer:?}");
    assert_eq!(answer.stderr.lines().count(), 1, "{answer:?}");
}
