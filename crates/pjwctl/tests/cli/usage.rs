//! The exit codes and messages of `pjwctl` without a daemon.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{CommandOutput, answer, assert_refused, pjwctl};

const SOCKET_WITHOUT_DAEMON: &str = "/nonexistent/pjwd.sock";

fn without_daemon(arguments: &[&str]) -> CommandOutput {
    answer(&mut pjwctl(Path::new(SOCKET_WITHOUT_DAEMON), arguments))
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
        let answer = without_daemon(arguments);
        assert_refused(&answer, SOCKET_WITHOUT_DAEMON);
        assert!(answer.stderr.contains("start it"), "{answer:?}");
    }
}

#[test]
fn advise_needs_no_daemon_and_says_how_many_items_are_needed() {
    let answer = without_daemon(&[
        "advise",
        "--serial",
        "5m",
        "--item",
        "2s",
        "--workers",
        "8",
        "--items",
        "1000",
        "--json",
    ]);
    assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{answer:?}");
    let advice: serde_json::Value = serde_json::from_str(&answer.stdout).unwrap();
    assert_eq!(
        advice["needed"][2],
        serde_json::json!({ "efficiency": 0.9, "items": 9304, "wall_s": 2626.0 })
    );
    assert_eq!(advice["job"]["wall_s"], 550.0);
    let answer = without_daemon(&["advise", "--serial", "0s", "--item", "1ms"]);
    assert!(answer.code == Some(0) && answer.stdout.contains("core time used"), "{answer:?}");
    let answer = without_daemon(&["advise", "--serial", "1s", "--item", "0s"]);
    assert!(answer.code == Some(2) && answer.stderr.contains("give a time above 0"), "{answer:?}");
}

#[test]
fn the_option_of_the_socket_overrides_the_variable_and_an_empty_variable_is_ignored() {
    assert_refused(&without_daemon(&["--socket", "/nonexistent/other", "status"]), "/nonexistent/other");
    let mut command = pjwctl(Path::new(""), &["status"]);
    let dir = tempfile::tempdir().unwrap();
    let answer = answer(command.env("XDG_RUNTIME_DIR", dir.path()));
    // A daemon may run on this machine, so only a usage error about the variable is wrong.
    assert!(answer.code != Some(2), "{answer:?}");
}

#[test]
fn a_stale_socket_means_that_the_daemon_does_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("stale");
    drop(UnixListener::bind(&socket).unwrap());
    // A child that another test starts at the same time has the socket open too, until it executes its program.
    // Connections succeed until then.
    let begin = Instant::now();
    while UnixStream::connect(&socket).is_ok() {
        assert!(begin.elapsed() < Duration::from_secs(60), "a process still listens on the socket");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_refused(&answer(&mut pjwctl(&socket, &["status"])), "not running");
}

#[test]
fn a_socket_path_of_another_kind_of_file_is_named_as_no_socket() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    for path in [&file, dir.path()] {
        let refused = answer(&mut pjwctl(path, &["status"]));
        assert_refused(
            &refused,
            &format!("{} is not a socket, and pjwd listens on a socket", path.display()),
        );
        assert!(refused.stderr.contains("--socket or PJW_SOCKET"), "{refused:?}");
    }
}

#[test]
fn a_negative_number_is_refused_by_a_sentence_without_a_proposal_that_does_not_help() {
    for (arguments, number) in [
        (&["assign", "a", "--cores", "-1"][..], "-1"),
        (&["assign", "a", "--cores", "1", "--pid", "-71"], "-71"),
        (&["run", "--cores", "-2", "--", "true"], "-2"),
        (&["spawn", "-n", "-3", "--", "true"], "-3"),
        (&["report", "--last", "-5"], "-5"),
        (&["report", "--last", "-1.5"], "-1.5"),
    ] {
        let refused = without_daemon(arguments);
        assert_eq!((refused.code, refused.stdout.as_str()), (Some(2), ""), "{refused:?}");
        assert_eq!(refused.stderr, format!("error: {number} looks like an option: give a value without -\n"));
    }
    let option = without_daemon(&["status", "-x"]);
    assert!(option.code == Some(2) && option.stderr.contains("unexpected argument '-x'"), "{option:?}");
}

