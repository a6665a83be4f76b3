//! Children of released processes that a killed daemon did not find. The journal has the masks that such children may
//! have, until a full scan after the release finds none of them.

use pjw_core::command::{AssignCommand, Command};
use pjw_core::ids::{Pid, Tid};
use pjw_core::job::CpuRequest;
use pjw_core::record::Record;
use pjw_core::snapshot::{BatchIdentity, ProcessEvent};
use pjw_core::time::Nanos;

use crate::machine::{Machine, ROOT, SECOND, assign_of, job, machine, machine_with_cpusets};

/// Makes a job on PUs 0-1 with process 10. Its daemon is killed right after it recorded the release in the journal.
/// Returns the records.
fn kill_daemon_in_a_release(m: &mut Machine) -> Vec<Record> {
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    let mut records = m.state.records();
    m.advance(SECOND);
    let scan = m.state.scan_request(true);
    let release = m.cycle(&scan, &[Command::Release { job: job("a"), caller: ROOT }]);
    records.extend(release.records);
    records
}

/// Starts a process that inherited this mask.
fn spawn_with(m: &Machine, (pid, parent, uid): (u32, u32, u32), mask: &str) {
    m.spawn(pid, parent, uid);
    m.bind(pid, pid, mask);
}

/// Replaces the daemon by another one with these records.
fn restart_with(m: &mut Machine, records: Vec<Record>) {
    m.lose_state();
    records.into_iter().for_each(|record| m.state.apply_record(record));
    m.settle();
}

#[test]
fn an_orphan_that_a_killed_daemon_did_not_find_after_a_release_gets_the_original_mask() {
    let mut m = machine();
    let records = kill_daemon_in_a_release(&mut m);
    // The parent of process 20 had the mask of the job, and ended. Process 30 chose another mask.
    for (pid, uid, mask) in [(20, 1001, "0-1"), (30, 1001, "1-2"), (40, 0, "0-1"), (50, 1002, "0-1")] {
        spawn_with(&m, (pid, 1, uid), mask);
    }
    restart_with(&mut m, records);
    assert_eq!(
        [10, 20, 30, 40, 50].map(|pid| m.effective_mask(pid, pid)),
        ["0-7", "0-7", "1-2", "0-1", "0-1"]
    );
}

#[test]
fn an_orphan_gets_the_original_mask_also_if_every_process_of_the_journal_has_ended() {
    let mut m = machine();
    let records = kill_daemon_in_a_release(&mut m);
    spawn_with(&m, (20, 1, 1001), "0-1");
    m.exit(10);
    restart_with(&mut m, records);
    assert_eq!(m.effective_mask(20, 20), "0-7");
}

#[test]
fn the_children_of_an_orphan_get_their_original_masks() {
    let mut m = machine();
    let records = kill_daemon_in_a_release(&mut m);
    spawn_with(&m, (20, 1, 1001), "0-1");
    m.spawn(21, 20, 1001);
    m.spawn(22, 21, 1001);
    restart_with(&mut m, records);
    assert_eq!([20, 21, 22].map(|pid| m.effective_mask(pid, pid)), ["0-7", "0-7", "0-7"]);
}

#[test]
fn a_child_that_was_born_before_its_parent_was_restored_gets_the_original_mask_from_the_next_daemon() {
    let mut m = machine();
    let records = kill_daemon_in_a_release(&mut m);
    // The killed daemon had already restored the parent.
    assert_eq!(m.effective_mask(10, 10), "0-7");
    spawn_with(&m, (20, 10, 1001), "0-1");
    restart_with(&mut m, records);
    assert_eq!(m.effective_mask(20, 20), "0-7");
}

#[test]
fn a_rewritten_journal_still_names_the_masks_of_a_release() {
    let mut m = machine();
    let records = kill_daemon_in_a_release(&mut m);
    spawn_with(&m, (20, 1, 1001), "0-1");
    m.lose_state();
    records.into_iter().for_each(|record| m.state.apply_record(record));
    let rewritten = m.state.records();
    restart_with(&mut m, rewritten);
    assert_eq!(m.effective_mask(20, 20), "0-7");
}

