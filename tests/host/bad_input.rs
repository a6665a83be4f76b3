//! Wrong input gets a clear error, and nothing is lost.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use pjw_tests::daemon::Daemon;
use pjw_tests::programs::program_path;
use pjw_tests::skipping::skip;
use pjw_tests::stale_socket::leave_stale_socket;
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::processes::{Shell, has_two_cores, is_installed, is_root, mask};

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn check_refused(daemon: &Daemon, args: &[&str], expected: &str) {
    let output = daemon.pjwctl(args);
    let stderr = stderr_of(&output);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{args:?}: {output:?}");
    assert!(stderr.contains(expected), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{args:?}: {output:?}");
    assert!(stderr.len() < 1000, "{args:?}: {} bytes", stderr.len());
}

#[test]
fn invalid_requests_are_refused() {
    let daemon = Daemon::start("");
    let shell = Shell::start();
    let before = mask(shell.pid());
    let long = "x".repeat(10_000);
    let pid = shell.pid().to_string();
    let mut ended = Command::new("true").spawn().unwrap();
    let ended_pid = ended.id().to_string();
    ended.wait().unwrap();
    check_refused(&daemon, &["assign", "a", "--cores", "0", "--pid", &pid], "at least 1");
    check_refused(&daemon, &["assign", "a", "--cores", "99999", "--pid", &pid], "this machine has");
    check_refused(&daemon, &["assign", "a", "--cores", "-1"], "");
    check_refused(&daemon, &["assign", "a", "--cores", "two"], "");
    check_refused(&daemon, &["assign", "a"], "");
    check_refused(&daemon, &["assign", "a", "--cores", "1", "--within-job", "nodes"], "rr, ll, fill, packed");
    let call = json!({ "job": "a", "cores": 1, "within_job": "nodes" });
    let refused = daemon.call::<Value>("Assign", &call).unwrap_err().to_string();
    assert!(refused.contains("within_job"), "{refused}");
    check_refused(&daemon, &["assign", "a", "--cores", "1", "--pid", &ended_pid], "no process");
    check_refused(&daemon, &["assign", "a", "--cores", "1", "--pid", "1"], "");
    check_refused(&daemon, &["assign", "a", "--cores", "1", "--pid", "2"], "");
    check_refused(
        &daemon,
        &["assign", "a", "--cores", "1", "--pid", &daemon.pid().to_string()],
        "a process of pjwd",
    );
    check_refused(&daemon, &["assign", &long, "--cores", "1"], "at most 128");
    check_refused(&daemon, &["assign", "a b;\u{1b}[2J", "--cores", "1"], "letters, digits and");
    check_refused(&daemon, &["assign", "slrm:1", "--cores", "1"], "not a source");
    for list in ["", "0,,1", "0,0", "3-1", "a", "0-99999999", "70000", "0-3:2", "-"] {
        check_refused(&daemon, &["assign", "a", &format!("--cpus={list}")], "");
    }
    check_refused(&daemon, &["assign", "a", "--cpus", "0,60000"], "not on this machine");
    check_refused(&daemon, &["release", "nobody"], "no job manual:nobody");
    check_refused(&daemon, &["show", "nobody"], "no job");
    check_refused(&daemon, &["explain", "nobody"], "no job");
    check_refused(&daemon, &["explain", "4194304"], "no process");
    assert!(daemon.status().jobs.is_empty());
    assert_eq!(mask(shell.pid()), before);
}

fn check_start_refused(args: &[&str], expected: &str) {
    let output =
        Command::new(program_path("pjwd")).arg("--beside").args(args).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {output:?}");
    assert!(stderr_of(&output).contains(expected), "{args:?}: {}", stderr_of(&output));
}

#[test]
fn unusable_socket_and_state_paths_are_refused_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let state = path("state");
    check_start_refused(&["--socket", &path(""), "--state-dir", &state], "is a directory, not a socket");
    std::fs::write(path("file"), "precious").unwrap();
    check_start_refused(&["--socket", &path("file"), "--state-dir", &state], "is a file, not a socket");
    assert_eq!(std::fs::read_to_string(path("file")).unwrap(), "precious");
    check_start_refused(&["--socket", "/proc/pjwd.sock", "--state-dir", &state], "/proc/pjwd.sock");
    check_start_refused(&["--socket", &path("s"), "--state-dir", "/proc/pjwd"], "/proc/pjwd");
    check_start_refused(&["--socket", &path("s"), "--state-dir", &path("file")], "file");
    check_start_refused(
        &["--config", &path("none.toml"), "--socket", &path("s"), "--state-dir", &state],
        "No such file",
    );
}

