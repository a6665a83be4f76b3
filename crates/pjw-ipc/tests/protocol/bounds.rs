//! The limits for clients: large, slow and invalid requests, unread replies.

use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::time::Duration;

use pjw_ipc::server::ServerLimits;
use serde_json::{Value, json};

use super::fixture::{RawClient, TIMEOUT, TestServer, wait_until};

const GET_STATUS: &str = r#"{"method":"org.pjw.Warden.GetStatus"}"#;

fn is_status(reply: &Value) -> bool {
    reply["error"].is_null() && reply["parameters"]["status"]["schema"] == 1
}

#[test]
fn a_request_of_the_largest_size_is_answered_and_one_byte_more_is_not() {
    let server = TestServer::start(ServerLimits { max_request_bytes: 5000, ..ServerLimits::default() });
    let padded = |length: usize| format!("{GET_STATUS}{}", " ".repeat(length - GET_STATUS.len()));
    let mut client = server.connect();
    assert!(is_status(&client.exchange(&padded(5000))));
    assert!(
        is_status(&client.exchange(&padded(5000))),
        "the limit is for each request, not for the connection"
    );
    client.send(&padded(5001));
    assert_eq!(client.receive(), None);
    assert!(is_status(&server.connect().exchange(GET_STATUS)));
}

#[test]
fn pipelined_calls_may_exceed_the_size_of_one_request() {
    let server = TestServer::start(ServerLimits { max_request_bytes: 100, ..ServerLimits::default() });
    let mut client = server.connect();
    client.0.write_all(format!("{GET_STATUS}\0").repeat(500).as_bytes()).unwrap();
    for _ in 0..500 {
        assert!(is_status(&client.receive().unwrap()));
    }
}

#[test]
fn the_connection_of_a_request_that_exceeds_its_time_limit_is_closed() {
    let server = TestServer::start(ServerLimits {
        request_timeout: Duration::from_secs(1),
        ..ServerLimits::default()
    });
    let mut client = server.connect();
    wait_until("the connection is closed", || {
        std::thread::sleep(Duration::from_millis(20));
        client.0.write_all(b" ").is_err()
    });
    assert!(is_status(&server.connect().exchange(GET_STATUS)));
}

#[test]
fn an_idle_connection_is_closed() {
    let server =
        TestServer::start(ServerLimits { idle_timeout: Duration::from_secs(2), ..ServerLimits::default() });
    let mut client = server.connect();
    assert!(is_status(&client.exchange(GET_STATUS)));
    assert_eq!(client.receive(), None);
}

#[test]
fn json_that_is_no_call_is_refused_and_the_connection_stays_open() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = server.connect();
    for text in [
        "7",
        "null",
        "{}",
        r#"{"method":7}"#,
        r#"{"method":"org.pjw.Warden.GetStatus","more":"yes"}"#,
        r#"["org.pjw.Warden.GetStatus"]"#,
    ] {
        assert_eq!(client.exchange(text)["error"], "org.varlink.service.InvalidParameter", "{text}");
    }
    assert!(is_status(&client.exchange(GET_STATUS)));
}

#[test]
fn invalid_json_closes_the_connection() {
    let server = TestServer::start(ServerLimits::default());
    let deep = "[".repeat(60_000);
    for text in ["", "{", "\u{1}\u{2}", "{\"method\":\"org.pjw.Warden.GetStatus\"}}", &deep] {
        let mut client = server.connect();
        assert_eq!(client.exchange(text)["error"], "org.varlink.service.InvalidParameter", "{text:.40}");
        assert_eq!(client.receive(), None, "{text:.40}");
    }
    let mut client = server.connect();
    client.0.write_all(b"\xff\xfe{}\0").unwrap();
    assert_eq!(client.receive().unwrap()["error"], "org.varlink.service.InvalidParameter");
    assert!(is_status(&server.connect().exchange(GET_STATUS)));
}

