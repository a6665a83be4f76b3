//! A process with many threads of which few are active: most scans read and plan only the active ones. All threads are
//! read in one scan of four, and as soon as an idle thread runs or requests another mask.

use pjw_core::command::Command;
use pjw_core::ids::{Pid, Tid};
use pjw_core::scan::ScanRequest;
use pjw_core::state::members::{MAX_SCANS_PER_FULL_READING, MIN_THREADS_FOR_PARTIAL_READING};

use super::machine::{Machine, ROOT, job, machine};

/// The process, which is also its first thread. It is active.
const PROCESS: u32 = 7;
/// The second thread of the process, which is active too.
const SECOND_THREAD: u32 = 1000;
/// A thread that sleeps.
const IDLE: u32 = 1005;
const ACTIVE: [u32; 2] = [PROCESS, SECOND_THREAD];

/// A job on three cores with a process of many threads, of which two have been running for some time.
fn with_two_active_threads() -> Machine {
    let mut machine = machine();
    machine.world().pid_max = 10_000;
    machine.spawn(PROCESS, 1, 1000);
    for tid in (SECOND_THREAD..).take(MIN_THREADS_FOR_PARTIAL_READING + 50) {
        machine.clone_thread(PROCESS, tid);
    }
    machine.assign("a", 3, &[PROCESS]).unwrap();
    for _ in 0..8 * MAX_SCANS_PER_FULL_READING {
        run_second_and_cycle(&mut machine, &ACTIVE);
    }
    machine
}

/// Lets a second pass in which these threads run, and makes the regular cycle after it. Returns whether its first scan
/// read all threads of the process.
fn run_second_and_cycle(machine: &mut Machine, active: &[u32]) -> bool {
    machine.run(active);
    let mut scan: Option<ScanRequest> = Some(machine.state.scan_request(false));
    let mut has_read_all = None;
    while let Some(request) = scan.take() {
        let decision = machine.cycle(&request, &[]);
        let mut dirty = decision.newly_planned.listed_jobs();
        has_read_all.get_or_insert(dirty.any(|(_, scope)| scope.contains_whole_process(Pid(PROCESS))));
        scan = decision.next_scan;
    }
    has_read_all.unwrap()
}

/// Lets seconds pass until a scan that reads all threads, and one more second.
fn run_until_after_full_reading(machine: &mut Machine) {
    while !run_second_and_cycle(machine, &ACTIVE) {}
    assert!(!run_second_and_cycle(machine, &ACTIVE));
}

fn is_pinned(machine: &Machine, tid: u32) -> bool {
    let member = &machine.state.members[&Pid(PROCESS)];
    machine.state.pinned_pu_of(member, Tid(tid)).is_some()
}

#[test]
fn the_idle_threads_of_an_active_process_are_read_in_one_scan_of_four() {
    let mut machine = with_two_active_threads();
    assert!(ACTIVE.iter().all(|&tid| is_pinned(&machine, tid)));
    let read_all: Vec<bool> = (0..16).map(|_| run_second_and_cycle(&mut machine, &ACTIVE)).collect();
    assert_eq!(read_all.iter().filter(|read_all| **read_all).count(), 4, "{read_all:?}");
    assert!(ACTIVE.iter().all(|&tid| is_pinned(&machine, tid)));
}

#[test]
fn each_scan_reads_all_threads_of_a_process_with_few_threads() {
    let mut machine = machine();
    machine.world().pid_max = 10_000;
    machine.spawn(PROCESS, 1, 1000);
    machine.clone_thread(PROCESS, SECOND_THREAD);
    machine.assign("a", 3, &[PROCESS]).unwrap();
    for _ in 0..8 * MAX_SCANS_PER_FULL_READING {
        run_second_and_cycle(&mut machine, &ACTIVE);
    }
    assert!((0..8).all(|_| run_second_and_cycle(&mut machine, &ACTIVE)));
}

#[test]
fn the_mask_of_an_idle_thread_is_corrected_only_when_all_threads_are_read_next() {
    let mut machine = with_two_active_threads();
    run_until_after_full_reading(&mut machine);
    machine.bind(PROCESS, IDLE, "0-7");
    let mut seconds = 1;
    while !run_second_and_cycle(&mut machine, &ACTIVE) {
        assert_eq!(machine.effective_mask(PROCESS, IDLE), "0-7");
        seconds += 1;
    }
    assert!(seconds < MAX_SCANS_PER_FULL_READING, "{seconds}");
    assert_eq!(machine.effective_mask(PROCESS, IDLE), "0-2");
}

