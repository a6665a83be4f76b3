//! The server with correct, slow and hostile clients, and with an independent client.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail
#![allow(missing_docs)]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use pjw_ipc::bind::bind;
use pjw_ipc::call::{Call, CallError, Reply};
use pjw_ipc::client::Client;
use pjw_ipc::server::{Peer, Replies, ServerLimits, Service, serve};
use pjw_ipc::wire;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

/// A service whose replies show that the call was parsed.
struct Echo;

impl Service for Echo {
    async fn call(&self, peer: Peer, call: Call, _more: bool) -> Result<Replies, CallError> {
        match call {
            Call::GetStatus => {
                let status = wire::Status { schema: 1, pid: peer.uid, ..wire::Status::default() };
                Ok(Replies::Single(Box::new(Reply::Status { status: Arc::new(status) })))
            }
            Call::Release(request) => Err(CallError::Refused(format!("no {}", request.job))),
            Call::Events(request) => Ok(Replies::Stream(events(request.follow.unwrap_or(false)))),
            _ => Ok(Replies::Single(Box::new(Reply::Jobs { jobs: Vec::new() }))),
        }
    }
}

/// Sends three events. With `follow`, it sends events without end.
fn events(follow: bool) -> mpsc::Receiver<Reply> {
    let (sender, receiver) = mpsc::channel(4);
    tokio::task::spawn_local(async move {
        for n in 0u32.. {
            if n == 3 && !follow {
                return;
            }
            let event = wire::Event { text: format!("{n}{}", "x".repeat(1000)), ..wire::Event::default() };
            if sender.send(Reply::Event { event: event.into() }).await.is_err() {
                return;
            }
        }
    });
    receiver
}