#[test]
fn invalid_arguments_have_exit_code_two_and_help_has_exit_code_zero() {
    for arguments in [&["nonsense"][..], &["status", "--nonsense"], &["assign", "a", "--cpus", "0,,1"], &[]] {
        let answer = without_daemon(arguments);
        assert_eq!((answer.code, answer.stdout.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(!answer.stderr.is_empty(), "{arguments:?}");
    }
    for arguments in [&["--help"][..], &["help", "assign"], &["run", "--help"]] {
        let answer = without_daemon(arguments);
        assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        assert!(answer.stdout.contains("Examples:"), "{arguments:?}: {}", answer.stdout);
    }
}

#[test]
fn an_invalid_option_of_a_hook_fails_no_job_unless_the_hook_is_strict() {
    for (arguments, code, expected) in [
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
        let answer = without_daemon(arguments);
        assert_eq!((answer.code, answer.stdout.as_str()), (Some(code), ""), "{answer:?}");
        assert!(answer.stderr.starts_with("pjwctl: hook ") && answer.stderr.contains(expected), "{answer:?}");
        assert_eq!(answer.stderr.lines().count(), 1, "{answer:?}");
    }
    // With exit code 0, the job of a job starter could be lost.
    for arguments in [&["hook", "lsf-job-starer", "--", "sh", "-c", "exit 7"][..], &["hook"]] {
        assert_eq!(without_daemon(arguments).code, Some(2), "{arguments:?}");
    }
    let help = without_daemon(&["hook", "slurm-prolog", "--help"]);
    assert!(help.code == Some(0) && help.stdout.contains("Usage: pjwctl hook"), "{help:?}");
}

#[test]
fn the_arguments_of_a_hook_need_no_dashes_before_them() {
    let started = without_daemon(&[
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
    assert_eq!(without_daemon(&["hook", "sge-prolog", "root"]).code, Some(0));
}

#[test]
fn a_number_that_is_none_or_0_or_too_large_is_refused_in_plain_words() {
    for (line, words) in [
        ("report --last x", "give a number of at least 1"),
        ("report --last 0", "give a number of at least 1"),
        ("provision web --cores 0", "give a number of at least 1"),
        ("assign a --cores 1 --session 0", "give a number of at least 1"),
        ("advise --serial 1s --item 1s --workers 0", "give a number from 1 to 16384"),
        ("spawn -n x -- true", "give a number of at least 1"),
        ("spawn -n 4294967296 -- true", "give a number from 1 to 4294967295"),
        ("report --last 18446744073709551615", "give a number from 1 to 4294967295"),
        ("assign a --cores 4294967296", "give a number of cores up to 4294967295, or all"),
        ("want a 4294967296", "give a number of cores up to 4294967295, or default"),
    ] {
        let refused = without_daemon(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(refused.code, Some(2), "{line}: {refused:?}");
        assert!(refused.stderr.contains(words), "{line}: {refused:?}");
    }
}

#[test]
fn the_version_is_that_of_the_package() {
    assert_eq!(without_daemon(&["--version"]).stdout, format!("pjwctl {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn completions_and_manual_pages_need_no_daemon() {
    assert!(without_daemon(&["completions", "bash"]).stdout.contains("check-config"));
    assert!(without_daemon(&["man"]).stdout.contains(".TH pjwctl 1"));
}

#[test]
fn man_writes_a_page_for_each_command_the_daemon_and_its_configuration() {
    let help =
        r"printf 'pjwd is made up.\n\nIt is.\n\nUsage: pjwd [OPTIONS]\n\nOptions:\n  --odd\n    Oddly\n'";
    let (dir, command) = pjwctl_beside_pjwd(help);
    let man = |arguments: &[&str]| answer(Command::new(command.get_program()).arg("man").args(arguments));
    let (root, done) =
        (dir.path(), CommandOutput { code: Some(0), stdout: String::new(), stderr: String::new() });
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
    let (_dir, mut with_invalid_help) = pjwctl_beside_pjwd("echo nonsense");
    assert_refused(
        &answer(with_invalid_help.args(["man", "--dir", "/nonexistent"])),
        "--help can't be parsed",
    );
}

/// A copy of `pjwctl` in a directory with a `pjwd` that is this shell script, so that no installed `pjwd` is found
/// first.
///
/// A shell writes both files: a file that this process has open for writing cannot be executed while a child that
/// another test forked has it open too.
pub(super) fn pjwctl_beside_pjwd(script: &str) -> (tempfile::TempDir, Command) {
    let dir = tempfile::tempdir().unwrap();
    let write = r#"cp "$1" pjwctl && printf '#!/bin/sh\n%s\n' "$2" > pjwd && chmod 755 pjwd"#;
    let arguments = ["-c", write, "sh", env!("CARGO_BIN_EXE_pjwctl"), script];
    assert!(Command::new("sh").args(arguments).current_dir(dir.path()).status().unwrap().success());
    let command = Command::new(dir.path().join("pjwctl"));
    (dir, command)
}

#[test]
fn check_config_prints_the_result_of_pjwd() {
    let (dir, command) = pjwctl_beside_pjwd("echo \"$@\"; echo 'pjwd: -odd.toml:1:2: wrong' >&2; exit 1");
    std::fs::write(dir.path().join("-odd.toml"), "x").unwrap();
    let check = |arguments: &[&str]| {
        let mut command = Command::new(command.get_program());
        answer(command.current_dir(dir.path()).arg("check-config").args(arguments))
    };
    // A path that begins with a dash must follow `--`.
    assert_eq!(check(&["-odd.toml"]).code, Some(2));
    let expected = CommandOutput {
        code: Some(1),
        stdout: "--check-config --config=-odd.toml\n".into(),
        stderr: "-odd.toml:1:2: wrong\n".into(),
    };
    assert_eq!(check(&["--", "-odd.toml"]), expected);
}

#[test]
fn check_config_reads_a_configuration_from_its_standard_input() {
    let (_dir, mut command) = pjwctl_beside_pjwd("cat");
    let (input, mut writer) = std::io::pipe().unwrap();
    std::io::Write::write_all(&mut writer, b"interval = \"2s\"\n").unwrap();
    drop(writer);
    let output = answer(command.args(["check-config", "/dev/stdin"]).stdin(input));
    assert_eq!((output.code, output.stdout.as_str()), (Some(0), "interval = \"2s\"\n"), "{}", output.stderr);
}

#[test]
fn a_missing_configuration_is_refused_with_a_remedy() {
    assert_refused(
        &without_daemon(&["check-config", "/nonexistent"]),
        "/nonexistent: there is no such file: check the path",
    );
    assert_refused(&without_daemon(&["check-config", "/"]), "this is a directory: give the path of a file");
}

#[test]
fn the_topology_of_another_machine_is_read_by_pjwd() {
    let json = r#"{"packages":1,"numa_nodes":1,"l3":0,"cores":1,"pus":1,"kinds":1,"cpus":"0","tree":[]}"#;
    let script = format!("test \"$*\" = '--topology-json --synthetic=core:1' && echo '{json}'");
    let (_dir, mut command) = pjwctl_beside_pjwd(&script);
    let output_json = answer(command.args(["topology", "--synthetic", "core:1"]));
    assert!(output_json.stdout.starts_with("machine: 1 package"), "{output_json:?}");

    let (_dir, mut command) =
        pjwctl_beside_pjwd("echo 'libxml: noise' >&2; echo 'pjwd: no such file' >&2; exit 1");
    let output_json = answer(command.args(["topology", "--input", "missing.xml", "--json"]));
    let expected =
        CommandOutput { code: Some(1), stdout: String::new(), stderr: "pjwctl: no such file\n".into() };
    assert_eq!(output_json, expected);

    let (_dir, mut command) = pjwctl_beside_pjwd("kill -ABRT $$");
    assert_refused(&answer(command.args(["topology", "--input", "x.xml"])), "hwloc died of signal 6");

    let (_dir, mut command) = pjwctl_beside_pjwd("echo nonsense");
    assert_refused(&answer(command.args(["topology", "--input", "x.xml"])), "can't be parsed");
}

#[test]
fn help_that_cannot_be_written_has_exit_code_one() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let status = pjwctl(Path::new("/none"), &["--help"]).stdout(full).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn the_variable_of_the_socket_is_no_option_in_the_usage_line_of_an_error() {
    let error = without_daemon(&["release"]);
    assert!(error.code == Some(2) && error.stderr.contains("Usage: pjwctl release"), "{error:?}");
    assert!(!error.stderr.contains("--socket"), "{error:?}");
}
