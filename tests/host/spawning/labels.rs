//! The labelled output of `pjwctl spawn`: long lines, and a standard output that takes no more.

use std::fs::File;
use std::io::{PipeReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use pjw_tests::programs::program_path;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until};

use super::{local, text};
use crate::processes::{KillOnDrop, is_ended, is_installed};

/// `pjwctl spawn --local --label` of a line for sh(1), with this standard output.
fn labelled(instances: &str, script: &str) -> Command {
    let mut pjwctl = Command::new(program_path("pjwctl"));
    pjwctl.args(["spawn", "--local", "-n", instances, "--label", "--", "sh", "-c", script]);
    pjwctl
}

#[test]
fn a_long_labelled_line_stays_one_line() {
    let output = local(
        "-n 2 --label --",
        &["sh", "-c", "for i in 1 2 3; do head -c 200000 /dev/zero | tr '\\0' x; echo; done"],
    );
    let text = text(&output.stdout);
    assert_eq!(text.lines().count(), 6);
    for line in text.lines() {
        let (rank, line) = line.split_once(": ").unwrap();
        assert!(["0", "1"].contains(&rank) && line.len() == 200_000, "{rank}: {}", line.len());
    }
}

#[test]
fn labelled_output_that_cannot_be_written_is_told_once_and_the_instances_go_on() {
    let dir = tempfile::tempdir().unwrap();
    for (name, script) in [
        ("one line", "echo important; echo done >%r"),
        // More than the pipe takes.
        ("many lines", "seq 100000 && echo done >%r"),
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut pjwctl = labelled("2", script);
        pjwctl.current_dir(&dir).stdin(Stdio::null()).stdout(full).stderr(Stdio::piped());
        let output = pjwctl.spawn().unwrap().wait_with_output().unwrap();
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{name}: {error}");
        let begin =
            "pjwctl: can't write the output of the instances to standard output: No space left on device";
        assert!(error.starts_with(begin), "{name}: {error}");
        for rank in ["0", "1"] {
            let file = dir.path().join(rank);
            assert_eq!(std::fs::read_to_string(&file).unwrap_or_default(), "done\n", "{name}: {error}");
            std::fs::remove_file(file).unwrap();
        }
    }
}

/// A pipe whose writing end does not block.
fn nonblocking_pipe() -> (PipeReader, OwnedFd) {
    let (reader, writer) = std::io::pipe().unwrap();
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    (reader, writer.into())
}

/// Whether the pipe with this writing end takes no more.
fn is_full(writer: &OwnedFd) -> bool {
    let mut room = [PollFd::new(writer.as_fd(), PollFlags::POLLOUT)];
    poll(&mut room, PollTimeout::ZERO).unwrap() == 0
}

#[test]
fn labelled_output_waits_for_a_slow_reader_also_if_its_pipe_does_not_block() {
    for options in ["--label", "--json"] {
        let (mut reader, writer) = nonblocking_pipe();
        let own_end = writer.try_clone().unwrap();
        let mut pjwctl = Command::new(program_path("pjwctl"));
        // The result of so many instances is longer than a pipe, too.
        let instances = if options == "--json" { "600" } else { "2" };
        pjwctl.args(["spawn", "--local", "-n", instances, options, "--", "sh", "-c"]);
        pjwctl.arg(if options == "--json" { "exit 0" } else { "seq 100000" });
        let child = pjwctl.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        // The command has the writing end too.
        drop(pjwctl);
        wait_until("the pipe is full", || is_full(&own_end));
        drop(own_end);
        let mut printed = String::new();
        reader.read_to_string(&mut printed).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{options}: {}", text(&output.stderr));
        match options {
            "--label" => assert_eq!(printed.lines().count(), 200_000),
            _ => assert!(printed.len() > 65_536 && printed.ends_with("}\n"), "{}", printed.len()),
        }
    }
}

