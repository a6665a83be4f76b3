//! The client: the paths of the socket, the errors without a daemon, and invalid replies.

use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{Backlog, listen};
use pjw_ipc::client::{Client, ClientError, lock_dir, runtime_dir, socket_path};
use pjw_ipc::server::ServerLimits;
use serde_json::{Value, json};

use super::fixture::{Running, until};

fn complaint(path: &Path) -> String {
    Client::connect_with_timeout(path, Duration::from_secs(1)).unwrap_err().to_string()
}

/// A daemon that calls `act` with its first connection.
fn daemon(act: impl FnOnce(UnixStream) + Send + 'static) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || act(listener.accept().unwrap().0));
    (dir, path)
}

fn ask(path: &Path) -> ClientError {
    let mut client = Client::connect_with_timeout(path, Duration::from_secs(1)).unwrap();
    client.call::<Value>("GetStatus", &json!({})).unwrap_err()
}

#[test]
fn without_a_daemon_the_error_has_the_path_and_the_command_to_start_one() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent");
    let stale = dir.path().join("stale");
    drop(UnixListener::bind(&stale).unwrap());
    std::fs::write(dir.path().join("file"), "").unwrap();
    let below_a_file = dir.path().join("file/s");
    for path in [absent, stale, below_a_file] {
        let expected = format!(
            "pjwd is not running: looked for {}; start it with: {}; if it listens elsewhere, give the path with --socket or PJW_SOCKET",
            path.display(),
            pjw_ipc::service_commands::pjwd_start_commands()
        );
        assert_eq!(complaint(&path), expected);
    }
}

