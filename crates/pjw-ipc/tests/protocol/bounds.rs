//! The limits of a client: large requests, slow requests, invalid requests, forged peers.

use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::time::Duration;

use pjw_ipc::server::ServerLimits;
use serde_json::{Value, json};

use super::fixture::{RawClient, Running, TIMEOUT, until};

const ASK: &str = r#"{"method":"org.pjw.Warden.GetStatus"}"#;

fn is_fine(reply: &Value) -> bool {
    reply["error"].is_null() && reply["parameters"]["status"]["schema"] == 1
}

#[test]
fn a_request_of_the_largest_size_is_answered_and_one_byte_more_is_not() {
    let server = Running::start(ServerLimits { max_request_bytes: 5000, ..ServerLimits::default() });
    let padded = |length: usize| format!("{ASK}{}", " ".repeat(length - ASK.len()));
    let mut client = server.connect();
    assert!(is_fine(&client.ask(&padded(5000))));
    assert!(is_fine(&client.ask(&padded(5000))), "the limit is one request's, not the connection's");
    client.say(&padded(5001));
    assert_eq!(client.receive(), None);
    assert!(is_fine(&server.connect().ask(ASK)));
}

#[test]
fn pipelined_calls_may_exceed_the_size_of_one_request() {
    let server = Running::start(ServerLimits { max_request_bytes: 100, ..ServerLimits::default() });
    let mut client = server.connect();
    client.0.write_all(format!("{ASK}\0").repeat(500).as_bytes()).unwrap();
    for _ in 0..500 {
        assert!(is_fine(&client.receive().unwrap()));
    }
}

#[test]
fn a_slow_request_is_cut_off_at_its_time_limit() {
    let server =
        Running::start(ServerLimits { request_timeout: Duration::from_secs(1), ..ServerLimits::default() });
    let mut client = server.connect();
    until("the trickle is cut off", || {
        std::thread::sleep(Duration::from_millis(20));
        client.0.write_all(b" ").is_err()
    });
    assert!(is_fine(&server.connect().ask(ASK)));
}

#[test]
fn an_idle_connection_is_closed() {
    let server =
        Running::start(ServerLimits { idle_timeout: Duration::from_secs(2), ..ServerLimits::default() });
    let mut client = server.connect();
    assert!(is_fine(&client.ask(ASK)));
    assert_eq!(client.receive(), None);
}

#[test]
fn json_that_is_no_call_is_refused_and_the_connection_stays_open() {
    let server = Running::start(ServerLimits::default());
    let mut client = server.connect();
    for text in [
        "7",
        "null",
        "{}",
        r#"{"method":7}"#,
        r#"{"method":"org.pjw.Warden.GetStatus","more":"yes"}"#,
        r#"["org.pjw.Warden.GetStatus"]"#,
    ] {
        assert_eq!(client.ask(text)["error"], "org.varlink.service.InvalidParameter", "{text}");
    }
    assert!(is_fine(&client.ask(ASK)));
}

#[test]
fn invalid_json_closes_the_connection() {
    let server = Running::start(ServerLimits::default());
    let deep = "[".repeat(60_000);
    for text in ["", "{", "\u{1}\u{2}", "{\"method\":\"org.pjw.Warden.GetStatus\"}}", &deep] {
        let mut client = server.connect();
        assert_eq!(client.ask(text)["error"], "org.varlink.service.InvalidParameter", "{text:.40}");
        assert_eq!(client.receive(), None, "{text:.40}");
    }
    let mut client = server.connect();
    client.0.write_all(b"\xff\xfe{}\0").unwrap();
    assert_eq!(client.receive().unwrap()["error"], "org.varlink.service.InvalidParameter");
    assert!(is_fine(&server.connect().ask(ASK)));
}

