//! `doctor` on this machine, without a daemon and with a daemon of the test.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

use pjw_ipc::call::{Call, Reply};
use pjw_ipc::wire::{Node, Status, Warning};
use serde_json::Value;

use super::daemon::{CallReplies, Daemon};
use super::usage::pjwctl_beside_pjwd;
use super::{answer, pjwctl};

/// The output of `doctor --json`.
fn output_json(socket: &Path) -> Value {
    let answer = answer(&mut pjwctl(socket, &["doctor", "--json"]));
    assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{answer:?}");
    serde_json::from_str(&answer.stdout).unwrap()
}

fn finding<'a>(output_json: &'a Value, code: &str) -> Option<&'a Value> {
    output_json["findings"].as_array().unwrap().iter().find(|finding| finding["code"] == code)
}

fn fact<'a>(output_json: &'a Value, code: &str) -> &'a str {
    let facts = output_json["facts"].as_array().unwrap();
    facts.iter().find(|fact| fact["code"] == code).unwrap()["text"].as_str().unwrap()
}

#[test]
fn doctor_works_without_a_daemon_and_says_how_to_start_one() {
    let output_json = output_json(Path::new("/nonexistent/pjwd.sock"));
    assert!(fact(&output_json, "warden").contains("start it"), "{output_json}");
    for code in ["machine", "kernel", "cgroups", "scheduler", "enforcement"] {
        assert!(!fact(&output_json, code).is_empty(), "{code}: {output_json}");
    }
    for finding in output_json["findings"].as_array().unwrap() {
        for field in ["code", "severity", "text", "remedy", "cpus"] {
            assert!(finding[field].is_string(), "{field}: {finding}");
        }
        assert!(finding["jobs"].is_array() && finding["pids"].is_array(), "{finding}");
        assert!(finding["cpus"].as_str().unwrap().parse::<pjw_core::cpuset::CpuSet>().is_ok(), "{finding}");
    }
}

#[test]
fn doctor_names_the_mistake_in_the_configuration_with_which_pjwd_cannot_start() {
    let mistake = "/etc/pjw/pjwd.toml:3:1: modus: there is no such key";
    // The exit code 2 says that pjwd does not know the option.
    for (code, is_wrong) in [(1, true), (2, false)] {
        let script = format!("test \"$1\" = --check-config && echo 'pjwd: {mistake}' >&2; exit {code}");
        let (_dir, mut command) = pjwctl_beside_pjwd(&script);
        let command = command.env("PJW_SOCKET", "/nonexistent/pjwd.sock").args(["doctor", "--json"]);
        let answer = answer(command);
        assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{answer:?}");
        let output_json: Value = serde_json::from_str(&answer.stdout).unwrap();
        let finding = finding(&output_json, "wrong-configuration");
        assert_eq!(finding.is_some(), is_wrong, "{output_json}");
        let Some(finding) = finding else { continue };
        assert_eq!(finding["severity"], "problem");
        assert!(finding["text"].as_str().unwrap().ends_with(mistake), "{finding}");
        assert!(finding["remedy"].as_str().unwrap().contains("--check-config"), "{finding}");
    }
}

#[test]
fn doctor_checks_the_configuration_file_that_the_unit_of_systemd_names() {
    let script = r#"test "$1 $2" = "--check-config --config=$PWD/a.toml" || exit 1
        echo "pjwd: $PWD/a.toml:3:1: modus: no" >&2; exit 1"#;
    let (dir, mut command) = pjwctl_beside_pjwd(script);
    let dir = dir.path().canonicalize().unwrap();
    let unit = r#"shown="ExecStart={ path=/x/pjwd ; argv[]=/x/pjwd --config $PWD/a.toml ; pid=0 }"
        printf '#!/bin/sh\necho "%s"\n' "$shown" > systemctl; chmod 755 systemctl; : > a.toml"#;
    assert!(Command::new("sh").args(["-c", unit]).current_dir(&dir).status().unwrap().success());
    let path = format!("{}:/usr/bin:/bin", dir.display());
    command.current_dir(&dir).env("PATH", path).env("PJW_SOCKET", "/nonexistent/pjwd.sock");
    let answer = answer(command.args(["doctor", "--json"]));
    assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{answer:?}");
    let output_json: Value = serde_json::from_str(&answer.stdout).unwrap();
    let finding = finding(&output_json, "wrong-configuration").unwrap_or_else(|| panic!("{output_json}"));
    assert!(finding["text"].as_str().unwrap().contains("/a.toml:3:1: modus"), "{finding}");
    assert!(finding["remedy"].as_str().unwrap().contains("pjwctl check-config /"), "{finding}");
}

