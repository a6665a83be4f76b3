//! The shipped systemd files, checked with the tools of systemd. An unknown key in a unit causes only a warning in the
//! journal of systemd, and may make the unit less safe than its text.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The text of a file in the directory `systemd`.
fn shipped_file(name: &str) -> io::Result<String> {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../systemd").join(name))
}

/// The service with the path of this test program, because the tool checks that the path exists.
fn service() -> io::Result<String> {
    let this_program = std::env::current_exe()?;
    Ok(shipped_file("pjwd.service")?
        .replace("ExecStart=/usr/bin/pjwd", &format!("ExecStart={}", this_program.display())))
}

/// The output of `systemd-analyze verify` for the units. `None` if systemd is not installed. The exit status is not
/// sufficient: an unknown key is only a warning.
fn verify_units(units: &[(&str, String)]) -> io::Result<Option<String>> {
    let directory = tempfile::tempdir()?;
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no"]);
    for (name, text) in units {
        let path: PathBuf = directory.path().join(name);
        fs::write(&path, text)?;
        verify.arg(path);
    }
    match verify.output() {
        Ok(output) => {
            let messages = [output.stdout, output.stderr].concat();
            let messages = String::from_utf8_lossy(&messages).into_owned();
            Ok(Some(if output.status.success() { messages } else { format!("{messages}{}", output.status) }))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The output of a tool that reads a file from standard input. `None` if the tool is not installed.
fn run_with_input(tool: &str, arguments: &[&str], root: &Path, text: &str) -> io::Result<Option<String>> {
    let root = format!("--root={}", root.display());
    let mut command = Command::new(tool);
    command.args(arguments).args([&root, "-"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        child => child?,
    };
    if let Some(mut input) = child.stdin.take() {
        input.write_all(text.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    Ok(Some(if output.status.success() {
        String::new()
    } else {
        format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr))
    }))
}

#[test]
fn systemd_analyze_reports_no_problem_in_the_units() {
    let units = [("pjwd.service", service().unwrap()), ("pjwd.socket", shipped_file("pjwd.socket").unwrap())];
    match verify_units(&units).unwrap() {
        Some(messages) => assert_eq!(messages, ""),
        None => skip("systemd-analyze is not installed"),
    }
}

#[test]
fn systemd_analyze_reports_an_unknown_key_in_a_unit() {
    let wrong = service().unwrap().replace("WatchdogSec=", "WatchdogSecs=");
    match verify_units(&[("pjwd.service", wrong)]).unwrap() {
        Some(messages) => assert!(messages.contains("WatchdogSecs"), "{messages}"),
        None => skip("systemd-analyze is not installed"),
    }
}

#[test]
fn the_service_has_the_capabilities_that_the_daemon_needs() {
    let service = shipped_file("pjwd.service").unwrap();
    for required in [
        "CAP_KILL",
        "CAP_SYS_NICE",
        "CAP_SYS_PTRACE",
        "CAP_DAC_READ_SEARCH",
        "CAP_DAC_OVERRIDE",
        "CAP_NET_ADMIN",
        "AF_NETLINK",
        "AF_UNIX",
        "ProtectControlGroups=no",
    ] {
        assert!(service.contains(required), "{required}");
    }
    let keys: Vec<&str> =
        service.lines().filter_map(|line| line.split_once('=')).map(|(key, _)| key).collect();
    for key_of_hiding in
        ["ProtectProc", "ProcSubset", "PrivateUsers", "PrivateNetwork", "DynamicUser", "User"]
    {
        assert!(
            !keys.contains(&key_of_hiding),
            "{key_of_hiding}= would hide parts of the node from the daemon"
        );
    }
    assert!(
        service.contains("RuntimeDirectoryPreserve=yes"),
        "jobs keep their cores while the daemon is stopped"
    );
}

#[test]
fn the_service_may_serve_metrics_on_loopback_only() {
    let service = shipped_file("pjwd.service").unwrap();
    let value = |key: &str| -> Vec<&str> {
        let values = service.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        values.flat_map(str::split_whitespace).collect()
    };
    assert_eq!(value("RestrictAddressFamilies"), ["AF_UNIX", "AF_NETLINK", "AF_INET", "AF_INET6"]);
    assert_eq!((value("IPAddressDeny"), value("IPAddressAllow")), (vec!["any"], vec!["localhost"]));
    let documented = include_str!("../../../docs/metrics.md");
    let (of_pjwd, directories): (Vec<&str>, Vec<&str>) =
        value("ReadWritePaths").into_iter().partition(|path| *path == "/run");
    assert!(!of_pjwd.is_empty() && !directories.is_empty());
    for directory in directories {
        let path =
            directory.strip_prefix('-').expect("the service starts also if the directory does not exist");
        assert!(documented.contains(&format!("`{path}`")), "{path} is not in docs/metrics.md");
    }
    for key in ["ReadWritePaths=", "IPAddressAllow="] {
        assert!(documented.contains(&format!("\n{key}")), "{key} of a drop-in is not in docs/metrics.md");
    }
}

#[test]
fn systemd_sysusers_and_tmpfiles_create_the_group_and_the_directories() {
    if !nix::unistd::Uid::effective().is_root() {
        skip("only root may make groups and directories of root");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("etc")).unwrap();
    let group =
        run_with_input("systemd-sysusers", &[], root.path(), &shipped_file("pjw.sysusers").unwrap()).unwrap();
    let directory = run_with_input(
        "systemd-tmpfiles",
        &["--create"],
        root.path(),
        &shipped_file("pjw.tmpfiles").unwrap(),
    )
    .unwrap();
    let (Some(group), Some(directory)) = (group, directory) else {
        skip("systemd-sysusers or systemd-tmpfiles is not installed");
        return;
    };
    assert_eq!((group.as_str(), directory.as_str()), ("", ""));
    assert!(fs::read_to_string(root.path().join("etc/group")).unwrap().starts_with("pjw:"));
    assert!(root.path().join("run/pjwd").is_dir());
    assert!(root.path().join("run/pjwd-lock").is_dir());
}

/// Writes to stderr directly, because the captured output of a test is shown only if the test fails.
fn skip(why: &str) {
    let _ = writeln!(io::stderr(), "skipped: {why}");
}
