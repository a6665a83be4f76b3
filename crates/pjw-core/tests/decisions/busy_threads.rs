//! A process with many threads of which few run: most scans read and plan only these. The others are read in one scan
//! of four, or as soon as one of them runs or requests another mask.

use pjw_core::command::Command;
use pjw_core::ids::{Pid, Tid};
use pjw_core::scan::ScanRequest;
use pjw_core::state::members::{MAX_SCANS_PER_FULL_READING, MIN_THREADS_FOR_PARTIAL_READING};

use super::machine::{Machine, ROOT, job, machine};

/// The process, its first thread, and its second thread. Both threads are busy.
const PROCESS: u32 = 7;
const SECOND: u32 = 1000;
/// A thread that sleeps.
const IDLE: u32 = 1005;
const BUSY: [u32; 2] = [PROCESS, SECOND];

/// A job on three cores with a process of many threads, of which two have been running for some time.
fn with_two_busy_threads() -> Machine {
    let mut machine = machine();
    machine.world().pid_max = 10_000;
    machine.spawn(PROCESS, 1, 1000);
    for tid in (SECOND..).take(MIN_THREADS_FOR_PARTIAL_READING + 50) {
        machine.clone_thread(PROCESS, tid);
    }
    machine.assign("a", 3, &[PROCESS]).unwrap();
    for _ in 0..8 * MAX_SCANS_PER_FULL_READING {
        second(&mut machine, &BUSY);
    }
    machine
}

/// A second in which these threads run, and the regular cycle after it. Returns whether its first scan read all threads
/// of the process.
fn second(machine: &mut Machine, busy: &[u32]) -> bool {
    machine.run(busy);
    let mut scan: Option<ScanRequest> = Some(machine.state.scan_request(false));
    let mut is_whole = None;
    while let Some(request) = scan.take() {
        let decision = machine.cycle(&request, &[]);
        let mut dirty = decision.newly_planned.dirty_jobs();
        is_whole.get_or_insert(dirty.any(|(_, scope)| scope.contains_whole_process(Pid(PROCESS))));
        scan = decision.next_scan;
    }
    is_whole.unwrap()
}

/// Lets seconds pass until one whose scan does not read all threads follows one whose scan does.
fn just_after_a_reading(machine: &mut Machine) {
    while !second(machine, &BUSY) {}
    assert!(!second(machine, &BUSY));
}

fn is_pinned(machine: &Machine, tid: u32) -> bool {
    let member = &machine.state.members[&Pid(PROCESS)];
    machine.state.pinned_pu_of(member, Tid(tid)).is_some()
}

#[test]
fn the_idle_threads_of_a_busy_process_are_read_in_one_scan_of_four() {
    let mut machine = with_two_busy_threads();
    assert!(BUSY.iter().all(|&tid| is_pinned(&machine, tid)));
    let whole: Vec<bool> = (0..16).map(|_| second(&mut machine, &BUSY)).collect();
    assert_eq!(whole.iter().filter(|whole| **whole).count(), 4, "{whole:?}");
    assert!(BUSY.iter().all(|&tid| is_pinned(&machine, tid)));
}

#[test]
fn few_threads_are_always_read() {
    let mut machine = machine();
    machine.world().pid_max = 10_000;
    machine.spawn(PROCESS, 1, 1000);
    machine.clone_thread(PROCESS, SECOND);
    machine.assign("a", 3, &[PROCESS]).unwrap();
    for _ in 0..8 * MAX_SCANS_PER_FULL_READING {
        second(&mut machine, &BUSY);
    }
    assert!((0..8).all(|_| second(&mut machine, &BUSY)));
}

#[test]
fn an_idle_thread_is_not_visited_between_two_readings_and_put_right_at_the_next_one() {
    let mut machine = with_two_busy_threads();
    just_after_a_reading(&mut machine);
    machine.bind(PROCESS, IDLE, "0-7");
    let mut seconds = 1;
    while !second(&mut machine, &BUSY) {
        assert_eq!(machine.effective_mask(PROCESS, IDLE), "0-7");
        seconds += 1;
    }
    assert!(seconds < MAX_SCANS_PER_FULL_READING, "{seconds}");
    assert_eq!(machine.effective_mask(PROCESS, IDLE), "0-2");
}