#[test]
fn a_process_that_checks_the_configuration_is_no_daemon_for_doctor() {
    // A doctor itself runs the script without an input.
    let (dir, mut command) = pjwctl_beside_pjwd("read line");
    let check = || {
        let mut pjwd = Command::new(dir.path().join("pjwd"));
        pjwd.arg("--check-config").stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    };
    let mut checks = [check(), check()];
    let command = command.env("PJW_SOCKET", "/nonexistent/pjwd.sock").args(["doctor", "--json"]);
    let answer = answer(command);
    assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{answer:?}");
    let output_json: Value = serde_json::from_str(&answer.stdout).unwrap();
    let names_a_check = |finding: &&Value| {
        let pids = finding["pids"].as_array().unwrap();
        finding["code"] == "master" && checks.iter().any(|check| pids.contains(&check.id().into()))
    };
    let found = output_json["findings"].as_array().unwrap().iter().find(names_a_check);
    assert_eq!(found, None);
    for check in &mut checks {
        drop(check.stdin.take());
        check.wait().unwrap();
    }
}

#[test]
fn the_report_of_doctor_has_no_colours_in_a_pipe() {
    let answer = answer(&mut pjwctl(Path::new("/nonexistent/pjwd.sock"), &["doctor", "--all"]));
    assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{answer:?}");
    assert!(!answer.stdout.contains('\x1b'), "{answer:?}");
    assert!(answer.stdout.lines().next().unwrap().contains(": "), "{answer:?}");
}

#[test]
fn doctor_reports_the_version_and_the_warnings_of_a_running_daemon() {
    let daemon = Daemon::start(|call| {
        assert!(matches!(call, Call::GetStatus), "doctor only reads: {call:?}");
        let warning = Warning {
            code: "audit".into(),
            job: "slurm:7".into(),
            text: "a \u{1b}[2Jplan broke a promise".into(),
            remedy: "report it".into(),
        };
        let node = Node { cpus: "0".into(), ..Node::default() };
        let status = Status {
            schema: 1,
            version: "99.0".into(),
            mode: "enforce".into(),
            node,
            warnings: vec![warning],
            ..Status::default()
        };
        CallReplies::reply(Reply::Status { status: status.into() })
    });
    let output_json = output_json(&daemon.socket());
    assert!(fact(&output_json, "warden").contains("99.0 runs"), "{output_json}");
    assert_eq!(finding(&output_json, "version").unwrap()["severity"], "advice");
    let audit = finding(&output_json, "audit").unwrap();
    assert_eq!((&audit["severity"], &audit["jobs"][0]), (&"problem".into(), &"slurm:7".into()));
    let shown = answer(&mut pjwctl(&daemon.socket(), &["doctor"])).stdout;
    assert!(shown.contains("\\u{1b}[2Jplan") && !shown.contains('\x1b'), "{shown}");
}

#[test]
fn a_daemon_that_hangs_is_a_finding_of_doctor() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("hangs");
    let _listener = UnixListener::bind(&socket).unwrap();
    let output_json = output_json(&socket);
    let finding = finding(&output_json, "mute-warden").unwrap();
    assert_eq!(finding["severity"], "problem", "{output_json}");
    assert!(finding["text"].as_str().unwrap().contains("has not answered"), "{output_json}");
}
