//! What each user may do: root, plain users with a daemon of root, and a plain user with a daemon of its own.

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pjw_ipc::client::Client;
use pjw_tests::daemon::Daemon;
use pjw_tests::programs::program_path;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::processes::{KillOnDrop, Shell, has_two_cores, is_root, mask};

const NOBODY: u32 = 65_534;
const OTHER: u32 = 65_533;

fn run_as_user(uid: u32, command: &mut Command) -> Output {
    command.uid(uid).gid(uid).current_dir("/").stdin(Stdio::null()).output().unwrap()
}

/// Whether other users can run the built programs. If not, reports that the test is skipped.
pub fn programs_are_reachable() -> bool {
    let output = run_as_user(NOBODY, Command::new("test").arg("-x").arg(program_path("pjwctl")));
    if !output.status.success() {
        skip("the built programs are in a directory that other users may not enter");
    }
    output.status.success()
}

pub fn make_accessible(daemon: &Daemon) {
    std::fs::set_permissions(daemon.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn start_shell_as(uid: u32) -> Shell {
    let mut command = Command::new("sh");
    command.uid(uid).gid(uid);
    Shell::from_command(command)
}

#[test]
fn a_plain_user_reads_the_status_and_gets_cores_within_the_limits_for_own_processes() {
    if !is_root() || !programs_are_reachable() || !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    make_accessible(&daemon);
    let (a, b) = (daemon.job_id("a"), daemon.job_id("b"));
    let pjwctl = |args: &[&str]| run_as_user(NOBODY, daemon.pjwctl_command(args).env_remove("PJW_SOCKET"));
    let stderr = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(pjwctl(&["status"]).status.success());

    let (own, other) = (start_shell_as(NOBODY), start_shell_as(OTHER));
    let (own_pid, other_pid) = (own.pid().to_string(), other.pid().to_string());
    for pid in [&own_pid, &other_pid] {
        let refused = pjwctl(&["assign", &a, "--cores", "1", "--pid", pid]);
        assert!(!refused.status.success() && stderr(&refused).contains("user_max_cores"), "{refused:?}");
    }
    assert!(!pjwctl(&["reload"]).status.success());
    let planned = pjwctl(&["plan", "--defrag"]);
    assert!(String::from_utf8_lossy(&planned.stdout).contains("nothing to move"), "{planned:?}");
    let refused = pjwctl(&["defrag"]);
    assert!(!refused.status.success() && stderr(&refused).contains("only an administrator"), "{refused:?}");
    assert!(daemon.pjwctl(&["defrag"]).status.success());

    std::fs::write(daemon.dir().join("pjwd.toml"), "user_max_cores = 1\n").unwrap();
    daemon.call::<Value>("Reload", &json!({})).unwrap();
    let refused = pjwctl(&["assign", &a, "--cores", "1", "--pid", &other_pid]);
    assert!(!refused.status.success() && stderr(&refused).contains("belongs to user"), "{refused:?}");
    let granted = pjwctl(&["assign", &a, "--cores", "1", "--pid", &own_pid]);
    assert!(granted.status.success(), "{granted:?}");
    let refused = pjwctl(&["assign", &b, "--cores", "1"]);
    assert!(stderr(&refused).contains("the limit is 1"), "{refused:?}");
    let other = run_as_user(OTHER, &mut daemon.pjwctl_command(&["release", &a]));
    assert!(stderr(&other).contains("belongs to user"), "{other:?}");
    assert!(pjwctl(&["release", &a]).status.success());
}

/// A daemon that a plain user runs, with a directory of that user.
struct UserDaemon {
    /// Stopped. Used for its lock and its directory.
    private: Daemon,
    child: Child,
}

impl UserDaemon {
    fn start(config: &str) -> Self {
        let mut private = Daemon::start(config);
        private.stop();
        make_accessible(&private);
        let dir = private.dir().join("own");
        std::fs::create_dir(&dir).unwrap();
        chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
        let mut command = Command::new(program_path("pjwd"));
        command.arg("--beside").arg("--config").arg(private.dir().join("pjwd.toml"));
        command.arg("--socket").arg(dir.join("pjwd.sock")).arg("--state-dir").arg(&dir);
        command.uid(NOBODY).gid(NOBODY).current_dir("/").stdin(Stdio::null());
        let log = std::fs::File::create(dir.join("log")).unwrap();
        let child = command.stderr(log).spawn().unwrap();
        let daemon = Self { private, child };
        wait_for("the user's daemon answers", || {
            daemon.connect()?.call::<Value>("GetStatus", &json!({})).ok()
        });
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.private.dir().join("own/pjwd.sock")
    }

    fn connect(&self) -> Option<Client> {
        Client::connect(&self.socket()).ok()
    }

    fn status(&self) -> Value {
        let mut reply: Value = self.connect().unwrap().call("GetStatus", &json!({})).unwrap();
        reply["status"].take()
    }

    /// Runs `pjwctl` as the user of the daemon.
    fn pjwctl(&self, args: &[&str]) -> Output {
        let mut command = Command::new(program_path("pjwctl"));
        run_as_user(NOBODY, command.arg("--socket").arg(self.socket()).args(args))
    }

    /// Sends the daemon SIGTERM and waits for its end.
    fn stop(mut self) {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for UserDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const FLOOD_SOCKET: &str = "PJW_TEST_ASKS_WITHOUT_END";

/// Not a test, but the process of the next test that sends many requests. Without the variable, the function returns
/// at once.
#[test]
fn flooding_user_process() {
    let Some(socket) = std::env::var_os(FLOOD_SOCKET) else { return };
    let mut client = Client::connect(Path::new(&socket)).unwrap();
    println!();
    // Every sixth number up to 60,000. The list has no ranges, so the refusal that repeats it is long.
    let long = (0..10_000).map(|n| (n * 6 + 1).to_string()).collect::<Vec<_>>().join(",");
    let first = client.call::<Value>("Assign", &json!({ "job": "a", "cpus": long })).unwrap_err();
    println!("long: {first:.80}");
    for _ in 0..500 {
        let fault = client.call::<Value>("Assign", &json!({ "job": "a", "cores": 99_999 })).unwrap_err();
        println!("refused: {fault}");
    }
}

/// The events of other users stay in the history, the log stays small, and most requests are refused without being
/// checked.
#[test]
fn a_flood_of_refused_requests_affects_no_other_user() {
    if !is_root() || !programs_are_reachable() {
        return;
    }
    for (config, why) in [("", "user_max_cores"), ("user_max_cores = 1\n", "the limit is 1")] {
        let daemon = Daemon::start(config);
        make_accessible(&daemon);
        let shell = Shell::start();
        daemon.assign("roots", 1, &[shell.pid()]).unwrap();
        let mut user = Command::new(std::env::current_exe().unwrap());
        user.args(["--exact", "permissions::flooding_user_process", "--nocapture"])
            .env(FLOOD_SOCKET, daemon.socket());
        let output = String::from_utf8(run_as_user(NOBODY, &mut user).stdout).unwrap();
        let stderr: Vec<&str> = output.lines().filter_map(|line| line.strip_prefix("refused: ")).collect();
        assert_eq!(stderr.len(), 500, "{output}");
        assert!(stderr[..20].iter().all(|text| text.contains(why)), "{:?}", stderr[0]);
        assert!(stderr.iter().any(|text| text.contains("too often")), "{:?}", stderr[499]);

        let detail: Value = daemon.call("GetJob", &json!({ "job": daemon.job_id("roots") })).unwrap();
        assert_eq!(detail["history"][0]["event"], "assigned");
        let events = String::from_utf8(daemon.pjwctl(&["events"]).stdout).unwrap();
        let checked = events.lines().filter(|line| line.contains(" refused ")).count();
        assert!((20..400).contains(&checked), "{checked} of 500 requests were checked");
        let log = daemon.log();
        assert!(log.contains("commands of users were refused"), "{log}");
        assert!(log.lines().count() < 100, "{log}");
        assert!(log.lines().all(|line| line.len() < 2000), "a refusal in the log repeats the whole request");
    }
}

#[test]
fn strays_of_a_user_are_reported_once() {
    if !is_root() {
        return;
    }
    let daemon = Daemon::start("interval = \"50ms\"\nrescan_interval = \"50ms\"\n");
    let (inside, outside) = (start_shell_as(NOBODY), start_shell_as(NOBODY));
    daemon.assign("a", 1, &[inside.pid()]).unwrap();
    let events = || String::from_utf8(daemon.pjwctl(&["events"]).stdout).unwrap();
    let stderr =
        wait_for("the stray is reported", || Some(events()).filter(|events| events.contains(" stray ")));
    assert!(stderr.contains(&format!("of user {NOBODY} belong")), "{stderr}");
    assert!(daemon.job("a").unwrap().strays >= 1);
    // Another stray is not reported while there is one.
    let another = start_shell_as(NOBODY);
    wait_for("both are counted", || daemon.job("a").filter(|job| job.strays >= 2));
    assert_eq!(events().matches(" stray ").count(), 1);
    drop((inside, outside, another));
}

#[test]
fn the_daemon_of_a_plain_user_confines_that_users_processes_and_has_that_user_as_administrator() {
    if !is_root() || !programs_are_reachable() || !has_two_cores() {
        return;
    }
    // No timer starts a scan during the test. So a process is found by an event, or by a scan after a reload.
    let daemon = UserDaemon::start("interval = \"10m\"\nrescan_interval = \"10m\"\n");
    let mut shell = start_shell_as(NOBODY);
    let output = daemon.pjwctl(&["assign", "a", "--cores", "1", "--pid", &shell.pid().to_string()]);
    assert!(output.status.success(), "{output:?}");
    let cpus = String::from_utf8_lossy(&output.stdout).split_whitespace().nth(1).unwrap().to_owned();
    assert_eq!(mask(shell.pid()).to_string(), cpus);

    // Whether a plain user gets process events depends on the kernel. The status must say it correctly.
    let child = shell.background("sleep 1000");
    let _end = KillOnDrop(child);
    let found = || daemon.status()["jobs"][0]["processes"] == 2;
    let discovery = daemon.status()["discovery"].as_str().unwrap().to_owned();
    println!("discovery is by {discovery}");
    if discovery == "polling" {
        assert!(!found(), "there was no scan yet");
        std::fs::write(daemon.private.dir().join("pjwd.toml"), "interval = \"50ms\"\n").unwrap();
        assert!(daemon.pjwctl(&["reload"]).status.success());
    } else {
        assert_eq!(discovery, "netlink");
    }
    wait_until("the child is a member", found);
    assert_eq!(mask(child).to_string(), cpus);
    let log = std::fs::read_to_string(daemon.private.dir().join("own/log")).unwrap();
    assert!(log.contains("watches this machine"), "{log}");
    assert!(
        !log.contains("real-time"),
        "a plain user may have no real-time priority, which is normal: {log}"
    );
    daemon.stop();
}

/// Checks the refusal of a process that the daemon's user may not change: one line with the process, its owner, and
/// the remedy.
fn assert_out_of_reach(output: &Output, pid: &str, owner: u32) {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    assert!(stderr.contains(&format!("process {pid}")), "the process is named: {stderr}");
    assert!(stderr.contains(&format!("user {owner}")), "its owner is named: {stderr}");
    assert!(stderr.contains("root") || stderr.contains("CAP_SYS_NICE"), "the remedy is named: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

/// A request that names a process that can't be confined is refused as a whole, and no core is reserved.
#[test]
fn the_daemon_of_a_plain_user_refuses_processes_of_other_users() {
    if !is_root() || !programs_are_reachable() {
        return;
    }
    let daemon = UserDaemon::start("");
    let (own, of_root, of_other) = (start_shell_as(NOBODY), Shell::start(), start_shell_as(OTHER));
    let before = [mask(own.pid()), mask(of_root.pid()), mask(of_other.pid())];
    let own_pid = own.pid().to_string();
    for (other, owner) in [(&of_root, 0), (&of_other, OTHER)] {
        let pid = other.pid().to_string();
        for pid_arguments in [&["--pid", &pid][..], &["--pid", &own_pid, "--pid", &pid][..]] {
            assert_out_of_reach(
                &daemon.pjwctl(&[&["assign", "b", "--cores", "1"], pid_arguments].concat()),
                &pid,
                owner,
            );
            let status = daemon.status();
            assert_eq!(status["jobs"], json!([]), "{pid_arguments:?}");
            assert_eq!(status["pool"]["free"], status["node"]["cpus"], "{pid_arguments:?}");
        }
    }
    assert_eq!([mask(own.pid()), mask(of_root.pid()), mask(of_other.pid())], before);
    daemon.stop();
}

/// Returns the effective user of a process. `None` for a kernel thread, and if the process has ended.
fn owner_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let owner = status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(1)?;
    // Kernel threads and zombies have no memory.
    if status.contains("VmSize:") { owner.parse().ok() } else { None }
}

/// Returns a process of another user, and its owner. Not process 1, which is refused for every user.
fn foreign_process() -> Option<(u32, u32)> {
    let own_uid = nix::unistd::Uid::effective().as_raw();
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find_map(|pid: u32| {
        let owner = owner_of(pid)?;
        (pid > 1 && owner != own_uid).then_some((pid, owner))
    })
}

#[test]
fn the_daemon_of_the_testing_user_refuses_processes_of_other_users() {
    if nix::unistd::Uid::effective().is_root() {
        skip("root may change the processes of all users");
        return;
    }
    let daemon = Daemon::start("");
    if foreign_process().is_none() {
        skip("there is no process of another user here");
        return;
    }
    // A process of another user may end at any time, or become one of this user. Then another one is tried.
    wait_until("a process of another user is refused", || {
        let Some((pid, owner)) = foreign_process() else { return false };
        let (before, pid_text) = (mask(pid), pid.to_string());
        let output = daemon.pjwctl(&["assign", &daemon.job_id("b"), "--cores", "1", "--pid", &pid_text]);
        let after = mask(pid);
        if owner_of(pid) != Some(owner) {
            let _ = daemon.release("b");
            return false;
        }
        assert_out_of_reach(&output, &pid_text, owner);
        assert_eq!(after, before);
        true
    });
    assert!(daemon.status().jobs.is_empty());
    assert_eq!(daemon.status().pool.free, daemon.status().node.cpus);
}

#[test]
fn the_directories_are_open_to_all_users_whatever_the_umask_of_the_administrator_is() {
    let mut daemon = Daemon::start("");
    daemon.lose_state();
    daemon.spawn_by(&["sh", "-c", "umask 077; exec \"$@\"", "sh"]);
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let jobs = daemon.state_dir().join("jobs");
    let of_job = wait_for("the job has a core map", || {
        std::fs::read_dir(&jobs)
            .ok()?
            .flatten()
            .map(|entry| entry.path().join("cpus"))
            .find(|cpus| cpus.exists())
    });
    for (path, mode) in [(daemon.state_dir(), 0o755), (jobs, 0o755), (of_job, 0o644)] {
        let found = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(format!("{found:o}"), format!("{mode:o}"), "{}", path.display());
    }
}
