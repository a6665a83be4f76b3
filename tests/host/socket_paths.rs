//! The default paths of the socket and the state, and the paths that the daemon refuses: another user must not be
//! able to put files there that the daemon would trust, or links through which it would write.

use std::fs::{File, Permissions, create_dir, read_to_string, set_permissions, write};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use pjw_ipc::client::{Client, lasting_lock_dir, lock_dir};
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::programs::program_path;
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::permissions::programs_are_reachable;
use crate::processes::{Shell, has_two_cores, is_root};

/// A plain user that no other file of this program uses.
const DAEMON_USER: u32 = 65_411;
const OTHER_USER: u32 = 65_410;
/// The user of the test that deletes its directory: the directory has a fixed path, and tests run side by side.
const DELETING_USER: u32 = 65_412;
/// The user of the test that logs out, for the same reason.
const LEAVING_USER: u32 = 65_413;
/// The user of the test that stops a daemon and deletes its directory, for the same reason.
const STOPPING_USER: u32 = 65_414;

/// Returns the plain user that starts the daemon: the user of the test, or another one if the test runs as root.
fn daemon_user() -> u32 {
    if Uid::effective().is_root() { DAEMON_USER } else { Uid::effective().as_raw() }
}

/// Whether the test can run the daemon as a plain user. If not, reports that the test is skipped.
fn can_act_as_user() -> bool {
    !Uid::effective().is_root() || programs_are_reachable()
}

/// Returns the command that starts the daemon as the plain user, with default paths, beside those of other tests.
fn pjwd_command(runtime: Option<&Path>) -> Command {
    let mut command = Command::new(program_path("pjwd"));
    command.arg("--beside").stdin(Stdio::null()).stderr(Stdio::piped()).current_dir("/");
    match runtime {
        Some(runtime) => command.env("XDG_RUNTIME_DIR", runtime),
        None => command.env_remove("XDG_RUNTIME_DIR"),
    };
    if Uid::effective().is_root() {
        command.uid(DAEMON_USER).gid(DAEMON_USER);
    }
    command
}

/// A started daemon. It is killed when this value is dropped.
struct StartedDaemon(Child);

impl Drop for StartedDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a daemon that must refuse to start. Returns the line that it prints.
fn start_and_read_refusal(mut command: Command) -> String {
    let mut started = StartedDaemon(command.stderr(Stdio::piped()).spawn().unwrap());
    let status = wait_for("pjwd refuses", || started.0.try_wait().unwrap());
    let mut stderr = String::new();
    started.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr
}

