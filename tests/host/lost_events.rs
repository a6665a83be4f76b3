//! Lost events: the daemon is stopped while processes start and end, until the kernel drops events, and then
//! continues.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pjw_core::ids::Tid;
use pjw_ipc::wire::Warning;
use pjw_linux::sys::affinity;
use pjw_tests::daemon::Daemon;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until};

use crate::processes::{Shell, has_two_cores, mask};

/// The number of the protocol `NETLINK_CONNECTOR`.
const CONNECTOR: &str = "11";
/// The number of threads that start and end between two checks for dropped events.
const THREADS_PER_BATCH: usize = 1000;

/// Returns how many events the kernel has dropped for this daemon. `None` if the daemon has no socket for process
/// events.
fn dropped_events(daemon: &Daemon) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/net/netlink").ok()?;
    let (pid, mut lines) = (daemon.pid().to_string(), text.lines());
    let names: Vec<&str> = lines.next()?.split_whitespace().collect();
    let column = |name: &str| names.iter().position(|&other| other == name);
    let (kind, port, drops) = (column("Eth")?, column("Pid")?, column("Drops")?);
    let mut sockets = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
    let socket = sockets
        .find(|fields| fields.get(kind) == Some(&CONNECTOR) && fields.get(port) == Some(&pid.as_str()))?;
    socket.get(drops)?.parse().ok()
}

#[test]
fn after_lost_events_one_full_scan_finds_every_process() {
    if !has_two_cores() {
        return;
    }
    // With these intervals no timer starts a scan during the test.
    let daemon = Daemon::start("interval = \"10m\"\nrescan_interval = \"10m\"\nenforcement = \"affinity\"\n");
    if dropped_events(&daemon).is_none() {
        return skip("the kernel sends the daemon no process events here");
    }
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();

    let unseen = daemon.while_stopped(|| {
        // On a busy machine events may have been dropped before.
        let before = dropped_events(&daemon);
        let unseen = shell.background("sleep 1000");
        affinity::set_full_mask(Tid(unseen)).unwrap();
        assert_ne!(mask(unseen), cpus);
        wait_until("the kernel drops events", || {
            (0..THREADS_PER_BATCH).for_each(|_| std::thread::spawn(|| {}).join().unwrap());
            dropped_events(&daemon) > before
        });
        unseen
    });

    wait_until("the process without an event is confined", || mask(unseen) == cpus);
    // The mask is set first. The status follows after the whole scan.
    wait_until("the process is a member", || daemon.job("a").unwrap().processes == 2);
    wait_until("the loss is reported", || {
        let events = daemon.pjwctl(&["events", "--json"]).stdout;
        String::from_utf8_lossy(&events).contains("\"event\":\"overrun\"")
    });
}

#[test]
fn a_delayed_daemon_warns_until_it_has_caught_up() {
    let daemon = Daemon::start("interval = \"50ms\"\n");
    // A stop in the middle of a cycle makes this cycle long, and delays no due one: the next one is planned at its end.
    let warning = wait_for("the warning appears", || {
        stop_for(&daemon, Duration::from_secs(1));
        // The status follows at the end of the first cycle after the stop.
        let resumed_at = Instant::now();
        while resumed_at.elapsed() < Duration::from_secs(1) {
            // On a busy machine, process events of other tests may have delayed the daemon before.
            let warning = behind_warning(&daemon);
            if let Some(warning) = warning.filter(|warning| warning.text.contains("pjwd did not run")) {
                return Some(warning);
            }
        }
        None
    });
    assert!(warning.text.contains(" ms") && warning.remedy.contains("what stops pjwd"), "{warning:?}");
    wait_until("the warning is gone", || behind_warning(&daemon).is_none());
}

/// Stops the daemon for at least the time `length`.
fn stop_for(daemon: &Daemon, length: Duration) {
    daemon.signal(Signal::SIGSTOP);
    let stopped_at = Instant::now();
    wait_until("the stop is over", || stopped_at.elapsed() > length);
    daemon.signal(Signal::SIGCONT);
}

/// Returns the warning that the daemon is behind, if the status has it.
fn behind_warning(daemon: &Daemon) -> Option<Warning> {
    daemon.status().warnings.into_iter().find(|warning| warning.code == "behind")
}
