//! Calls whose callers hang up before the reply.

use std::net::Shutdown;

use pjw_ipc::server::ServerLimits;

use super::fixture::Running;

const SLOW: &str = r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"}}"#;
const SLOW_ONEWAY: &str = r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"},"oneway":true}"#;

#[test]
fn an_assign_ends_when_its_caller_hangs_up() {
    let server = Running::start(ServerLimits::default());
    let mut client = server.connect();
    client.say(SLOW);
    server.wait_for_slow_calls(1);
    drop(client);
    server.wait_for_slow_calls(0);
}

#[test]
fn a_caller_that_only_closed_its_sending_side_gets_its_reply() {
    let server = Running::start(ServerLimits::default());
    let (mut client, mut gone) = (server.connect(), server.connect());
    client.say(SLOW);
    client.0.shutdown(Shutdown::Write).unwrap();
    gone.say(SLOW);
    gone.0.shutdown(Shutdown::Write).unwrap();
    server.wait_for_slow_calls(2);
    drop(gone);
    server.wait_for_slow_calls(1);
    server.open_gate();
    assert_eq!(client.receive().unwrap()["parameters"]["job"]["id"], "slow");
    assert_eq!(client.receive(), None);
}

#[test]
fn requests_that_arrive_during_a_call_are_answered_after_it() {
    let server = Running::start(ServerLimits::default());
    let mut client = server.connect();
    client.say(SLOW);
    server.wait_for_slow_calls(1);
    client.say(r#"{"method":"org.pjw.Warden.ListJobs"}"#);
    server.open_gate();
    assert_eq!(client.receive().unwrap()["parameters"]["job"]["id"], "slow");
    assert_eq!(client.receive().unwrap()["parameters"]["jobs"][0]["id"], "manual:a");
}

#[test]
fn a_oneway_call_does_not_end_with_its_connection() {
    let server = Running::start(ServerLimits::default());
    let mut client = server.connect();
    client.say(SLOW_ONEWAY);
    server.wait_for_slow_calls(1);
    drop(client);
    let mut other = server.connect();
    other.say(SLOW);
    server.wait_for_slow_calls(2);
    drop(other);
    server.wait_for_slow_calls(1);
    server.open_gate();
}
