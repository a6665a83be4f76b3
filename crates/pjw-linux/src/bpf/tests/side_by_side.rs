//! Every field of every record is what /proc and the system calls say.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::process::{Comm, Pid, StartTime, Tid, Uid};

use super::company::{Company, scan, until};
use crate::affinity;
use crate::bpf::{TaskRecord, TaskScan, Whom};
use crate::procfs::Proc;

/// What both can tell of a task.
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
    /// `None` for what has ended: the system call no longer knows it.
    pub(super) allowed: Option<CpuSet>,
}

pub(super) fn facts_of(task: &TaskRecord<'_>) -> Facts {
    Facts {
        start: task.start,
        relatives: [task.process, task.parent, task.session, task.group],
        state: task.state,
        comm: task.comm,
        stack: task.stack,
        last_cpu: task.last_cpu.0,
        uid: task.uid,
        run_ns: task.run_ns,
        wait_ns: task.wait_ns.unwrap(),
        allowed: Some(task.allowed()),
    }
}

pub(super) fn by_proc(proc: &mut Proc, pid: Pid) -> Result<BTreeMap<Tid, Facts>, Errno> {
    let uid = Uid(proc.status(pid)?.uid);
    let mut tasks = BTreeMap::new();
    for tid in proc.tids(pid)? {
        // A thread may end while it is looked at; then the scan does not tell of it either, or is asked again.
        let (Ok(stat), Ok(sched)) = (proc.thread_stat(pid, tid), proc.schedstat(pid, tid)) else { continue };
        let facts = Facts {
            start: stat.start,
            relatives: [pid, stat.parent, stat.session, stat.group],
            state: stat.state,
            comm: stat.comm,
            stack: stat.stack,
            last_cpu: stat.last_cpu.0,
            uid,
            run_ns: sched.run_ns,
            wait_ns: sched.wait_ns,
            allowed: affinity::get(tid).ok(),
        };
        tasks.insert(tid, facts);
    }
    Ok(tasks)
}

pub(super) fn by_scan(scan: &mut TaskScan, whom: Whom<'_>) -> BTreeMap<Tid, Facts> {
    let mut tasks = BTreeMap::new();
    let mut twice = Vec::new();
    let tell = &mut |task: TaskRecord<'_>| {
        if tasks.insert(task.tid, facts_of(&task)).is_some() {
            twice.push(task.tid);
        }
    };
    scan.pass(whom, tell).unwrap();
    assert_eq!(twice, [], "told twice");
    tasks
}

/// The two sides agree on all tasks of a process, which may need some looks while it moves.
fn agree(scan: &mut TaskScan, pid: Pid) -> BTreeMap<Tid, Facts> {
    let mut proc = Proc::open(Path::new("/proc")).unwrap();
    let whom = BTreeSet::from([pid]);
    let mut last = None;
    let agreed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        until("both tell the same", || {
            let (before, told) = (by_proc(&mut proc, pid).unwrap(), by_scan(scan, Whom::These(&whom)));
            let after = by_proc(&mut proc, pid).unwrap();
            let same = before.len() == told.len()
                && told.iter().all(|(tid, told)| {
                    before.get(tid).zip(after.get(tid)).is_some_and(|(b, a)| is_between(told, b, a))
                });
            last = Some((before, told.clone()));
            same.then_some(told)
        })
    }));
    agreed.unwrap_or_else(|_| panic!("proc and scan: {last:#?}"))
}

/// The clocks of what runs go on between two looks; all else has to be the same.
fn is_between(told: &Facts, before: &Facts, after: &Facts) -> bool {
    let still = |facts: &Facts| Facts {
        run_ns: told.run_ns,
        wait_ns: told.wait_ns,
        allowed: facts.allowed.clone().or_else(|| told.allowed.clone()),
        ..facts.clone()
    };
    still(before) == *told
        && still(after) == *told
        && (before.run_ns..=after.run_ns).contains(&told.run_ns)
        && (before.wait_ns..=after.wait_ns).contains(&told.wait_ns)
}

#[test]
fn threads_with_odd_names_and_masks_of_their_own() {
    let Some(mut scan) = scan() else { return };
    let (mut company, tids) = Company::start(8);
    let names =
        ["a) S 1 2 (", "two words", ")))", "fifteen-letters", "x", "\u{e4}\u{f6}", "Z (zombie)", "%d\\n"];
    for (k, name) in names.iter().enumerate() {
        company.order(&format!("name {k} {name}"));
    }
    let all = affinity::get(tids[0]).unwrap();
    let pus: Vec<Pu> = all.iter().collect();
    for (pu, tid) in pus.iter().copied().cycle().zip(&tids).skip(2) {
        affinity::set(*tid, &CpuSet::from(pu)).unwrap();
    }
    let told = agree(&mut scan, company.pid());
    for (tid, name) in tids.iter().zip(names) {
        assert_eq!(told[tid].comm, Comm::from(name));
    }
    assert_eq!(told[&tids[0]].allowed, Some(all));
    assert_eq!(told[&tids[3]].allowed.as_ref().map(CpuSet::len), Some(1));
}