#[test]
fn a_start_with_too_few_descriptors_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut shell = Command::new("sh");
    // Without -H or -S both limits are set.
    let line = "ulimit -n 24 && exec \"$0\" --beside --socket \"$1/s\" --state-dir \"$1/state\"";
    shell.args(["-c", line]).arg(program_path("pjwd")).arg(dir.path()).stdin(Stdio::null());
    let output = shell.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = stderr_of(&output);
    assert!(error.contains("at most 24 files may be open (RLIMIT_NOFILE), and pjwd needs"), "{error}");
    assert!(error.contains("raise the hard limit (ulimit -Hn"), "{error}");
    assert!(!dir.path().join("s").exists());
}

#[test]
fn a_start_on_the_socket_of_another_daemon_is_refused_and_leaves_no_new_directory() {
    let daemon = Daemon::start("");
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(program_path("pjwd"));
    command.args(["--beside", "--socket"]).arg(daemon.socket());
    command.arg("--state-dir").arg(dir.path().join("new/state")).stdin(Stdio::null());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = stderr_of(&output);
    assert!(error.contains("pjwd is running already as process"), "{error}");
    assert!(!dir.path().join("new").exists());
}

#[test]
fn a_daemon_with_the_least_descriptors_refuses_connections_and_keeps_enough_for_itself() {
    const LIMIT: usize = 144;
    let line = format!("ulimit -n {LIMIT} && exec \"$@\"");
    let daemon = Daemon::start_by(&["sh", "-c", &line, "sh"]);
    assert!(daemon.log().contains("clients can have 32 connections instead of"), "{}", daemon.log());
    let mut connections: Vec<UnixStream> =
        (0..100).map(|_| UnixStream::connect(daemon.socket()).unwrap()).collect();
    let last = connections.last_mut().unwrap();
    last.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut refusal = String::new();
    last.read_to_string(&mut refusal).unwrap();
    assert!(refusal.contains("too many connections"), "{refusal}");
    let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count();
    assert!(open + 16 < LIMIT, "{open} descriptors are open");
    drop(connections);
    wait_until("a connection is free", || daemon.call::<Value>("GetStatus", &json!({})).is_ok());
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let warnings = daemon.status().warnings;
    let is_missed = |code: &str| code == "core-map" || code == "unseen";
    assert!(!warnings.iter().any(|warning| is_missed(&warning.code)), "{warnings:?}");
}

#[test]
fn a_second_daemon_on_the_same_socket_names_the_process_of_the_first() {
    let daemon = Daemon::start("");
    let output = daemon.command().output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr_of(&output).contains(&format!("as process {}", daemon.pid())), "{}", stderr_of(&output));
    assert_eq!(daemon.status().pid, daemon.pid(), "the first daemon runs on");
}

#[test]
fn a_stale_socket_and_a_damaged_state_file_do_not_prevent_the_start() {
    let mut daemon = Daemon::start("");
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    daemon.kill();
    assert!(daemon.socket().exists(), "a killed daemon leaves its socket");
    daemon.spawn();
    assert!(daemon.job("a").is_some());
    daemon.stop();
    std::fs::write(daemon.state_dir().join("state.json"), "}{ damaged").unwrap();
    leave_stale_socket(&daemon.socket());
    daemon.spawn();
    assert!(daemon.log().contains("can't be understood"));
    assert!(daemon.state_dir().join("state.json.unreadable").exists());
    // The cpuset or masks of the job are still in force. A new request for the job gets the same cores.
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    assert_eq!(mask(shell.pid()), cpus);
}

