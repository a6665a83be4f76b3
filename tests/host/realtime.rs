//! The real-time priority of the daemon, and its bounds.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_linux::sys::affinity;
use pjw_linux::sys::realtime::{self, SchedulingPolicy};
use pjw_linux::topology::{TopologySource, load_topology};
use pjw_tests::daemon::Daemon;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::wait_until;

use crate::processes::has_two_cores;

const STATUS_CALL: &[u8] = b"{\"method\":\"org.pjw.Warden.GetStatus\"}\0";
/// The number of requests that a client of the flood sends at once.
const REQUESTS: usize = 500;
const CLIENTS: usize = 16;

/// Whether a daemon of this user may have a real-time priority. If not, reports that the test is skipped.
fn may_have_realtime_priority() -> bool {
    let raise = || realtime::set_realtime_policy(affinity::own_thread());
    let raised = thread::spawn(raise).join().unwrap();
    if let Err(errno) = raised {
        skip(format_args!("no real-time priority here: {errno}"));
    }
    raised.is_ok()
}

/// Returns the policy of the daemon's control server, which is its first thread.
fn policy_of_control_server(daemon: &Daemon) -> SchedulingPolicy {
    realtime::scheduling_policy(Tid(daemon.pid())).unwrap()
}

/// Returns the thread of the daemon's event loop.
fn event_loop_of(daemon: &Daemon) -> Tid {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap().flatten();
    let is_loop = |task: &std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm == "warden\n")
    };
    let task = tasks.into_iter().find(is_loop).expect("the event loop has a thread");
    Tid(task.file_name().to_str().unwrap().parse().unwrap())
}

fn policy_of_event_loop(daemon: &Daemon) -> SchedulingPolicy {
    realtime::scheduling_policy(event_loop_of(daemon)).unwrap()
}

fn wait_for_policy(daemon: &Daemon, policy: SchedulingPolicy) {
    wait_until(&format!("the control server has the policy {policy:?}"), || {
        policy_of_control_server(daemon) == policy
    });
    wait_until(&format!("the event loop has the policy {policy:?}"), || {
        policy_of_event_loop(daemon) == policy
    });
}

#[test]
fn the_event_loop_and_the_control_server_have_a_realtime_priority_unless_it_is_switched_off() {
    if !may_have_realtime_priority() {
        return;
    }
    let daemon = Daemon::start("");
    wait_for_policy(&daemon, SchedulingPolicy::RoundRobin);
    reload(&daemon, "realtime = false\n");
    wait_for_policy(&daemon, SchedulingPolicy::Normal);
    reload(&daemon, "");
    wait_for_policy(&daemon, SchedulingPolicy::RoundRobin);
}

/// The affinity masks of the control server and of the event loop.
fn masks_of(daemon: &Daemon) -> [CpuSet; 2] {
    [Tid(daemon.pid()), event_loop_of(daemon)].map(|tid| affinity::get_mask(tid).unwrap())
}

/// Whether the daemon runs on none of these CPUs.
fn avoids(daemon: &Daemon, cpus: &CpuSet) -> bool {
    masks_of(daemon).iter().all(|mask| !mask.intersects(cpus))
}

/// Makes a job without processes, and returns its PUs (logical CPUs).
fn assign(daemon: &Daemon, job: &str, options: &[&str]) -> CpuSet {
    let assigned = daemon.pjwctl(&[&["assign", &daemon.job_id(job)], options].concat());
    assert!(assigned.status.success(), "{assigned:?}");
    daemon.job(job).unwrap().cpus.parse().unwrap()
}

fn reload(daemon: &Daemon, config: &str) {
    daemon.configure(config);
    assert!(daemon.pjwctl(&["reload"]).status.success());
}

#[test]
fn the_daemon_runs_on_no_core_of_a_job_while_other_cores_are_free() {
    if !may_have_realtime_priority() || !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    wait_for_policy(&daemon, SchedulingPolicy::RoundRobin);
    let original = masks_of(&daemon);
    let first = assign(&daemon, "first", &["--cores", "1"]);
    wait_until("the daemon has left the core of the job", || avoids(&daemon, &first));
    assign(&daemon, "rest", &["--cores", "all"]);
    wait_until("the daemon runs where it was started if no core is free", || masks_of(&daemon) == original);
    daemon.release("rest").unwrap();
    wait_until("the daemon has left the core again", || avoids(&daemon, &first));
    daemon.release("first").unwrap();
    wait_until("the daemon runs where it was started", || masks_of(&daemon) == original);
}

#[test]
fn the_daemon_runs_where_it_was_started_when_its_realtime_priority_is_switched_off() {
    if !may_have_realtime_priority() || !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    wait_for_policy(&daemon, SchedulingPolicy::RoundRobin);
    let original = masks_of(&daemon);
    let job = assign(&daemon, "job", &["--cores", "1"]);
    wait_until("the daemon has left the core", || avoids(&daemon, &job));
    reload(&daemon, "realtime = false\n");
    wait_until("the daemon runs where it was started", || masks_of(&daemon) == original);
    reload(&daemon, "");
    wait_until("the daemon has left it again", || avoids(&daemon, &job));
}

