//! The stop of a server: calls that are being processed get their replies, no new call begins, no client delays the
//! stop.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use pjw_ipc::server::ServerLimits;
use serde_json::json;

use super::fixture::{Running, until};

const SLOW: &str = r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"}}"#;

#[test]
fn a_call_that_is_being_processed_is_still_answered() {
    let mut server = Running::start(ServerLimits::default());
    let (mut client, mut idle) = (server.connect(), server.connect());
    client.say(SLOW);
    server.wait_for_calls(1);
    server.tell_to_stop();
    assert_eq!(idle.receive(), None, "whoever has asked nothing is sent away");
    until("newcomers are told", || {
        let told = server.connect().receive();
        told.is_some_and(|told| {
            assert_eq!(told["error"], "org.pjw.Warden.Busy");
            told["parameters"]["message"].as_str().unwrap().contains("stopping")
        })
    });
    server.open_gate();
    assert_eq!(client.receive().unwrap()["parameters"]["job"]["id"], "slow");
    assert_eq!(client.receive(), None);
    server.wait_for_end();
    assert!(UnixStream::connect(server.path()).is_err());
}

#[test]
fn a_stream_gets_its_last_reply() {
    let mut server = Running::with_past(ServerLimits::default(), 0);
    let mut client = server.connect();
    client.say(r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#);
    server.wait_for_streams(1);
    server.tell_to_stop();
    assert_eq!(client.receive().unwrap(), json!({ "parameters": {} }));
    assert_eq!(client.receive(), None);
    server.wait_for_end();
}

#[test]
fn a_call_without_end_does_not_delay_the_stop_for_ever() {
    let mut server =
        Running::start(ServerLimits { write_timeout: Duration::from_millis(100), ..ServerLimits::default() });
    let mut client = server.connect();
    client.say(SLOW);
    server.wait_for_calls(1);
    server.tell_to_stop();
    server.wait_for_end();
    assert_eq!(client.receive(), None);
}
