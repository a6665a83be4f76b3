//! A look by the task scan and a look by /proc tell the same of the same live processes.

use std::process::Command;
use std::sync::Arc;

use pjw_core::node::Node;
use pjw_core::snapshot::{Look, Process, Scope, Seen, Snapshot};

use super::*;
use crate::bpf::tests::company::{Company, Yard, scan, until};
use crate::node::LinuxNode;
use crate::node::acquaintance::PLACE_LASTS;

/// A node that looks by /proc, and one that has the kernel tell.
fn both() -> Option<[LinuxNode; 2]> {
    let node = || LinuxNode::new(BTreeSet::from(["PJW_COMPANY"])).ok();
    let (by_proc, mut by_scan) = (node()?, node()?);
    by_scan.use_task_scan(Some(scan()?));
    Some([by_proc, by_scan])
}

fn full(threads_of: &[Pid]) -> Look {
    let threads_of = threads_of.iter().copied().collect();
    Look { scope: Scope::Full, threads_of, cgroups: BTreeSet::new(), watch: Arc::default() }
}

fn partial(pids: &[Pid]) -> Look {
    Look { scope: Scope::Partial(pids.iter().copied().collect()), ..full(pids) }
}

fn seen(snapshot: &Snapshot, pid: Pid) -> Option<&Process> {
    snapshot.processes.get(&pid).and_then(Seen::here)
}

/// What both told, once they agree: somebody may run between two looks.
fn agreed(look: &Look, pids: &[Pid], fresh: bool) -> Option<Vec<Process>> {
    let mut nodes = both()?;
    if !fresh {
        nodes.iter_mut().for_each(|node| drop(node.observe(look)));
    }
    let told = until("both tell the same", || {
        if fresh {
            nodes = both()?;
        }
        let [by_proc, by_scan] = &mut nodes;
        let snapshots = [by_proc.observe(look), by_scan.observe(look)];
        let told = snapshots.map(|snapshot| {
            assert_eq!((&snapshot.blind, &snapshot.scope), (&None, &look.scope));
            pids.iter().map(|&pid| seen(&snapshot, pid).cloned()).collect::<Option<Vec<Process>>>()
        });
        let [proc, scan] = told;
        proc.filter(|proc| Some(proc) == scan.as_ref())
    });
    Some(told)
}

#[test]
fn who_is_hidden_from_the_scan_is_met_all_the_same() {
    let Some([mut by_proc, mut by_scan]) = both() else { return };
    let first = by_scan.observe(&full(&[]));
    // Whoever was there before and is there after was there meanwhile.
    let before = by_proc.observe(&full(&[]));
    let later = by_scan.observe(&full(&[]));
    let after = by_proc.observe(&full(&[]));
    for (pid, process) in before.processes.iter().filter_map(|(pid, seen)| Some((*pid, seen.here()?))) {
        if seen(&after, pid).is_some_and(|still| still.id == process.id) {
            assert!(seen(&later, pid).is_some(), "process {pid}, {}", process.comm);
        }
    }
    assert!(seen(&first, Pid(1)).is_some() || seen(&before, Pid(1)).is_none(), "the first process");
}

#[test]
fn a_full_look_tells_the_same_by_both_ways() {
    let (company, threads) = Company::start(40);
    let (other, _) = Company::start(3);
    // A kernel thread and a stranger are told too, without their threads.
    let pids = [company.pid(), other.pid(), Pid(2)];
    let Some(told) = agreed(&full(&[company.pid()]), &pids, true) else { return };
    assert_eq!(told[0].threads.as_ref().unwrap().len(), threads.len() + 2);
    assert_eq!(told[0].marks.as_ref().unwrap().environ["PJW_COMPANY"], "yes");
    assert!(told[1].threads.is_none() && told[2].kernel);
}

#[test]
fn a_second_look_tells_the_same_by_both_ways_and_no_marks_again() {
    let (company, _) = Company::start(40);
    for look in [full(&[company.pid()]), partial(&[company.pid()])] {
        let Some(told) = agreed(&look, &[company.pid()], false) else { return };
        assert!(told[0].marks.is_none());
        assert_eq!(told[0].threads.as_ref().unwrap().len(), 42);
    }
}

