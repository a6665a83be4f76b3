//! Signals of a terminal to `pjwctl spawn`, and signals that it was started to ignore.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use pjw_tests::programs::program_path;
use pjw_tests::waiting::{wait_until, wait_until_empty};

use super::killed::{MARK, marked_processes};
use super::{output_in_time, text};
use crate::processes::{KillOnDrop, is_ended, is_installed, is_root};

/// Starts `pjwctl spawn --local` with these words as the leader of a session with a terminal of its own: script(1) holds
/// the other end. Returns script when two instances have made the files `begun.0` and `begun.1`.
fn in_terminal(dir: &Path, words: &str, mark: &str) -> Child {
    let line =
        format!("exec env --default-signal {} spawn --local {words}", program_path("pjwctl").display());
    let mut script = Command::new("script");
    script.args(["-qec", &line, "/dev/null"]).env(MARK, mark).env("SHELL", "/bin/sh").current_dir(dir);
    // Older versions have a second process.
    script.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
    let script = script.spawn().unwrap();
    wait_until("both instances have begun", || {
        ["begun.0", "begun.1"].iter().all(|name| dir.join(name).exists())
    });
    script
}

#[test]
fn a_terminal_that_is_closed_ends_the_instances_of_a_session_leader() {
    if !is_installed("script") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mark = format!("hangup-{}", std::process::id());
    let mut script = in_terminal(dir.path(), "-n 2 -- sh -c ': >begun.%r; exec sleep 1000'", &mark);
    killpg(Pid::from_raw(script.id().cast_signed()), Signal::SIGKILL).unwrap();
    script.wait().unwrap();
    wait_until_empty("pjwctl and its instances end", || marked_processes(&mark));
}

#[test]
fn a_key_of_the_terminal_reaches_an_instance_in_a_process_group_of_its_own_too() {
    if !is_installed("script") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mark = format!("key-{}", std::process::id());
    // setsid(1) makes a process group. So does timeout(1), but a signal during its fork ends it without its child.
    std::fs::write(
        dir.path().join("multi"),
        "0 setsid sh -c ': >begun.0; exec sleep 1000'\n1 sh -c ': >begun.1; exec sleep 1000'\n",
    )
    .unwrap();
    let mut script = in_terminal(dir.path(), "--multi multi", &mark);
    let mut keyboard = script.stdin.take().unwrap();
    keyboard.write_all(b"\x03").unwrap();
    wait_until_empty("pjwctl and its instances end", || marked_processes(&mark));
    drop(keyboard);
    script.wait().unwrap();
}

#[test]
fn a_signal_that_pjwctl_was_started_to_ignore_is_for_no_instance() {
    // The instance does not ignore it.
    let script = "trap 'exit 7' USR1; kill -HUP $PPID; kill -INT $PPID; kill -USR1 $PPID; while :; do sleep 0.01; done";
    let mut ignoring = Command::new("env");
    ignoring
        .arg("--ignore-signal=HUP,INT")
        .arg(program_path("pjwctl"))
        .args(["spawn", "--local", "-n", "1", "--"]);
    ignoring.args(["env", "--default-signal", "sh", "-c", script]);
    let output = output_in_time(&mut ignoring, "pjwctl ends");
    assert_eq!(output.status.code(), Some(7), "{}", text(&output.stderr));
}

#[test]
fn an_instance_that_changes_its_user_outlives_a_killed_pjwctl_as_documented() {
    if !is_root() {
        return;
    }
    if !is_installed("setpriv") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mark = format!("user-{}", std::process::id());
    let file = dir.path().join("multi");
    std::fs::write(&file, "0 setpriv --reuid 65534 --clear-groups sleep 1000\n1 sleep 1000\n").unwrap();
    let mut pjwctl = Command::new(program_path("pjwctl"));
    pjwctl.args(["spawn", "--local", "--multi"]).arg(&file).env(MARK, &mark).stdin(Stdio::null());
    let mut pjwctl = pjwctl.spawn().unwrap();
    let mut sleeps = Vec::new();
    wait_until("both sleep", || {
        sleeps = marked_processes(&mark);
        sleeps.retain(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n")
        });
        sleeps.len() == 2
    });
    let uid = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let (others, own): (Vec<u32>, Vec<u32>) =
        sleeps.into_iter().partition(|pid| uid(pid).contains("Uid:\t65534"));
    let other = KillOnDrop(others[0]);
    kill(Pid::from_raw(pjwctl.id().cast_signed()), Signal::SIGKILL).unwrap();
    pjwctl.wait().unwrap();
    wait_until("the other instance ends", || is_ended(own[0]));
    assert!(!is_ended(other.0), "docs/spawn.md says that it lives on");
}