#[test]
fn a_process_in_its_own_group_and_then_in_its_own_session() {
    let Some(mut scan) = scan() else { return };
    let (mut company, _) = Company::start(1);
    let told = agree(&mut scan, company.pid());
    let [process, parent, _, group] = told[&Tid(company.pid().0)].relatives;
    assert_eq!((parent, group), (Pid(std::process::id()), process));
    // Who leads a group can't begin a session, and says so; `setsid` starts one that can.
    assert!(company.order("session").contains("EPERM"));
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
    let (mut company, tids) = Company::start(3);
    let pid = company.pid();
    let signal = |signal| kill(nix::unistd::Pid::from_raw(pid.0.cast_signed()), signal).unwrap();
    let players: Vec<Tid> = [Tid(pid.0)].into_iter().chain(tids.iter().copied()).collect();
    let states = |scan: &mut TaskScan| -> String {
        let told = agree(scan, pid);
        players.iter().map(|tid| told.get(tid).map_or('-', |facts| facts.state)).collect()
    };
    until("all sleep", || (states(&mut scan) == "SSSS").then_some(()));
    company.order("work-on 1");
    until("one runs", || (states(&mut scan) == "SSRS").then_some(()));
    signal(Signal::SIGSTOP);
    until("all are stopped", || (states(&mut scan) == "TTTT").then_some(()));
    signal(Signal::SIGCONT);
    company.order("leave 2");
    until("one has left", || (states(&mut scan) == "SSR-").then_some(()));
    company.order("first-leaves");
    until("the first has left", || (states(&mut scan) == "ZSR-").then_some(()));
    let told = agree(&mut scan, pid);
    assert_eq!(told[&Tid(pid.0)].stack, 0, "who has ended has no memory");
    assert_ne!(told[&tids[0]].stack, 0);
    company.kill();
    until("all have ended", || (states(&mut scan) == "Z---").then_some(()));
    company.end();
    assert_eq!(by_scan(&mut scan, Whom::These(&BTreeSet::from([pid]))), BTreeMap::new());
}

#[test]
fn real_and_effective_users_are_told_apart() {
    let Some(mut scan) = scan() else { return };
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can be another user");
        return;
    }
    let mut child = Command::new("sleep").arg("1000").uid(65_534).spawn().unwrap();
    let pid = Pid(child.id());
    let told = agree(&mut scan, pid);
    assert_eq!(told[&Tid(pid.0)].uid, Uid(65_534));
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    let ids: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
    let mut users = Vec::new();
    let whom = BTreeSet::from([pid]);
    scan.pass(Whom::These(&whom), &mut |task| users.push((task.uid.0, task.effective_uid.0))).unwrap();
    assert_eq!(users, [(ids[0], ids[1])]);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn three_thousand_threads_are_told_once_each() {
    let Some(mut scan) = scan() else { return };
    let (company, _) = Company::start(3000);
    let told = agree(&mut scan, company.pid());
    assert_eq!(told.len(), 3002);
    let everybody = by_scan(&mut scan, Whom::Everybody(&BTreeSet::from([company.pid()])));
    assert!(told.keys().all(|tid| everybody.contains_key(tid)));
}

/// A security module may keep a process to itself: its files in /proc are refused even to root, and its tasks are told
/// to no BPF program.
fn may_be_looked_into(pid: Pid) -> bool {
    std::fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok()
}

#[test]
fn everybody_is_every_process_and_kernel_thread() {
    let Some(mut scan) = scan() else { return };
    let mut proc = Proc::open(Path::new("/proc")).unwrap();
    let all = |proc: &mut Proc| -> BTreeSet<Pid> {
        proc.pids().unwrap().into_iter().filter(|pid| may_be_looked_into(*pid)).collect()
    };
    let before = all(&mut proc);
    let mut told = BTreeSet::new();
    let mut kernel = 0;
    let tell = &mut |task: TaskRecord<'_>| {
        told.insert(task.process);
        kernel += u32::from(task.kernel);
    };
    let summary = scan.pass(Whom::Everybody(&BTreeSet::new()), tell).unwrap();
    let after = all(&mut proc);
    let missed: Vec<&Pid> = before.intersection(&after).filter(|pid| !told.contains(pid)).collect();
    assert_eq!(missed, [] as [&Pid; 0]);
    assert!(summary.passed_over > 0, "other threads of this test");
    assert!(kernel > 0, "every kernel has threads");
}

#[test]
fn a_kernel_thread_is_told_as_one() {
    let Some(mut scan) = scan() else { return };
    let mut proc = Proc::open(Path::new("/proc")).unwrap();
    let Ok(stat) = proc.thread_stat(Pid(2), Tid(2)) else {
        println!("skipped: the kernel's threads are hidden from us");
        return;
    };
    let mut told = Vec::new();
    let tell = &mut |task: TaskRecord<'_>| told.push((task.kernel, task.comm, task.stack, task.parent));
    scan.pass(Whom::These(&BTreeSet::from([Pid(2)])), tell).unwrap();
    assert!(stat.kernel);
    assert_eq!(told, [(true, stat.comm, 0, Pid(0))]);
}
