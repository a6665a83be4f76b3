//! The stop of a server: calls that are being processed get their replies, no new call begins, no client delays the
//! stop.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use pjw_ipc::server::ServerLimits;
use serde_json::json;

use super::fixture::{TestServer, wait_until};

const SLOW: &str = r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"}}"#;

#[test]
fn a_stopping_server_answers_the_calls_that_it_processes_and_rejects_new_connections() {
    let mut server = TestServer::start(ServerLimits::default());
    let (mut client, mut idle) = (server.connect(), server.connect());
    client.send(SLOW);
    server.wait_for_calls(1);
    server.request_stop();
    assert_eq!(idle.receive(), None, "a connection without a call is closed");
    wait_until("a new connection gets the reason", || {
        let reply = server.connect().receive();
        reply.is_some_and(|reply| {
            assert_eq!(reply["error"], "org.pjw.Warden.Busy");
            reply["parameters"]["message"].as_str().unwrap().contains("stopping")
        })
    });
    server.open_gate();
    assert_eq!(client.receive().unwrap()["parameters"]["job"]["id"], "slow");
    assert_eq!(client.receive(), None);
    server.wait_for_end();
    assert!(UnixStream::connect(server.path()).is_err());
}

#[test]
fn a_stopping_server_sends_the_last_reply_of_each_stream() {
    let mut server = TestServer::with_recorded_events(ServerLimits::default(), 0);
    let mut client = server.connect();
    client.send(r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#);
    server.wait_for_streams(1);
    server.request_stop();
    assert_eq!(client.receive().unwrap(), json!({ "parameters": {} }));
    assert_eq!(client.receive(), None);
    server.wait_for_end();
}

#[test]
fn a_stopping_server_ends_after_a_time_limit_even_if_a_call_does_not_end() {
    let mut server = TestServer::start(ServerLimits {
        write_timeout: Duration::from_millis(100),
        ..ServerLimits::default()
    });
    let mut client = server.connect();
    client.send(SLOW);
    server.wait_for_calls(1);
    server.request_stop();
    server.wait_for_end();
    assert_eq!(client.receive(), None);
}