/// Checks that a daemon starts and answers, and ends the daemon.
fn check_starts(mut command: Command, socket: &Path) {
    let mut started = StartedDaemon(command.stderr(Stdio::null()).spawn().unwrap());
    wait_for("pjwd answers", || {
        assert_eq!(started.0.try_wait().unwrap(), None, "pjwd ended");
        Client::connect(socket).ok()?.call::<Value>("GetStatus", &json!({})).ok()
    });
    kill(Pid::from_raw(started.0.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert!(started.0.wait().unwrap().success());
}

fn set_mode(path: &Path, mode: u32) {
    set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Makes a runtime directory of the plain user, as pam_systemd does.
fn runtime_directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    if Uid::effective().is_root() {
        chown(dir.path(), Some(DAEMON_USER), Some(DAEMON_USER)).unwrap();
    }
    dir
}

#[test]
fn the_daemon_of_a_plain_user_uses_the_runtime_directory() {
    if !can_act_as_user() {
        return;
    }
    // If the test runs as a plain user, this daemon would also confine the processes of jobs that another test has
    // started for its own daemon. So it runs while no other daemon of this program does.
    let _alone = Daemon::prepare_with(Enforcement::Affinity, "");
    let runtime = runtime_directory();
    let own_dir = runtime.path().join("pjwd");
    check_starts(pjwd_command(Some(runtime.path())), &own_dir.join("pjwd.sock"));
    let meta = std::fs::symlink_metadata(&own_dir).unwrap();
    assert_eq!((meta.mode() & 0o777, meta.uid()), (0o700, daemon_user()));
    assert!(own_dir.join("state.json").exists());
}

#[test]
fn a_runtime_directory_that_cannot_be_written_is_an_error_with_a_remedy() {
    if !can_act_as_user() {
        return;
    }
    let runtime = runtime_directory();
    set_mode(runtime.path(), 0o500);
    let stderr = start_and_read_refusal(pjwd_command(Some(runtime.path())));
    set_mode(runtime.path(), 0o700);
    let own_dir = runtime.path().join("pjwd");
    assert!(stderr.contains(&format!("can't make {}", own_dir.display())), "{stderr}");
    assert!(stderr.contains("--state-dir") && stderr.contains("Permission denied"), "{stderr}");
}

#[test]
fn a_symbolic_link_is_refused_as_the_directory() {
    if !can_act_as_user() {
        return;
    }
    let (runtime, elsewhere) = (runtime_directory(), runtime_directory());
    symlink(elsewhere.path(), runtime.path().join("pjwd")).unwrap();
    let stderr = start_and_read_refusal(pjwd_command(Some(runtime.path())));
    assert!(stderr.contains(&format!("is not a directory of user {}: remove it", daemon_user())), "{stderr}");
    assert_eq!(
        std::fs::read_dir(elsewhere.path()).unwrap().count(),
        0,
        "no file was written through the link"
    );
}

#[test]
fn a_directory_of_another_user_is_refused() {
    if !is_root() || !programs_are_reachable() {
        return;
    }
    let runtime = runtime_directory();
    let foreign = runtime.path().join("pjwd");
    create_dir(&foreign).unwrap();
    set_mode(&foreign, 0o777);
    chown(&foreign, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    let stderr = start_and_read_refusal(pjwd_command(Some(runtime.path())));
    assert!(stderr.contains(&format!("is not a directory of user {DAEMON_USER}")), "{stderr}");
    assert_eq!(std::fs::read_dir(&foreign).unwrap().count(), 0);
}

/// Removes a file or directory of a test when this value is dropped.
struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn without_a_runtime_directory_one_in_tmp_is_used_unless_another_user_made_it() {
    // A plain user's own daemon may use the directory.
    if !is_root() || !programs_are_reachable() {
        return;
    }
    let own_dir = RemoveOnDrop(PathBuf::from(format!("/tmp/pjwd-{DAEMON_USER}")));
    let elsewhere = runtime_directory();
    symlink(elsewhere.path(), &own_dir.0).unwrap();
    assert!(start_and_read_refusal(pjwd_command(None)).contains("is not a directory of user"));
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    std::fs::remove_file(&own_dir.0).unwrap();
    create_dir(&own_dir.0).unwrap();
    chown(&own_dir.0, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    assert!(start_and_read_refusal(pjwd_command(None)).contains("is not a directory of user"));
    std::fs::remove_dir(&own_dir.0).unwrap();
    check_starts(pjwd_command(None), &own_dir.0.join("pjwd.sock"));
    assert_eq!(std::fs::symlink_metadata(&own_dir.0).unwrap().mode() & 0o777, 0o700);
}

#[test]
fn after_the_whole_directory_of_a_user_is_deleted_the_next_daemon_names_the_masks_that_it_can_not_know() {
    if !is_root() || !programs_are_reachable() || !has_two_cores() {
        return;
    }
    // It also keeps the other tests of this program from starting a daemon meanwhile.
    let mut other = Daemon::start("");
    other.stop();
    let own_dir = RemoveOnDrop(PathBuf::from(format!("/tmp/pjwd-{DELETING_USER}")));
    let lock_dir = RemoveOnDrop(lock_dir(DELETING_USER));
    let start = || {
        let mut command = Command::new(program_path("pjwd"));
        command.env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null()).stderr(Stdio::null()).current_dir("/");
        let started = StartedDaemon(command.uid(DELETING_USER).gid(DELETING_USER).spawn().unwrap());
        let connect = || Client::connect(&own_dir.0.join("pjwd.sock")).ok();
        let answers = |client: &mut Client| client.call::<Value>("GetStatus", &json!({})).is_ok();
        let client = wait_for("pjwd answers", || {
            connect().and_then(|mut client| answers(&mut client).then_some(client))
        });
        (started, client)
    };
    let mut shell = Command::new("sh");
    let shell = Shell::from_command({
        shell.uid(DELETING_USER).gid(DELETING_USER);
        shell
    });
    let (first, mut client) = start();
    let job = format!("manual:hint.{}", std::process::id());
    let request = json!({ "job": job, "cores": 1, "pids": [shell.pid()] });
    client.call::<Value>("Assign", &request).unwrap();
    drop(first);
    std::fs::remove_dir_all(&own_dir.0).unwrap();
    assert!(lock_dir.0.join("warden.lock").exists(), "the lock file is elsewhere");
    let (_next, mut client) = start();
    wait_until("the mask is named", || {
        let status: Value = client.call("GetStatus", &json!({})).unwrap();
        let warnings = status["status"]["warnings"].as_array().unwrap().clone();
        let is_of_shell = |warning: &Value| {
            let text = warning["text"].as_str().unwrap();
            warning["code"] == "unknown-masks"
                && text.split([' ', ',']).any(|word| word == shell.pid().to_string())
        };
        warnings.iter().any(is_of_shell)
    });
}

#[test]
fn records_that_are_gone_are_missed_after_a_kill_and_not_after_a_stop_that_left_nothing_to_undo() {
    if !is_root() || !programs_are_reachable() {
        return;
    }
    // It also keeps the other tests of this program from starting a daemon meanwhile.
    let mut other = Daemon::start("");
    other.stop();
    let own_dir = RemoveOnDrop(PathBuf::from(format!("/tmp/pjwd-{STOPPING_USER}")));
    let _lock_dir = RemoveOnDrop(lock_dir(STOPPING_USER));
    let log_dir = tempfile::tempdir().unwrap();
    let log = log_dir.path().join("log");
    let start = || {
        let mut command = Command::new(program_path("pjwd"));
        command.env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null()).current_dir("/");
        command.stderr(File::create(&log).unwrap());
        let started = StartedDaemon(command.uid(STOPPING_USER).gid(STOPPING_USER).spawn().unwrap());
        wait_until("pjwd answers", || {
            let client = Client::connect(&own_dir.0.join("pjwd.sock")).ok();
            client.is_some_and(|mut client| client.call::<Value>("GetStatus", &json!({})).is_ok())
        });
        started
    };
    for (signal, is_missed) in [(Signal::SIGTERM, false), (Signal::SIGKILL, true)] {
        let mut first = start();
        kill(Pid::from_raw(first.0.id().cast_signed()), signal).unwrap();
        first.0.wait().unwrap();
        std::fs::remove_dir_all(&own_dir.0).unwrap();
        let _next = start();
        let text = read_to_string(&log).unwrap();
        assert_eq!(text.contains("the records of the pjwd before are gone"), is_missed, "{signal:?}: {text}");
    }
}

#[test]
fn a_daemon_that_runs_on_after_the_logout_of_its_user_is_found_by_a_later_one() {
    if !is_root() || !programs_are_reachable() {
        return;
    }
    // It also keeps the other tests of this program from starting a daemon meanwhile.
    let mut other = Daemon::start("");
    other.stop();
    let runtime = RemoveOnDrop(PathBuf::from(format!("/run/user/{LEAVING_USER}")));
    let _lasting = RemoveOnDrop(lasting_lock_dir(LEAVING_USER).unwrap());
    let unmounted = RemoveOnDrop(PathBuf::from(format!("/run/user/{LEAVING_USER}-unmounted")));
    let command = || {
        let mut command = Command::new(program_path("pjwd"));
        command.env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null()).stderr(Stdio::null()).current_dir("/");
        command.uid(LEAVING_USER).gid(LEAVING_USER);
        command
    };
    // As the login of a user does, and the last logout.
    std::fs::create_dir_all(&runtime.0).unwrap();
    chown(&runtime.0, Some(LEAVING_USER), Some(LEAVING_USER)).unwrap();
    let first = StartedDaemon(command().spawn().unwrap());
    let socket = runtime.0.join("pjwd/pjwd.sock");
    wait_until("pjwd answers", || {
        let client = Client::connect(&socket).ok();
        client.is_some_and(|mut client| client.call::<Value>("GetStatus", &json!({})).is_ok())
    });
    assert!(lock_dir(LEAVING_USER).starts_with(&runtime.0));
    // The path vanishes at once, so that the daemon makes no file meanwhile.
    std::fs::rename(&runtime.0, &unmounted.0).unwrap();
    let stderr = start_and_read_refusal(command());
    let named = format!("for user {LEAVING_USER} (process {}, ", first.0.id());
    assert!(stderr.contains(&format!("another pjwd runs {named}")), "{stderr}");
}

#[test]
fn the_log_has_the_state_directory_that_was_made() {
    let mut daemon = Daemon::start("");
    let lines = |daemon: &Daemon| {
        let path = daemon.state_dir().display().to_string();
        let log = daemon.log();
        log.lines().filter(|line| line.contains("the directory was missing") && line.contains(&path)).count()
    };
    assert_eq!(lines(&daemon), 1, "{}", daemon.log());
    daemon.stop();
    daemon.spawn();
    assert_eq!(lines(&daemon), 1, "a directory that is there is not reported: {}", daemon.log());
}

#[test]
fn a_state_directory_that_others_can_change_is_refused() {
    let mut daemon = Daemon::start("");
    daemon.stop();
    let state = daemon.state_dir();
    set_mode(&state, 0o777);
    let stderr = start_and_read_refusal(daemon.command());
    assert!(stderr.contains(&format!("chmod o-w {}", state.display())), "{stderr}");
    set_mode(&state, 0o1777);
    daemon.spawn();
    daemon.stop();
    if is_root() {
        set_mode(&state, 0o755);
        chown(&state, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
        let stderr = start_and_read_refusal(daemon.command());
        assert!(stderr.contains(&format!("{} belongs to user {OTHER_USER}", state.display())), "{stderr}");
        chown(daemon.dir(), Some(OTHER_USER), Some(OTHER_USER)).unwrap();
        chown(&state, Some(0), Some(0)).unwrap();
        let stderr = start_and_read_refusal(daemon.command());
        assert!(
            stderr.contains(&format!("{} belongs to user {OTHER_USER}", daemon.dir().display())),
            "{stderr}"
        );
    }
    assert!(!daemon.socket().exists(), "a refused start leaves no socket");
}

#[test]
fn symbolic_links_and_pipes_in_the_state_directory_are_not_followed() {
    let mut daemon = Daemon::start("");
    daemon.stop();
    let state = |name: &str| daemon.state_dir().join(name);
    set_mode(&daemon.state_dir(), 0o1777);
    let other_file = daemon.dir().join("precious");
    write(&other_file, "precious").unwrap();
    let journal = state("journal.jsonl");
    std::fs::remove_file(&journal).unwrap();
    symlink(&other_file, &journal).unwrap();
    assert!(
        start_and_read_refusal(daemon.command()).contains("journal.jsonl: it is a symbolic link; remove it")
    );
    std::fs::remove_file(&journal).unwrap();
    nix::unistd::mkfifo(&journal, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(
        start_and_read_refusal(daemon.command())
            .contains("journal.jsonl: it is not a regular file; remove it")
    );
    std::fs::remove_file(&journal).unwrap();
    let (old, new) = (state("state.json"), state("state.json.new"));
    std::fs::remove_file(&old).unwrap();
    symlink(&other_file, &old).unwrap();
    symlink(&other_file, &new).unwrap();
    daemon.spawn();
    assert!(daemon.log().contains("state.json: it is a symbolic link"), "{}", daemon.log());
    daemon.stop();
    assert!(std::fs::symlink_metadata(&old).unwrap().is_file(), "the daemon wrote a new file at its end");
    assert_eq!(read_to_string(&other_file).unwrap(), "precious");
}

#[test]
fn a_journal_of_another_user_is_refused() {
    if !is_root() {
        return;
    }
    let mut daemon = Daemon::start("");
    daemon.stop();
    let journal = daemon.state_dir().join("journal.jsonl");
    chown(&journal, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    let stderr = start_and_read_refusal(daemon.command());
    assert!(
        stderr.contains(&format!("it belongs to user {OTHER_USER}, not to user 0; remove it")),
        "{stderr}"
    );
}