#[test]
fn the_daemon_follows_a_change_of_the_housekeeping_cpus() {
    if !has_two_cores() {
        return;
    }
    let own = affinity::get_mask(affinity::own_thread()).unwrap();
    // Housekeeping needs whole cores.
    let topology = load_topology(TopologySource::Live).unwrap();
    let [first, last] = [own.first(), own.last()].map(|pu| topology.core_cpus(pu.unwrap()));
    let daemon = Daemon::start(&format!("housekeeping = \"{first}\"\n"));
    let is_at = |cpus: &CpuSet| masks_of(&daemon).iter().all(|mask| mask == cpus);
    wait_until("the daemon runs on the first CPU", || is_at(&first));
    reload(&daemon, &format!("housekeeping = \"{last}\"\n"));
    wait_until("the daemon runs on the last CPU", || is_at(&last));
    reload(&daemon, "");
    wait_until("the daemon runs where it was started", || is_at(&own));
}

#[test]
fn the_daemon_keeps_the_narrower_mask_with_which_it_was_started() {
    if !may_have_realtime_priority() || !has_two_cores() || !crate::processes::is_installed("taskset") {
        return;
    }
    let own = affinity::get_mask(affinity::own_thread()).unwrap();
    let (first, last) = (own.first().unwrap(), own.last().unwrap());
    let daemon = Daemon::start_by(&["taskset", "-c", &last.to_string()]);
    wait_for_policy(&daemon, SchedulingPolicy::RoundRobin);
    let is_at_last = || masks_of(&daemon).iter().all(|mask| *mask == CpuSet::from(last));
    for cpu in [first, last] {
        assign(&daemon, &format!("job-{cpu}"), &["--cpus", &cpu.to_string()]);
        // The event loop sets its mask before it waits for the next query.
        assert!(daemon.pjwctl(&["plan"]).status.success());
        assert!(is_at_last(), "{:?}", masks_of(&daemon));
    }
    reload(&daemon, "realtime = false\n");
    assert!(daemon.pjwctl(&["plan"]).status.success());
    assert!(is_at_last(), "{:?}", masks_of(&daemon));
}

#[test]
fn a_flood_of_requests_does_not_keep_a_cpu_by_the_realtime_priority() {
    if !may_have_realtime_priority() {
        return;
    }
    let daemon = Daemon::start("");
    wait_for_policy(&daemon, SchedulingPolicy::RoundRobin);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| flood(&daemon, &stop));
        }
        wait_until("the control server gives way", || {
            policy_of_control_server(&daemon) == SchedulingPolicy::Normal
        });
        stop.store(true, Ordering::Relaxed);
    });
    wait_for_policy(&daemon, SchedulingPolicy::RoundRobin);
    let log = daemon.log();
    let lines = log.lines().filter(|line| line.contains("the control server has the normal priority"));
    assert_eq!(lines.count(), 1, "the log says so once: {log}");
}

/// Sends many requests at once and reads the replies, again and again until `stop` is set.
fn flood(daemon: &Daemon, stop: &AtomicBool) {
    let mut reader = UnixStream::connect(daemon.socket()).unwrap();
    let mut writer = reader.try_clone().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) && writer.write_all(&STATUS_CALL.repeat(REQUESTS)).is_ok() {}
            let _ = writer.shutdown(std::net::Shutdown::Write);
        });
        let mut buffer = vec![0; 1 << 20];
        while reader.read(&mut buffer).is_ok_and(|read| read > 0) {}
    });
}

#[test]
fn without_permission_the_log_says_so_once_and_the_daemon_works() {
    if !crate::processes::is_root() || !crate::processes::is_installed("setpriv") {
        return;
    }
    let daemon = Daemon::start_by(&["setpriv", "--bounding-set", "-sys_nice", "--"]);
    assert!(daemon.status().jobs.is_empty());
    wait_until("the log says so", || daemon.log().contains("no real-time priority: EPERM"));
    assert!(daemon.pjwctl(&["events"]).status.success());
    let log = daemon.log();
    assert_eq!(log.lines().filter(|line| line.contains("real-time")).count(), 1, "{log}");
    assert_eq!(policy_of_control_server(&daemon), SchedulingPolicy::Normal);
}

#[test]
fn a_daemon_with_a_policy_of_its_own_keeps_it() {
    if !crate::processes::is_installed("chrt") {
        return;
    }
    let daemon = Daemon::start_by(&["chrt", "-b", "0"]);
    wait_until("the log says so, except to a plain user", || {
        daemon.log().contains("a scheduling policy of its own") || !nix::unistd::Uid::effective().is_root()
    });
    assert_eq!(policy_of_control_server(&daemon), SchedulingPolicy::AnyOther);
    assert_eq!(policy_of_event_loop(&daemon), SchedulingPolicy::AnyOther);
}
