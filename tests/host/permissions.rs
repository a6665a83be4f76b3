//! Who may do what: root, plain users beside a root daemon, and a daemon of a user's own.

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pjw_ipc::client::Client;
use pjw_tests::daemon::Daemon;
use pjw_tests::patience::{until, until_true};
use pjw_tests::programs::program;
use pjw_tests::skipping::skip;
use serde_json::{Value, json};

use crate::processes::{EndOf, Shell, mask, root, two_cores};

const NOBODY: u32 = 65_534;
const OTHER: u32 = 65_533;

fn as_user(uid: u32, command: &mut Command) -> Output {
    command.uid(uid).gid(uid).current_dir("/").stdin(Stdio::null()).output().unwrap()
}

/// A plain user can only run programs that everybody may reach.
pub fn reachable() -> bool {
    let output = as_user(NOBODY, Command::new("test").arg("-x").arg(program("pjwctl")));
    if !output.status.success() {
        skip("the built programs are in a directory that other users may not enter");
    }
    output.status.success()
}

fn open_to_all(daemon: &Daemon) {
    std::fs::set_permissions(daemon.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn shell_of(uid: u32) -> Shell {
    let mut command = Command::new("sh");
    command.uid(uid).gid(uid);
    Shell::from(command)
}

#[test]
fn a_plain_user_reads_the_status_and_gets_cores_within_the_limits_for_own_processes() {
    if !root() || !reachable() || !two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    open_to_all(&daemon);
    let (a, b) = (daemon.id("a"), daemon.id("b"));
    let ctl = |args: &[&str]| as_user(NOBODY, daemon.pjwctl_command(args).env_remove("PJW_SOCKET"));
    let told = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(ctl(&["status"]).status.success());

    let (mine, theirs) = (shell_of(NOBODY), shell_of(OTHER));
    let (my_pid, their_pid) = (mine.pid().to_string(), theirs.pid().to_string());
    for pid in [&my_pid, &their_pid] {
        let refused = ctl(&["assign", &a, "--cores", "1", "--pid", pid]);
        assert!(!refused.status.success() && told(&refused).contains("user_max_cores"), "{refused:?}");
    }
    assert!(!ctl(&["reload"]).status.success());
    let planned = ctl(&["plan", "--defrag"]);
    assert!(String::from_utf8_lossy(&planned.stdout).contains("nothing to move"), "{planned:?}");
    let refused = ctl(&["defrag"]);
    assert!(!refused.status.success() && told(&refused).contains("only an administrator"), "{refused:?}");
    assert!(daemon.pjwctl(&["defrag"]).status.success());

    std::fs::write(daemon.dir().join("pjwd.toml"), "user_max_cores = 1\n").unwrap();
    daemon.call::<Value>("Reload", &json!({})).unwrap();
    let refused = ctl(&["assign", &a, "--cores", "1", "--pid", &their_pid]);
    assert!(!refused.status.success() && told(&refused).contains("belongs to user"), "{refused:?}");
    let granted = ctl(&["assign", &a, "--cores", "1", "--pid", &my_pid]);
    assert!(granted.status.success(), "{granted:?}");
    let refused = ctl(&["assign", &b, "--cores", "1"]);
    assert!(told(&refused).contains("the limit is 1"), "{refused:?}");
    let other = as_user(OTHER, &mut daemon.pjwctl_command(&["release", &a]));
    assert!(told(&other).contains("belongs to user"), "{other:?}");
    assert!(ctl(&["release", &a]).status.success());
}

/// A daemon of a plain user's own, in a directory of that user's.
struct OwnDaemon {
    /// Only for its turn and its directory.
    turn: Daemon,
    child: Child,
}

impl OwnDaemon {
    fn start(config: &str) -> Self {
        let mut turn = Daemon::start(config);
        turn.stop();
        open_to_all(&turn);
        let dir = turn.dir().join("own");
        std::fs::create_dir(&dir).unwrap();
        chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
        let mut command = Command::new(program("pjwd"));
        command.arg("--config").arg(turn.dir().join("pjwd.toml"));
        command.arg("--socket").arg(dir.join("pjwd.sock")).arg("--state-dir").arg(&dir);
        command.uid(NOBODY).gid(NOBODY).current_dir("/").stdin(Stdio::null());
        let child = command.stderr(Stdio::null()).spawn().unwrap();
        let own = Self { turn, child };
        until("the user's daemon answers", || own.connect()?.call::<Value>("GetStatus", &json!({})).ok());
        own
    }

    fn socket(&self) -> PathBuf {
        self.turn.dir().join("own/pjwd.sock")
    }

    fn connect(&self) -> Option<Client> {
        Client::connect(&self.socket()).ok()
    }

    fn status(&self) -> Value {
        let mut reply: Value = self.connect().unwrap().call("GetStatus", &json!({})).unwrap();
        reply["status"].take()
    }

    /// `pjwctl` as the daemon's user.
    fn ctl(&self, args: &[&str]) -> Output {
        let mut command = Command::new(program("pjwctl"));
        as_user(NOBODY, command.arg("--socket").arg(self.socket()).args(args))
    }

    /// Asks it to end, and waits.
    fn stop(mut self) {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for OwnDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const ASKS_WITHOUT_END: &str = "PJW_TEST_ASKS_WITHOUT_END";

/// Not a test but the user of the next one; without the variable there is nothing to do.
#[test]
fn flooding_user_process() {
    let Some(socket) = std::env::var_os(ASKS_WITHOUT_END) else { return };
    let mut client = Client::connect(Path::new(&socket)).unwrap();
    println!();
    // Every sixth number up to 60,000, of which no range can be made: the refusal repeats it.
    let long = (0..10_000).map(|n| (n * 6 + 1).to_string()).collect::<Vec<_>>().join(",");
    let first = client.call::<Value>("Assign", &json!({ "job": "a", "cpus": long })).unwrap_err();
    println!("long: {first:.80}");
    for _ in 0..500 {
        let fault = client.call::<Value>("Assign", &json!({ "job": "a", "cores": 99_999 })).unwrap_err();
        println!("refused: {fault}");
    }
}

/// Nobody else's events are forgotten, nobody's log is filled, and only so many wishes are even judged.
#[test]
fn a_flood_of_refused_requests_affects_no_other_user() {
    if !root() || !reachable() {
        return;
    }
    for (config, why) in [("", "user_max_cores"), ("user_max_cores = 1\n", "the limit is 1")] {
        let daemon = Daemon::start(config);
        open_to_all(&daemon);
        let shell = Shell::start();
        daemon.assign("roots", 1, &[shell.pid()]).unwrap();
        let mut user = Command::new(std::env::current_exe().unwrap());
        user.args(["--exact", "permissions::flooding_user_process", "--nocapture"])
            .env(ASKS_WITHOUT_END, daemon.socket());
        let output = String::from_utf8(as_user(NOBODY, &mut user).stdout).unwrap();
        let told: Vec<&str> = output.lines().filter_map(|line| line.strip_prefix("refused: ")).collect();
        assert_eq!(told.len(), 500, "{output}");
        assert!(told[..20].iter().all(|text| text.contains(why)), "{:?}", told[0]);
        assert!(told.iter().any(|text| text.contains("too often")), "{:?}", told[499]);

        let detail: Value = daemon.call("GetJob", &json!({ "job": daemon.id("roots") })).unwrap();
        assert_eq!(detail["history"][0]["event"], "assigned");
        let events = String::from_utf8(daemon.pjwctl(&["events"]).stdout).unwrap();
        let judged = events.lines().filter(|line| line.contains(" refused ")).count();
        assert!((20..400).contains(&judged), "{judged} of 500 were judged");
        let log = daemon.log();
        assert!(log.contains("commands of users were refused"), "{log}");
        assert!(log.lines().count() < 100, "{log}");
        assert!(log.lines().all(|line| line.len() < 2000), "a refusal repeats what was asked for");
    }
}

#[test]
fn strays_of_a_user_are_reported_once() {
    if !root() {
        return;
    }
    let daemon = Daemon::start("interval = \"50ms\"\nrescan_interval = \"50ms\"\n");
    let (inside, outside) = (shell_of(NOBODY), shell_of(NOBODY));
    daemon.assign("a", 1, &[inside.pid()]).unwrap();
    let events = || String::from_utf8(daemon.pjwctl(&["events"]).stdout).unwrap();
    let told = until("the stray is told of", || Some(events()).filter(|events| events.contains(" stray ")));
    assert!(told.contains(&format!("of user {NOBODY} belong")), "{told}");
    assert!(daemon.job("a").unwrap().strays >= 1);
    // Another that comes while there is one is no news.
    let another = shell_of(NOBODY);
    until("both are counted", || daemon.job("a").filter(|job| job.strays >= 2));
    assert_eq!(events().matches(" stray ").count(), 1);
    drop((inside, outside, another));
}

#[test]
fn the_daemon_of_a_plain_user_confines_that_users_processes_and_has_that_user_as_administrator() {
    if !root() || !reachable() || !two_cores() {
        return;
    }
    // No timer within the test: who is found is found by an event, or because the daemon was told to look.
    let own = OwnDaemon::start("interval = \"10m\"\nrescan_interval = \"10m\"\n");
    let mut shell = shell_of(NOBODY);
    let output = own.ctl(&["assign", "a", "--cores", "1", "--pid", &shell.pid().to_string()]);
    assert!(output.status.success(), "{output:?}");
    let cpus = String::from_utf8_lossy(&output.stdout).split_whitespace().nth(1).unwrap().to_owned();
    assert_eq!(mask(shell.pid()).to_string(), cpus);

    // Whether the kernel tells a plain user of births depends on the kernel; what status says must be so.
    let child = shell.background("sleep 1000");
    let _end = EndOf(child);
    let found = || own.status()["jobs"][0]["processes"] == 2;
    let discovery = own.status()["discovery"].as_str().unwrap().to_owned();
    println!("discovery is by {discovery}");
    if discovery == "polling" {
        assert!(!found(), "nobody looked yet");
        std::fs::write(own.turn.dir().join("pjwd.toml"), "interval = \"50ms\"\n").unwrap();
        assert!(own.ctl(&["reload"]).status.success());
    } else {
        assert_eq!(discovery, "netlink");
    }
    until_true("the child is found", found);
    assert_eq!(mask(child).to_string(), cpus);
    own.stop();
}

/// The refusal of a process that the daemon's user may not move: one line with the process, its owner, the remedy.
fn assert_out_of_reach(output: &Output, pid: &str, owner: u32) {
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    assert!(told.contains(&format!("process {pid}")), "the process is named: {told}");
    assert!(told.contains(&format!("user {owner}")), "its owner is named: {told}");
    assert!(told.contains("root") || told.contains("CAP_SYS_NICE"), "the remedy is named: {told}");
    assert_eq!(told.lines().count(), 1, "{told}");
}

/// Nothing is held for a process that can't be kept: a wish that names one is refused as a whole.
#[test]
fn the_daemon_of_a_plain_user_refuses_processes_of_other_users() {
    if !root() || !reachable() {
        return;
    }
    let own = OwnDaemon::start("");
    let (mine, roots, others) = (shell_of(NOBODY), Shell::start(), shell_of(OTHER));
    let before = [mask(mine.pid()), mask(roots.pid()), mask(others.pid())];
    let my_pid = mine.pid().to_string();
    for (theirs, owner) in [(&roots, 0), (&others, OTHER)] {
        let pid = theirs.pid().to_string();
        for wish in [&["--pid", &pid][..], &["--pid", &my_pid, "--pid", &pid][..]] {
            assert_out_of_reach(&own.ctl(&[&["assign", "b", "--cores", "1"], wish].concat()), &pid, owner);
            let status = own.status();
            assert_eq!(status["jobs"], json!([]), "{wish:?}");
            assert_eq!(status["pool"]["free"], status["node"]["cpus"], "{wish:?}");
        }
    }
    assert_eq!([mask(mine.pid()), mask(roots.pid()), mask(others.pid())], before);
    own.stop();
}

/// A process of another user's that runs now, and its owner. Not the first one: that is refused to everybody.
fn foreign_process() -> Option<(u32, u32)> {
    let me = nix::unistd::Uid::effective().as_raw();
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find_map(|pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let owner = status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(1)?;
        let owner = owner.parse().ok()?;
        // Kernel threads have no memory of their own.
        (pid > 1 && owner != me && status.contains("VmSize:")).then_some((pid, owner))
    })
}

#[test]
fn the_daemon_of_the_testing_user_refuses_processes_of_other_users() {
    if nix::unistd::Uid::effective().is_root() {
        skip("root may move everybody's processes");
        return;
    }
    let Some((pid, owner)) = foreign_process() else {
        skip("no other user's process is seen here");
        return;
    };
    let daemon = Daemon::start("");
    let before = mask(pid);
    let pid_told = pid.to_string();
    let output = daemon.pjwctl(&["assign", "b", "--cores", "1", "--pid", &pid_told]);
    assert_out_of_reach(&output, &pid_told, owner);
    assert!(daemon.status().jobs.is_empty());
    assert_eq!(daemon.status().pool.free, daemon.status().node.cpus);
    assert_eq!(mask(pid), before);
}
