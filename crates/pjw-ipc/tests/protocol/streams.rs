//! Streams: their begin, their end, and the hang-up of the client.

use std::io::Write;
use std::net::Shutdown;

use pjw_ipc::server::ServerLimits;
use serde_json::{Value, json};

use super::fixture::{RawClient, Running};

const TELL: &str = r#"{"method":"org.pjw.Warden.Events","more":true}"#;
const FOLLOW: &str = r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#;
const ASK: &str = r#"{"method":"org.pjw.Warden.GetStatus"}"#;

/// The texts of a stream's events up to its last reply.
fn texts(client: &mut RawClient) -> Vec<Value> {
    let mut texts = Vec::new();
    loop {
        let mut reply = client.receive().expect("a stream has a last reply");
        texts.push(reply["parameters"]["event"]["text"].take());
        if reply["continues"] != true {
            return texts;
        }
    }
}

#[test]
fn every_event_is_sent_once_and_in_order_and_the_last_is_marked() {
    let server = Running::with_past(ServerLimits::default(), 100);
    let mut client = server.connect();
    client.say(TELL);
    let expected: Vec<Value> = (0..100).map(|number: u32| json!(number.to_string())).collect();
    assert_eq!(texts(&mut client), expected);
    assert!(client.ask(ASK)["error"].is_null(), "and the connection goes on");
}

#[test]
fn a_stream_without_events_is_one_empty_reply() {
    let server = Running::with_past(ServerLimits::default(), 0);
    assert_eq!(server.connect().ask(TELL), json!({ "parameters": {} }));
}

#[test]
fn recorded_events_are_sent_at_once_in_a_stream_that_goes_on() {
    let server = Running::start(ServerLimits::default());
    let mut client = server.connect();
    client.say(FOLLOW);
    for number in ["0", "1", "2"] {
        let reply = client.receive().unwrap();
        assert_eq!(
            (&reply["parameters"]["event"]["text"], &reply["continues"]),
            (&json!(number), &json!(true))
        );
    }
}

#[test]
fn a_stream_without_more_is_an_error_and_leaves_nothing_behind() {
    let server = Running::start(ServerLimits::default());
    let mut client = server.connect();
    let reply = client.ask(r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true}}"#);
    assert_eq!(reply["error"], "org.varlink.service.ExpectedMore");
    server.wait_for_streams(0);
    assert!(client.ask(ASK)["error"].is_null());
}

#[test]
fn a_hang_up_ends_a_stream_whatever_was_sent_before() {
    let server = Running::start(ServerLimits { max_request_bytes: 1000, ..ServerLimits::default() });
    let farewells = [String::new(), "{".to_owned(), format!("{ASK}\0"), format!("{ASK}\0").repeat(100)];
    let listeners: Vec<RawClient> = farewells
        .iter()
        .map(|farewell| {
            let mut client = server.connect();
            client.say(FOLLOW);
            client.receive().unwrap();
            client.0.write_all(farewell.as_bytes()).unwrap();
            client
        })
        .collect();
    server.wait_for_streams(farewells.len());
    drop(listeners);
    server.wait_for_streams(0);
}

#[test]
fn a_client_with_a_closed_sending_side_still_gets_events() {
    let server = Running::start(ServerLimits::default());
    let mut finite = server.connect();
    finite.say(TELL);
    finite.0.shutdown(Shutdown::Write).unwrap();
    assert_eq!(texts(&mut finite), ["0", "1", "2"]);
    assert_eq!(finite.receive(), None);
    let mut endless = server.connect();
    endless.say(FOLLOW);
    endless.0.shutdown(Shutdown::Write).unwrap();
    for number in ["0", "1", "2"] {
        assert_eq!(endless.receive().unwrap()["parameters"]["event"]["text"], number);
    }
    drop(endless);
    server.wait_for_streams(0);
}

#[test]
fn calls_that_come_during_a_stream_are_answered_after_it() {
    let server = Running::with_past(ServerLimits::default(), 50);
    let mut client = server.connect();
    client.say(TELL);
    client.say(ASK);
    assert_eq!(texts(&mut client).len(), 50);
    assert_eq!(client.receive().unwrap()["parameters"]["status"]["schema"], 1);
}
