//! Whom a pass reports, and whom it passes over.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use pjw_core::cpuset::CpuSet;
use pjw_core::process::{Pid, Tid};

use super::company::{Company, Yard, scan, until};
use super::side_by_side::by_scan;
use crate::affinity;
use crate::bpf::{MOST_WATCHED, PassError, TaskScan, Whom};

#[test]
fn only_the_processes_that_were_asked_for_are_told_and_the_others_are_counted() {
    let Some(mut scan) = scan() else { return };
    let ((one, threads), (other, _)) = (Company::start(4), Company::start(4));
    let (only_one, only_other) = (BTreeSet::from([one.pid()]), BTreeSet::from([other.pid()]));
    assert!(by_scan(&mut scan, Whom::These(&BTreeSet::new())).is_empty());
    let told = by_scan(&mut scan, Whom::These(&only_one));
    assert_eq!(told.len(), 6);
    assert!(threads.iter().all(|tid| told.contains_key(tid)));
    let summary = scan.pass(Whom::These(&only_one), &mut |_| {}).unwrap();
    assert_eq!(summary.reported, 6);
    assert!(summary.passed_over >= 6);
    let told = by_scan(&mut scan, Whom::These(&only_other));
    assert!(told.contains_key(&Tid(other.pid().0)) && !told.contains_key(&Tid(one.pid().0)));
    assert_eq!(by_scan(&mut scan, Whom::These(&(&only_one | &only_other))).len(), 12);
    let everybody = by_scan(&mut scan, Whom::Everybody(&only_one));
    assert!(everybody.contains_key(&Tid(one.pid().0)) && everybody.contains_key(&Tid(other.pid().0)));
    let of = |company: &Company| everybody.values().filter(|task| task.relatives[0] == company.pid()).count();
    assert_eq!((of(&one), of(&other)), (6, 1), "all threads of one, the first of the other");
    assert_eq!(by_scan(&mut scan, Whom::These(&only_one)).len(), 6, "who was asked for before is forgotten");
}

#[test]
fn a_mask_that_others_change_is_told() {
    let Some(mut scan) = scan() else { return };
    let (company, threads) = Company::start(4);
    let all = affinity::get(threads[1]).unwrap();
    if all.len() < 2 {
        println!("skipped: one PU leaves nothing to choose");
        return;
    }
    let one = CpuSet::from(all.last().unwrap());
    affinity::set(threads[1], &one).unwrap();
    let told = by_scan(&mut scan, Whom::These(&BTreeSet::from([company.pid()])));
    assert_eq!(told[&threads[1]].allowed, Some(one));
    assert_eq!(told[&threads[2]].allowed, Some(all));
}

#[test]
fn a_process_that_is_put_into_another_cgroup_is_told_with_it() {
    let Some(mut scan) = scan() else { return };
    let Some(yard) = Yard::unified() else { return };
    let (company, threads) = Company::start(3);
    company.move_to(&yard);
    let mut cgroups = BTreeSet::new();
    let mut told = BTreeSet::new();
    scan.pass(Whom::These(&BTreeSet::from([company.pid()])), &mut |task| {
        cgroups.insert(task.cgroup);
        told.insert(task.tid);
    })
    .unwrap();
    assert!(threads.iter().all(|tid| told.contains(tid)));
    let inode = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(yard.path()).unwrap());
    assert_eq!(cgroups, BTreeSet::from([inode]));
    company.end();
}

#[test]
fn a_process_that_is_put_into_another_cgroup_of_any_hierarchy_is_told_at_another_place() {
    let Some(mut scan) = scan() else { return };
    let yards = Yard::all();
    let (company, _) = Company::start(3);
    let whom = BTreeSet::from([company.pid()]);
    let mut place = || {
        let mut places = BTreeSet::new();
        scan.pass(Whom::These(&whom), &mut |task| {
            places.insert((task.tid.0 == task.process.0, task.place));
        })
        .unwrap();
        let threads = places.iter().filter(|(is_first, _)| !is_first);
        assert!(threads.eq([&(false, 0)]), "it is asked of the first thread only");
        places.last().unwrap().1
    };
    let mut before = place();
    assert!(before != 0 && before == place());
    for yard in &yards {
        company.move_to(yard);
        let now = place();
        assert!(now != before, "{}", yard.path().display());
        assert_eq!(now, place());
        before = now;
    }
    company.end();
}

#[test]
fn an_exec_is_told_by_its_stack() {
    let Some(mut scan) = scan() else { return };
    let mut sh = Command::new("sh");
    sh.args(["-c", "read line; exec sleep 1000"]).stdin(Stdio::piped());
    let mut child = sh.spawn().unwrap();
    let whom = BTreeSet::from([Pid(child.id())]);
    let look = |scan: &mut TaskScan| by_scan(scan, Whom::These(&whom)).into_values().next().unwrap();
    let sh = until("it is sh", || Some(look(&mut scan)).filter(|task| task.comm.to_string() == "sh"));
    drop(child.stdin.take());
    let sleep =
        until("it is sleep", || Some(look(&mut scan)).filter(|task| task.comm.to_string() == "sleep"));
    assert_eq!(sh.start, sleep.start);
    let fixed =
        std::fs::read_to_string("/proc/sys/kernel/randomize_va_space").is_ok_and(|text| text.trim() == "0");
    assert!(fixed || sh.stack != sleep.stack);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn sixty_five_thousand_processes_can_be_asked_for_and_too_many_are_refused() {
    let Some(mut scan) = scan() else { return };
    let us = Pid(std::process::id());
    let highest: u32 = std::fs::read_to_string("/proc/sys/kernel/pid_max").unwrap().trim().parse().unwrap();
    // Numbers that the kernel never gives.
    let nobody = |count: u32| (1..=count).map(move |n| Pid(highest + n));
    let many: BTreeSet<Pid> = nobody(65_536).chain([us]).collect();
    assert!(by_scan(&mut scan, Whom::These(&many)).contains_key(&Tid(us.0)));
    let too_many = nobody(MOST_WATCHED + 1).collect();
    let error = scan.pass(Whom::These(&too_many), &mut |_| {}).unwrap_err();
    assert!(matches!(error, PassError::TooMany { asked } if asked == MOST_WATCHED as usize + 1));
    assert!(by_scan(&mut scan, Whom::These(&many)).contains_key(&Tid(us.0)), "others can still be asked for");
}
