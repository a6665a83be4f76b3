//! Where the daemon keeps its socket and state when nobody says, and what it refuses when somebody does: others
//! must not be able to put there what it would believe, or write through.

use std::fs::{Permissions, create_dir, read_to_string, set_permissions, write};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use pjw_ipc::client::Client;
use pjw_tests::daemon::Daemon;
use pjw_tests::patience::until;
use pjw_tests::programs::program;
use serde_json::{Value, json};

use crate::permissions::reachable;
use crate::processes::root;

/// A plain user whom nobody else in these tests plays.
const SOMEBODY: u32 = 65_411;
const OTHER: u32 = 65_410;

/// The plain user who starts the daemon: this one, or one whom root plays.
fn user() -> u32 {
    if Uid::effective().is_root() { SOMEBODY } else { Uid::effective().as_raw() }
}

fn is_playable() -> bool {
    !Uid::effective().is_root() || reachable()
}

/// The daemon as the plain user's, with nothing said about its places.
fn pjwd(runtime: Option<&Path>) -> Command {
    let mut command = Command::new(program("pjwd"));
    command.stdin(Stdio::null()).stderr(Stdio::piped()).current_dir("/");
    match runtime {
        Some(runtime) => command.env("XDG_RUNTIME_DIR", runtime),
        None => command.env_remove("XDG_RUNTIME_DIR"),
    };
    if Uid::effective().is_root() {
        command.uid(SOMEBODY).gid(SOMEBODY);
    }
    command
}

