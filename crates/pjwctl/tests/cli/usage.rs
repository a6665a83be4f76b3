//! Exit codes and messages without a daemon.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{Answer, answer, assert_refused, pjwctl};

const NOWHERE: &str = "/nonexistent/pjwd.sock";

fn alone(arguments: &[&str]) -> Answer {
    answer(&mut pjwctl(Path::new(NOWHERE), arguments))
}

#[test]
fn without_a_daemon_one_line_has_the_path_and_the_command_to_start_it() {
    let commands: [&[&str]; 14] = [
        &["status"],
        &["jobs", "--json"],
        &["show", "a"],
        &["assign", "a", "--cores", "1"],
        &["release", "--all"],
        &["run", "--cores", "1", "--", "true"],
        &["explain", "1"],
        &["plan"],
        &["plan", "--defrag"],
        &["defrag"],
        &["events"],
        &["topology"],
        &["reload"],
        &["status", "--socket", "/nonexistent/pjwd.sock"],
    ];
    for arguments in commands {
        let answer = alone(arguments);
        assert_refused(&answer, NOWHERE);
        assert!(answer.stderr.contains("start it"), "{answer:?}");
    }
}

#[test]
fn advise_needs_no_daemon_and_says_how_many_items_are_needed() {
    let answer =
        alone(&["advise", "--serial", "5m", "--item", "2s", "--workers", "8", "--items", "1000", "--json"]);
    assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{answer:?}");
    let advice: serde_json::Value = serde_json::from_str(&answer.stdout).unwrap();
    assert_eq!(
        advice["needed"][2],
        serde_json::json!({ "efficiency": 0.9, "items": 9304, "wall_s": 2626.0 })
    );
    assert_eq!(advice["job"]["wall_s"], 550.0);
    let answer = alone(&["advise", "--serial", "0s", "--item", "1ms"]);
    assert!(answer.code == Some(0) && answer.stdout.contains("core time used"), "{answer:?}");
    let answer = alone(&["advise", "--serial", "1s", "--item", "0s"]);
    assert!(answer.code == Some(2) && answer.stderr.contains("give a time above 0"), "{answer:?}");
}

#[test]
fn the_option_beats_the_variable_and_an_empty_variable_is_none() {
    assert_refused(&alone(&["--socket", "/nonexistent/other", "status"]), "/nonexistent/other");
    let mut command = pjwctl(Path::new(""), &["status"]);
    let dir = tempfile::tempdir().unwrap();
    let answer = answer(command.env("XDG_RUNTIME_DIR", dir.path()));
    // A daemon may run on this machine. Only an error about the variable would be wrong.
    assert!(answer.code != Some(2), "{answer:?}");
}

#[test]
fn a_stale_socket_is_no_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("stale");
    drop(UnixListener::bind(&socket).unwrap());
    assert_refused(&answer(&mut pjwctl(&socket, &["status"])), "not running");
}

