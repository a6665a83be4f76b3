//! What a client can't do: ask too much, take too long, speak in riddles, pretend to be another.

use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::time::Duration;

use pjw_ipc::server::Limits;
use serde_json::{Value, json};

use super::desk::{PATIENCE, Running, Talk, until};

const ASK: &str = r#"{"method":"org.pjw.Warden.GetStatus"}"#;

fn is_fine(reply: &Value) -> bool {
    reply["error"].is_null() && reply["parameters"]["status"]["schema"] == 1
}

#[test]
fn a_request_of_the_largest_size_is_answered_and_one_byte_more_is_not() {
    let server = Running::start(Limits { request_bytes: 5000, ..Limits::default() });
    let padded = |length: usize| format!("{ASK}{}", " ".repeat(length - ASK.len()));
    let mut talk = server.connect();
    assert!(is_fine(&talk.ask(&padded(5000))));
    assert!(is_fine(&talk.ask(&padded(5000))), "the limit is one request's, not the connection's");
    talk.say(&padded(5001));
    assert_eq!(talk.hear(), None);
    assert!(is_fine(&server.connect().ask(ASK)));
}

#[test]
fn more_calls_than_one_request_may_hold_can_wait_in_line() {
    let server = Running::start(Limits { request_bytes: 100, ..Limits::default() });
    let mut talk = server.connect();
    talk.0.write_all(format!("{ASK}\0").repeat(500).as_bytes()).unwrap();
    for _ in 0..500 {
        assert!(is_fine(&talk.hear().unwrap()));
    }
}

#[test]
fn a_request_that_trickles_in_is_cut_off_however_steadily_it_does() {
    let server = Running::start(Limits { request_time: Duration::from_millis(300), ..Limits::default() });
    let mut talk = server.connect();
    until("the trickle is cut off", || {
        std::thread::sleep(Duration::from_millis(20));
        talk.0.write_all(b" ").is_err()
    });
    assert!(is_fine(&server.connect().ask(ASK)));
}

#[test]
fn who_asks_nothing_for_long_loses_the_connection() {
    let server = Running::start(Limits { idle_time: Duration::from_millis(100), ..Limits::default() });
    let mut talk = server.connect();
    assert!(is_fine(&talk.ask(ASK)));
    assert_eq!(talk.hear(), None);
}

#[test]
fn json_that_is_no_call_is_refused_and_the_connection_stays() {
    let server = Running::start(Limits::default());
    let mut talk = server.connect();
    for text in [
        "7",
        "null",
        "{}",
        r#"{"method":7}"#,
        r#"{"method":"org.pjw.Warden.GetStatus","more":"yes"}"#,
        r#"["org.pjw.Warden.GetStatus"]"#,
    ] {
        assert_eq!(talk.ask(text)["error"], "org.varlink.service.InvalidParameter", "{text}");
    }
    assert!(is_fine(&talk.ask(ASK)));
}

#[test]
fn what_is_no_json_ends_the_connection_of_its_sender() {
    let server = Running::start(Limits::default());
    let deep = "[".repeat(60_000);
    for text in ["", "{", "\u{1}\u{2}", "{\"method\":\"org.pjw.Warden.GetStatus\"}}", &deep] {
        let mut talk = server.connect();
        assert_eq!(talk.ask(text)["error"], "org.varlink.service.InvalidParameter", "{text:.40}");
        assert_eq!(talk.hear(), None, "{text:.40}");
    }
    let mut talk = server.connect();
    talk.0.write_all(b"\xff\xfe{}\0").unwrap();
    assert_eq!(talk.hear().unwrap()["error"], "org.varlink.service.InvalidParameter");
    assert!(is_fine(&server.connect().ask(ASK)));
}

