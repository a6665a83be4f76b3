//! How new processes are found: the status says it correctly.

use std::process::Command;

use pjw_ipc::client::Client;
use pjw_tests::daemon::Daemon;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::processes::{Shell, has_two_cores, is_installed};

/// Starts a shell in a pid namespace of its own, as its first process. `None`, with a report, if that is not possible
/// here.
fn start_shell_in_pid_namespace() -> Option<Shell> {
    let words = ["--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"];
    // Root needs no user namespace, and some kernels have none.
    let words = if nix::unistd::Uid::effective().is_root() { &words[2..] } else { &words[..] };
    let attempt =
        is_installed("unshare").then(|| Command::new("unshare").args(words).arg("true").output().unwrap());
    let attempt = attempt?;
    if !attempt.status.success() {
        skip(format_args!("unshare: {}", String::from_utf8_lossy(&attempt.stderr).trim()));
        return None;
    }
    let mut command = Command::new("unshare");
    command.args(words).arg("sh");
    Some(Shell::from_command(command))
}

/// In a pid namespace the kernel accepts the subscription to process events and sends none. If the daemon relied on
/// the events, it would find new processes only at the next rescan.
#[test]
fn in_a_pid_namespace_the_daemon_polls_and_reports_it() {
    let mut daemon = Daemon::start("interval = \"50ms\"\nrescan_interval = \"10m\"\n");
    let Some(mut shell) = start_shell_in_pid_namespace() else { return };
    // The test needs only the lock, the directory and the command of this daemon. The shell starts the daemon that is
    // tested.
    daemon.stop();
    let words: Vec<String> = std::iter::once(daemon.command().get_program())
        .chain(daemon.command().get_args())
        .map(|word| word.to_str().unwrap().to_owned())
        .collect();
    let log = daemon.dir().join("log");
    shell.send_line(&format!("{} 2>>{} &", words.join(" "), log.display()));
    wait_for("the daemon answers", || {
        Client::connect(&daemon.socket()).ok()?.call::<Value>("GetStatus", &json!({})).ok()
    });
    assert_eq!(daemon.status().discovery, "polling");
    assert!(daemon.log().contains("namespace"), "the log has the reason: {}", daemon.log());
    if !has_two_cores() {
        return;
    }
    let fifo = daemon.dir().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let inner = shell.background(&format!("sh -c 'read line <{}; sleep 1000 & wait'", fifo.display()));
    daemon.assign("a", 1, &[inner]).unwrap();
    assert_eq!(daemon.job("a").unwrap().processes, 1);
    std::fs::write(&fifo, "go\n").unwrap();
    wait_until("the new process is a member", || daemon.job("a").is_some_and(|job| job.processes == 2));
    daemon.release("a").unwrap();
}