#[test]
fn the_masks_of_a_release_are_forgotten_when_a_full_scan_finds_nothing_left_to_restore() {
    let mut m = machine();
    kill_daemon_in_a_release(&mut m);
    assert!(!m.state.released_masks.is_empty());
    m.settle();
    m.advance(SECOND);
    m.settle();
    assert!(m.state.released_masks.is_empty());
    assert!(m.state.records().is_empty(), "{:?}", m.state.records());
    spawn_with(&m, (20, 1, 1001), "0-1");
    m.settle();
    assert_eq!(m.effective_mask(20, 20), "0-1", "the program itself requested this mask");
}

#[test]
fn an_orphan_of_root_with_a_mask_of_a_released_job_is_named_in_a_warning() {
    let mut m = machine();
    m.spawn(11, 1, 0);
    m.assign("b", 2, &[11]).unwrap();
    let mut records = m.state.records();
    m.advance(SECOND);
    let scan = m.state.scan_request(true);
    records.extend(m.cycle(&scan, &[Command::Release { job: job("b"), caller: ROOT }]).records);
    spawn_with(&m, (20, 1, 0), "0-1");
    restart_with(&mut m, records);
    assert_eq!((m.effective_mask(20, 20), m.warnings()), ("0-1".into(), vec!["unknown-masks"]));
}

#[test]
fn a_child_that_was_forked_in_a_cpuset_and_begins_outside_with_the_mask_of_the_cpuset_gets_the_original_mask()
{
    let mut m = machine_with_cpusets(true);
    m.state.fork_events_complete_since = Some(Nanos(0));
    m.spawn(10, 1, 1001);
    m.settle();
    m.assign("a", 2, &[10]).unwrap();
    m.advance(SECOND);
    let scan = m.state.scan_request(true);
    let _ = m.cycle(&scan, &[Command::Release { job: job("a"), caller: ROOT }]);
    // The kernel copied the mask before the parent was moved, and sends the fork event after that.
    spawn_with(&m, (20, 10, 1001), "0-1");
    let at = Nanos(m.now());
    let fork = ProcessEvent::Fork { parent: Pid(10), creator: Tid(10), child: Pid(20), at };
    m.state.apply_process_events(&[fork]);
    m.spawn(21, 20, 1001);
    m.settle();
    assert_eq!([10, 20, 21].map(|pid| m.effective_mask(pid, pid)), ["0-7", "0-7", "0-7"]);
}

/// Runs a cycle that scans only known processes. Returns the records.
fn cycle_without_new_processes(m: &mut Machine, command: Command) -> Vec<Record> {
    let scan = m.state.scan_request(false);
    m.cycle(&scan, &[command]).records
}

#[test]
fn an_orphan_that_is_found_after_its_job_was_released_and_assigned_again_gets_the_original_mask() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    let mut records = m.state.records();
    m.advance(SECOND);
    spawn_with(&m, (20, 1, 1001), "0-1");
    m.advance(SECOND);
    records.extend(cycle_without_new_processes(&mut m, Command::Release { job: job("a"), caller: ROOT }));
    m.advance(SECOND / 100);
    let again = AssignCommand { pids: vec![Pid(10)], ..assign_of("a", Some(CpuRequest::Cores(2))) };
    records.extend(cycle_without_new_processes(&mut m, Command::Assign(again)));
    restart_with(&mut m, records);
    assert_eq!(m.member(20), "manual:a by Parent");
    m.release("a").unwrap();
    assert_eq!([10, 20].map(|pid| m.effective_mask(pid, pid)), ["0-7", "0-7"]);
}

/// Completes the fork of a process that began the fork before its mask was restored.
fn finish_fork(m: &mut Machine, child: u32, parent: u32) {
    spawn_with(m, (child, parent, 1001), "0-1");
    let at = Nanos(m.now());
    let (creator, child) = (Tid(parent), Pid(child));
    m.state.apply_process_events(&[ProcessEvent::Fork { parent: Pid(parent), creator, child, at }]);
}

