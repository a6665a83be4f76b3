//! Affinity requests of live processes.

use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::{Comm, Pid, Tid};
use pjw_core::snapshot::AffinityRequest;

use super::test_process::TestProcess;
use crate::bpf::{AffinityMonitor, AffinityMonitorUnavailable};
use crate::sys::{affinity, clock};
use crate::tests::until;

/// Serialises the tests: many requests of one test would fill the ring buffer.
static ALONE: Mutex<()> = Mutex::new(());

/// A monitor that is used by one test at a time. `None`, with a printed reason, if the machine or the user
/// lacks a requirement.
fn monitor() -> Option<(AffinityMonitor, MutexGuard<'static, ()>)> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    match AffinityMonitor::load() {
        Ok(monitor) => Some((monitor, alone)),
        Err(
            error @ (AffinityMonitorUnavailable::Refused { .. }
            | AffinityMonitorUnavailable::SelfCheckFailed { .. }),
        ) => {
            panic!("{error}")
        }
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// The drained requests of one process.
fn drained(monitor: &mut AffinityMonitor, pid: Pid) -> Vec<AffinityRequest> {
    monitor.drain_requests().requests.into_iter().filter(|request| request.caller_pid == pid).collect()
}

fn online() -> CpuSet {
    std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap().trim().parse().unwrap()
}

#[test]
fn a_request_for_every_pu_is_reported_and_own_requests_are_not() {
    let Some((mut monitor, _alone)) = monitor() else { return };
    let (mut test_process, threads) = TestProcess::start(2);
    let before = clock::now().since_boot;
    assert_eq!(test_process.order("request 1 all"), "requested");
    let reported = drained(&mut monitor, test_process.pid());
    let [request] = reported.as_slice() else { panic!("{reported:?}") };
    assert_eq!((request.caller, request.target, request.refused), (threads[1], None, false));
    assert_eq!(request.caller_parent, Pid(std::process::id()));
    assert!(online().is_subset(&request.requested_mask), "{request:?}");
    assert!(before < request.called_at && request.called_at < clock::now().since_boot, "{request:?}");
    assert!(!request.comm.to_string().is_empty(), "{request:?}");
    affinity::set_full_mask(threads[0]).unwrap();
    affinity::set_full_mask(Tid(std::process::id())).unwrap();
    let ours = monitor
        .drain_requests()
        .requests
        .into_iter()
        .filter(|request| request.caller_pid.0 == std::process::id())
        .count();
    assert_eq!(ours, 0, "requests of this process are not reported");
}

#[test]
fn a_refused_request_is_reported_for_its_cpuset_only() {
    let Some((mut monitor, _alone)) = monitor() else { return };
    let (mut test_process, _) = TestProcess::start(1);
    let absent_pu = online().last().map_or(0, |pu| pu.0) + 1;
    assert_eq!(test_process.order(&format!("request 0 {absent_pu}")), "EINVAL");
    assert_eq!(test_process.order("request-for 0 4194305"), "ESRCH");
    let reported = drained(&mut monitor, test_process.pid());
    let [request] = reported.as_slice() else { panic!("{reported:?}") };
    assert!(request.refused, "{request:?}");
    // The kernel's masks have no bit for an impossible PU.
    let possible = std::fs::read_to_string("/sys/devices/system/cpu/possible").unwrap();
    let expected = if possible.trim().parse::<CpuSet>().unwrap().contains(Pu(absent_pu)) {
        CpuSet::from(Pu(absent_pu))
    } else {
        request.requested_mask.clone()
    };
    assert_eq!(request.requested_mask, expected);
}

#[test]
fn the_target_is_reported_by_the_id_that_the_caller_used() {
    let Some((mut monitor, _alone)) = monitor() else { return };
    let (mut test_process, threads) = TestProcess::start(2);
    assert_eq!(test_process.order(&format!("request-for 0 {}", threads[1])), "requested");
    assert_eq!(test_process.order(&format!("request-for 0 {}", threads[0])), "requested");
    let reported: Vec<_> =
        drained(&mut monitor, test_process.pid()).into_iter().map(|request| request.target).collect();
    assert_eq!(reported, [Some(threads[1]), None]);
}

#[test]
fn a_caller_that_has_ended_is_reported_with_its_name_and_parent() {
    let Some((mut monitor, _alone)) = monitor() else { return };
    let mut taskset = Command::new("taskset");
    let all = format!("0-{}", online().last().unwrap());
    let Ok(mut child) = taskset.args(["-c", &all, "true"]).stdout(Stdio::null()).spawn() else {
        println!("skipped: there is no taskset here");
        return;
    };
    let pid = Pid(child.id());
    assert!(child.wait().unwrap().success());
    let reported = drained(&mut monitor, pid);
    let [request] = reported.as_slice() else { panic!("{reported:?}") };
    assert_eq!((request.comm, request.caller_parent), (Comm::from("taskset"), Pid(std::process::id())));
}

#[test]
fn a_caller_in_another_pid_namespace_is_reported() {
    let Some((mut monitor, _alone)) = monitor() else { return };
    let all = format!("0-{}", online().last().unwrap());
    let script = format!("taskset -c {all} true");
    let done = Command::new("unshare").args(["--pid", "--fork", "--", "sh", "-c", &script]).output();
    if !done.is_ok_and(|done| done.status.success()) {
        println!("skipped: unshare makes no pid namespace here");
        return;
    }
    let reported = monitor.drain_requests().requests;
    let request = reported.iter().find(|request| request.comm == Comm::from("taskset"));
    let request = request.unwrap_or_else(|| panic!("{reported:?}"));
    assert!(
        request.caller.0 > 10 && request.caller_parent.0 > 10,
        "ids are those of the initial namespace: {request:?}"
    );
}

#[test]
fn requests_that_do_not_fit_into_the_ring_are_counted() {
    let Some((mut monitor, _alone)) = monitor() else { return };
    let (mut test_process, _) = TestProcess::start(1);
    let _ = monitor.drain_requests();
    assert_eq!(test_process.order("request-many 0 20000"), "requested");
    let flood = monitor.drain_requests();
    let reported =
        flood.requests.iter().filter(|request| request.caller_pid == test_process.pid()).count() as u64;
    // Other processes on this machine may set masks, too.
    assert!(
        reported >= 60 && flood.lost_count >= 10_000 && reported + flood.lost_count >= 20_000,
        "{reported} {}",
        flood.lost_count
    );
    let rest =
        until("it is quiet", || Some(monitor.drain_requests()).filter(|drained| drained.lost_count == 0));
    assert!(rest.requests.len() < 20_000);
    assert_eq!(test_process.order("request 0 all"), "requested");
    assert_eq!(drained(&mut monitor, test_process.pid()).len(), 1, "later requests are reported again");
}
