//! Requests of clients that hang up before the daemon begins with them.

use std::io::Write;
use std::os::unix::net::UnixStream;

use nix::sys::signal::Signal;
use pjw_tests::daemon::Daemon;
use pjw_tests::waiting::wait_until;
use serde_json::{Value, json};

/// Sends a request to the daemon while the daemon is stopped, and hangs up.
fn send_and_hang_up(daemon: &Daemon, request: &Value) {
    daemon.signal(Signal::SIGSTOP);
    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    stream.write_all(format!("{request}\0").as_bytes()).unwrap();
    drop(stream);
    daemon.signal(Signal::SIGCONT);
}

fn request(daemon: &Daemon, method: &str, more: &Value) -> Value {
    let mut parameters = json!({ "job": daemon.job_id("a") });
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({ "method": format!("org.pjw.Warden.{method}"), "parameters": parameters })
}

#[test]
fn an_assign_whose_caller_has_hung_up_takes_no_cores() {
    let daemon = Daemon::start("");
    send_and_hang_up(&daemon, &request(&daemon, "Assign", &json!({ "cores": 1 })));
    wait_until("the daemon reports the request", || daemon.log().contains("hung up"));
    assert!(daemon.job("a").is_none());
    assert!(daemon.assign("b", 1, &[]).is_ok());
    assert!(daemon.job("a").is_none(), "and none later");
}

#[test]
fn a_oneway_assign_is_carried_out_although_its_caller_has_hung_up() {
    let daemon = Daemon::start("");
    let mut oneway = request(&daemon, "Assign", &json!({ "cores": 1 }));
    oneway["oneway"] = true.into();
    send_and_hang_up(&daemon, &oneway);
    wait_until("the job has its cores", || daemon.job("a").is_some());
}

#[test]
fn a_release_is_carried_out_although_its_caller_has_hung_up() {
    let daemon = Daemon::start("");
    daemon.assign("a", 1, &[]).unwrap();
    send_and_hang_up(&daemon, &request(&daemon, "Release", &json!({})));
    wait_until("the job is released", || daemon.job("a").is_none());
}
