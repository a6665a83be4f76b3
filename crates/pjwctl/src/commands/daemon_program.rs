//! Finds the program `pjwd`, for verbs that need its code but no running daemon.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use serde::de::DeserializeOwned;

/// The directories in which distributions install daemons. The PATH of a plain user does not contain them.
const DAEMON_DIRECTORIES: [&str; 2] = ["/usr/sbin", "/usr/lib/pjw"];

/// Returns a command that runs the program `pjwd`, without arguments. Searches the program first in the directory of
/// this pjwctl, so that both have the same version, then in the directories of `PATH`, `/usr/sbin` and `/usr/lib/pjw`.
pub(super) fn pjwd_command() -> anyhow::Result<Command> {
    let pjwctl = std::env::current_exe().ok();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs: Vec<PathBuf> = search_directories(pjwctl.as_deref(), &path).collect();
    let found = dirs.iter().map(|dir| dir.join("pjwd")).find(|file| is_program(file));
    found.map(Command::new).ok_or_else(|| {
        let first = dirs.first().map(|dir| dir.display().to_string()).unwrap_or_default();
        let last = DAEMON_DIRECTORIES.join(", ");
        anyhow!("pjwd was not found (looked in {first}, PATH, {last}): install pjw completely")
    })
}

/// Returns the command line option `name` with its value as one argument: `name=value`. In this form, a value that
/// begins with a dash is not taken for an option.
pub(super) fn option_argument(name: &str, value: &OsStr) -> OsString {
    let mut option = OsString::from(name);
    option.push("=");
    option.push(value);
    option
}

/// Returns the command line option of `pjwd` that selects the machine of which `pjwd` reads the topology. `input` is
/// the path of a topology file, and `synthetic` is a description of a synthetic machine. If both are `None`, returns
/// `None`, which stands for this machine.
pub(super) fn topology_source_option(input: Option<&Path>, synthetic: Option<&str>) -> Option<OsString> {
    let file = input.map(|file| option_argument("--input", file.as_os_str()));
    file.or_else(|| synthetic.map(|description| option_argument("--synthetic", description.as_ref())))
}

/// Runs `pjwd --topology-json` with `arguments`, and returns the topology that `pjwd` prints, parsed as a `T`. The last
/// element of `arguments` is the option that selects the machine.
///
/// hwloc, a C library, reads the topology. A damaged topology file can make hwloc crash. For this reason the file is
/// read in another process.
pub(super) fn load_topology_from_pjwd<T: DeserializeOwned>(arguments: &[OsString]) -> anyhow::Result<T> {
    let mut pjwd = pjwd_command()?;
    let source = arguments.last().map(|argument| argument.to_string_lossy().into_owned()).unwrap_or_default();
    let shown = source.split_once('=').map_or(source.as_str(), |(_, value)| value);
    pjwd.env("HWLOC_HIDE_ERRORS", "2").env("HWLOC_XML_VERBOSE", "0");
    let output = pjwd.arg("--topology-json").args(arguments).stdin(Stdio::inherit()).output();
    let program = || pjwd.get_program().to_string_lossy().into_owned();
    let output = output.map_err(|error| anyhow!("can't start {}: {error}", program()))?;
    if let Some(signal) = output.status.signal() {
        return Err(anyhow!(
            "hwloc died of signal {signal} while it read {shown}: the topology is damaged, or hwloc has a bug; \
             write it anew with: lstopo FILE.xml"
        ));
    }
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let reason = stderr.lines().rev().find_map(|line| line.strip_prefix("pjwd: "));
        return match reason {
            Some(reason) => Err(anyhow!("{reason}")),
            None => Err(anyhow!("{} can't read {shown}, and gave no reason", program())),
        };
    }
    let topology = serde_json::from_slice(&output.stdout);
    topology.with_context(|| {
        format!("{}'s output can't be parsed: check that it has the same version as pjwctl", program())
    })
}

/// Returns the directories in which `pjwd` is searched, the first one first. `pjwctl` is the path of this program, and
/// `path` the value of `PATH`.
fn search_directories(pjwctl: Option<&Path>, path: &OsStr) -> impl Iterator<Item = PathBuf> {
    let beside = pjwctl.and_then(Path::parent).map(Path::to_owned);
    let path: Vec<PathBuf> = std::env::split_paths(path).filter(|dir| dir.is_absolute()).collect();
    beside.into_iter().chain(path).chain(DAEMON_DIRECTORIES.map(PathBuf::from))
}

fn is_program(file: &Path) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_beside_this_one_comes_first() {
        let directories: Vec<_> =
            search_directories(Some(Path::new("/opt/pjw/pjwctl")), OsStr::new("/bin:.:/usr/bin")).collect();
        let expected = ["/opt/pjw", "/bin", "/usr/bin", "/usr/sbin", "/usr/lib/pjw"].map(PathBuf::from);
        assert_eq!(directories, expected);
    }

    #[test]
    fn a_directory_or_a_plain_file_is_no_program() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pjwd");
        std::fs::write(&file, "").unwrap();
        assert!(!is_program(dir.path()) && !is_program(&file) && !is_program(Path::new("/nonexistent")));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(is_program(&file));
    }

    #[test]
    fn a_value_that_begins_with_a_dash_stays_a_value() {
        assert_eq!(option_argument("--config", OsStr::new("-x")), "--config=-x");
    }
}
