//! Every field of a record equals the value in /proc or of the system call.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::{Comm, Pid, StartTime, Tid, Uid};

use super::test_process::{TestProcess, scan};
use crate::bpf::{TaskRecord, TaskScan, TaskScope};
use crate::proc::procfs::ProcDir;
use crate::sys::affinity;
use crate::tests::until;

/// Facts that both sides report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) start: StartTime,
    pub(super) relatives: [Pid; 4],
    pub(super) state: char,
    pub(super) comm: Comm,
    pub(super) stack: u64,
    pub(super) last_cpu: u32,
    pub(super) uid: Uid,
    pub(super) run_ns: u64,
    pub(super) wait_ns: u64,
    /// `None` for an ended thread, which the system call no longer finds.
    pub(super) allowed: Option<CpuSet>,
}

pub(super) fn facts_of(task: &TaskRecord<'_>) -> Facts {
    Facts {
        start: task.stat.start,
        relatives: [task.pid, task.stat.parent, task.stat.session, task.stat.process_group],
        state: task.stat.state,
        comm: task.stat.comm,
        stack: task.stat.stack_start,
        last_cpu: task.stat.last_cpu.0,
        uid: task.uid,
        run_ns: task.run_ns,
        wait_ns: task.wait_ns.unwrap(),
        allowed: Some(task.allowed_pus()),
    }
}

pub(super) fn by_proc(proc: &mut ProcDir, pid: Pid) -> Result<BTreeMap<Tid, Facts>, Errno> {
    let uid = Uid(proc.status(pid)?.uid);
    let mut tasks = BTreeMap::new();
    for tid in proc.tids(pid)? {
        // The thread ended between the reads. The task scan does not report it either, or is repeated.
        let (Ok(stat), Ok(sched)) = (proc.thread_stat(pid, tid), proc.schedstat(pid, tid)) else { continue };
        let facts = Facts {
            start: stat.start,
            relatives: [pid, stat.parent, stat.session, stat.process_group],
            state: stat.state,
            comm: stat.comm,
            stack: stat.stack_start,
            last_cpu: stat.last_cpu.0,
            uid,
            run_ns: sched.run_ns,
            wait_ns: sched.wait_ns,
            allowed: affinity::get_mask(tid).ok(),
        };
        tasks.insert(tid, facts);
    }
    Ok(tasks)
}

pub(super) fn by_scan(scan: &mut TaskScan, scope: TaskScope<'_>) -> BTreeMap<Tid, Facts> {
    let mut tasks = BTreeMap::new();
    let mut twice = Vec::new();
    let collect = &mut |task: TaskRecord<'_>| {
        if tasks.insert(task.tid, facts_of(&task)).is_some() {
            twice.push(task.tid);
        }
    };
    scan.for_each_task(scope, collect).unwrap();
    assert_eq!(twice, [], "reported twice");
    tasks
}

/// Compares both sides for all threads of a process. Repeats while the process changes.
fn agree(scan: &mut TaskScan, pid: Pid) -> BTreeMap<Tid, Facts> {
    let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
    let scope = BTreeSet::from([pid]);
    let mut last = None;
    let agreed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        until("both report the same", || {
            let (before, reported) =
                (by_proc(&mut proc, pid).unwrap(), by_scan(scan, TaskScope::ThreadsOf(&scope)));
            let after = by_proc(&mut proc, pid).unwrap();
            let same = before.len() == reported.len()
                && reported.iter().all(|(tid, reported)| {
                    before.get(tid).zip(after.get(tid)).is_some_and(|(b, a)| is_between(reported, b, a))
                });
            last = Some((before, reported.clone()));
            same.then_some(reported)
        })
    }));
    agreed.unwrap_or_else(|_| panic!("proc and scan: {last:#?}"))
}

/// Times of a running thread increase between two reads. All other facts are equal.
fn is_between(reported: &Facts, before: &Facts, after: &Facts) -> bool {
    let still = |facts: &Facts| Facts {
        run_ns: reported.run_ns,
        wait_ns: reported.wait_ns,
        allowed: facts.allowed.clone().or_else(|| reported.allowed.clone()),
        ..facts.clone()
    };
    still(before) == *reported
        && still(after) == *reported
        && (before.run_ns..=after.run_ns).contains(&reported.run_ns)
        && (before.wait_ns..=after.wait_ns).contains(&reported.wait_ns)
}

#[test]
fn threads_with_odd_names_and_masks_of_their_own() {
    let Some(mut scan) = scan() else { return };
    let (mut test_process, tids) = TestProcess::start(8);
    let names =
        ["a) S 1 2 (", "two words", ")))", "fifteen-letters", "x", "\u{e4}\u{f6}", "Z (zombie)", "%d\\n"];
    for (k, name) in names.iter().enumerate() {
        test_process.order(&format!("name {k} {name}"));
    }
    let all = affinity::get_mask(tids[0]).unwrap();
    let pus: Vec<Pu> = all.iter().collect();
    for (pu, tid) in pus.iter().copied().cycle().zip(&tids).skip(2) {
        affinity::set_mask(*tid, &CpuSet::from(pu)).unwrap();
    }
    let reported = agree(&mut scan, test_process.pid());
    for (tid, name) in tids.iter().zip(names) {
        assert_eq!(reported[tid].comm, Comm::from(name));
    }
    assert_eq!(reported[&tids[0]].allowed, Some(all));
    assert_eq!(reported[&tids[3]].allowed.as_ref().map(CpuSet::len), Some(1));
}

