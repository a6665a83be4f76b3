//! Streams of events: their begin, their end, and clients that hang up.

use std::io::Write;
use std::net::Shutdown;

use pjw_ipc::server::ServerLimits;
use serde_json::{Value, json};

use super::fixture::{RawClient, TestServer};

const EVENTS: &str = r#"{"method":"org.pjw.Warden.Events","more":true}"#;
const FOLLOW_EVENTS: &str = r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#;
const GET_STATUS: &str = r#"{"method":"org.pjw.Warden.GetStatus"}"#;

/// Reads the replies of a stream up to the last one. Returns the texts of their events.
fn receive_texts(client: &mut RawClient) -> Vec<Value> {
    let mut receive_texts = Vec::new();
    loop {
        let mut reply = client.receive().expect("a stream has a last reply");
        receive_texts.push(reply["parameters"]["event"]["text"].take());
        if reply["continues"] != true {
            return receive_texts;
        }
    }
}

#[test]
fn every_event_is_sent_once_and_in_order_and_the_last_is_marked() {
    let server = TestServer::with_recorded_events(ServerLimits::default(), 100);
    let mut client = server.connect();
    client.send(EVENTS);
    let expected: Vec<Value> = (0..100).map(|number: u32| json!(number.to_string())).collect();
    assert_eq!(receive_texts(&mut client), expected);
    assert!(client.exchange(GET_STATUS)["error"].is_null(), "the connection stays open after the stream");
}

#[test]
fn a_stream_without_events_consists_of_one_empty_reply() {
    let server = TestServer::with_recorded_events(ServerLimits::default(), 0);
    assert_eq!(server.connect().exchange(EVENTS), json!({ "parameters": {} }));
}

#[test]
fn a_stream_that_follows_new_events_sends_the_recorded_events_first() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = server.connect();
    client.send(FOLLOW_EVENTS);
    for number in ["0", "1", "2"] {
        let reply = client.receive().unwrap();
        assert_eq!(
            (&reply["parameters"]["event"]["text"], &reply["continues"]),
            (&json!(number), &json!(true))
        );
    }
}

#[test]
fn a_call_of_events_without_the_flag_more_is_an_error_and_leaves_no_stream() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = server.connect();
    let reply = client.exchange(r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true}}"#);
    assert_eq!(reply["error"], "org.varlink.service.ExpectedMore");
    server.wait_for_streams(0);
    assert!(client.exchange(GET_STATUS)["error"].is_null());
}

#[test]
fn a_stream_ends_when_its_client_hangs_up_whatever_the_client_sent_before() {
    let server = TestServer::start(ServerLimits { max_request_bytes: 1000, ..ServerLimits::default() });
    let last_bytes_of_clients =
        [String::new(), "{".to_owned(), format!("{GET_STATUS}\0"), format!("{GET_STATUS}\0").repeat(100)];
    let followers: Vec<RawClient> = last_bytes_of_clients
        .iter()
        .map(|last_bytes| {
            let mut client = server.connect();
            client.send(FOLLOW_EVENTS);
            client.receive().unwrap();
            client.0.write_all(last_bytes.as_bytes()).unwrap();
            client
        })
        .collect();
    server.wait_for_streams(last_bytes_of_clients.len());
    drop(followers);
    server.wait_for_streams(0);
}

#[test]
fn a_client_that_closed_its_sending_side_still_gets_events() {
    let server = TestServer::start(ServerLimits::default());
    let mut finite = server.connect();
    finite.send(EVENTS);
    finite.0.shutdown(Shutdown::Write).unwrap();
    assert_eq!(receive_texts(&mut finite), ["0", "1", "2"]);
    assert_eq!(finite.receive(), None);
    let mut endless = server.connect();
    endless.send(FOLLOW_EVENTS);
    endless.0.shutdown(Shutdown::Write).unwrap();
    for number in ["0", "1", "2"] {
        assert_eq!(endless.receive().unwrap()["parameters"]["event"]["text"], number);
    }
    drop(endless);
    server.wait_for_streams(0);
}

#[test]
fn calls_that_arrive_during_a_stream_are_answered_after_it() {
    let server = TestServer::with_recorded_events(ServerLimits::default(), 50);
    let mut client = server.connect();
    client.send(EVENTS);
    client.send(GET_STATUS);
    assert_eq!(receive_texts(&mut client).len(), 50);
    assert_eq!(client.receive().unwrap()["parameters"]["status"]["schema"], 1);
}