/// A node that looks by the scan and knows this process as long as it takes for its place to be believed.
fn acquainted(company: &Company) -> Option<LinuxNode> {
    let [_, mut node] = both()?;
    assert!(seen(&node.observe(&full(&[])), company.pid()).is_some());
    assert_eq!(node.known[&company.pid()].place, 0, "it may have moved between the pass and its file");
    until("its place is believed", || {
        node.observe(&full(&[]));
        (node.known[&company.pid()].place != 0).then_some(())
    });
    Some(node)
}

/// As if it had been read elsewhere, of which its place does not tell.
fn misremember(node: &mut LinuxNode, company: &Company) {
    node.known.get_mut(&company.pid()).unwrap().marks.cgroups.clear();
}

#[test]
fn of_a_process_that_stays_the_cgroups_are_read_again_in_some_full_looks_only() {
    let (company, _) = Company::start(3);
    let Some(mut node) = acquainted(&company) else { return };
    let mut read = 0;
    for _ in 0..3 * PLACE_LASTS {
        if node.known[&company.pid()].place != 0 {
            misremember(&mut node, &company);
        }
        let snapshot = node.observe(&full(&[]));
        read += u32::from(seen(&snapshot, company.pid()).unwrap().marks.is_some());
    }
    assert!((2..=3).contains(&read), "{read}");
}

#[test]
fn a_place_that_the_pass_before_did_not_tell_is_not_believed_yet() {
    let (company, _) = Company::start(3);
    let Some(mut node) = acquainted(&company) else { return };
    let known = node.known.get_mut(&company.pid()).unwrap();
    // As if it had been elsewhere when the last pass came by, and back when its file was read.
    (known.told, known.place) = (known.place ^ 1, 0);
    let mut place = || {
        node.observe(&full(&[]));
        node.known[&company.pid()].place
    };
    assert_eq!(place(), 0);
    assert_ne!(place(), 0);
}

#[test]
fn where_a_hierarchy_was_mounted_or_is_gone_all_cgroups_are_read_again() {
    let (company, _) = Company::start(3);
    let Some(mut node) = acquainted(&company) else { return };
    misremember(&mut node, &company);
    node.mounts.legacy.push(("another".to_owned(), "/nowhere".into()));
    let snapshot = node.observe(&full(&[]));
    assert!(seen(&snapshot, company.pid()).unwrap().marks.is_some());
}

#[test]
fn a_process_that_moves_in_any_hierarchy_is_told_with_its_new_marks() {
    let Some([_, mut node]) = both() else { return };
    let yards = Yard::all();
    let (company, _) = Company::start(3);
    let mut marks = || seen(&node.observe(&full(&[])), company.pid()).unwrap().marks.clone();
    assert!(marks().is_some());
    for yard in &yards {
        assert!(marks().is_none() && marks().is_none());
        company.move_to(yard);
        let cgroups = marks().expect("it is elsewhere").cgroups;
        let name = format!("/{}", yard.path().file_name().unwrap().to_str().unwrap());
        assert!(cgroups.iter().any(|(_, path)| path.ends_with(&name)), "{name} in {cgroups:?}");
    }
    company.end();
}

#[test]
fn a_full_look_finds_who_came_and_who_went() {
    let Some([_, mut node]) = both() else { return };
    let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = Pid(child.id());
    assert!(seen(&node.observe(&full(&[])), pid).is_some());
    child.kill().unwrap();
    until("it is over, though nobody has waited for it", || {
        seen(&node.observe(&full(&[])), pid).is_none().then_some(())
    });
    child.wait().unwrap();
    let snapshot = node.observe(&full(&[]));
    assert!(snapshot.scope == Scope::Full && !snapshot.processes.contains_key(&pid));
}

#[test]
fn a_process_whose_first_thread_has_left_is_still_there() {
    let (mut company, threads) = Company::start(2);
    company.order("first-leaves");
    let Some(told) = agreed(&full(&[company.pid()]), &[company.pid()], true) else { return };
    assert_eq!(told[0].marks.as_ref().unwrap().environ["PJW_COMPANY"], "yes", "others tell whose they are");
    let told = told[0].threads.as_ref().unwrap();
    assert!(threads.iter().all(|tid| told.iter().any(|thread| thread.tid == *tid)));
}

#[test]
fn few_threads_are_read_in_proc_and_many_told_by_a_pass() {
    assert!(!is_worth_a_pass(1, 200), "opening some files is quicker");
    assert!(is_worth_a_pass(100, 200));
    assert!(!is_worth_a_pass(100, 50_000), "the pass would walk fifty thousand tasks");
    assert!(is_worth_a_pass(10_000, 50_000));
}
