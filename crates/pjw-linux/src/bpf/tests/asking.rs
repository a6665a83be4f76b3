//! Who asks for which PUs, by live processes.

use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::process::{Comm, Pid, Tid};
use pjw_core::snapshot::Asked;

use super::company::{Company, until};
use crate::affinity;
use crate::bpf::{Asks, AsksUnavailable};
use crate::clock;

/// What one test asks would drown another's.
static ALONE: Mutex<()> = Mutex::new(());

/// What tells, and nobody beside; `None`, with the reason told, where the machine or the user lacks something.
fn asks() -> Option<(Asks, MutexGuard<'static, ()>)> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    match Asks::load() {
        Ok(asks) => Some((asks, alone)),
        Err(error @ (AsksUnavailable::Refused { .. } | AsksUnavailable::Deaf { .. })) => panic!("{error}"),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// What is heard of one process.
fn heard(asks: &mut Asks, pid: Pid) -> Vec<Asked> {
    asks.hear().asked.into_iter().filter(|asked| asked.process == pid).collect()
}

fn everything() -> CpuSet {
    std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap().trim().parse().unwrap()
}

#[test]
fn a_thread_that_asks_for_every_pu_is_told_and_our_own_calls_are_not() {
    let Some((mut asks, _alone)) = asks() else { return };
    let (mut company, threads) = Company::start(2);
    let before = clock::now().since_boot;
    assert_eq!(company.order("asks 1 all"), "asked");
    let told = heard(&mut asks, company.pid());
    let [asked] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!((asked.caller, asked.target, asked.refused), (threads[1], None, false));
    assert_eq!(asked.parent, Pid(std::process::id()));
    assert!(everything().is_subset(&asked.cpus), "{asked:?}");
    assert!(before < asked.at && asked.at < clock::now().since_boot, "{asked:?}");
    assert!(!asked.comm.to_string().is_empty(), "{asked:?}");
    affinity::set_all(threads[0]).unwrap();
    affinity::set_all(Tid(std::process::id())).unwrap();
    let ours = asks.hear().asked.into_iter().filter(|asked| asked.process.0 == std::process::id()).count();
    assert_eq!(ours, 0, "who repairs masks is no fugitive");
}

#[test]
fn what_is_refused_is_told_if_no_pu_of_it_may_be_had_and_not_if_nobody_is_there() {
    let Some((mut asks, _alone)) = asks() else { return };
    let (mut company, _) = Company::start(1);
    let nowhere = everything().last().map_or(0, |pu| pu.0) + 1;
    assert_eq!(company.order(&format!("asks 0 {nowhere}")), "EINVAL");
    assert_eq!(company.order("asks-for 0 4194305"), "ESRCH");
    let told = heard(&mut asks, company.pid());
    let [asked] = told.as_slice() else { panic!("{told:?}") };
    assert!(asked.refused, "{asked:?}");
    // A PU that can never be there has no place in the kernel's masks.
    let possible = std::fs::read_to_string("/sys/devices/system/cpu/possible").unwrap();
    let expected = if possible.trim().parse::<CpuSet>().unwrap().contains(Pu(nowhere)) {
        CpuSet::from(Pu(nowhere))
    } else {
        asked.cpus.clone()
    };
    assert_eq!(asked.cpus, expected);
}

#[test]
fn who_is_asked_for_is_told_by_the_number_that_the_caller_gave() {
    let Some((mut asks, _alone)) = asks() else { return };
    let (mut company, threads) = Company::start(2);
    assert_eq!(company.order(&format!("asks-for 0 {}", threads[1])), "asked");
    assert_eq!(company.order(&format!("asks-for 0 {}", threads[0])), "asked");
    let told: Vec<_> = heard(&mut asks, company.pid()).into_iter().map(|asked| asked.target).collect();
    assert_eq!(told, [Some(threads[1]), None]);
}

#[test]
fn who_is_gone_by_now_is_told_with_its_name_and_its_parent() {
    let Some((mut asks, _alone)) = asks() else { return };
    let mut taskset = Command::new("taskset");
    let all = format!("0-{}", everything().last().unwrap());
    let Ok(mut child) = taskset.args(["-c", &all, "true"]).stdout(Stdio::null()).spawn() else {
        println!("skipped: there is no taskset here");
        return;
    };
    let pid = Pid(child.id());
    assert!(child.wait().unwrap().success());
    let told = heard(&mut asks, pid);
    let [asked] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!((asked.comm, asked.parent), (Comm::from("taskset"), Pid(std::process::id())));
}

#[test]
fn a_namespace_of_ones_own_hides_nobody() {
    let Some((mut asks, _alone)) = asks() else { return };
    let all = format!("0-{}", everything().last().unwrap());
    let script = format!("taskset -c {all} true");
    let done = Command::new("unshare").args(["--pid", "--fork", "--", "sh", "-c", &script]).output();
    if !done.is_ok_and(|done| done.status.success()) {
        println!("skipped: unshare makes no pid namespace here");
        return;
    }
    let told = asks.hear().asked;
    let asked = told.iter().find(|asked| asked.comm == Comm::from("taskset"));
    let asked = asked.unwrap_or_else(|| panic!("{told:?}"));
    assert!(asked.caller.0 > 10 && asked.parent.0 > 10, "these are the first namespace's numbers: {asked:?}");
}

#[test]
fn a_flood_is_heard_as_far_as_the_ring_reaches_and_the_rest_is_counted() {
    let Some((mut asks, _alone)) = asks() else { return };
    let (mut company, _) = Company::start(1);
    let _ = asks.hear();
    assert_eq!(company.order("asks-on 0 20000"), "asked");
    let flood = asks.hear();
    let told = flood.asked.iter().filter(|asked| asked.process == company.pid()).count() as u64;
    // Others on this machine may ask too.
    assert!(told >= 60 && flood.lost >= 10_000 && told + flood.lost >= 20_000, "{told} {}", flood.lost);
    let rest = until("it is quiet", || Some(asks.hear()).filter(|heard| heard.lost == 0));
    assert!(rest.asked.len() < 20_000);
    assert_eq!(company.order("asks 0 all"), "asked");
    assert_eq!(heard(&mut asks, company.pid()).len(), 1, "it goes on");
}
