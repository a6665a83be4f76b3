//! Errors of pjw, and wrong values in the environment of a hook, never fail a job, unless the hook is strict.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pjw_tests::daemon::Daemon;
use pjw_tests::programs::program_path;
use pjw_tests::stale_socket::leave_stale_socket;
use pjw_tests::waiting::wait_until;

use super::slurm::{EPILOG, PROLOG};
use super::{Call, hook_path, installed_hook, patient_hook, write_executable};
use crate::processes::has_two_cores;

/// The time limit of a hook.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TimeLimit {
    /// That of the shipped hooks, for a hook that gets no answer.
    Default,
    /// A minute, for a hook whose answer comes soon. On a busy machine, that may be later than the default.
    Long,
}

impl TimeLimit {
    /// Copies a shipped hook to `dir`, with this time limit, and returns the path.
    fn hook(self, dir: &Path, name: &str) -> PathBuf {
        match self {
            Self::Default => installed_hook(dir, name),
            Self::Long => patient_hook(dir, name),
        }
    }

    /// The options of `pjwctl hook` for this time limit.
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Default => &[],
            Self::Long => &["--timeout", "60"],
        }
    }
}

/// Returns the call of the prolog, as by Slurm.
fn prolog(dir: &Path, socket: &Path, limit: TimeLimit) -> Call {
    Call::new(limit.hook(dir, "slurm/prolog.sh"))
        .with_environment(PROLOG)
        .with_variable("SLURM_CONF", "/nowhere/slurm.conf")
        .with_socket(socket)
}

fn strict_hook(socket: &Path, hook: &str, limit: TimeLimit) -> Call {
    let call = Call::new(program_path("pjwctl"))
        .with_environment(PROLOG)
        .with_variable("SLURM_CONF", "/nowhere/slurm.conf");
    call.with_socket(socket).args(&["hook", hook, "--strict"]).args(limit.options())
}

/// Checks that each hook ends: with a warning, or, if it is strict, with an error. With the time limit `Long`, it does
/// not wait for the end of the time. With the default, it gives up after 1.2 s at the latest: a connection to a daemon
/// that does not answer has what is left of that.
fn check_job_is_not_delayed(dir: &Path, socket: &Path, limit: TimeLimit, expected: &str) {
    let mut lines = vec![prolog(dir, socket, limit).assert_warning(expected)];
    for (file, environment) in [("slurm/epilog.sh", EPILOG), ("slurm/task-prolog.sh", PROLOG)] {
        let hook = Call::new(limit.hook(dir, file)).with_environment(environment).with_socket(socket);
        lines.push(hook.assert_warning(expected));
    }
    for hook in ["slurm-prolog", "slurm-epilog", "slurm-task-prolog"] {
        lines.push(strict_hook(socket, hook, limit).assert_refusal(expected));
    }
    for line in lines {
        match limit {
            TimeLimit::Long => assert!(!line.contains(" within "), "{line}"),
            TimeLimit::Default => {
                assert!(waited_time(&line).is_some_and(|time| time <= Duration::from_millis(1200)), "{line}");
            }
        }
    }
}

/// Reads how long a hook waited from its line, such as `within 950ms` or `within 1.2s`.
fn waited_time(line: &str) -> Option<Duration> {
    let (_, rest) = line.split_once(" within ")?;
    let end = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.')?;
    let number: f64 = rest[..end].parse().ok()?;
    let unit = if rest[end..].starts_with("ms") { 1e-3 } else { 1.0 };
    Some(Duration::from_secs_f64(number * unit))
}

#[test]
fn without_a_daemon_the_job_starts() {
    let dir = tempfile::tempdir().unwrap();
    let check = |socket: &Path, expected| {
        check_job_is_not_delayed(dir.path(), socket, TimeLimit::Long, expected);
    };
    check(&dir.path().join("none"), "pjwd is not running");
    check(Path::new("/proc/1/none/deeper"), "");
    let killed = dir.path().join("killed");
    leave_stale_socket(&killed);
    check(&killed, "pjwd is not running");
    check(&dir.path().join("x".repeat(200)), "bytes long");
}

#[test]
fn a_daemon_that_hangs_delays_no_job() {
    let daemon = Daemon::start("");
    daemon.while_stopped(|| {
        check_job_is_not_delayed(daemon.dir(), &daemon.socket(), TimeLimit::Default, " within ");
    });
}

#[test]
fn a_prolog_that_gave_up_leaves_no_reservation() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    daemon.while_stopped(|| {
        prolog(daemon.dir(), &daemon.socket(), TimeLimit::Default).assert_warning(" within ");
    });
    wait_until("the daemon reports the request", || daemon.log().contains("hung up"));
    assert!(daemon.status().jobs.is_empty());
    prolog(daemon.dir(), &daemon.socket(), TimeLimit::Long).assert_silent_success();
}

#[test]
fn a_socket_that_accepts_and_never_answers_delays_no_job() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("silent");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming() {
            kept.push(stream);
        }
    });
    check_job_is_not_delayed(dir.path(), &socket, TimeLimit::Default, " within ");
    let starter = Call::new(program_path("pjwctl")).with_socket(&socket).with_variable("LSB_JOBID", "7");
    let output = starter.args(&["hook", "lsf-job-starter", "--strict", "--", "/bin/echo", "runs"]).output();
    assert!(output.status.success() && output.stdout == b"runs\n", "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1, "{output:?}");
}

