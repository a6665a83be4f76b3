//! The scope of a task scan.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use pjw_core::cpuset::CpuSet;
use pjw_core::ids::{Pid, Tid};

use super::side_by_side::by_scan;
use super::test_process::{TestCgroup, TestProcess, scan};
use crate::bpf::{MAX_SCANNED_PROCESSES, TaskScan, TaskScanError, TaskScope};
use crate::sys::affinity;
use crate::tests::until;

#[test]
fn processes_outside_the_scope_are_only_counted() {
    let Some(mut scan) = scan() else { return };
    let ((one, threads), (other, _)) = (TestProcess::start(4), TestProcess::start(4));
    let (only_one, only_other) = (BTreeSet::from([one.pid()]), BTreeSet::from([other.pid()]));
    assert!(by_scan(&mut scan, TaskScope::ThreadsOf(&BTreeSet::new())).is_empty());
    let reported = by_scan(&mut scan, TaskScope::ThreadsOf(&only_one));
    assert_eq!(reported.len(), 6);
    assert!(threads.iter().all(|tid| reported.contains_key(tid)));
    let summary = scan.for_each_task(TaskScope::ThreadsOf(&only_one), &mut |_| {}).unwrap();
    assert_eq!(summary.reported_tasks, 6);
    assert!(summary.skipped_tasks >= 6);
    let reported = by_scan(&mut scan, TaskScope::ThreadsOf(&only_other));
    assert!(reported.contains_key(&Tid(other.pid().0)) && !reported.contains_key(&Tid(one.pid().0)));
    assert_eq!(by_scan(&mut scan, TaskScope::ThreadsOf(&(&only_one | &only_other))).len(), 12);
    let all = by_scan(&mut scan, TaskScope::AllProcessesAndThreadsOf(&only_one));
    assert!(all.contains_key(&Tid(one.pid().0)) && all.contains_key(&Tid(other.pid().0)));
    let of = |test_process: &TestProcess| {
        all.values().filter(|task| task.relatives[0] == test_process.pid()).count()
    };
    assert_eq!((of(&one), of(&other)), (6, 1), "all threads of one, the first of the other");
    assert_eq!(
        by_scan(&mut scan, TaskScope::ThreadsOf(&only_one)).len(),
        6,
        "processes of an earlier task scan are dropped"
    );
}

#[test]
fn a_changed_mask_is_reported() {
    let Some(mut scan) = scan() else { return };
    let (test_process, threads) = TestProcess::start(4);
    let all = affinity::get_mask(threads[1]).unwrap();
    if all.len() < 2 {
        println!("skipped: one PU leaves nothing to choose");
        return;
    }
    let one = CpuSet::from(all.last().unwrap());
    affinity::set_mask(threads[1], &one).unwrap();
    let reported = by_scan(&mut scan, TaskScope::ThreadsOf(&BTreeSet::from([test_process.pid()])));
    assert_eq!(reported[&threads[1]].allowed, Some(one));
    assert_eq!(reported[&threads[2]].allowed, Some(all));
}

#[test]
fn a_process_that_moves_is_reported_with_its_new_cgroup() {
    let Some(mut scan) = scan() else { return };
    let Some(cgroup) = TestCgroup::unified() else { return };
    let (test_process, threads) = TestProcess::start(3);
    test_process.move_to(&cgroup);
    let mut cgroups = BTreeSet::new();
    let mut reported = BTreeSet::new();
    scan.for_each_task(TaskScope::ThreadsOf(&BTreeSet::from([test_process.pid()])), &mut |task| {
        cgroups.insert(task.cgroup_inode);
        reported.insert(task.tid);
    })
    .unwrap();
    assert!(threads.iter().all(|tid| reported.contains(tid)));
    let inode = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(cgroup.path()).unwrap());
    assert_eq!(cgroups, BTreeSet::from([inode]));
    test_process.end();
}

#[test]
fn a_move_in_any_hierarchy_changes_the_fingerprint() {
    let Some(mut scan) = scan() else { return };
    let cgroups = TestCgroup::all();
    let (test_process, _) = TestProcess::start(3);
    let scope = BTreeSet::from([test_process.pid()]);
    let mut place = || {
        let mut places = BTreeSet::new();
        scan.for_each_task(TaskScope::ThreadsOf(&scope), &mut |task| {
            places.insert((task.tid.0 == task.pid.0, task.cgroup_fingerprint));
        })
        .unwrap();
        let threads = places.iter().filter(|(is_first, _)| !is_first);
        assert!(threads.eq([&(false, 0)]), "only the first thread has a fingerprint");
        places.last().unwrap().1
    };
    let mut before = place();
    assert!(before != 0 && before == place());
    for cgroup in &cgroups {
        test_process.move_to(cgroup);
        let now = place();
        assert!(now != before, "{}", cgroup.path().display());
        assert_eq!(now, place());
        before = now;
    }
    test_process.end();
}

#[test]
fn an_exec_changes_the_stack_address() {
    let Some(mut scan) = scan() else { return };
    let mut sh = Command::new("sh");
    sh.args(["-c", "read line; exec sleep 1000"]).stdin(Stdio::piped());
    let mut child = sh.spawn().unwrap();
    let scope = BTreeSet::from([Pid(child.id())]);
    let observe =
        |scan: &mut TaskScan| by_scan(scan, TaskScope::ThreadsOf(&scope)).into_values().next().unwrap();
    let sh = until("it is sh", || Some(observe(&mut scan)).filter(|task| task.comm.to_string() == "sh"));
    drop(child.stdin.take());
    let sleep =
        until("it is sleep", || Some(observe(&mut scan)).filter(|task| task.comm.to_string() == "sleep"));
    assert_eq!(sh.start, sleep.start);
    let fixed =
        std::fs::read_to_string("/proc/sys/kernel/randomize_va_space").is_ok_and(|text| text.trim() == "0");
    assert!(fixed || sh.stack != sleep.stack);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_task_scan_may_name_65000_processes_and_too_many_are_refused() {
    let Some(mut scan) = scan() else { return };
    let us = Pid(std::process::id());
    let highest: u32 = std::fs::read_to_string("/proc/sys/kernel/pid_max").unwrap().trim().parse().unwrap();
    // Ids that the kernel never assigns.
    let unused = |count: u32| (1..=count).map(move |n| Pid(highest + n));
    let many: BTreeSet<Pid> = unused(65_536).chain([us]).collect();
    assert!(by_scan(&mut scan, TaskScope::ThreadsOf(&many)).contains_key(&Tid(us.0)));
    let too_many = unused(MAX_SCANNED_PROCESSES + 1).collect();
    let error = scan.for_each_task(TaskScope::ThreadsOf(&too_many), &mut |_| {}).unwrap_err();
    assert!(
        matches!(error, TaskScanError::TooManyProcesses { processes } if processes == MAX_SCANNED_PROCESSES as usize + 1)
    );
    assert!(
        by_scan(&mut scan, TaskScope::ThreadsOf(&many)).contains_key(&Tid(us.0)),
        "later task scans still work"
    );
}
