//! `pjwctl check-config FILE`: has the daemon's own program read the file, as the caller.
//!
//! What it says goes to stderr as other checkers say it, `FILE:LINE:COL: …` at the start of a line, so that editors find
//! the places; lines that begin with a blank show the line itself.

use std::fmt::Write;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::process::{ExitCode, Stdio};

use anyhow::anyhow;

use super::daemon_program;
use crate::output;

/// So many mistakes are told: with more of them the file is probably no configuration at all.
const MOST: usize = 20;

/// Asks `pjwd --check-config`, whose exit code is the answer.
pub(super) fn run(file: &Path) -> anyhow::Result<ExitCode> {
    look(file).map_err(|error| anyhow!("{}: {}", file.display(), unreadable(&error)))?;
    let mut pjwd = daemon_program::command()?;
    pjwd.arg("--check-config").arg(daemon_program::option("--config", file.as_os_str()));
    let program = Path::new(pjwd.get_program()).display().to_string();
    let said = pjwd
        .stdout(Stdio::inherit())
        .output()
        .map_err(|error| anyhow!("can't start {program}: {error}; is pjw installed completely?"))?;
    output::tell(&first(&String::from_utf8_lossy(&said.stderr), MOST));
    Ok(if said.status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Whether there is something to be read. A pipe is not even opened: it can be read once only.
fn look(file: &Path) -> io::Result<()> {
    let what = file.metadata()?;
    if what.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    if what.is_file() { File::open(file).map(drop) } else { Ok(()) }
}

fn unreadable(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => "there is no such file: check the path".to_owned(),
        ErrorKind::IsADirectory => "this is a directory: name the file in it".to_owned(),
        ErrorKind::PermissionDenied => {
            "this user may not read it: check it as one who may, such as root".to_owned()
        }
        _ => format!("can't be read ({error}): check that it is a file, and its disk"),
    }
}

/// The first of the mistakes that the daemon's program told, without its name before them.
fn first(said: &str, most: usize) -> String {
    let said = said.strip_prefix("pjwd: ").unwrap_or(said);
    // A mistake begins at the margin; what belongs to it is indented.
    let begins = |line: &&str| !line.starts_with(' ');
    let mistakes = said.lines().filter(begins).count();
    let mut told = 0;
    let lines = said.lines().take_while(|line| {
        told += usize::from(begins(line));
        told <= most
    });
    let mut text = lines.map(|line| line.to_owned() + "\n").collect::<String>();
    if mistakes > most {
        let _ = writeln!(text, "and {} more", mistakes - most);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mistake_begins_with_its_place() {
        let said = "pjwd: f:3:1: a: no\n  3 | a\n    | ^\nf:7:8: b: no\n";
        assert_eq!(first(said, 9), "f:3:1: a: no\n  3 | a\n    | ^\nf:7:8: b: no\n");
        assert_eq!(first("", 9), "");
    }

    #[test]
    fn a_file_that_is_no_configuration_at_all_is_not_quoted_whole() {
        let many: String = (1..=24).map(|n| format!("f:{n}:1: no\n  {n} | x\n    | ^\n")).collect();
        let told = first(&many, 20);
        assert!(told.ends_with("f:20:1: no\n  20 | x\n    | ^\nand 4 more\n"), "{told}");
        assert_eq!(first(&many, 24), many);
    }
}
