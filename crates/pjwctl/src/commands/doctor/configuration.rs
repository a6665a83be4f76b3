//! Checks the configuration files of a pjwd that does not run: pjwd does not start if its file has a mistake.
//!
//! The program `pjwd` itself checks the files, with the permissions of the caller. So the doctor finds the mistakes
//! that a start of pjwd would find, also those that depend on this machine.

use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;

use nix::unistd::geteuid;
use pjw_core::diagnosis::WrongConfiguration;

use super::super::check_config::check_readable;
use super::super::daemon_program::{option_argument, pjwd_command};

/// The default configuration file of root's pjwd.
const SYSTEM_FILE: &str = "/etc/pjw/pjwd.toml";
/// The end of the path of each default configuration file, and the colon after it in a message of pjwd.
const DEFAULT_FILE: &str = "pjw/pjwd.toml:";
/// The beginning of an error of pjwd.
const PJWD_PREFIX: &str = "pjwd: ";
/// The exit code of pjwd after an error. Wrong options have another exit code.
const FAILURE_CODE: i32 = 1;

/// Checks the default configuration file of the caller, and also that of root if the caller may read it. Returns those
/// with which pjwd can't start. A file that does not exist is not wrong. Empty if the program `pjwd` is not found.
pub(super) fn find_wrong_configurations() -> Vec<WrongConfiguration> {
    let of_caller = check_configuration(None, "pjwd --check-config".to_owned());
    let reads_file_of_root = || !geteuid().is_root() && check_readable(Path::new(SYSTEM_FILE)).is_ok();
    let of_root = reads_file_of_root().then(|| {
        let option = option_argument("--config", SYSTEM_FILE.as_ref());
        check_configuration(Some(option), format!("pjwctl check-config {SYSTEM_FILE}"))
    });
    of_caller.into_iter().chain(of_root.flatten()).collect()
}

/// Lets pjwd check the configuration file that `option` names, or the default file of the caller if `option` is `None`.
/// `check_command` is the command that shows the user the mistakes. `None` if the file is valid, or if it can't be
/// checked.
fn check_configuration(option: Option<OsString>, check_command: String) -> Option<WrongConfiguration> {
    let mut pjwd = pjwd_command().ok()?;
    pjwd.arg("--check-config").args(option).env("HWLOC_HIDE_ERRORS", "2").stdin(Stdio::null());
    let output = pjwd.output().ok()?;
    if output.status.code() != Some(FAILURE_CODE) {
        return None;
    }
    let (first_mistake, has_further_mistakes) = mistakes(&String::from_utf8_lossy(&output.stderr))?;
    Some(WrongConfiguration { first_mistake, has_further_mistakes, check_command })
}

/// Returns the first mistake in `stderr`, the error output of `pjwd --check-config`, and whether there are more. The
/// lines of the file that pjwd quotes are left out. `None` if pjwd failed for another reason.
fn mistakes(stderr: &str) -> Option<(String, bool)> {
    let lines = stderr.lines().skip_while(|line| !line.starts_with(PJWD_PREFIX));
    // Quoted lines are indented.
    let mut mistakes = lines.filter(|line| !line.starts_with(' '));
    let first = mistakes.next()?.strip_prefix(PJWD_PREFIX)?;
    first.contains(DEFAULT_FILE).then(|| (first.to_owned(), mistakes.next().is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mistakes_in_a_default_file_are_found_in_the_output_of_pjwd() {
        let first = "/etc/pjw/pjwd.toml:3:1: modus: there is no such key";
        let one = format!("hwloc: noise\npjwd: {first}\n  3 | modus = 1\n    | ^^^^^\n");
        assert_eq!(mistakes(&one), Some((first.to_owned(), false)));
        let two = format!("{one}/etc/pjw/pjwd.toml:7:8: mode: no\n  7 | mode = 1\n    |        ^\n");
        assert_eq!(mistakes(&two), Some((first.to_owned(), true)));
        let unreadable = "/home/a/.config/pjw/pjwd.toml: the configuration can't be read: it is gone";
        assert_eq!(mistakes(&format!("pjwd: {unreadable}\n")), Some((unreadable.to_owned(), false)));
        for other in ["", "pjwd: can't read the topology\n", "error: unexpected argument\n"] {
            assert_eq!(mistakes(other), None, "{other}");
        }
    }
}
