//! A scan by the task scan and a scan by `/proc` report the same facts about the same live processes.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::Arc;

use pjw_core::ids::Tid;
use pjw_core::ports::MachineInterface;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::snapshot::{Observed, Process, Snapshot};

use super::*;
use crate::bpf::tests::test_process::{TestCgroup, TestProcess, scan};
use crate::node::{LinuxMachine, process_cache::FINGERPRINT_SCANS};
use crate::tests::{is_asleep, until, until_true};

/// A node that uses `/proc` only, and a node that uses the task scan.
fn both() -> Option<[LinuxMachine; 2]> {
    let node = || LinuxMachine::new(BTreeSet::from(["PJW_TEST_PROCESS"])).ok();
    let (by_proc, mut by_scan) = (node()?, node()?);
    by_scan.set_task_scan(Some(scan()?));
    Some([by_proc, by_scan])
}

fn full(threads_of: &[Pid]) -> ScanRequest {
    let threads_of = threads_of.iter().copied().collect();
    let (active_threads, cgroups) = (BTreeMap::new(), BTreeSet::new());
    ScanRequest {
        scope: ScanScope::Full,
        pids_to_read_threads_of: threads_of,
        active_threads,
        cgroups,
        idle_watch: Arc::default(),
    }
}

fn partial(pids: &[Pid]) -> ScanRequest {
    ScanRequest { scope: ScanScope::Partial(pids.iter().copied().collect()), ..full(pids) }
}

fn seen(snapshot: &Snapshot, pid: Pid) -> Option<&Process> {
    snapshot.processes.get(&pid).and_then(Observed::present)
}

/// Whether the environment and the command line of a process are read. A scan ends without them if the thread that
/// reads them gets no CPU in time, and a later scan reads them.
fn has_memory_contents(process: &Process) -> bool {
    process.attributes.as_ref().is_some_and(|attributes| !attributes.command_line.is_empty())
}

/// The processes as both nodes report them, once they agree: a process may run between two scans. If the nodes are
/// `fresh`, the first process is reported with its environment. Otherwise an earlier scan has reported that.
fn agreed(scan_request: &ScanRequest, pids: &[Pid], fresh: bool) -> Option<Vec<Process>> {
    let mut nodes = both()?;
    if !fresh {
        for node in &mut nodes {
            until_true("the environment is read", || {
                seen(&node.scan(scan_request), pids[0]).is_some_and(has_memory_contents)
            });
        }
    }
    let reported = until("both report the same", || {
        if fresh {
            nodes = both()?;
        }
        let [by_proc, by_scan] = &mut nodes;
        let snapshots = [by_proc.scan(scan_request), by_scan.scan(scan_request)];
        let reported = snapshots.map(|snapshot| {
            assert_eq!((&snapshot.incomplete_reason, &snapshot.scope), (&None, &scan_request.scope));
            pids.iter().map(|&pid| seen(&snapshot, pid).cloned()).collect::<Option<Vec<Process>>>()
        });
        let [proc, scan] = reported;
        proc.filter(|proc| Some(proc) == scan.as_ref() && (!fresh || has_memory_contents(&proc[0])))
    });
    Some(reported)
}

#[test]
fn a_process_hidden_from_the_task_scan_is_observed() {
    let Some([mut by_proc, mut by_scan]) = both() else { return };
    let first = by_scan.scan(&full(&[]));
    // A process that exists before and after also exists in between.
    let before = by_proc.scan(&full(&[]));
    let later = by_scan.scan(&full(&[]));
    let after = by_proc.scan(&full(&[]));
    for (pid, process) in before.processes.iter().filter_map(|(pid, seen)| Some((*pid, seen.present()?))) {
        if seen(&after, pid).is_some_and(|still| still.id == process.id) {
            assert!(seen(&later, pid).is_some(), "process {pid}, {}", process.comm);
        }
    }
    assert!(seen(&first, Pid(1)).is_some() || seen(&before, Pid(1)).is_none(), "the init process");
}

#[test]
fn a_full_scan_is_the_same_both_ways() {
    let (test_process, threads) = TestProcess::start(40);
    let (other, _) = TestProcess::start(3);
    // A kernel thread and an unassigned process are reported without their threads.
    let pids = [test_process.pid(), other.pid(), Pid(2)];
    let Some(reported) = agreed(&full(&[test_process.pid()]), &pids, true) else { return };
    assert_eq!(reported[0].threads.as_ref().unwrap().len(), threads.len() + 2);
    assert_eq!(reported[0].attributes.as_ref().unwrap().environ["PJW_TEST_PROCESS"], "yes");
    assert!(reported[1].threads.is_none() && reported[2].is_kernel_thread);
}

