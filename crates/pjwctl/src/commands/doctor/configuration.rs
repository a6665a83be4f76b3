//! Checks the configuration files of a pjwd that does not run: pjwd does not start if its file has a mistake.
//!
//! The program `pjwd` itself checks the files, with the permissions of the caller. So the doctor finds the mistakes
//! that a start of pjwd would find, also those that depend on this machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use nix::unistd::geteuid;
use pjw_core::diagnosis::ConfigurationProblem;

use super::super::check_config::check_readable;
use super::super::daemon_program::{option_argument, pjwd_command};
use super::time_limit::{ProgramEnd, run_with_time_limit, within};

/// The default configuration file of root's pjwd.
const SYSTEM_FILE: &str = "/etc/pjw/pjwd.toml";
/// The end of the path of each default configuration file, and the colon after it in a message of pjwd.
const DEFAULT_FILE: &str = "pjw/pjwd.toml:";
/// The beginning of an error of pjwd.
const PJWD_PREFIX: &str = "pjwd: ";
/// The exit code of pjwd after an error. Wrong options have another exit code.
const FAILURE_CODE: i32 = 1;
/// The longest time for the check of a file, and for the answer of systemd. The file system of a file may not respond.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// Checks the default configuration file of the caller, and that of root's pjwd if the caller may read it. The latter
/// is the file that the unit `pjwd.service` names, or else the default file of root. Returns the problems with which
/// pjwd can't start. A default file that does not exist is no problem. Empty if the program `pjwd` is not found.
pub(super) fn find_configuration_problems() -> Vec<ConfigurationProblem> {
    let of_unit = config_file_of_unit();
    if geteuid().is_root() {
        return check_configuration(of_unit.as_deref()).into_iter().collect();
    }
    let file_of_root = of_unit.unwrap_or_else(|| PathBuf::from(SYSTEM_FILE));
    let path = file_of_root.clone();
    let of_root = match within(TIME_LIMIT, move || check_readable(&path).is_ok()) {
        Ok(true) => check_configuration(Some(&file_of_root)),
        Err(RecvTimeoutError::Timeout) => Some(timeout_problem(Some(&file_of_root))),
        Ok(false) | Err(RecvTimeoutError::Disconnected) => None,
    };
    check_configuration(None).into_iter().chain(of_root).collect()
}

/// Lets pjwd check the configuration file `file`, or the default file of the caller if `file` is `None`. `None` if the
/// file is valid, or if pjwd can't be run.
fn check_configuration(file: Option<&Path>) -> Option<ConfigurationProblem> {
    let mut pjwd = pjwd_command().ok()?;
    pjwd.arg("--check-config").env("HWLOC_HIDE_ERRORS", "2");
    pjwd.args(file.map(|file| option_argument("--config", file.as_os_str())));
    match run_with_time_limit(pjwd, TIME_LIMIT)? {
        ProgramEnd::TimedOut => Some(timeout_problem(file)),
        ProgramEnd::Exited { code: Some(FAILURE_CODE), output } => {
            let (first_mistake, has_further_mistakes) = mistakes(&output, file)?;
            let check_command = check_command(file);
            Some(ConfigurationProblem::Wrong { first_mistake, has_further_mistakes, check_command })
        }
        ProgramEnd::Exited { .. } => None,
    }
}

/// The problem that the check of `file` did not end in time.
fn timeout_problem(file: Option<&Path>) -> ConfigurationProblem {
    ConfigurationProblem::CheckTimedOut {
        time_limit_s: TIME_LIMIT.as_secs(),
        check_command: check_command(file),
    }
}

/// Returns the command that shows the user the mistakes of `file`, or of the default file of the user.
fn check_command(file: Option<&Path>) -> String {
    file.map_or_else(
        || "pjwd --check-config".to_owned(),
        |file| format!("pjwctl check-config {}", file.display()),
    )
}

/// Returns the configuration file that the unit `pjwd.service` of systemd names. `None` if it names none, if there is
/// no such unit, or if systemd does not answer.
fn config_file_of_unit() -> Option<PathBuf> {
    let mut systemctl = Command::new("systemctl");
    systemctl.args(["show", "--property=ExecStart", "pjwd.service"]);
    match run_with_time_limit(systemctl, TIME_LIMIT)? {
        ProgramEnd::Exited { code: Some(0), output } => config_option(&output),
        ProgramEnd::Exited { .. } | ProgramEnd::TimedOut => None,
    }
}

