//! `pjwctl` with a limit of the stack (`ulimit -s`) that is smaller than the stack it needs.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::run::{granting_daemon, own_cpus};
use super::{answer, assert_refused};

/// `pjwctl` with these arguments, on a stack of at most 100 KiB.
fn with_small_stack(socket: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -s 100 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_pjwctl")]).args(arguments);
    command.env("PJW_SOCKET", socket);
    command
}

#[test]
fn pjwctl_works_with_a_small_limit_of_the_stack() {
    let unused_path = Path::new("/nonexistent/pjwd.sock");
    assert_refused(&answer(&mut with_small_stack(unused_path, &["status"])), "pjwd is not running");
    assert_eq!(answer(&mut with_small_stack(unused_path, &["--help"])).code, Some(0));
    assert_eq!(answer(&mut with_small_stack(unused_path, &["nonsense"])).code, Some(2));
}

#[test]
fn with_a_small_stack_the_command_of_run_keeps_the_process_id_the_signal_mask_and_the_cpus() {
    let daemon = granting_daemon(own_cpus());
    // A shell may block signals at the moment at which another process reads its status. So the command reads its own.
    let script = "echo $$; ulimit -s; exec grep -E '^(SigBlk|Threads|Cpus_allowed_list)' /proc/self/status";
    let run = |script| {
        with_small_stack(&daemon.socket(), &["run", "--cores", "1", "--", "sh", "-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let child = run(script);
    let pid = child.id();
    let expected = format!(
        "{pid}\n100\nThreads:\t1\nSigBlk:\t{:016x}\nCpus_allowed_list:\t{}\n",
        blocked_signals(),
        own_cpus()
    );
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    assert_eq!(run("exit 42").wait().unwrap().code(), Some(42));
}

/// The signals that this test blocks, which a child inherits.
fn blocked_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap()
}

#[test]
fn with_a_small_stack_sigterm_ends_the_instances_of_spawn_and_the_command_of_run() {
    let unused_path = Path::new("/nonexistent/pjwd.sock");
    let script = "echo begun; exec sleep 1000";
    let spawned = terminate_after_first_line(with_small_stack(
        unused_path,
        &["spawn", "--local", "-n", "1", "--", "sh", "-c", script],
    ));
    assert_eq!(spawned.code(), Some(128 + Signal::SIGTERM as i32), "the exit code of the instance");
    let daemon = granting_daemon(own_cpus());
    let run = terminate_after_first_line(with_small_stack(
        &daemon.socket(),
        &["run", "--cores", "1", "--", "sh", "-c", script],
    ));
    assert_eq!(run.signal(), Some(Signal::SIGTERM as i32));
}

/// Starts a command, sends it SIGTERM after its first line, and waits for its end.
fn terminate_after_first_line(mut command: Command) -> ExitStatus {
    let mut child: Child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "begun\n");
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    child.wait().unwrap()
}