/// A started daemon that doesn't outlive the test.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a daemon that must not start; returns its one line.
fn refusal(mut command: Command) -> String {
    let mut started = Started(command.stderr(Stdio::piped()).spawn().unwrap());
    let status = until("pjwd refuses", || started.0.try_wait().unwrap());
    let mut told = String::new();
    started.0.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert_eq!(status.code(), Some(1), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    told
}

/// Starts a daemon that must start, and ends it.
fn starts(mut command: Command, socket: &Path) {
    let mut started = Started(command.stderr(Stdio::null()).spawn().unwrap());
    until("pjwd answers", || {
        assert_eq!(started.0.try_wait().unwrap(), None, "pjwd ended");
        Client::connect(socket).ok()?.call::<Value>("GetStatus", &json!({})).ok()
    });
    kill(Pid::from_raw(started.0.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert!(started.0.wait().unwrap().success());
}

fn with_mode(path: &Path, mode: u32) {
    set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// A runtime directory as pam_systemd makes it.
fn runtime_directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    if Uid::effective().is_root() {
        chown(dir.path(), Some(SOMEBODY), Some(SOMEBODY)).unwrap();
    }
    dir
}

#[test]
fn the_daemon_of_a_plain_user_uses_the_runtime_directory() {
    if !is_playable() {
        return;
    }
    let runtime = runtime_directory();
    let own = runtime.path().join("pjwd");
    starts(pjwd(Some(runtime.path())), &own.join("pjwd.sock"));
    let meta = std::fs::symlink_metadata(&own).unwrap();
    assert_eq!((meta.mode() & 0o777, meta.uid()), (0o700, user()));
    assert!(own.join("state.json").exists());
}

#[test]
fn a_runtime_directory_that_cannot_be_written_is_an_error_with_a_remedy() {
    if !is_playable() {
        return;
    }
    let runtime = runtime_directory();
    with_mode(runtime.path(), 0o500);
    let told = refusal(pjwd(Some(runtime.path())));
    with_mode(runtime.path(), 0o700);
    let own = runtime.path().join("pjwd");
    assert!(told.contains(&format!("can't make {}", own.display())), "{told}");
    assert!(told.contains("--state-dir") && told.contains("Permission denied"), "{told}");
}

#[test]
fn a_symbolic_link_is_refused_as_the_directory() {
    if !is_playable() {
        return;
    }
    let (runtime, elsewhere) = (runtime_directory(), runtime_directory());
    symlink(elsewhere.path(), runtime.path().join("pjwd")).unwrap();
    let told = refusal(pjwd(Some(runtime.path())));
    assert!(told.contains(&format!("is not a directory of user {}: remove it", user())), "{told}");
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0, "nothing was written through it");
}

#[test]
fn a_directory_of_another_user_is_refused() {
    if !root() || !reachable() {
        return;
    }
    let runtime = runtime_directory();
    let planted = runtime.path().join("pjwd");
    create_dir(&planted).unwrap();
    with_mode(&planted, 0o777);
    chown(&planted, Some(OTHER), Some(OTHER)).unwrap();
    let told = refusal(pjwd(Some(runtime.path())));
    assert!(told.contains(&format!("is not a directory of user {SOMEBODY}")), "{told}");
    assert_eq!(std::fs::read_dir(&planted).unwrap().count(), 0);
}

/// Removes what a test made below /tmp.
struct Below(PathBuf);

impl Drop for Below {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn without_a_runtime_directory_one_in_tmp_is_used_unless_another_user_made_it() {
    // A plain user's own daemon may be there.
    if !root() || !reachable() {
        return;
    }
    let own = Below(PathBuf::from(format!("/tmp/pjwd-{SOMEBODY}")));
    let elsewhere = runtime_directory();
    symlink(elsewhere.path(), &own.0).unwrap();
    assert!(refusal(pjwd(None)).contains("is not a directory of user"));
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    std::fs::remove_file(&own.0).unwrap();
    create_dir(&own.0).unwrap();
    chown(&own.0, Some(OTHER), Some(OTHER)).unwrap();
    assert!(refusal(pjwd(None)).contains("is not a directory of user"));
    std::fs::remove_dir(&own.0).unwrap();
    starts(pjwd(None), &own.0.join("pjwd.sock"));
    assert_eq!(std::fs::symlink_metadata(&own.0).unwrap().mode() & 0o777, 0o700);
}

#[test]
fn a_state_directory_that_others_can_change_is_refused() {
    let mut daemon = Daemon::start("");
    daemon.stop();
    let state = daemon.state_dir();
    with_mode(&state, 0o777);
    let told = refusal(daemon.command());
    assert!(told.contains(&format!("chmod o-w {}", state.display())), "{told}");
    with_mode(&state, 0o1777);
    daemon.spawn();
    daemon.stop();
    if root() {
        with_mode(&state, 0o755);
        chown(&state, Some(OTHER), Some(OTHER)).unwrap();
        let told = refusal(daemon.command());
        assert!(told.contains(&format!("{} belongs to user {OTHER}", state.display())), "{told}");
        chown(daemon.dir(), Some(OTHER), Some(OTHER)).unwrap();
        chown(&state, Some(0), Some(0)).unwrap();
        let told = refusal(daemon.command());
        assert!(told.contains(&format!("{} belongs to user {OTHER}", daemon.dir().display())), "{told}");
    }
    assert!(!daemon.socket().exists(), "who refuses leaves nothing behind");
}

#[test]
fn symbolic_links_and_pipes_in_the_state_directory_are_not_followed() {
    let mut daemon = Daemon::start("");
    daemon.stop();
    let state = |name: &str| daemon.state_dir().join(name);
    with_mode(&daemon.state_dir(), 0o1777);
    let precious = daemon.dir().join("precious");
    write(&precious, "precious").unwrap();
    let journal = state("journal.jsonl");
    std::fs::remove_file(&journal).unwrap();
    symlink(&precious, &journal).unwrap();
    assert!(refusal(daemon.command()).contains("journal.jsonl: it is a symbolic link; remove it"));
    std::fs::remove_file(&journal).unwrap();
    nix::unistd::mkfifo(&journal, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(refusal(daemon.command()).contains("journal.jsonl: it is not a regular file; remove it"));
    std::fs::remove_file(&journal).unwrap();
    let (old, new) = (state("state.json"), state("state.json.new"));
    std::fs::remove_file(&old).unwrap();
    symlink(&precious, &old).unwrap();
    symlink(&precious, &new).unwrap();
    daemon.spawn();
    assert!(daemon.log().contains("state.json: it is a symbolic link"), "{}", daemon.log());
    daemon.stop();
    assert!(std::fs::symlink_metadata(&old).unwrap().is_file(), "the end wrote a new one in its place");
    assert_eq!(read_to_string(&precious).unwrap(), "precious");
}

#[test]
fn a_journal_of_another_user_is_refused() {
    if !root() {
        return;
    }
    let mut daemon = Daemon::start("");
    daemon.stop();
    let journal = daemon.state_dir().join("journal.jsonl");
    chown(&journal, Some(OTHER), Some(OTHER)).unwrap();
    let told = refusal(daemon.command());
    assert!(told.contains(&format!("it belongs to user {OTHER}, not to user 0; remove it")), "{told}");
}
