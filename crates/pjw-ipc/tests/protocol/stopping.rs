//! The end: what is under way is answered, nothing new begins, nobody can put it off.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use pjw_ipc::server::Limits;
use serde_json::json;

use super::desk::{Running, until};

const SLOW: &str = r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"}}"#;

#[test]
fn a_call_that_is_under_way_is_still_answered() {
    let mut server = Running::start(Limits::default());
    let (mut talk, mut idle) = (server.connect(), server.connect());
    talk.say(SLOW);
    server.wait_for_calls(1);
    server.tell_to_stop();
    assert_eq!(idle.hear(), None, "whoever has asked nothing is sent away");
    until("newcomers are told", || {
        let told = server.connect().hear();
        told.is_some_and(|told| {
            assert_eq!(told["error"], "org.pjw.Warden.Busy");
            told["parameters"]["message"].as_str().unwrap().contains("stopping")
        })
    });
    server.open_gate();
    assert_eq!(talk.hear().unwrap()["parameters"]["job"]["id"], "slow");
    assert_eq!(talk.hear(), None);
    server.wait_for_end();
    assert!(UnixStream::connect(server.path()).is_err());
}

#[test]
fn a_stream_gets_its_last_reply() {
    let mut server = Running::with_past(Limits::default(), 0);
    let mut talk = server.connect();
    talk.say(r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#);
    server.wait_for_streams(1);
    server.tell_to_stop();
    assert_eq!(talk.hear().unwrap(), json!({ "parameters": {} }));
    assert_eq!(talk.hear(), None);
    server.wait_for_end();
}

#[test]
fn a_call_without_end_does_not_put_it_off_for_ever() {
    let mut server = Running::start(Limits { write_time: Duration::from_millis(100), ..Limits::default() });
    let mut talk = server.connect();
    talk.say(SLOW);
    server.wait_for_calls(1);
    server.tell_to_stop();
    server.wait_for_end();
    assert_eq!(talk.hear(), None);
}
