//! Requests of clients that hang up before the daemon begins with them.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use pjw_tests::daemon::Daemon;
use pjw_tests::waiting::wait_until;
use serde_json::{Value, json};

/// A caller hangs up after another time at each try: from 0 to the longest delay. On a busy machine the daemon begins
/// with a request only after some milliseconds.
const DELAY_STEP: Duration = Duration::from_micros(20);
const LONGEST_DELAY: Duration = Duration::from_millis(20);

/// Sends a request to the daemon while the daemon is stopped, and hangs up.
fn send_and_hang_up(daemon: &Daemon, request: &Value) {
    daemon.while_stopped(|| {
        let mut stream = UnixStream::connect(daemon.socket()).unwrap();
        stream.write_all(format!("{request}\0").as_bytes()).unwrap();
        // A child that another test starts at the same time has the socket open too, until the child has executed its
        // program. So the end of this function need not close the connection.
        stream.shutdown(Shutdown::Both).unwrap();
    });
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

/// A hook that gave up may have made room for a job that begins minutes later, so the job is not taken back at once.
#[test]
fn a_job_whose_caller_hangs_up_while_it_is_made_stays_until_its_reservation_ends() {
    let daemon = Daemon::start("reservation_timeout = \"1s\"\n");
    let assign = request(&daemon, "Assign", &json!({ "cores": 1 })).to_string();
    let mut delay = Duration::ZERO;
    wait_until("a caller hangs up while its request is carried out", || {
        let mut stream = UnixStream::connect(daemon.socket()).unwrap();
        stream.write_all(format!("{assign}\0").as_bytes()).unwrap();
        // The moment between the begin of the request and its answer is found by trying.
        let sent = Instant::now();
        while sent.elapsed() < delay {
            std::hint::spin_loop();
        }
        drop(stream);
        // Later, a longer step is as likely to meet the moment: what delays its begin lengthens it too.
        delay = if delay < LONGEST_DELAY { delay + delay / 16 + DELAY_STEP } else { Duration::ZERO };
        // The answer to a later request, which is a refusal, tells that the loop is through with the first one.
        let _ = daemon.release("another");
        let is_found =
            daemon.log().contains("hung up while the request was carried out") && daemon.job("a").is_some();
        if !is_found {
            // There is no job if the caller hung up before.
            let _ = daemon.release("a");
        }
        is_found
    });
    wait_until("the reservation ends", || {
        daemon.log().contains("it was reserved and no process came within reservation_timeout")
    });
    wait_until("the job is gone", || daemon.job("a").is_none());
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