#[test]
fn a_process_in_its_own_group_and_then_in_its_own_session() {
    let Some(mut scan) = scan() else { return };
    let (mut test_process, _) = TestProcess::start(1);
    let reported = agree(&mut scan, test_process.pid());
    let [process, parent, _, group] = reported[&Tid(test_process.pid().0)].relatives;
    assert_eq!((parent, group), (Pid(std::process::id()), process));
    // A group leader can't start a session. `setsid` starts a process that can.
    assert!(test_process.order("session").contains("EPERM"));
    let Ok(mut child) = Command::new("setsid").args(["sleep", "1000"]).spawn() else {
        println!("skipped: there is no setsid here");
        return;
    };
    let pid = Pid(child.id());
    until("it leads a session", || (agree(&mut scan, pid)[&Tid(pid.0)].relatives[2] == pid).then_some(()));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn states_from_running_to_stopped_to_zombie() {
    let Some(mut scan) = scan() else { return };
    let (mut test_process, tids) = TestProcess::start(3);
    let pid = test_process.pid();
    let signal = |signal| kill(nix::unistd::Pid::from_raw(pid.0.cast_signed()), signal).unwrap();
    let players: Vec<Tid> = [Tid(pid.0)].into_iter().chain(tids.iter().copied()).collect();
    let states = |scan: &mut TaskScan| -> String {
        let reported = agree(scan, pid);
        players.iter().map(|tid| reported.get(tid).map_or('-', |facts| facts.state)).collect()
    };
    until("all sleep", || (states(&mut scan) == "SSSS").then_some(()));
    test_process.order("work-on 1");
    until("one runs", || (states(&mut scan) == "SSRS").then_some(()));
    signal(Signal::SIGSTOP);
    until("all are stopped", || (states(&mut scan) == "TTTT").then_some(()));
    signal(Signal::SIGCONT);
    test_process.order("leave 2");
    until("one has left", || (states(&mut scan) == "SSR-").then_some(()));
    test_process.order("first-leaves");
    until("the first has left", || (states(&mut scan) == "ZSR-").then_some(()));
    let reported = agree(&mut scan, pid);
    assert_eq!(reported[&Tid(pid.0)].stack, 0, "an ended process has no memory");
    assert_ne!(reported[&tids[0]].stack, 0);
    test_process.kill();
    until("all have ended", || (states(&mut scan) == "Z---").then_some(()));
    test_process.end();
    assert_eq!(by_scan(&mut scan, TaskScope::ThreadsOf(&BTreeSet::from([pid]))), BTreeMap::new());
}

#[test]
fn real_and_effective_users_differ() {
    let Some(mut scan) = scan() else { return };
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can be another user");
        return;
    }
    let mut child = Command::new("sleep").arg("1000").uid(65_534).spawn().unwrap();
    let pid = Pid(child.id());
    let reported = agree(&mut scan, pid);
    assert_eq!(reported[&Tid(pid.0)].uid, Uid(65_534));
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    let ids: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
    let mut users = Vec::new();
    let scope = BTreeSet::from([pid]);
    scan.for_each_task(TaskScope::ThreadsOf(&scope), &mut |task| {
        users.push((task.uid.0, task.effective_uid.0));
    })
    .unwrap();
    assert_eq!(users, [(ids[0], ids[1])]);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn each_of_three_thousand_threads_is_reported_once() {
    let Some(mut scan) = scan() else { return };
    let (test_process, _) = TestProcess::start(3000);
    let reported = agree(&mut scan, test_process.pid());
    assert_eq!(reported.len(), 3002);
    let all = by_scan(&mut scan, TaskScope::AllProcessesAndThreadsOf(&BTreeSet::from([test_process.pid()])));
    assert!(reported.keys().all(|tid| all.contains_key(tid)));
}

/// A security module may hide a process: even root may not read its files in /proc, and BPF programs do not
/// see its tasks.
fn is_readable(pid: Pid) -> bool {
    std::fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok()
}

#[test]
fn the_scope_of_all_processes_includes_kernel_threads() {
    let Some(mut scan) = scan() else { return };
    let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
    let all = |proc: &mut ProcDir| -> BTreeSet<Pid> {
        proc.pids().unwrap().into_iter().filter(|pid| is_readable(*pid)).collect()
    };
    let before = all(&mut proc);
    let mut reported = BTreeSet::new();
    let mut kernel = 0;
    let collect = &mut |task: TaskRecord<'_>| {
        reported.insert(task.pid);
        kernel += u32::from(task.stat.is_kernel_thread);
    };
    let summary = scan.for_each_task(TaskScope::AllProcessesAndThreadsOf(&BTreeSet::new()), collect).unwrap();
    let after = all(&mut proc);
    let missed: Vec<&Pid> = before.intersection(&after).filter(|pid| !reported.contains(pid)).collect();
    assert_eq!(missed, [] as [&Pid; 0]);
    assert!(summary.skipped_tasks > 0, "other threads of this test");
    assert!(kernel > 0, "every kernel has threads");
}

#[test]
fn a_kernel_thread_is_marked() {
    let Some(mut scan) = scan() else { return };
    let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
    let Ok(stat) = proc.thread_stat(Pid(2), Tid(2)) else {
        println!("skipped: the kernel's threads are hidden from us");
        return;
    };
    let mut reported = Vec::new();
    let collect = &mut |task: TaskRecord<'_>| {
        let stat = task.stat;
        reported.push((stat.is_kernel_thread, stat.comm, stat.stack_start, task.address_space, stat.parent));
    };
    scan.for_each_task(TaskScope::ThreadsOf(&BTreeSet::from([Pid(2)])), collect).unwrap();
    assert!(stat.is_kernel_thread);
    assert_eq!(reported, [(true, stat.comm, 0, None, Pid(0))]);
}