#[test]
fn parameters_have_names_and_no_order() {
    let server = Running::start(ServerLimits::default());
    let reply = server.connect().ask(r#"{"method":"org.pjw.Warden.Release","parameters":["manual:a"]}"#);
    assert_eq!(reply["error"], "org.varlink.service.InvalidParameter");
    assert_eq!(reply["parameters"], json!({ "parameter": "parameters" }));
}

#[test]
fn a_oneway_call_is_carried_out_and_never_answered_even_if_it_is_wrong() {
    let server = Running::start(ServerLimits::default());
    let mut client = server.connect();
    client.say(r#"{"method":"org.pjw.Warden.Release","parameters":{"job":"a"},"oneway":true}"#);
    client.say(r#"{"method":"org.pjw.Warden.Release","parameters":{},"oneway":true}"#);
    client.say(r#"{"method":"org.pjw.Warden.Events","more":true,"oneway":true}"#);
    assert!(is_fine(&client.ask(ASK)), "the first answer is the one to the question");
    server.wait_for_calls(3);
    let mut gone = server.connect();
    gone.say(r#"{"method":"org.pjw.Warden.Reload","oneway":true}"#);
    drop(gone);
    server.wait_for_calls(4);
}

#[test]
fn the_peer_is_the_one_that_the_kernel_reports() {
    let server = Running::start(ServerLimits::default());
    let status = server.connect().ask(ASK)["parameters"]["status"].take();
    assert_eq!(status["pid"], std::process::id());
    assert_eq!(status["jobs"][0]["owner"], nix::unistd::geteuid().as_raw());
}

#[test]
fn a_client_that_closed_its_sending_side_gets_every_reply() {
    let server = Running::start(ServerLimits::default());
    let mut client = server.connect();
    client.say(ASK);
    client.say(r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"}}"#);
    client.0.shutdown(Shutdown::Write).unwrap();
    assert!(is_fine(&client.receive().unwrap()));
    server.wait_for_calls(2);
    server.open_gate();
    assert_eq!(client.receive().unwrap()["parameters"]["job"]["id"], "slow");
    assert_eq!(client.receive(), None);
}

#[test]
fn a_call_that_takes_long_delays_no_other_connection() {
    let server = Running::start(ServerLimits::default());
    let mut slow = server.connect();
    slow.say(r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"}}"#);
    server.wait_for_calls(1);
    assert!(is_fine(&server.connect().ask(ASK)));
    server.open_gate();
    assert_eq!(slow.receive().unwrap()["parameters"]["job"]["id"], "slow");
}

#[test]
fn a_reply_beyond_the_budget_is_refused_and_small_ones_are_not() {
    let server = Running::start(ServerLimits { max_unread_reply_bytes: 20_000, ..ServerLimits::default() });
    let mut client = server.connect();
    // The reply repeats the job's name.
    let reply = client.call("org.pjw.Warden.GetJob", &json!({ "job": "x".repeat(30_000) }));
    assert_eq!(reply["error"], "org.pjw.Warden.Busy");
    assert!(reply["parameters"]["message"].as_str().unwrap().contains("wait to be read"), "{reply}");
    assert!(is_fine(&client.ask(ASK)), "the connection goes on");
}

#[test]
fn unread_replies_never_exceed_the_budget() {
    let limits = ServerLimits {
        max_unread_reply_bytes: 5_000,
        write_timeout: 10 * TIMEOUT,
        ..ServerLimits::default()
    };
    let server = Running::with_past(limits, usize::MAX);
    // Each sends nothing more and reads nothing: bytes that do not fit the socket wait in the server.
    let mut silent: Vec<RawClient> = (0..60).map(|_| server.connect()).collect();
    for client in &mut silent {
        client.say(r#"{"method":"org.pjw.Warden.Events","parameters":{"follow":true},"more":true}"#);
    }
    // A full socket is not a closed one.
    let is_hung_up = |client: &mut RawClient| {
        client.0.set_nonblocking(true).unwrap();
        client.0.write(b" ").is_err_and(|error| error.kind() != ErrorKind::WouldBlock)
    };
    until("those beyond the budget are hung up on", || silent.iter_mut().any(is_hung_up));
    assert!(!silent.iter_mut().all(is_hung_up), "the others may stay");
}