#[test]
fn invalid_arguments_are_exit_code_two_and_help_is_not_an_error() {
    for arguments in [&["nonsense"][..], &["status", "--nonsense"], &["assign", "a", "--cpus", "0,,1"], &[]] {
        let answer = alone(arguments);
        assert_eq!((answer.code, answer.stdout.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(!answer.stderr.is_empty(), "{arguments:?}");
    }
    for arguments in [&["--help"][..], &["help", "assign"], &["run", "--help"]] {
        let answer = alone(arguments);
        assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        assert!(answer.stdout.contains("Examples:"), "{arguments:?}: {}", answer.stdout);
    }
}

#[test]
fn a_mistake_in_the_command_line_of_a_hook_disturbs_no_job() {
    for (arguments, code, mistake) in [
        (
            &["hook", "slurm-prolog", "--tmeout", "3"][..],
            0,
            "unexpected argument '--tmeout' found; the job goes on",
        ),
        (
            &["hook", "slurm-epilog", "--timeout", "soon"],
            0,
            "expected a number of seconds, 0.01 to 60; the job goes on",
        ),
        (
            &["--socket", "/x", "hook", "--nonsense", "pbs-begin", "--", "7"],
            0,
            "'--nonsense' found; the job goes on",
        ),
        (&["hook", "slurm-prolog", "--strict", "--cores", "-1"], 1, "refused, as --strict says"),
        (
            &["--socket=/x", "hook", "lsf-job-starter", "--strict", "--no", "--", "sh", "-c", "exit 7"],
            7,
            "the job goes on",
        ),
    ] {
        let answer = alone(arguments);
        assert_eq!((answer.code, answer.stdout.as_str()), (Some(code), ""), "{answer:?}");
        assert!(answer.stderr.starts_with("pjwctl: hook ") && answer.stderr.contains(mistake), "{answer:?}");
        assert_eq!(answer.stderr.lines().count(), 1, "{answer:?}");
    }
    // An exit code of 0 could lose the job of a starter.
    for arguments in [&["hook", "lsf-job-starer", "--", "sh", "-c", "exit 7"][..], &["hook"]] {
        assert_eq!(alone(arguments).code, Some(2), "{arguments:?}");
    }
    let help = alone(&["hook", "slurm-prolog", "--help"]);
    assert!(help.code == Some(0) && help.stdout.contains("Usage: pjwctl hook"), "{help:?}");
}

#[test]
fn the_arguments_of_a_hook_need_no_dashes_before_them() {
    let started = alone(&[
        "hook",
        "lsf-job-starter",
        "--timeout",
        "0.05",
        "sh",
        "-c",
        "echo $0 $1; exit 7",
        "--",
        "--strict",
    ]);
    assert_eq!((started.code, started.stdout.as_str()), (Some(7), "-- --strict\n"), "{started:?}");
    assert_eq!(alone(&["hook", "sge-prolog", "root"]).code, Some(0));
}

#[test]
fn the_version_is_the_packages() {
    assert_eq!(alone(&["--version"]).stdout, format!("pjwctl {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn completions_and_manual_pages_need_no_daemon() {
    assert!(alone(&["completions", "bash"]).stdout.contains("check-config"));
    assert!(alone(&["man"]).stdout.contains(".TH pjwctl 1"));
}

#[test]
fn manual_pages_are_of_the_commands_the_daemon_and_its_configuration() {
    let help =
        r"printf 'pjwd is made up.\n\nIt is.\n\nUsage: pjwd [OPTIONS]\n\nOptions:\n  --odd\n    Oddly\n'";
    let (dir, command) = beside(help);
    let man = |arguments: &[&str]| answer(Command::new(command.get_program()).arg("man").args(arguments));
    let (root, done) = (dir.path(), Answer { code: Some(0), stdout: String::new(), stderr: String::new() });
    assert_eq!(man(&["--dir", root.to_str().unwrap()]), done);
    for page in ["pjwctl.1", "pjwctl-run.1", "pjwctl-man.1", "pjwd.toml.5"] {
        assert!(root.join(page).exists(), "{page}");
    }
    assert!(std::fs::read_to_string(root.join("pjwd.8")).unwrap().contains("Oddly"));
    let man1 = root.join("man/man1");
    std::fs::create_dir_all(&man1).unwrap();
    assert_eq!(man(&["--dir", man1.to_str().unwrap()]), done);
    for page in ["man1/pjwctl.1", "man5/pjwd.toml.5", "man8/pjwd.8"] {
        assert!(root.join("man").join(page).exists(), "{page}");
    }
    assert_refused(&man(&["--dir", "/nonexistent"]), "/nonexistent/pjwctl.1");
    let (_dir, mut odd) = beside("echo nonsense");
    assert_refused(&answer(odd.args(["man", "--dir", "/nonexistent"])), "--help can't be parsed");
}

/// A copy of pjwctl beside a `pjwd` that is this shell script, so that nothing installed here is found first.
///
/// A shell writes both: a file that this process has open for writing can't be executed as long as a child
/// that another test just forked has it open too.
pub(super) fn beside(script: &str) -> (tempfile::TempDir, Command) {
    let dir = tempfile::tempdir().unwrap();
    let write = r#"cp "$1" pjwctl && printf '#!/bin/sh\n%s\n' "$2" > pjwd && chmod 755 pjwd"#;
    let arguments = ["-c", write, "sh", env!("CARGO_BIN_EXE_pjwctl"), script];
    assert!(Command::new("sh").args(arguments).current_dir(dir.path()).status().unwrap().success());
    let command = Command::new(dir.path().join("pjwctl"));
    (dir, command)
}

#[test]
fn check_config_has_the_result_of_the_daemons_program() {
    let (dir, command) = beside("echo \"$@\"; echo 'pjwd: -odd.toml:1:2: wrong' >&2; exit 1");
    std::fs::write(dir.path().join("-odd.toml"), "x").unwrap();
    let check = |arguments: &[&str]| {
        let mut command = Command::new(command.get_program());
        answer(command.current_dir(dir.path()).arg("check-config").args(arguments))
    };
    // A path that begins with a dash must follow `--`.
    assert_eq!(check(&["-odd.toml"]).code, Some(2));
    let expected = Answer {
        code: Some(1),
        stdout: "--check-config --config=-odd.toml\n".into(),
        stderr: "-odd.toml:1:2: wrong\n".into(),
    };
    assert_eq!(check(&["--", "-odd.toml"]), expected);
}

#[test]
fn a_configuration_that_is_not_there_comes_with_a_remedy() {
    assert_refused(
        &alone(&["check-config", "/nonexistent"]),
        "/nonexistent: there is no such file: check the path",
    );
    assert_refused(&alone(&["check-config", "/"]), "this is a directory: give the path of a file");
}

#[test]
fn another_machines_topology_comes_from_the_daemons_program() {
    let json = r#"{"packages":1,"numa_nodes":1,"l3":0,"cores":1,"pus":1,"kinds":1,"cpus":"0","tree":[]}"#;
    let script = format!("test \"$*\" = '--topology-json --synthetic=core:1' && echo '{json}'");
    let (_dir, mut command) = beside(&script);
    let output_json = answer(command.args(["topology", "--synthetic", "core:1"]));
    assert!(output_json.stdout.starts_with("machine: 1 package"), "{output_json:?}");

    let (_dir, mut command) = beside("echo 'libxml: noise' >&2; echo 'pjwd: no such file' >&2; exit 1");
    let output_json = answer(command.args(["topology", "--input", "missing.xml", "--json"]));
    let expected = Answer { code: Some(1), stdout: String::new(), stderr: "pjwctl: no such file\n".into() };
    assert_eq!(output_json, expected);

    let (_dir, mut command) = beside("kill -ABRT $$");
    assert_refused(&answer(command.args(["topology", "--input", "x.xml"])), "hwloc died of signal 6");

    let (_dir, mut command) = beside("echo nonsense");
    assert_refused(&answer(command.args(["topology", "--input", "x.xml"])), "can't be parsed");
}

#[test]
fn help_that_can_not_be_written_is_a_failure() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let status = pjwctl(Path::new("/none"), &["--help"]).stdout(full).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn the_variable_of_the_socket_is_no_option_in_the_usage_line_of_an_error() {
    let error = alone(&["release"]);
    assert!(error.code == Some(2) && error.stderr.contains("Usage: pjwctl release"), "{error:?}");
    assert!(!error.stderr.contains("--socket"), "{error:?}");
}
