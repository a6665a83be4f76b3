//! Streams: how they begin, end, and notice that nobody listens any more.

use std::io::Write;
use std::net::Shutdown;

use pjw_ipc::server::Limits;
use serde_json::{Value, json};

use super::desk::{Running, Talk};

const TELL: &str = r#"{"method":"org.pjw.Warden.Events","more":true}"#;
const FOLLOW: &str = r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#;
const ASK: &str = r#"{"method":"org.pjw.Warden.GetStatus"}"#;

/// The texts of a stream's events up to its last reply.
fn texts(talk: &mut Talk) -> Vec<Value> {
    let mut texts = Vec::new();
    loop {
        let mut reply = talk.hear().expect("a stream has a last reply");
        texts.push(reply["parameters"]["event"]["text"].take());
        if reply["continues"] != true {
            return texts;
        }
    }
}

#[test]
fn every_event_is_told_once_and_in_order_and_the_last_says_so() {
    let server = Running::with_past(Limits::default(), 100);
    let mut talk = server.connect();
    talk.say(TELL);
    let expected: Vec<Value> = (0..100).map(|number: u32| json!(number.to_string())).collect();
    assert_eq!(texts(&mut talk), expected);
    assert!(talk.ask(ASK)["error"].is_null(), "and the connection goes on");
}

#[test]
fn a_stream_with_nothing_to_tell_is_one_reply_without_an_event() {
    let server = Running::with_past(Limits::default(), 0);
    assert_eq!(server.connect().ask(TELL), json!({ "parameters": {} }));
}

#[test]
fn a_listener_hears_the_past_at_once_though_more_may_come() {
    let server = Running::start(Limits::default());
    let mut talk = server.connect();
    talk.say(FOLLOW);
    for number in ["0", "1", "2"] {
        let reply = talk.hear().unwrap();
        assert_eq!(
            (&reply["parameters"]["event"]["text"], &reply["continues"]),
            (&json!(number), &json!(true))
        );
    }
}

#[test]
fn a_stream_without_more_is_an_error_and_leaves_nothing_behind() {
    let server = Running::start(Limits::default());
    let mut talk = server.connect();
    let reply = talk.ask(r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true}}"#);
    assert_eq!(reply["error"], "org.varlink.service.ExpectedMore");
    server.wait_for_streams(0);
    assert!(talk.ask(ASK)["error"].is_null());
}

#[test]
fn listeners_that_hang_up_are_gone_whatever_they_said_before() {
    let server = Running::start(Limits { request_bytes: 1000, ..Limits::default() });
    let farewells = [String::new(), "{".to_owned(), format!("{ASK}\0"), format!("{ASK}\0").repeat(100)];
    let listeners: Vec<Talk> = farewells
        .iter()
        .map(|farewell| {
            let mut talk = server.connect();
            talk.say(FOLLOW);
            talk.hear().unwrap();
            talk.0.write_all(farewell.as_bytes()).unwrap();
            talk
        })
        .collect();
    server.wait_for_streams(farewells.len());
    drop(listeners);
    server.wait_for_streams(0);
}

#[test]
fn a_shells_pipe_that_has_ended_still_listens_until_it_is_closed() {
    let server = Running::start(Limits::default());
    let mut finite = server.connect();
    finite.say(TELL);
    finite.0.shutdown(Shutdown::Write).unwrap();
    assert_eq!(texts(&mut finite), ["0", "1", "2"]);
    assert_eq!(finite.hear(), None);
    let mut endless = server.connect();
    endless.say(FOLLOW);
    endless.0.shutdown(Shutdown::Write).unwrap();
    for number in ["0", "1", "2"] {
        assert_eq!(endless.hear().unwrap()["parameters"]["event"]["text"], number);
    }
    drop(endless);
    server.wait_for_streams(0);
}

#[test]
fn calls_that_come_during_a_stream_are_answered_after_it() {
    let server = Running::with_past(Limits::default(), 50);
    let mut talk = server.connect();
    talk.say(TELL);
    talk.say(ASK);
    assert_eq!(texts(&mut talk).len(), 50);
    assert_eq!(talk.hear().unwrap()["parameters"]["status"]["schema"], 1);
}
