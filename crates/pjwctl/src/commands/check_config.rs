//! `pjwctl check-config FILE`: the daemon's program checks the file, with the permissions of the caller.
//!
//! Errors go to stderr in the usual form of checkers, `FILE:LINE:COL: …` at the start of a line, so that editors find
//! the places. Lines that begin with a blank show the line of the file.

use std::fmt::Write;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::process::{ExitCode, Stdio};

use anyhow::anyhow;

use super::daemon_program;
use crate::output;

/// The maximum number of errors that are printed. A file with more errors is probably no configuration.
const MAX_ERRORS: usize = 20;

/// Runs `pjwctl check-config`: starts `pjwd --check-config` to check the configuration file `file`, and returns the
/// exit code of `pjwd`.
pub(super) fn run(file: &Path) -> anyhow::Result<ExitCode> {
    check_readable(file).map_err(|error| anyhow!("{}: {}", file.display(), unreadable_file_text(&error)))?;
    let mut pjwd = daemon_program::pjwd_command()?;
    pjwd.arg("--check-config").arg(daemon_program::option_argument("--config", file.as_os_str()));
    let program = Path::new(pjwd.get_program()).display().to_string();
    let output = pjwd
        // The file may be `/dev/stdin`.
        .stdin(Stdio::inherit())
        .stdout(Stdio::inherit())
        .output()
        .map_err(|error| anyhow!("can't start {program}: {error}; check that pjw is installed completely"))?;
    output::print_escaped_error(&first_errors(&String::from_utf8_lossy(&output.stderr), MAX_ERRORS));
    Ok(if output.status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Checks that the file `file` exists, can be opened and is no directory. A pipe is not opened, because it can be
/// read only once.
pub(super) fn check_readable(file: &Path) -> io::Result<()> {
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    if metadata.is_file() { File::open(file).map(drop) } else { Ok(()) }
}

/// Returns a text with the reason why the configuration file can't be read, and with a remedy. `error` is the error
/// of the kernel.
fn unreadable_file_text(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => "there is no such file: check the path".to_owned(),
        ErrorKind::IsADirectory => "this is a directory: give the path of a file".to_owned(),
        ErrorKind::PermissionDenied => {
            "this user has no permission to read it: run the check as root or as its owner".to_owned()
        }
        _ => format!("can't be read ({error}): check that it is a file, and that its disk works"),
    }
}

/// Returns the first `max_errors` errors in `stderr`, the error output of `pjwd --check-config`. An error can have
/// several lines. Leaves out the prefix `pjwd: `. If there are more errors, the last line says how many.
fn first_errors(stderr: &str, max_errors: usize) -> String {
    let mut text = String::new();
    let mut errors = 0;
    for line in stderr.strip_prefix("pjwd: ").unwrap_or(stderr).lines() {
        // An error begins at the start of a line. Its further lines are indented.
        errors += usize::from(!line.starts_with(' '));
        if errors <= max_errors {
            text.push_str(line);
            text.push('\n');
        }
    }
    if errors > max_errors {
        let _ = writeln!(text, "and {} more", errors - max_errors);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_begins_with_its_position() {
        let stderr = "pjwd: f:3:1: a: no\n  3 | a\n    | ^\nf:7:8: b: no\n";
        assert_eq!(first_errors(stderr, 9), "f:3:1: a: no\n  3 | a\n    | ^\nf:7:8: b: no\n");
        assert_eq!(first_errors("", 9), "");
    }

    #[test]
    fn only_the_first_errors_of_a_file_are_printed() {
        let many: String = (1..=24).map(|n| format!("f:{n}:1: no\n  {n} | x\n    | ^\n")).collect();
        let printed = first_errors(&many, 20);
        assert!(printed.ends_with("f:20:1: no\n  20 | x\n    | ^\nand 4 more\n"), "{printed}");
        assert_eq!(first_errors(&many, 24), many);
    }
}