#[test]
fn a_fork_that_began_before_an_orphan_was_restored_may_end_after_the_next_full_scan() {
    let mut m = machine();
    let records = kill_daemon_in_a_release(&mut m);
    spawn_with(&m, (20, 1, 1001), "0-1");
    m.lose_state();
    m.state.fork_events_complete_since = Some(Nanos(m.now() + SECOND));
    records.into_iter().for_each(|record| m.state.apply_record(record));
    m.advance(SECOND);
    m.settle();
    assert_eq!(m.effective_mask(20, 20), "0-7");
    m.advance(SECOND / 100);
    finish_fork(&mut m, 21, 20);
    m.settle();
    assert_eq!(m.effective_mask(21, 21), "0-7");
    m.advance(SECOND);
    m.settle();
    assert!(m.state.released_masks.is_empty());
}

#[test]
fn a_release_is_not_settled_while_a_process_of_unknown_descent_is_unscanned() {
    let mut m = machine();
    let records = kill_daemon_in_a_release(&mut m);
    m.lose_state();
    m.state.fork_events_complete_since = Some(Nanos(m.now()));
    records.into_iter().for_each(|record| m.state.apply_record(record));
    m.settle();
    m.advance(SECOND);
    let snapshot = m.scan();
    // The scan finds neither the parent, which had the mask of the job and ended, nor the child.
    let at = Nanos(m.now());
    let fork = ProcessEvent::Fork { parent: Pid(19), creator: Tid(19), child: Pid(20), at };
    m.state.apply_process_events(&[fork]);
    let _ = m.decide(&snapshot, &[]);
    spawn_with(&m, (20, 1, 1001), "0-1");
    m.settle();
    assert_eq!(m.effective_mask(20, 20), "0-7");
}

#[test]
fn a_rewritten_journal_still_names_the_restored_processes_of_a_release() {
    let mut m = machine();
    kill_daemon_in_a_release(&mut m);
    m.settle();
    assert!(m.state.processes_to_restore.is_empty() && !m.state.released_masks.is_empty());
    let rewritten = m.state.records();
    spawn_with(&m, (20, 10, 1001), "0-1");
    restart_with(&mut m, rewritten);
    assert_eq!(m.effective_mask(20, 20), "0-7");
}

#[test]
fn a_child_of_a_restored_process_keeps_the_original_mask_of_its_parent_also_if_the_job_set_the_same_mask_elsewhere()
 {
    let mut m = machine();
    m.state.fork_events_complete_since = Some(Nanos(0));
    m.spawn(10, 1, 1001);
    m.bind(10, 10, "0-1");
    m.spawn(11, 1, 1001);
    m.settle();
    m.assign("a", 2, &[10, 11]).unwrap();
    m.release("a").unwrap();
    assert_eq!([10, 11].map(|pid| m.effective_mask(pid, pid)), ["0-1", "0-7"]);
    assert!(!m.state.released_masks.is_empty(), "the release is not settled");
    finish_fork(&mut m, 20, 10);
    finish_fork(&mut m, 21, 11);
    m.settle();
    assert_eq!([20, 21].map(|pid| m.effective_mask(pid, pid)), ["0-1", "0-7"]);
}

/// Makes a process of the job that `pjwctl spawn` started on the PUs `part`.
fn start_instance(m: &Machine, pid: u32, part: &str) {
    let start_cpus = Some(part.parse().unwrap());
    m.spawn(pid, 10, 1001).batch_identity = Some(BatchIdentity { start_cpus, ..BatchIdentity::default() });
    m.bind(pid, pid, part);
}

#[test]
fn a_release_restores_the_masks_from_before_pjwctl_spawn() {
    for (is_killed, is_scanned) in [(false, true), (true, true), (true, false)] {
        let mut m = machine();
        m.state.fork_events_complete_since = Some(Nanos(0));
        m.spawn(10, 1, 1001);
        m.assign("a", 4, &[10]).unwrap();
        start_instance(&m, 20, "0");
        start_instance(&m, 21, "1");
        // This one has chosen another mask since, and the mask of this one has every PU of the job.
        start_instance(&m, 22, "2");
        m.bind(22, 22, "2-3");
        start_instance(&m, 23, "0-3");
        m.settle();
        let masks = |m: &Machine| [20, 21, 22, 23].map(|pid| m.effective_mask(pid, pid));
        assert_eq!(masks(&m), ["0", "1", "2-3", "0-3"], "parts are kept");
        if is_killed {
            let records = m.state.records();
            m.lose_state();
            records.into_iter().for_each(|record| m.state.apply_record(record));
        }
        if is_scanned {
            m.settle();
        }
        m.release("a").unwrap();
        m.settle();
        assert_eq!(masks(&m), ["0-7", "0-7", "2-3", "0-7"], "{is_killed} {is_scanned}");
        assert!(m.journaled_threads().is_empty());
    }
}

