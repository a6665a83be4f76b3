//! The client: the paths of the socket, the errors without a daemon, and invalid replies.

use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{Backlog, listen};
use pjw_ipc::client::{Client, ClientError, lasting_lock_dir, lock_dir, runtime_dir, socket_path};
use pjw_ipc::server::ServerLimits;
use serde_json::{Value, json};

use super::fixture::{TestServer, wait_until};

/// The error of a connection to this path.
fn connect_error(path: &Path) -> String {
    Client::connect_with_timeout(path, Duration::from_secs(1)).unwrap_err().to_string()
}

/// Starts a daemon that calls `act` with its first connection. Returns the directory and the path of its socket.
fn fake_daemon(act: impl FnOnce(UnixStream) + Send + 'static) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || act(listener.accept().unwrap().0));
    (dir, path)
}

/// Leaves a socket file at which no process listens. If another test starts a program at the same time, the new process
/// has a copy of the listener until it executes the program. Connections succeed until then.
fn leave_stale_socket(path: &Path) {
    drop(UnixListener::bind(path).unwrap());
    wait_until("no process listens at the path", || UnixStream::connect(path).is_err());
}

/// The error of a call at this path.
fn call_error(path: &Path) -> ClientError {
    let mut client = Client::connect_with_timeout(path, Duration::from_secs(1)).unwrap();
    client.call::<Value>("GetStatus", &json!({})).unwrap_err()
}

#[test]
fn without_a_daemon_the_error_has_the_path_and_the_command_to_start_one() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent");
    let stale = dir.path().join("stale");
    leave_stale_socket(&stale);
    std::fs::write(dir.path().join("file"), "").unwrap();
    let below_a_file = dir.path().join("file/s");
    for path in [absent, stale, below_a_file] {
        let expected = format!(
            "pjwd is not running: looked for {}; start it with: {}; if it listens elsewhere, give the path with --socket or PJW_SOCKET",
            path.display(),
            pjw_ipc::service_commands::pjwd_start_commands()
        );
        assert_eq!(connect_error(&path), expected);
    }
}