#[test]
fn a_busy_thread_is_put_right_by_the_next_scan() {
    let mut machine = with_two_busy_threads();
    just_after_a_reading(&mut machine);
    let before = machine.effective_mask(PROCESS, SECOND);
    machine.bind(PROCESS, SECOND, "0-7");
    second(&mut machine, &BUSY);
    assert!(!machine.effective_mask(PROCESS, SECOND).contains('7'), "it was on {before}");
}

#[test]
fn a_thread_that_requests_another_mask_is_put_right_by_the_next_cycle_where_requests_are_monitored() {
    let mut machine = with_two_busy_threads();
    just_after_a_reading(&mut machine);
    machine.bind(PROCESS, IDLE, "0-7");
    drop(machine.ask(PROCESS, IDLE, "0-7"));
    second(&mut machine, &BUSY);
    assert_eq!(machine.effective_mask(PROCESS, IDLE), "0-2");
}

#[test]
fn a_thread_that_begins_to_run_is_read_at_once_and_pinned_as_soon_as_another() {
    let mut machine = with_two_busy_threads();
    just_after_a_reading(&mut machine);
    let three = [PROCESS, SECOND, IDLE];
    assert!(second(&mut machine, &three));
    assert!(!is_pinned(&machine, IDLE), "it ran for one second");
    assert!(second(&mut machine, &three), "other threads are busy than before");
    assert!(is_pinned(&machine, IDLE));
}

#[test]
fn a_new_thread_that_runs_and_a_busy_one_that_ended_are_found_at_once() {
    let mut machine = with_two_busy_threads();
    just_after_a_reading(&mut machine);
    machine.clone_thread(PROCESS, 5000);
    assert!(second(&mut machine, &[PROCESS, SECOND, 5000]));
    assert!(machine.state.members[&Pid(PROCESS)].threads.contains_key(&Tid(5000)));
    while second(&mut machine, &[PROCESS, SECOND, 5000]) {}
    machine.process(PROCESS).threads.remove(&Tid(SECOND));
    assert!(second(&mut machine, &[PROCESS, 5000]));
    assert!(!machine.state.members[&Pid(PROCESS)].threads.contains_key(&Tid(SECOND)));
}

#[test]
fn a_busy_thread_that_falls_asleep_floats_and_a_process_of_which_all_sleep_is_idle() {
    let mut machine = with_two_busy_threads();
    for _ in 0..8 {
        second(&mut machine, &[PROCESS]);
    }
    assert!(!is_pinned(&machine, SECOND) && is_pinned(&machine, PROCESS));
    assert_eq!(machine.effective_mask(PROCESS, SECOND), "0-2");
    for _ in 0..16 {
        second(&mut machine, &[]);
    }
    assert_eq!(machine.state.members.active_pids().count(), 0);
    let request = machine.state.scan_request(false);
    assert!(
        request.busy_threads.is_empty() && !request.pids_to_read_threads_of.contains(&Pid(PROCESS)),
        "{request:?}"
    );
}

#[test]
fn a_full_scan_reads_all_threads() {
    let mut machine = with_two_busy_threads();
    just_after_a_reading(&mut machine);
    assert!(machine.state.scan_request(false).busy_threads.contains_key(&Pid(PROCESS)));
    assert!(machine.state.full_scan_request().busy_threads.is_empty());
}

#[test]
fn a_change_of_the_job_concerns_all_threads() {
    let mut machine = with_two_busy_threads();
    just_after_a_reading(&mut machine);
    machine.command(Command::Release { job: job("a"), caller: ROOT }).unwrap();
    for tid in [PROCESS, SECOND, IDLE] {
        assert_eq!(machine.effective_mask(PROCESS, tid), "0-7");
    }
}