#[test]
fn a_second_scan_is_the_same_both_ways_and_without_attributes() {
    let (test_process, _) = TestProcess::start(40);
    for scan_request in [full(&[test_process.pid()]), partial(&[test_process.pid()])] {
        let Some(reported) = agreed(&scan_request, &[test_process.pid()], false) else { return };
        assert!(reported[0].attributes.is_none());
        assert_eq!(reported[0].threads.as_ref().unwrap().len(), 42);
    }
}

/// A node with the task scan that has scanned this process often enough to trust its fingerprint, and has read its
/// environment.
fn node_with_trusted_fingerprint(test_process: &TestProcess) -> Option<LinuxMachine> {
    let [_, mut node] = both()?;
    assert!(seen(&node.scan(&full(&[])), test_process.pid()).is_some());
    assert_eq!(
        node.cache.processes[&test_process.pid()].fingerprint,
        0,
        "the process may have moved between the task scan and the read"
    );
    until_true("the fingerprint is trusted, and the environment is read", || {
        node.scan(&full(&[]));
        let known = &node.cache.processes[&test_process.pid()];
        known.fingerprint != 0 && !known.attributes.command_line.is_empty()
    });
    Some(node)
}

/// Clears the cached cgroups, as if they had been read in another cgroup with the same fingerprint.
fn misremember(node: &mut LinuxMachine, test_process: &TestProcess) {
    node.cache.processes.get_mut(&test_process.pid()).unwrap().attributes.cgroups.lines.clear();
}

#[test]
fn cgroups_with_the_same_fingerprint_are_read_in_some_full_scans_only() {
    let (test_process, _) = TestProcess::start(3);
    let Some(mut node) = node_with_trusted_fingerprint(&test_process) else { return };
    let mut read = 0;
    for _ in 0..3 * FINGERPRINT_SCANS {
        if node.cache.processes[&test_process.pid()].fingerprint != 0 {
            misremember(&mut node, &test_process);
        }
        let snapshot = node.scan(&full(&[]));
        read += u32::from(seen(&snapshot, test_process.pid()).unwrap().attributes.is_some());
    }
    assert!((2..=3).contains(&read), "{read}");
}

#[test]
fn a_fingerprint_is_trusted_after_two_equal_task_scans() {
    let (test_process, _) = TestProcess::start(3);
    let Some(mut node) = node_with_trusted_fingerprint(&test_process) else { return };
    let known = node.cache.processes.get_mut(&test_process.pid()).unwrap();
    // As if the process had been in another cgroup during the last task scan, and back when its file was read.
    (known.scanned_fingerprint, known.fingerprint) = (known.fingerprint ^ 1, 0);
    let mut place = || {
        node.scan(&full(&[]));
        node.cache.processes[&test_process.pid()].fingerprint
    };
    assert_eq!(place(), 0);
    assert_ne!(place(), 0);
}

#[test]
fn a_new_mount_makes_all_cgroups_be_read_again() {
    let (test_process, _) = TestProcess::start(3);
    let Some(mut node) = node_with_trusted_fingerprint(&test_process) else { return };
    misremember(&mut node, &test_process);
    node.mounts.v1_mounts.push(("another".to_owned(), "/nowhere".into()));
    let snapshot = node.scan(&full(&[]));
    assert!(seen(&snapshot, test_process.pid()).unwrap().attributes.is_some());
}

#[test]
fn a_move_in_any_hierarchy_gives_new_attributes() {
    let Some([_, mut node]) = both() else { return };
    let cgroups = TestCgroup::all();
    let (test_process, _) = TestProcess::start(3);
    let mut attributes = || seen(&node.scan(&full(&[])), test_process.pid()).unwrap().attributes.clone();
    assert!(attributes().is_some());
    // On a busy machine, the first scan may end before the environment is read, and a later one gives it.
    until_true("the environment is read", || attributes().is_none());
    for cgroup in &cgroups {
        assert!(attributes().is_none() && attributes().is_none());
        test_process.move_to(cgroup);
        let cgroups = attributes().expect("the process moved").cgroups.lines;
        let name = format!("/{}", cgroup.path().file_name().unwrap().to_str().unwrap());
        assert!(cgroups.iter().any(|(_, path)| path.ends_with(&name)), "{name} in {cgroups:?}");
    }
    test_process.end();
}