#[test]
fn parameters_have_names_and_no_order() {
    let server = Running::start(Limits::default());
    let reply = server.connect().ask(r#"{"method":"org.pjw.Warden.Release","parameters":["manual:a"]}"#);
    assert_eq!(reply["error"], "org.varlink.service.InvalidParameter");
    assert_eq!(reply["parameters"], json!({ "parameter": "parameters" }));
}

#[test]
fn a_oneway_call_is_carried_out_and_never_answered_even_if_it_is_wrong() {
    let server = Running::start(Limits::default());
    let mut talk = server.connect();
    talk.say(r#"{"method":"org.pjw.Warden.Release","parameters":{"job":"a"},"oneway":true}"#);
    talk.say(r#"{"method":"org.pjw.Warden.Release","parameters":{},"oneway":true}"#);
    talk.say(r#"{"method":"org.pjw.Warden.Events","more":true,"oneway":true}"#);
    assert!(is_fine(&talk.ask(ASK)), "the first answer is the one to the question");
    server.wait_for_calls(3);
    let mut gone = server.connect();
    gone.say(r#"{"method":"org.pjw.Warden.Reload","oneway":true}"#);
    drop(gone);
    server.wait_for_calls(4);
}

#[test]
fn the_peer_is_whom_the_kernel_says() {
    let server = Running::start(Limits::default());
    let status = server.connect().ask(ASK)["parameters"]["status"].take();
    assert_eq!(status["pid"], std::process::id());
    assert_eq!(status["jobs"][0]["owner"], nix::unistd::geteuid().as_raw());
}

#[test]
fn who_ends_the_sending_side_still_gets_every_answer() {
    let server = Running::start(Limits::default());
    let mut talk = server.connect();
    talk.say(ASK);
    talk.say(r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"}}"#);
    talk.0.shutdown(Shutdown::Write).unwrap();
    assert!(is_fine(&talk.hear().unwrap()));
    server.wait_for_calls(2);
    server.open_gate();
    assert_eq!(talk.hear().unwrap()["parameters"]["job"]["id"], "slow");
    assert_eq!(talk.hear(), None);
}

#[test]
fn a_call_that_takes_long_delays_no_other_connection() {
    let server = Running::start(Limits::default());
    let mut slow = server.connect();
    slow.say(r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"}}"#);
    server.wait_for_calls(1);
    assert!(is_fine(&server.connect().ask(ASK)));
    server.open_gate();
    assert_eq!(slow.hear().unwrap()["parameters"]["job"]["id"], "slow");
}

#[test]
fn a_reply_that_would_be_too_much_to_keep_is_refused_and_small_ones_are_not() {
    let server = Running::start(Limits { unsent_bytes: 20_000, ..Limits::default() });
    let mut talk = server.connect();
    // The desk says the job's name again.
    let reply = talk.call("org.pjw.Warden.GetJob", &json!({ "job": "x".repeat(30_000) }));
    assert_eq!(reply["error"], "org.pjw.Warden.Busy");
    assert!(reply["parameters"]["message"].as_str().unwrap().contains("wait to be read"), "{reply}");
    assert!(is_fine(&talk.ask(ASK)), "the connection goes on");
}

#[test]
fn readers_that_do_not_read_keep_no_more_than_the_budget_waiting() {
    let limits = Limits { unsent_bytes: 5_000, write_time: 10 * PATIENCE, ..Limits::default() };
    let server = Running::with_past(limits, usize::MAX);
    // Each says nothing more and reads nothing: what doesn't fit its socket waits in the server.
    let mut deaf: Vec<Talk> = (0..60).map(|_| server.connect()).collect();
    for talk in &mut deaf {
        talk.say(r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#);
    }
    // A full socket is not a closed one.
    let is_hung_up = |talk: &mut Talk| {
        talk.0.set_nonblocking(true).unwrap();
        talk.0.write(b" ").is_err_and(|error| error.kind() != ErrorKind::WouldBlock)
    };
    until("those beyond the budget are hung up on", || deaf.iter_mut().any(is_hung_up));
    assert!(!deaf.iter_mut().all(is_hung_up), "the others may stay");
}