#[test]
fn missing_permission_is_distinguished_from_a_missing_daemon() {
    if nix::unistd::geteuid().is_root() {
        skip("root has every permission");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let _listener = UnixListener::bind(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    assert!(connect_error(&path).contains("no permission to connect"), "{}", connect_error(&path));
}

#[test]
fn a_path_that_is_too_long_for_a_socket_is_an_error() {
    let long = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
    let text = connect_error(&long);
    assert!(text.contains("/tmp/xxx") && text.contains("is 205 bytes long"), "{text}");
    assert!(text.contains("at most 107") && text.contains("--socket"), "{text}");
}

#[test]
fn a_call_to_a_daemon_that_hangs_ends_with_the_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let hanging_daemon = UnixListener::bind(&path).unwrap();
    // The queue of connections that wait for accept(2), as short as possible.
    listen(&hanging_daemon, Backlog::new(0).unwrap()).unwrap();
    let error = call_error(&path);
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    let (text, pid) = (error.to_string(), std::process::id());
    assert!(text.contains(&format!("pjwd (process {pid}) has not answered within 1s")), "{text}");
    assert!(text.contains(&format!("kill -9 {pid}, and then pjwd again")), "{text}");
    // The client has ended, but its connection stays in the queue until a process accepts it.
    assert!(connect_error(&path).contains("pjwd hangs"), "{}", connect_error(&path));
}

#[test]
fn a_call_to_a_daemon_that_sends_single_bytes_ends_with_the_timeout() {
    // The second daemon leaves no pause, so that there is always a byte to read, also after the deadline.
    for pause in [Some(Duration::from_millis(20)), None] {
        let (_dir, path) = fake_daemon(move |mut stream| {
            // The client never waits for a byte as long as its timeout. The loop ends when the client closes the
            // connection.
            while stream.write_all(b" ").is_ok() {
                pause.into_iter().for_each(std::thread::sleep);
            }
        });
        let error = call_error(&path);
        assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
        assert!(error.to_string().contains("has not answered within 1s"), "{error}");
    }
}

#[test]
fn a_stream_of_replies_has_no_deadline_and_the_next_call_has_one() {
    let (_dir, path) = fake_daemon(|mut stream| {
        // The reply to the next call is sent with the last one of the stream. So it is in time also if this thread has
        // to wait for a CPU.
        let replies: [&[u8]; 2] = [
            b"{\"parameters\":{\"n\":1},\"continues\":true}\0",
            b"{\"parameters\":{\"n\":2}}\0{\"parameters\":{\"n\":3}}\0",
        ];
        for reply in replies {
            std::thread::sleep(Duration::from_millis(700));
            stream.write_all(reply).unwrap();
        }
        // Until the client closes the connection.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let mut client = Client::connect_with_timeout(&path, Duration::from_secs(1)).unwrap();
    let mut numbers = Vec::new();
    client
        .stream_replies("Events", &json!({}), |reply: Value| {
            numbers.push(reply["n"].as_u64());
            true
        })
        .unwrap();
    assert_eq!(numbers, [Some(1), Some(2)]);
    assert_eq!(client.call::<Value>("GetStatus", &json!({})).unwrap(), json!({"n": 3}));
}

#[test]
fn a_client_that_is_rejected_for_too_many_connections_gets_the_reason_after_it_sent_a_call() {
    let server = TestServer::start(ServerLimits { max_connections: 1, ..ServerLimits::default() });
    let mut first = Client::connect(server.path()).unwrap();
    first.call::<Value>("GetStatus", &json!({})).unwrap();
    let mut second = Client::connect(server.path()).unwrap();
    let error = second.call::<Value>("GetStatus", &json!({})).unwrap_err();
    assert!(error.to_string().contains("too many connections"), "{error}");
    assert!(error.is_busy_before_execution(), "{error:?}");
    drop(first);
    wait_until("the first connection is free again", || {
        let mut third = Client::connect(server.path()).unwrap();
        third.call::<Value>("GetStatus", &json!({})).is_ok()
    });
}

#[test]
fn an_error_that_the_daemon_sent_before_it_hung_up_is_read_even_if_sending_the_call_fails() {
    let (closed, wait) = std::sync::mpsc::channel();
    let (_dir, path) = fake_daemon(move |mut stream| {
        let busy = br#"{"error":"org.pjw.Warden.Busy","parameters":{"message":"come back later"}}"#;
        stream.write_all(busy).unwrap();
        stream.write_all(&[0]).unwrap();
        drop(stream);
        closed.send(()).unwrap();
    });
    let mut client = Client::connect(&path).unwrap();
    wait.recv().unwrap();
    let mut call = || client.call::<Value>("GetStatus", &json!({})).unwrap_err().to_string();
    assert_eq!(call(), "come back later");
    assert!(call().contains("the connection to pjwd broke"), "{}", call());
}

#[test]
fn replies_that_cannot_be_parsed_are_errors() {
    for (answer, expected) in [
        (b"no json\0".to_vec(), "cannot be parsed"),
        (b"{\"parameters\":{}}\0".to_vec(), "cannot be parsed"),
        (b"{\"parameters\":{\"half".to_vec(), "broke"),
        (b"{\"error\":\"org.other.Error\"}\0".to_vec(), "org.other.Error"),
        (
            b"{\"error\":\"org.varlink.service.InvalidParameter\",\"parameters\":{\"parameter\":\"x\"}}\0"
                .to_vec(),
            "the parameter x",
        ),
    ] {
        let (_dir, path) = fake_daemon(move |mut stream| {
            let _ = stream.read(&mut [0; 4096]);
            stream.write_all(&answer).unwrap();
        });
        let mut client = Client::connect(&path).unwrap();
        let error = client.call::<Vec<String>>("GetStatus", &json!({}));
        let error = match error {
            Err(error) => error,
            Ok(list) => panic!("{list:?}"),
        };
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        assert_eq!(error.is_unknown_parameter("x"), expected == "the parameter x", "{error}");
        assert!(!error.is_unknown_parameter("y"), "{error}");
    }
}

#[test]
fn a_reply_that_does_not_end_is_an_error() {
    let (_dir, path) = fake_daemon(|mut stream| while stream.write_all(&[b' '; 1 << 20]).is_ok() {});
    let mut client = Client::connect(&path).unwrap();
    let error = client.call::<Value>("GetStatus", &json!({})).unwrap_err();
    assert!(error.to_string().contains("it does not end"), "{error}");
}

#[test]
fn a_stream_is_read_to_its_end_and_the_client_can_call_again() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = Client::connect(server.path()).unwrap();
    let mut count = 0;
    client
        .stream_replies("Events", &json!({}), |_: Value| {
            count += 1;
            true
        })
        .unwrap();
    assert_eq!(count, 3);
    client.call::<Value>("GetStatus", &json!({})).unwrap();
    let mut first = None;
    client
        .stream_replies("Events", &json!({ "follow": true }), |reply: Value| {
            first = Some(reply);
            false
        })
        .unwrap();
    assert_eq!(first.unwrap()["event"]["text"], "0");
}

#[test]
fn the_socket_of_the_users_own_daemon_comes_before_that_of_the_system() {
    let dir = tempfile::tempdir().unwrap();
    let own_uid = nix::unistd::geteuid().as_raw();
    let system = PathBuf::from("/run/pjwd/pjwd.sock");
    assert_eq!(socket_path(Some(Path::new("told")), 1000, Some(dir.path())), PathBuf::from("told"));
    assert_eq!(socket_path(None, 0, Some(dir.path())), system);
    if own_uid != 0 {
        let own = dir.path().join("pjwd/pjwd.sock");
        assert_eq!(
            socket_path(None, own_uid, Some(dir.path())),
            if system.exists() { &system } else { &own }.clone()
        );
        std::fs::create_dir(dir.path().join("pjwd")).unwrap();
        let _daemon = UnixListener::bind(&own).unwrap();
        assert_eq!(socket_path(None, own_uid, Some(dir.path())), own);
    }
}

#[test]
fn a_runtime_directory_that_another_user_owns_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let system = PathBuf::from("/run/pjwd/pjwd.sock");
    let other_uid = nix::unistd::geteuid().as_raw() + 1;
    std::fs::create_dir(dir.path().join("pjwd")).unwrap();
    let _daemon = UnixListener::bind(dir.path().join("pjwd/pjwd.sock")).unwrap();
    assert_eq!(socket_path(None, other_uid, Some(dir.path())), system);
    let linked = tempfile::tempdir().unwrap();
    symlink(dir.path().join("pjwd"), linked.path().join("pjwd")).unwrap();
    assert_eq!(socket_path(None, other_uid, Some(linked.path())), system);
}

#[test]
fn the_runtime_directory_of_a_user_is_that_of_the_session_or_one_named_by_the_user_id() {
    assert_eq!(runtime_dir(0, Some(Path::new("/run/user/0"))), PathBuf::from("/run/pjwd"));
    assert_eq!(runtime_dir(7, Some(Path::new("/x"))), PathBuf::from("/x/pjwd"));
    assert_eq!(lock_dir(0), PathBuf::from("/run/pjwd-lock"));
    assert_eq!(lock_dir(4_000_000_000), PathBuf::from("/tmp/pjwd-4000000000-lock"));
    assert_eq!(lasting_lock_dir(0), None, "/run/pjwd-lock stays");
    assert_eq!(lasting_lock_dir(1000), Some(PathBuf::from("/tmp/pjwd-1000-lock")), "logged in or not");
    let uid_without_directory = 4_000_000_000;
    for invalid_directory in [None, Some(Path::new("relative")), Some(Path::new(""))] {
        assert_eq!(
            runtime_dir(uid_without_directory, invalid_directory),
            PathBuf::from("/tmp/pjwd-4000000000")
        );
    }
}

/// Writes to stderr directly, because the captured output of a test is shown only if the test fails.
fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