#[test]
fn a_full_scan_finds_new_and_ended_processes() {
    let Some([_, mut node]) = both() else { return };
    let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = Pid(child.id());
    assert!(seen(&node.scan(&full(&[])), pid).is_some());
    child.kill().unwrap();
    until("the process is a zombie", || seen(&node.scan(&full(&[])), pid).is_none().then_some(()));
    child.wait().unwrap();
    let snapshot = node.scan(&full(&[]));
    assert!(snapshot.scope == ScanScope::Full && !snapshot.processes.contains_key(&pid));
}

#[test]
fn a_process_without_its_first_thread_is_observed() {
    let (mut test_process, threads) = TestProcess::start(2);
    test_process.order("first-leaves");
    let Some(reported) = agreed(&full(&[test_process.pid()]), &[test_process.pid()], true) else { return };
    assert_eq!(
        reported[0].attributes.as_ref().unwrap().environ["PJW_TEST_PROCESS"],
        "yes",
        "another thread provides the environment"
    );
    let reported = reported[0].threads.as_ref().unwrap();
    assert!(threads.iter().all(|tid| reported.iter().any(|thread| thread.tid == *tid)));
}

#[test]
fn a_task_scan_is_faster_for_many_threads() {
    assert!(!is_task_scan_faster(1, 200), "reading some files is faster");
    assert!(is_task_scan_faster(100, 200));
    assert!(!is_task_scan_faster(100, 50_000), "the task scan would iterate over fifty thousand tasks");
    assert!(is_task_scan_faster(10_000, 50_000));
}

/// Waits until all threads of a process sleep: some of them run on for a moment after a reply.
fn wait_until_asleep(pid: Pid) {
    until_true("all threads sleep", || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
        let mut tids = threads.filter_map(|thread| thread.file_name().to_str()?.parse().ok().map(Tid));
        tids.all(|tid| is_asleep(pid, tid))
    });
}

/// Scans a process that sleeps with only these of its threads; with all if there are none.
fn scan_active(node: &mut LinuxMachine, pid: Pid, active: &BTreeSet<Tid>) -> Process {
    wait_until_asleep(pid);
    let named = (!active.is_empty()).then(|| (pid, active.clone()));
    let request = ScanRequest { active_threads: named.into_iter().collect(), ..partial(&[pid]) };
    node.scan(&request).processes.remove(&pid).and_then(|seen| seen.present().cloned()).unwrap()
}

#[test]
fn only_the_active_threads_of_a_process_are_read_until_another_one_runs_or_one_of_them_ends() {
    let (mut process, sleeping) = TestProcess::start(3);
    let mut node = LinuxMachine::new(BTreeSet::new()).unwrap();
    let pid = process.pid();
    let all = scan_active(&mut node, pid, &BTreeSet::new());
    assert!(all.has_all_threads);
    let active = BTreeSet::from([Tid(pid.0), sleeping[0]]);
    let tids = |process: &Process| -> BTreeSet<Tid> {
        process.threads.iter().flatten().map(|thread| thread.tid).collect()
    };
    for _ in 0..3 {
        let seen = scan_active(&mut node, pid, &active);
        assert!(!seen.has_all_threads && tids(&seen) == active, "{seen:?}");
    }
    process.order("work 1");
    let seen = scan_active(&mut node, pid, &active);
    assert!(seen.has_all_threads && tids(&seen) == tids(&all), "{seen:?}");
    let seen = scan_active(&mut node, pid, &active);
    assert!(!seen.has_all_threads, "no other thread ran since: {seen:?}");
    // The thread that reads the orders is not active. A stop of the machine may count as its run time, but does not
    // come each time.
    until_true("only the active threads are read after one of them ran", || {
        scan_active(&mut node, pid, &active);
        process.order("work 0");
        !scan_active(&mut node, pid, &active).has_all_threads
    });
    process.order("leave 0");
    let seen = until("the scan finds that an active thread has ended", || {
        Some(scan_active(&mut node, pid, &active)).filter(|seen| seen.has_all_threads)
    });
    assert!(!tids(&seen).contains(&sleeping[0]), "{seen:?}");
}
