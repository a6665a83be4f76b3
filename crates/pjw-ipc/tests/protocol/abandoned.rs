//! Calls whose callers hang up before the reply.

use std::net::Shutdown;

use pjw_ipc::server::ServerLimits;

use super::fixture::TestServer;

const SLOW: &str = r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"}}"#;
const SLOW_ONEWAY: &str = r#"{"method":"org.pjw.Warden.Assign","parameters":{"job":"slow"},"oneway":true}"#;

#[test]
fn a_call_of_assign_ends_when_its_caller_hangs_up() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = server.connect();
    client.send(SLOW);
    server.wait_for_slow_calls(1);
    drop(client);
    server.wait_for_slow_calls(0);
}

#[test]
fn a_caller_that_only_closed_its_sending_side_gets_its_reply() {
    let server = TestServer::start(ServerLimits::default());
    let (mut client, mut hung_up) = (server.connect(), server.connect());
    client.send(SLOW);
    client.0.shutdown(Shutdown::Write).unwrap();
    hung_up.send(SLOW);
    hung_up.0.shutdown(Shutdown::Write).unwrap();
    server.wait_for_slow_calls(2);
    drop(hung_up);
    server.wait_for_slow_calls(1);
    server.open_gate();
    assert_eq!(client.receive().unwrap()["parameters"]["job"]["id"], "slow");
    assert_eq!(client.receive(), None);
}

#[test]
fn calls_that_arrive_during_a_slow_call_are_answered_after_it() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = server.connect();
    client.send(SLOW);
    server.wait_for_slow_calls(1);
    client.send(r#"{"method":"org.pjw.Warden.ListJobs"}"#);
    server.open_gate();
    assert_eq!(client.receive().unwrap()["parameters"]["job"]["id"], "slow");
    assert_eq!(client.receive().unwrap()["parameters"]["jobs"][0]["id"], "manual:a");
}

#[test]
fn a_oneway_call_goes_on_after_its_connection_is_closed() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = server.connect();
    client.send(SLOW_ONEWAY);
    server.wait_for_slow_calls(1);
    drop(client);
    let mut other = server.connect();
    other.send(SLOW);
    server.wait_for_slow_calls(2);
    drop(other);
    server.wait_for_slow_calls(1);
    server.open_gate();
}