struct TestServer {
    path: PathBuf,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl TestServer {
    fn start(limits: ServerLimits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let owned = bind(&path).unwrap();
        let (stop, stopped) = watch::channel(false);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let listener = owned.dup_listener().unwrap();
            tokio::task::LocalSet::new()
                .block_on(&runtime, serve(listener, Rc::new(Echo), limits, stopped))
                .unwrap();
        });
        Self { path, stop, thread: Some(thread), _dir: dir }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    /// Asserts that the server answers a new client.
    fn assert_answers(&self) {
        let reply: Value = Client::connect(&self.path).unwrap().call("GetStatus", &json!({})).unwrap();
        assert_eq!(reply["status"]["schema"], 1);
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

/// Sends a message in one piece, so that no time limit of the server is between its parts.
fn send(stream: &mut UnixStream, text: &str) {
    stream.write_all(format!("{text}\0").as_bytes()).unwrap();
}

/// Reads one reply. Returns `None` if the server closed the connection.
fn receive(stream: &mut UnixStream) -> Option<Value> {
    let mut bytes = Vec::new();
    let mut byte = [0];
    loop {
        match stream.read(&mut byte) {
            Ok(0) => return None,
            Ok(_) if byte[0] == 0 => return Some(serde_json::from_slice(&bytes).unwrap()),
            Ok(_) => bytes.push(byte[0]),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Sends a message, and returns the reply to it.
fn exchange(stream: &mut UnixStream, text: &str) -> Value {
    send(stream, text);
    receive(stream).expect("an answer")
}

#[test]
fn pipelined_calls_are_answered_in_order_and_errors_are_those_of_varlink() {
    let server = TestServer::start(ServerLimits::default());
    let mut stream = server.connect();
    for call in [
        r#"{"method":"org.pjw.Warden.GetStatus"}"#,
        r#"{"method":"org.pjw.Warden.Release","parameters":{"job":"a"}}"#,
        r#"{"method":"org.pjw.Warden.Release","parameters":{}}"#,
        r#"{"method":"org.pjw.Warden.Nonsense"}"#,
        r#"{"method":"org.other.Thing"}"#,
        r#"{"method":"org.pjw.Warden.Events"}"#,
        r#"{"method":"org.pjw.Warden.ListJobs","oneway":true}"#,
        r#"{"method":"org.varlink.service.GetInfo"}"#,
    ] {
        send(&mut stream, call);
    }
    assert_eq!(receive(&mut stream).unwrap()["parameters"]["status"]["schema"], 1);
    let refused = receive(&mut stream).unwrap();
    assert_eq!(
        (&refused["error"], &refused["parameters"]["message"]),
        (&json!("org.pjw.Warden.Refused"), &json!("no a"))
    );
    for (error, parameters) in [
        ("InvalidParameter", json!({ "parameter": "job" })),
        ("MethodNotFound", json!({ "method": "org.pjw.Warden.Nonsense" })),
        ("InterfaceNotFound", json!({ "interface": "org.other" })),
        ("ExpectedMore", json!({})),
    ] {
        let expected = json!({ "error": format!("org.varlink.service.{error}"), "parameters": parameters });
        assert_eq!(receive(&mut stream).unwrap(), expected);
    }
    let info = receive(&mut stream).unwrap();
    assert_eq!(info["parameters"]["interfaces"][1], "org.pjw.Warden", "a oneway call has no reply");
}

#[test]
fn a_stream_ends_with_its_last_reply_and_the_connection_stays_open() {
    let server = TestServer::start(ServerLimits::default());
    let mut stream = server.connect();
    send(&mut stream, r#"{"method":"org.pjw.Warden.Events","more":true}"#);
    let mut texts = Vec::new();
    loop {
        let reply = receive(&mut stream).unwrap();
        texts.push(reply["parameters"]["event"]["text"].as_str().unwrap()[..1].to_owned());
        if reply["continues"] != true {
            break;
        }
    }
    assert_eq!(texts, ["0", "1", "2"]);
    let _ = exchange(&mut stream, r#"{"method":"org.pjw.Warden.GetStatus"}"#);
}

#[test]
fn invalid_incomplete_and_endless_requests_disturb_no_other_client() {
    let server = TestServer::start(ServerLimits {
        request_timeout: Duration::from_secs(1),
        ..ServerLimits::default()
    });
    let mut invalid = server.connect();
    assert_eq!(exchange(&mut invalid, "}{ no json")["error"], "org.varlink.service.InvalidParameter");
    assert_eq!(receive(&mut invalid), None, "the begin of the next request is not known");
    let mut incomplete = server.connect();
    incomplete.write_all(b"{\"method\":").unwrap();
    let mut endless = server.connect();
    let flood = vec![b'x'; 1 << 20];
    // The server closes the connection at its limit, so the rest cannot be written.
    let _ = endless.write_all(&flood);
    server.assert_answers();
    assert_eq!(receive(&mut endless), None);
    assert_eq!(receive(&mut incomplete), None, "an incomplete request has a time limit");
    server.assert_answers();
}

#[test]
fn the_connection_of_a_client_that_never_reads_is_closed_and_other_clients_are_not_delayed() {
    let server = TestServer::start(ServerLimits {
        write_timeout: Duration::from_millis(200),
        ..ServerLimits::default()
    });
    let mut silent: Vec<UnixStream> = (0..5).map(|_| server.connect()).collect();
    for stream in &mut silent {
        send(stream, r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#);
    }
    for _ in 0..50 {
        server.assert_answers();
    }
    // The buffer of this connection stays full: the server closes it.
    let hung_up = (0..3000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        silent[0].write_all(b" ").is_err()
    });
    assert!(hung_up);
}

#[test]
fn a_connection_with_a_stream_is_freed_when_its_client_hangs_up_even_if_it_sent_another_call() {
    let server = TestServer::start(ServerLimits { max_connections: 2, ..ServerLimits::default() });
    for _ in 0..20 {
        let mut stream = server.connect();
        // If the server still counts earlier connections, it may already have rejected this one and closed it.
        let calls = [
            r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#,
            r#"{"method":"org.pjw.Warden.GetStatus"}"#,
        ];
        let _ = stream.write_all(format!("{}\0{}\0", calls[0], calls[1]).as_bytes());
        assert!(receive(&mut stream).is_some());
    }
    // If the twenty connections were still counted, the server would reject each new one.
    for _ in 0..3000 {
        let mut stream = server.connect();
        let _ = stream.write_all(b"{\"method\":\"org.pjw.Warden.GetStatus\"}\0");
        if receive(&mut stream).is_some_and(|reply| reply["error"].is_null()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the server still counts connections whose clients hung up");
}

#[test]
fn too_many_connections_are_rejected_with_a_reason() {
    let server = TestServer::start(ServerLimits { max_connections: 3, ..ServerLimits::default() });
    let mut kept: Vec<UnixStream> = (0..3).map(|_| server.connect()).collect();
    for stream in &mut kept {
        assert!(exchange(stream, r#"{"method":"org.pjw.Warden.GetStatus"}"#)["error"].is_null());
    }
    let mut fourth = server.connect();
    assert_eq!(receive(&mut fourth).unwrap()["error"], "org.pjw.Warden.Busy");
    assert_eq!(receive(&mut fourth), None);
    assert!(exchange(&mut kept[0], r#"{"method":"org.pjw.Warden.GetStatus"}"#)["error"].is_null());
}

#[test]
fn the_types_of_the_interface_description_have_the_fields_of_the_wire_types() {
    let text = pjw_ipc::INTERFACE_DEFINITION;
    let fields = |name: &str| {
        let start = text.find(&format!("type {name} (")).unwrap_or_else(|| panic!("no type {name}"));
        let body = text[start..].split_once('(').unwrap().1.split_once(')').unwrap().0;
        let mut names: Vec<String> =
            body.split(',').map(|field| field.split(':').next().unwrap().trim().to_owned()).collect();
        names.sort();
        names
    };
    let check = |name: &str, value: Value| {
        let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        assert_eq!(fields(name), keys, "type {name}");
    };
    check("Status", serde_json::to_value(wire::Status::default()).unwrap());
    check("Node", serde_json::to_value(wire::Node::default()).unwrap());
    check("Pool", serde_json::to_value(wire::Pool::default()).unwrap());
    check("Fits", serde_json::to_value(wire::Fits::default()).unwrap());
    check("Core", serde_json::to_value(wire::Core::default()).unwrap());
    check("Job", serde_json::to_value(wire::Job::default()).unwrap());
    check("Warning", serde_json::to_value(wire::Warning::default()).unwrap());
    check("Member", serde_json::to_value(wire::Member::default()).unwrap());
    check("Thread", serde_json::to_value(wire::Thread::default()).unwrap());
    check("Event", serde_json::to_value(wire::Event::default()).unwrap());
    check("Action", serde_json::to_value(wire::Action::default()).unwrap());
    check("Abstained", serde_json::to_value(wire::Abstained::default()).unwrap());
    check("Topology", serde_json::to_value(wire::Topology::default()).unwrap());
    check("Domain", serde_json::to_value(wire::Domain::default()).unwrap());
    check("CoreKind", serde_json::to_value(wire::CoreKind::default()).unwrap());
    check("Device", serde_json::to_value(wire::Device::default()).unwrap());
}

/// The module `varlink` of PyPI does not know pjw. It reads the interface description, a reply, a stream and an error.
#[test]
fn the_varlink_module_of_python_parses_all_replies() {
    let python = std::env::var("PJW_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let probe = Command::new(&python).args(["-c", "import varlink"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        skip(&format!("{python} has no module varlink (make python installs it)"));
        return;
    }
    let server = TestServer::start(ServerLimits::default());
    let script = r#"
import sys, varlink
with varlink.Client.new_with_address("unix:" + sys.argv[1]) as client, client.open("org.pjw.Warden") as warden:
    assert warden.GetStatus()["status"]["schema"] == 1
    assert len(list(warden.Events(_more=True))) == 3
    try:
        warden.Release("a")
        sys.exit("no error")
    except varlink.VarlinkError as error:
        assert error.error() == "org.pjw.Warden.Refused", error
print("done")
"#;
    let output = Command::new(&python).args(["-c", script]).arg(&server.path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Writes to stderr directly, because the captured output of a test is shown only if the test fails.
fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