#[test]
fn missing_permission_is_distinguished_from_a_missing_daemon() {
    if nix::unistd::geteuid().is_root() {
        skip("root passes every door");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let _listener = UnixListener::bind(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    assert!(complaint(&path).contains("no permission to connect"), "{}", complaint(&path));
}

#[test]
fn a_path_that_no_socket_can_have_is_an_error_not_a_panic() {
    let long = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
    let text = complaint(&long);
    assert!(text.contains("/tmp/xxx") && text.contains("is 205 bytes long"), "{text}");
    assert!(text.contains("at most 107") && text.contains("--socket"), "{text}");
}

#[test]
fn a_daemon_that_hangs_runs_into_the_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let hanging = UnixListener::bind(&path).unwrap();
    // The queue of connections that wait for accept(2), as short as possible.
    listen(&hanging, Backlog::new(0).unwrap()).unwrap();
    let fault = ask(&path);
    assert!(matches!(fault, ClientError::Timeout(_)), "{fault}");
    assert!(fault.to_string().contains("has not answered within 1s"), "{fault}");
    // That client gave up, but its connection stays in the queue until a process accepts it.
    assert!(complaint(&path).contains("pjwd hangs"), "{}", complaint(&path));
}

#[test]
fn a_daemon_that_sends_a_byte_now_and_then_runs_into_the_timeout() {
    let (_dir, path) = daemon(|mut stream| {
        // The reads of the client are never idle for as long as its timeout. It ends them by closing the connection.
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let fault = ask(&path);
    assert!(matches!(fault, ClientError::Timeout(_)), "{fault}");
    assert!(fault.to_string().contains("has not answered within 1s"), "{fault}");
}

#[test]
fn a_series_of_replies_has_no_deadline_and_the_next_call_has_its_own() {
    let (_dir, path) = daemon(|mut stream| {
        let replies: [(&[u8], u64); 3] = [
            (br#"{"parameters":{"n":1},"continues":true}"#, 700),
            (br#"{"parameters":{"n":2}}"#, 700),
            (br#"{"parameters":{"n":3}}"#, 0),
        ];
        for (reply, ms) in replies {
            std::thread::sleep(Duration::from_millis(ms));
            stream.write_all(reply).unwrap();
            stream.write_all(&[0]).unwrap();
        }
        // Until the client closes the connection.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let mut client = Client::connect_with_timeout(&path, Duration::from_secs(1)).unwrap();
    let mut seen = Vec::new();
    client
        .stream_replies("Events", &json!({}), |reply: Value| {
            seen.push(reply["n"].as_u64());
            true
        })
        .unwrap();
    assert_eq!(seen, [Some(1), Some(2)]);
    assert_eq!(client.call::<Value>("GetStatus", &json!({})).unwrap(), json!({"n": 3}));
}

#[test]
fn a_rejected_client_reads_the_reason_also_after_it_sent_a_call() {
    let server = Running::start(ServerLimits { max_connections: 1, ..ServerLimits::default() });
    let mut first = Client::connect(server.path()).unwrap();
    first.call::<Value>("GetStatus", &json!({})).unwrap();
    let mut second = Client::connect(server.path()).unwrap();
    let fault = second.call::<Value>("GetStatus", &json!({})).unwrap_err();
    assert!(fault.to_string().contains("too many connections"), "{fault}");
    drop(first);
    until("the place is free again", || {
        let mut third = Client::connect(server.path()).unwrap();
        third.call::<Value>("GetStatus", &json!({})).is_ok()
    });
}

#[test]
fn an_error_before_the_hang_up_is_read_also_if_sending_fails() {
    let (closed, wait) = std::sync::mpsc::channel();
    let (_dir, path) = daemon(move |mut stream| {
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
        let (_dir, path) = daemon(move |mut stream| {
            let _ = stream.read(&mut [0; 4096]);
            stream.write_all(&answer).unwrap();
        });
        let mut client = Client::connect(&path).unwrap();
        let fault = client.call::<Vec<String>>("GetStatus", &json!({}));
        let fault = match fault {
            Err(fault) => fault,
            Ok(list) => panic!("{list:?}"),
        };
        assert!(fault.to_string().contains(expected), "{expected}: {fault}");
    }
}

#[test]
fn a_reply_without_end_is_cut_off() {
    let (_dir, path) = daemon(|mut stream| while stream.write_all(&[b' '; 1 << 20]).is_ok() {});
    let mut client = Client::connect(&path).unwrap();
    let fault = client.call::<Value>("GetStatus", &json!({})).unwrap_err();
    assert!(fault.to_string().contains("it does not end"), "{fault}");
}

#[test]
fn a_stream_is_read_to_its_end_and_the_client_can_call_again() {
    let server = Running::start(ServerLimits::default());
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
fn a_users_own_socket_comes_before_the_systems() {
    let dir = tempfile::tempdir().unwrap();
    let me = nix::unistd::geteuid().as_raw();
    let system = PathBuf::from("/run/pjwd/pjwd.sock");
    assert_eq!(socket_path(Some(Path::new("told")), 1000, Some(dir.path())), PathBuf::from("told"));
    assert_eq!(socket_path(None, 0, Some(dir.path())), system);
    if me != 0 {
        let own = dir.path().join("pjwd/pjwd.sock");
        assert_eq!(
            socket_path(None, me, Some(dir.path())),
            if system.exists() { &system } else { &own }.clone()
        );
        std::fs::create_dir(dir.path().join("pjwd")).unwrap();
        let _daemon = UnixListener::bind(&own).unwrap();
        assert_eq!(socket_path(None, me, Some(dir.path())), own);
    }
}

#[test]
fn a_directory_of_another_owner_in_the_users_name_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let system = PathBuf::from("/run/pjwd/pjwd.sock");
    let someone_else = nix::unistd::geteuid().as_raw() + 1;
    std::fs::create_dir(dir.path().join("pjwd")).unwrap();
    let _daemon = UnixListener::bind(dir.path().join("pjwd/pjwd.sock")).unwrap();
    assert_eq!(socket_path(None, someone_else, Some(dir.path())), system);
    let linked = tempfile::tempdir().unwrap();
    symlink(dir.path().join("pjwd"), linked.path().join("pjwd")).unwrap();
    assert_eq!(socket_path(None, someone_else, Some(linked.path())), system);
}

#[test]
fn a_users_own_directory_is_that_of_the_session_or_one_with_the_user_id() {
    assert_eq!(runtime_dir(0, Some(Path::new("/run/user/0"))), PathBuf::from("/run/pjwd"));
    assert_eq!(runtime_dir(7, Some(Path::new("/x"))), PathBuf::from("/x/pjwd"));
    assert_eq!(lock_dir(0), PathBuf::from("/run/pjwd-lock"));
    assert_eq!(lock_dir(4_000_000_000), PathBuf::from("/tmp/pjwd-4000000000-lock"));
    let nobodys = 4_000_000_000;
    for useless in [None, Some(Path::new("relative")), Some(Path::new(""))] {
        assert_eq!(runtime_dir(nobodys, useless), PathBuf::from("/tmp/pjwd-4000000000"));
    }
}

/// On stderr itself, because a test's output is shown only if it fails.
fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