#[test]
fn bad_configurations_are_refused_with_line_and_column() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pjwd.toml");
    let name = file.to_str().unwrap();
    for (text, expected) in [
        ("intervall = \"1s\"\n", "pjwd.toml:1:1: intervall: there is no such key"),
        ("\nmode = 3\n", "pjwd.toml:2:8"),
        ("housekeeping = \"0,0\"\n", "pjwd.toml:1:16"),
        ("housekeeping = \"0-65535\"\n", "pjwd.toml:1:16"),
        ("[[[\n", "pjwd.toml:1:"),
    ] {
        std::fs::write(&file, text).unwrap();
        check_start_refused(&["--config", name, "--check-config"], expected);
        check_start_refused(&["--config", name], expected);
    }
    std::fs::write(&file, "housekeeping = \"\"\n").unwrap();
    let output =
        Command::new(program_path("pjwd")).args(["--config", name, "--check-config"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Whether a file system can be mounted in a mount namespace of its own. Many containers forbid that, also to root.
/// If not, reports that the test is skipped.
fn can_mount() -> bool {
    if !is_installed("unshare") {
        return false;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = format!("mount -t tmpfs -o size=64k pjw-test {}", dir.path().display());
    let attempt = Command::new("unshare").args(["--mount", "sh", "-c", &script]).output().unwrap();
    if !attempt.status.success() {
        skip(format_args!("no file system may be mounted here: {}", stderr_of(&attempt).trim()));
    }
    attempt.status.success()
}

/// A daemon with a small file system as its state directory, in a mount namespace of its own. After the daemon has
/// ended, `pjwd --release-all` runs there if `with_undo`.
struct SmallDisk {
    daemon: Daemon,
    child: std::process::Child,
    pid: nix::unistd::Pid,
    filler: String,
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal_daemon(nix::sys::signal::Signal::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

impl SmallDisk {
    fn start(with_undo: bool) -> Self {
        // Reports of ended jobs would give up space of the full disk when the oldest are dropped.
        let mut daemon = Daemon::start("interval = \"50ms\"\nreport_keep = 0\n");
        daemon.stop();
        let state = daemon.state_dir();
        let command = daemon.command();
        let words: Vec<String> = std::iter::once(command.get_program())
            .chain(command.get_args())
            .map(|word| word.to_str().unwrap().to_owned())
            .collect();
        let words = words.join(" ");
        let run = if with_undo {
            format!("{{ {words}; {words} --release-all; }}")
        } else {
            format!("exec {words}")
        };
        // The core maps are on another disk, because the end of a job gives up the space of its core map.
        let jobs = state.join("jobs");
        let (state_text, jobs_text) = (state.display(), jobs.display());
        let script = format!(
            "mount -t tmpfs -o size=64k pjw-test {state_text} && mkdir {jobs_text} && \
             mount -t tmpfs -o mode=755 pjw-jobs {jobs_text} && {run}"
        );
        let log = std::fs::File::options().append(true).create(true).open(daemon.dir().join("log")).unwrap();
        let child = Command::new("unshare")
            .args(["--mount", "sh", "-c", &script])
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        wait_for("pjwd answers", || {
            let mut client = pjw_ipc::client::Client::connect(&daemon.socket()).ok()?;
            client.call::<Value>("GetStatus", &json!({})).ok()
        });
        let filler = format!("/proc/{}/root{}/filler", child.id(), state.display());
        let pid = nix::unistd::Pid::from_raw(daemon.status().pid.cast_signed());
        Self { daemon, child, pid, filler }
    }

    /// Fills the disk, with the records of this job in the end. Returns the refusal of the first one for which there is
    /// no space.
    fn fill(&self, job: &str) -> String {
        let _ = std::fs::write(&self.filler, vec![0u8; 1 << 20]);
        let job = self.daemon.job_id(job);
        let mut client = pjw_ipc::client::Client::connect(&self.daemon.socket()).unwrap();
        let refusal = (0..5000u32)
            .find_map(|n| client.call::<Value>("Want", &json!({ "job": job, "cores": n % 2 })).err());
        // What the daemon gave up after the failure.
        let mut filler = std::fs::File::options().append(true).open(&self.filler).unwrap();
        let _ = filler.write_all(&[0; 1 << 16]);
        refusal.expect("the disk becomes full").to_string()
    }

    fn journal_warning(&self) -> Option<String> {
        let warnings = self.daemon.status().warnings.into_iter();
        warnings.filter(|warning| warning.code == "journal").map(|warning| warning.text).next()
    }

    fn signal_daemon(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(self.pid, signal).unwrap();
    }
}

/// A full disk with the state: changes that can't be recorded are refused, existing jobs stay, and the daemon
/// recovers by itself.
#[test]
fn on_a_full_disk_requests_are_refused_and_no_job_is_lost() {
    if !is_root() || !has_two_cores() || !can_mount() {
        return;
    }
    let mut disk = SmallDisk::start(false);
    let shells = [Shell::start(), Shell::start()];
    let cpus = disk.daemon.assign("a", 1, &[shells[0].pid()]).unwrap();
    let before = mask(shells[1].pid());
    let refusals = [disk.fill("a"), disk.daemon.assign("b", 1, &[shells[1].pid()]).unwrap_err()];
    for refusal in refusals {
        assert!(refusal.contains("can't be recorded") && refusal.contains("No space left"), "{refusal}");
    }
    assert_eq!((mask(shells[0].pid()), mask(shells[1].pid())), (cpus.clone(), before));
    assert!(disk.daemon.job("a").is_some_and(|job| job.cpus == cpus.to_string()));
    let released = disk.daemon.pjwctl(&["release", "--all"]);
    assert!(released.status.success(), "{released:?}");
    assert_eq!(mask(shells[0].pid()), mask(shells[1].pid()), "a release needs no space");
    std::fs::remove_file(&disk.filler).unwrap();
    wait_until("the warning is gone", || disk.journal_warning().is_none());
    disk.daemon.assign("b", 1, &[shells[1].pid()]).unwrap();
    disk.daemon.release("b").unwrap();
    disk.signal_daemon(nix::sys::signal::Signal::SIGTERM);
    disk.child.wait().unwrap();
}

/// What a release changes is in the journal already, so it needs no space.
#[test]
fn on_a_full_disk_jobs_are_released_also_after_the_daemon_was_killed() {
    if !is_root() || !has_two_cores() || !can_mount() {
        return;
    }
    // The record of the release of the first job is longer than any record that `fill` writes: no gap is left for it.
    let names = ["one".repeat(33), "two".to_owned()];
    let shells = [Shell::start(), Shell::start()];
    let before = shells.each_ref().map(|shell| mask(shell.pid()));
    let mut disk = SmallDisk::start(true);
    for (name, shell) in names.iter().zip(&shells) {
        let cpus = disk.daemon.assign(name, 1, &[shell.pid()]).unwrap();
        assert_eq!(mask(shell.pid()), cpus);
    }
    disk.fill(&names[1]);
    disk.daemon.release(&names[0]).unwrap();
    disk.daemon.check_after_reply(&disk.daemon.job_id(&names[0]), &before[0], || mask(shells[0].pid()));
    assert!(disk.daemon.job(&names[0]).is_none());
    let warning = wait_for("the status has a warning", || disk.journal_warning());
    assert!(warning.contains("jobs are only released") && warning.contains("No space left"), "{warning}");
    disk.signal_daemon(nix::sys::signal::Signal::SIGKILL);
    assert!(disk.child.wait().unwrap().success(), "{}", disk.daemon.log());
    assert_eq!(shells.each_ref().map(|shell| mask(shell.pid())), before, "{}", disk.daemon.log());
    // The next pjwd did not know of the first release, and took up both jobs.
    for name in &names {
        let released = format!("{} released\n", disk.daemon.job_id(name));
        assert!(disk.daemon.log().contains(&released), "{released}{}", disk.daemon.log());
    }
}

/// Without the id of the boot, the records of an earlier daemon would count as those of another boot and be
/// overwritten.
#[test]
fn a_start_without_a_boot_id_is_refused_and_the_state_is_kept() {
    if !is_root() || !can_mount() {
        return;
    }
    let mut daemon = Daemon::start("");
    let shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    daemon.kill();
    let files =
        || ["journal.jsonl", "state.json"].map(|name| std::fs::read(daemon.state_dir().join(name)).ok());
    let before = files();
    let empty = daemon.dir().join("empty");
    std::fs::write(&empty, "").unwrap();
    let command = daemon.command();
    for more in [&[][..], &["--release-all"]] {
        let script = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "sh", "-c", script]).arg(&empty).arg(command.get_program());
        let output = unshare.args(command.get_args()).args(more).output().unwrap();
        let stderr = stderr_of(&output);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        let cause = "can't read the id of this boot in /proc/sys/kernel/random/boot_id: the file is empty";
        assert!(stderr.contains(cause) && stderr.contains("mount -t proc"), "{stderr}");
        assert_eq!(files(), before);
    }
    daemon.spawn();
    assert_eq!(daemon.job("a").map(|job| job.cpus), Some(cpus.to_string()));
    daemon.release("a").unwrap();
}