#[test]
fn a_reader_that_takes_nothing_holds_up_no_signal() {
    let dir = tempfile::tempdir().unwrap();
    for (options, script, errors_too) in [
        ("-n 2 --label", ": >begun.%r; exec yes", false),
        ("-n 2 --label", ": >begun.%r; exec yes", true),
        ("-n 600 --json", "exit 0", false),
    ] {
        let case = format!("{options}, {errors_too}");
        let (reader, writer) = std::io::pipe().unwrap();
        let own_end: OwnedFd = writer.try_clone().unwrap().into();
        let mut pjwctl = Command::new(program_path("pjwctl"));
        pjwctl.args(["spawn", "--local"]).args(options.split(' ')).args(["--", "sh", "-c", script]);
        pjwctl.current_dir(&dir);
        let errors = if errors_too { Stdio::from(writer.try_clone().unwrap()) } else { Stdio::piped() };
        let child = pjwctl.stdin(Stdio::null()).stdout(writer).stderr(errors).spawn().unwrap();
        let end = KillOnDrop(child.id());
        let begun = ["begun.0", "begun.1"].map(|name| dir.path().join(name));
        if options.contains("--label") {
            // One instance fills the pipe alone, and the signal keeps the other one from starting if it is late.
            wait_until("both instances have begun", || begun.iter().all(|file| file.exists()));
            begun.iter().for_each(|file| std::fs::remove_file(file).unwrap());
        }
        wait_until("the pipe is full", || is_full(&own_end));
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
        wait_until(&format!("pjwctl ends: {case}"), || is_ended(child.id()));
        drop(end);
        let output = child.wait_with_output().unwrap();
        let error = text(&output.stderr);
        if options.contains("--label") {
            assert_eq!(output.status.code(), Some(1), "{case}: {error}");
            let lines = ["instance 0 ", "instance 1 ", "standard output takes no more"];
            assert!(errors_too || lines.iter().all(|line| error.contains(line)), "{case}: {error}");
        } else {
            // No instance is left, so the signal has its usual effect.
            assert_eq!(output.status.signal(), Some(15), "{case}: {error}");
        }
        drop(reader);
    }
}

/// The terminal of pjwctl takes no more, because script(1) waits for the reader of its own output.
#[test]
fn a_terminal_that_takes_nothing_holds_up_no_signal() {
    if !is_installed("script") {
        return;
    }
    let has_option = Command::new("env").args(["--default-signal", "true"]).output();
    if !has_option.is_ok_and(|output| output.status.success()) {
        skip("env(1) has no option --default-signal here");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    let own_end: OwnedFd = writer.try_clone().unwrap().into();
    let line = format!(
        "echo $$ >pid; exec env --default-signal {} spawn --local -n 2 --label -- yes",
        program_path("pjwctl").display()
    );
    let mut command = Command::new("script");
    command.args(["-qec", &line, "/dev/null"]).env("SHELL", "/bin/sh").current_dir(&dir).process_group(0);
    let mut script = command.stdin(Stdio::piped()).stdout(writer).spawn().unwrap();
    // The command has the writing end too.
    drop(command);
    let pid: u32 = wait_for("pjwctl is executed", || {
        std::fs::read_to_string(dir.path().join("pid")).ok()?.trim().parse().ok()
    });
    let end = KillOnDrop(pid);
    let sleeps = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" S"))
    };
    // pjwctl has always something to print, except if the terminal takes nothing.
    let mut asleep = 0;
    wait_until("the terminal takes nothing", || {
        asleep = if is_full(&own_end) && sleeps() { asleep + 1 } else { 0 };
        asleep == 20
    });
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM).unwrap();
    wait_until("pjwctl ends", || is_ended(pid));
    drop(end);
    killpg(Pid::from_raw(script.id().cast_signed()), Signal::SIGKILL).unwrap();
    script.wait().unwrap();
    drop(reader);
}

/// Runs a command that may not end by itself with this standard output. Returns its exit code and its standard error.
fn ended_in_time(mut pjwctl: Command, stdout: impl Into<Stdio>) -> (Option<i32>, String) {
    pjwctl.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
    let child = pjwctl.spawn().unwrap();
    let end = KillOnDrop(child.id());
    wait_until("pjwctl ends", || is_ended(child.id()));
    // Before the process is waited for: after that, its process id may be that of another process.
    drop(end);
    let output = child.wait_with_output().unwrap();
    (output.status.code(), text(&output.stderr))
}

#[test]
fn instances_end_if_the_reader_of_their_labelled_output_has_closed_its_pipe() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let (code, error) = ended_in_time(labelled("2", "exec yes"), writer);
    assert!(code == Some(141) && !error.contains("can't write"), "{code:?}: {error}");
}

#[test]
fn an_endless_labelled_output_does_not_hold_up_signals() {
    let dir = tempfile::tempdir().unwrap();
    // The output of instance 0 has failed when more than a pipe takes was read of it.
    let script = "[ %r = 0 ] && { seq 100000; : >read; exec yes; }; \
                  while [ ! -e read ]; do sleep 0.01; done; kill $PPID; exec sleep 1000";
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut pjwctl = labelled("2", script);
    pjwctl.current_dir(&dir);
    let (code, error) = ended_in_time(pjwctl, full);
    assert_eq!(code, Some(1), "{error}");
    for rank in ["instance 0", "instance 1"] {
        let line = error.lines().find(|line| line.contains(rank)).unwrap_or_default();
        assert!(line.ends_with("was ended by signal 15"), "{error}");
    }
}
