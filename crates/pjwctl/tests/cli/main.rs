//! The real program, without a daemon and with a daemon of the test.
#![allow(clippy::unwrap_used, clippy::panic, reason = "this is how a test fails")]

mod answers;
mod daemon;
mod doctor;
mod run;
mod simulate;
mod stack;
mod usage;

use std::path::Path;
use std::process::{Command, Output};

/// `pjwctl` with these arguments and the socket at `socket`.
fn pjwctl(socket: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pjwctl"));
    command.env("PJW_SOCKET", socket).env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE").args(arguments);
    command
}

/// The output and the exit status.
#[derive(Debug, PartialEq)]
struct Answer {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn answer(command: &mut Command) -> Answer {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Answer { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}

/// Checks for a refusal: exit code 1, no output, the reason on one line.
#[track_caller]
fn assert_refused(answer: &Answer, reason: &str) {
    assert_eq!((answer.code, answer.stdout.as_str()), (Some(1), ""), "{answer:?}");
    assert!(answer.stderr.starts_with("pjwctl: ") && answer.stderr.contains(reason), "{answer:?}");
    assert_eq!(answer.stderr.lines().count(), 1, "{answer:?}");
}