/// Returns the value of the option `--config` in `exec_start`, the text that systemctl prints for the property
/// `ExecStart` of a unit. `None` if the command of the unit has no such option. Also `None` if the value has a quote, a
/// variable or a blank, because it can't be read with certainty: systemctl may print an argument with a blank without
/// quotes. A next word that is no option can be the end of such an argument.
fn config_option(exec_start: &str) -> Option<PathBuf> {
    let (_, arguments) = exec_start.split_once("argv[]=")?;
    let (arguments, _) = arguments.split_once(" ; ")?;
    let (_, rest) = arguments.split_once(" --config")?;
    let mut words = rest.strip_prefix(['=', ' '])?.split(' ');
    let value = words.next()?;
    let is_whole = words.next().is_none_or(|word| word.starts_with('-'));
    let is_certain = is_whole && !value.is_empty() && !value.contains(['"', '\'', '\\', '$']);
    // systemd starts its services in the directory `/`.
    is_certain.then(|| Path::new("/").join(value))
}

/// Returns the first mistake in `output`, the output of `pjwd --check-config`, and whether there are more. `file` is
/// the checked file, or `None` for a default file. The lines of the file that pjwd quotes are left out. `None` if pjwd
/// failed for another reason.
fn mistakes(output: &str, file: Option<&Path>) -> Option<(String, bool)> {
    let lines = output.lines().skip_while(|line| !line.starts_with(PJWD_PREFIX));
    // Quoted lines are indented.
    let mut mistakes = lines.filter(|line| !line.starts_with(' '));
    let first = mistakes.next()?.strip_prefix(PJWD_PREFIX)?;
    let is_about_file = match file {
        Some(file) => first.starts_with(&format!("{}:", file.display())),
        None => first.contains(DEFAULT_FILE),
    };
    is_about_file.then(|| (first.to_owned(), mistakes.next().is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mistakes_in_the_checked_file_are_found_in_the_output_of_pjwd() {
        let first = "/etc/pjw/pjwd.toml:3:1: modus: there is no such key";
        let one = format!("hwloc: noise\npjwd: {first}\n  3 | modus = 1\n    | ^^^^^\n");
        assert_eq!(mistakes(&one, None), Some((first.to_owned(), false)));
        let two = format!("{one}/etc/pjw/pjwd.toml:7:8: mode: no\n  7 | mode = 1\n    |        ^\n");
        assert_eq!(mistakes(&two, None), Some((first.to_owned(), true)));
        let unreadable = "/home/a/.config/pjw/pjwd.toml: the configuration can't be read: it is gone";
        assert_eq!(mistakes(&format!("pjwd: {unreadable}\n"), None), Some((unreadable.to_owned(), false)));
        for other in ["", "pjwd: can't read the topology\n", "error: unexpected argument\n"] {
            assert_eq!(mistakes(other, None), None, "{other}");
        }
        let named = "pjwd: /srv/a.toml:1:1: modus: there is no such key\n";
        assert!(mistakes(named, Some(Path::new("/srv/a.toml"))).is_some());
        assert_eq!(mistakes(named, None), None);
    }

    #[test]
    fn the_configuration_file_of_a_unit_is_read_from_its_command() {
        let show = |command: &str| {
            format!(
                "ExecStart={{ path=/usr/bin/pjwd ; argv[]={command} ; ignore_errors=no ; start_time=[n/a] ; pid=0 }}\n"
            )
        };
        for (command, expected) in [
            ("/usr/bin/pjwd", None),
            ("/usr/bin/pjwd --config /srv/a.toml", Some("/srv/a.toml")),
            ("/usr/bin/pjwd --socket /s --config=/srv/a.toml --beside", Some("/srv/a.toml")),
            ("/usr/bin/pjwd --config a.toml", Some("/a.toml")),
            ("/usr/bin/pjwd --config $FILE", None),
            ("/usr/bin/pjwd --config \"/srv/a b.toml\"", None),
            ("/usr/bin/pjwd --config /srv/a b.toml", None),
            ("/usr/bin/pjwd --config=/srv/a b.toml --beside", None),
            ("/usr/bin/pjwd --config", None),
        ] {
            assert_eq!(config_option(&show(command)), expected.map(PathBuf::from), "{command}");
        }
        assert_eq!(config_option("ExecStart=\n"), None, "there is no such unit");
    }
}