#[test]
fn the_mask_of_an_active_thread_is_corrected_by_the_next_scan() {
    let mut machine = with_two_active_threads();
    run_until_after_full_reading(&mut machine);
    let before = machine.effective_mask(PROCESS, SECOND_THREAD);
    machine.bind(PROCESS, SECOND_THREAD, "0-7");
    run_second_and_cycle(&mut machine, &ACTIVE);
    assert!(!machine.effective_mask(PROCESS, SECOND_THREAD).contains('7'), "it was on {before}");
}

#[test]
fn the_mask_of_an_idle_thread_is_corrected_by_the_next_cycle_if_its_request_was_monitored() {
    let mut machine = with_two_active_threads();
    run_until_after_full_reading(&mut machine);
    machine.bind(PROCESS, IDLE, "0-7");
    drop(machine.add_affinity_request(PROCESS, IDLE, "0-7"));
    run_second_and_cycle(&mut machine, &ACTIVE);
    assert_eq!(machine.effective_mask(PROCESS, IDLE), "0-2");
}

#[test]
fn an_idle_thread_that_begins_to_run_is_read_at_once_and_pinned_a_second_later() {
    let mut machine = with_two_active_threads();
    run_until_after_full_reading(&mut machine);
    let three = [PROCESS, SECOND_THREAD, IDLE];
    assert!(run_second_and_cycle(&mut machine, &three));
    assert!(!is_pinned(&machine, IDLE), "it ran for one second");
    assert!(
        run_second_and_cycle(&mut machine, &three),
        "the active threads are not those of the second before"
    );
    assert!(is_pinned(&machine, IDLE));
}

#[test]
fn a_new_thread_that_runs_and_an_active_one_that_ended_are_found_at_once() {
    let mut machine = with_two_active_threads();
    run_until_after_full_reading(&mut machine);
    machine.clone_thread(PROCESS, 5000);
    assert!(run_second_and_cycle(&mut machine, &[PROCESS, SECOND_THREAD, 5000]));
    assert!(machine.state.members[&Pid(PROCESS)].threads.contains_key(&Tid(5000)));
    while run_second_and_cycle(&mut machine, &[PROCESS, SECOND_THREAD, 5000]) {}
    machine.process(PROCESS).threads.remove(&Tid(SECOND_THREAD));
    assert!(run_second_and_cycle(&mut machine, &[PROCESS, 5000]));
    assert!(!machine.state.members[&Pid(PROCESS)].threads.contains_key(&Tid(SECOND_THREAD)));
}

#[test]
fn an_active_thread_that_falls_asleep_floats_and_a_process_is_idle_if_all_its_threads_sleep() {
    let mut machine = with_two_active_threads();
    for _ in 0..8 {
        run_second_and_cycle(&mut machine, &[PROCESS]);
    }
    let masks = [PROCESS, SECOND_THREAD].map(|tid| machine.effective_mask(PROCESS, tid));
    assert_eq!(masks, ["0-2", "0-2"], "the other one is the only hot thread of the job then");
    for _ in 0..16 {
        run_second_and_cycle(&mut machine, &[]);
    }
    assert_eq!(machine.state.members.active_pids().count(), 0);
    let request = machine.state.scan_request(false);
    assert!(
        request.active_threads.is_empty() && !request.pids_to_read_threads_of.contains(&Pid(PROCESS)),
        "{request:?}"
    );
}

#[test]
fn a_full_scan_reads_all_threads() {
    let mut machine = with_two_active_threads();
    run_until_after_full_reading(&mut machine);
    assert!(machine.state.scan_request(false).active_threads.contains_key(&Pid(PROCESS)));
    assert!(machine.state.full_scan_request().active_threads.is_empty());
}

#[test]
fn a_release_of_the_job_restores_the_masks_of_all_threads() {
    let mut machine = with_two_active_threads();
    run_until_after_full_reading(&mut machine);
    machine.command(Command::Release { job: job("a"), caller: ROOT }).unwrap();
    for tid in [PROCESS, SECOND_THREAD, IDLE] {
        assert_eq!(machine.effective_mask(PROCESS, tid), "0-7");
    }
}