#[test]
fn an_invalid_answer_delays_no_job() {
    use std::io::{Read, Write};
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("mad");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"what?\0");
        }
    });
    check_job_is_not_delayed(dir.path(), &socket, TimeLimit::Long, "cannot be parsed");
}

#[test]
fn a_refusal_is_reported_and_the_job_starts() {
    let daemon = Daemon::start("");
    let with_count = |call: Call| call.with_variable("SLURM_JOB_CPUS_PER_NODE", "60000");
    let (dir, socket) = (daemon.dir(), daemon.socket());
    with_count(prolog(dir, &socket, TimeLimit::Long)).assert_warning("this machine has");
    with_count(strict_hook(&socket, "slurm-prolog", TimeLimit::Long)).assert_refusal("this machine has");
    assert!(daemon.status().jobs.is_empty());
}

#[test]
fn invalid_values_are_named_and_nothing_is_requested() {
    let daemon = Daemon::start("");
    let long = "9".repeat(100_000);
    let cases = [
        ("SLURM_JOB_ID", "-4", "SLURM_JOB_ID names no job"),
        ("SLURM_JOB_ID", "04", "SLURM_JOB_ID names no job"),
        ("SLURM_JOB_ID", "4\nexport X=1", "SLURM_JOB_ID names no job"),
        ("SLURM_JOB_ID", "4;reboot", "SLURM_JOB_ID names no job"),
        ("SLURM_JOB_ID", &long, "SLURM_JOB_ID names no job"),
        ("SLURM_JOB_UID", "-1", "SLURM_JOB_UID names no user"),
        ("SLURM_JOB_UID", "4294967295", "SLURM_JOB_UID names no user"),
        ("SLURM_JOB_UID", "alice", "SLURM_JOB_UID names no user"),
        ("SLURM_JOB_CPUS_PER_NODE", "0", "a job cannot have 0 cores"),
        ("SLURM_JOB_CPUS_PER_NODE", "65537", "a job cannot have 65537 cores"),
        ("SLURM_JOB_CPUS_PER_NODE", "-2", "is not a count"),
        ("SLURM_JOB_CPUS_PER_NODE", "2\n", "is not a count"),
        ("SLURM_JOB_CPUS_PER_NODE", &long, "is not a count"),
        ("SLURM_JOB_CPUS_PER_NODE", "1(x99999999999)", "is not a count"),
        ("SLURM_JOB_CPUS_PER_NODE", "1,2", "the job has 1"),
    ];
    let prolog = || prolog(daemon.dir(), &daemon.socket(), TimeLimit::Long);
    let strict_hook = || strict_hook(&daemon.socket(), "slurm-prolog", TimeLimit::Long);
    for (name, value, expected) in cases {
        prolog().with_variable(name, value).assert_warning(expected);
        strict_hook().with_variable(name, value).assert_refusal(expected);
    }
    let other = |call: Call| {
        call.with_variable("SLURM_JOB_CPUS_PER_NODE", "1,2").with_variable("SLURM_NODELIST", "a,b")
    };
    other(prolog()).assert_warning("SLURM_NODELIST does not name this node, n1");
    for name in ["SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_ID", "SLURM_JOB_UID"] {
        let call = prolog().without_variable(name);
        let call = call.without_variable("SLURM_JOBID").without_variable("SLURM_UID");
        call.assert_warning(&format!("{name} is not set"));
    }
    assert!(daemon.status().jobs.is_empty());
}

#[test]
fn with_an_empty_environment_a_hook_succeeds_with_a_warning() {
    let hooks =
        ["slurm-prolog", "slurm-epilog", "slurm-task-prolog", "pbs-begin", "torque-end", "flux-prolog"];
    for hook in hooks {
        Call::new(program_path("pjwctl")).args(&["hook", hook]).assert_warning("not set");
    }
}

#[test]
fn without_pjwctl_the_hooks_do_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["slurm/prolog.sh", "slurm/epilog.sh", "slurm/task-prolog.sh"] {
        let text =
            std::fs::read_to_string(hook_path(name)).unwrap().replace("/usr/bin/pjwctl", "/nowhere/pjwctl");
        let file = dir.path().join("hook");
        std::fs::write(&file, text).unwrap();
        Call::new("/bin/sh").args(&[file.to_str().unwrap()]).with_environment(PROLOG).assert_silent_success();
    }
}

#[test]
fn a_broken_pjwctl_drains_no_node() {
    let dir = tempfile::tempdir().unwrap();
    let broken_program = dir.path().join("pjwctl");
    for (code, expected) in [(2, 0), (127, 0), (134, 0), (1, 1), (0, 0)] {
        write_executable(&broken_program, &format!("#!/bin/sh\nexit {code}\n"));
        let broken = installed_hook(dir.path(), "slurm/epilog.sh");
        let text = std::fs::read_to_string(&broken).unwrap();
        write_executable(
            &broken,
            &text.replace(program_path("pjwctl").to_str().unwrap(), broken_program.to_str().unwrap()),
        );
        assert_eq!(
            Call::new(&broken).with_environment(EPILOG).output().status.code(),
            Some(expected),
            "{code}"
        );
    }
}