#[test]
fn a_release_restores_the_mask_from_before_pjwctl_spawn_also_after_the_job_moved() {
    let mut m = machine();
    m.spawn(9, 1, 1001);
    m.bind(9, 9, "0-5");
    m.spawn(10, 9, 1001);
    m.settle();
    m.assign("a", 2, &[10]).unwrap();
    start_instance(&m, 20, "0");
    start_instance(&m, 21, "1");
    m.settle();
    // The parts are translated to other PUs.
    m.switch_off("0-1");
    m.settle();
    assert_ne!([20, 21].map(|pid| m.effective_mask(pid, pid)), ["0", "1"]);
    m.switch_off("");
    m.release("a").unwrap();
    m.settle();
    assert_eq!([10, 20, 21].map(|pid| m.effective_mask(pid, pid)), ["0-5", "0-5", "0-5"]);
}

#[test]
fn a_child_that_an_instance_forks_during_the_release_gets_the_mask_from_before_too() {
    let mut m = machine();
    m.state.fork_events_complete_since = Some(Nanos(0));
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    start_instance(&m, 20, "0");
    m.settle();
    m.advance(SECOND);
    let snapshot = m.scan();
    let start_cpus = Some("0".parse().unwrap());
    m.spawn(21, 20, 1001).batch_identity = Some(BatchIdentity { start_cpus, ..BatchIdentity::default() });
    let at = Nanos(m.now());
    let fork = ProcessEvent::Fork { parent: Pid(20), creator: Tid(20), child: Pid(21), at };
    m.state.apply_process_events(&[fork]);
    let release = m.decide(&snapshot, &[Command::Release { job: job("a"), caller: ROOT }]);
    release.plan.mask_actions.iter().for_each(|action| m.carry_out(action));
    m.settle();
    assert_eq!([20, 21].map(|pid| m.effective_mask(pid, pid)), ["0-7", "0-7"]);
}

#[test]
fn the_release_of_a_batch_systems_job_keeps_a_mask_that_the_batch_system_may_have_set() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("lsf:7", 2, &[10]).unwrap();
    start_instance(&m, 20, "0");
    m.settle();
    m.release("lsf:7").unwrap();
    m.settle();
    assert_eq!([10, 20].map(|pid| m.effective_mask(pid, pid)), ["0-7", "0"]);
}

#[test]
fn an_instance_that_requests_its_part_again_after_the_release_keeps_it() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    start_instance(&m, 20, "0");
    m.settle();
    let scan = m.state.scan_request(true);
    let next_scan = m.cycle(&scan, &[Command::Release { job: job("a"), caller: ROOT }]).next_scan;
    assert_eq!(m.effective_mask(20, 20), "0-7");
    m.bind(20, 20, "0");
    if let Some(scan) = next_scan {
        let _ = m.cycle(&scan, &[]);
    }
    m.settle();
    assert_eq!(m.effective_mask(20, 20), "0");
}

#[test]
fn a_stray_that_pjwctl_spawn_started_without_a_job_keeps_its_own_mask() {
    let mut m = machine();
    m.policy.adopt_unassigned_processes = true;
    for (pid, id) in [(10, "a"), (11, "b")] {
        m.spawn(pid, 1, 1001);
        m.assign(id, 1, &[pid]).unwrap();
    }
    let start_cpus = Some("5".parse().unwrap());
    m.spawn(20, 1, 1001).batch_identity = Some(BatchIdentity { start_cpus, ..BatchIdentity::default() });
    m.bind(20, 20, "5");
    m.settle();
    m.settle();
    assert_eq!(m.effective_mask(20, 20), "5");
}