#[test]
fn a_list_of_parameters_without_names_is_refused() {
    let server = TestServer::start(ServerLimits::default());
    let reply = server.connect().exchange(r#"{"method":"org.pjw.Warden.Release","parameters":["manual:a"]}"#);
    assert_eq!(reply["error"], "org.varlink.service.InvalidParameter");
    assert_eq!(reply["parameters"], json!({ "parameter": "parameters" }));
}

#[test]
fn a_oneway_call_is_carried_out_and_never_answered_even_if_it_is_invalid() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = server.connect();
    client.send(r#"{"method":"org.pjw.Warden.Release","parameters":{"job":"a"},"oneway":true}"#);
    client.send(r#"{"method":"org.pjw.Warden.Release","parameters":{},"oneway":true}"#);
    client.send(r#"{"method":"org.pjw.Warden.Events","more":true,"oneway":true}"#);
    assert!(
        is_status(&client.exchange(GET_STATUS)),
        "the first reply is that of the first call which is not oneway"
    );
    server.wait_for_calls(3);
    let mut hung_up = server.connect();
    hung_up.send(r#"{"method":"org.pjw.Warden.Reload","oneway":true}"#);
    drop(hung_up);
    server.wait_for_calls(4);
}

#[test]
fn the_process_and_the_user_of_a_call_are_those_that_the_kernel_reports() {
    let server = TestServer::start(ServerLimits::default());
    let status = server.connect().exchange(GET_STATUS)["parameters"]["status"].take();
    assert_eq!(status["pid"], std::process::id());
    assert_eq!(status["jobs"][0]["owner"], nix::unistd::geteuid().as_raw());
}

#[test]
fn a_client_that_closed_its_sending_side_gets_all_its_replies() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = server.connect();
    client.send(GET_STATUS);
    client.send(r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"}}"#);
    client.0.shutdown(Shutdown::Write).unwrap();
    assert!(is_status(&client.receive().unwrap()));
    server.wait_for_calls(2);
    server.open_gate();
    assert_eq!(client.receive().unwrap()["parameters"]["job"]["id"], "slow");
    assert_eq!(client.receive(), None);
}

#[test]
fn a_call_that_takes_long_delays_no_other_connection() {
    let server = TestServer::start(ServerLimits::default());
    let mut slow_client = server.connect();
    slow_client.send(r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"}}"#);
    server.wait_for_calls(1);
    assert!(is_status(&server.connect().exchange(GET_STATUS)));
    server.open_gate();
    assert_eq!(slow_client.receive().unwrap()["parameters"]["job"]["id"], "slow");
}

#[test]
fn a_reply_above_the_limit_of_unread_bytes_is_refused_and_a_small_one_is_sent() {
    let server =
        TestServer::start(ServerLimits { max_unread_reply_bytes: 20_000, ..ServerLimits::default() });
    let mut client = server.connect();
    // The reply repeats the job's name.
    let reply = client.call("org.pjw.Warden.GetJob", &json!({ "job": "x".repeat(30_000) }));
    assert_eq!(reply["error"], "org.pjw.Warden.Busy");
    assert!(reply["parameters"]["message"].as_str().unwrap().contains("wait to be read"), "{reply}");
    assert!(is_status(&client.exchange(GET_STATUS)), "the connection stays open");
}

#[test]
fn connections_are_closed_when_the_unread_replies_exceed_their_limit() {
    let limits = ServerLimits {
        max_unread_reply_bytes: 5_000,
        write_timeout: 10 * TIMEOUT,
        ..ServerLimits::default()
    };
    let server = TestServer::with_recorded_events(limits, usize::MAX);
    // The clients read nothing: the bytes for which their sockets have no room wait in the server.
    let mut silent: Vec<RawClient> = (0..60).map(|_| server.connect()).collect();
    for client in &mut silent {
        client.send(r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#);
    }
    // A socket whose buffer is full is not closed.
    let is_closed = |client: &mut RawClient| {
        client.0.set_nonblocking(true).unwrap();
        client.0.write(b" ").is_err_and(|error| error.kind() != ErrorKind::WouldBlock)
    };
    wait_until("a connection is closed", || silent.iter_mut().any(is_closed));
    assert!(!silent.iter_mut().all(is_closed), "the connections within the limit stay open");
}
