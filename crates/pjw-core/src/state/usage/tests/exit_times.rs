//! The CPU times that are read right after the exit of a process.

use super::*;
use crate::terms::ProcessEvent;

/// Records that the process `exited` has exited. `read` has a process and its CPU times, which were read at this exit.
fn note_exit(usage: &mut UsageState, exited: Pid, read: (Pid, ProcessCpuTimes), read_from: Option<Nanos>) {
    usage.note_exit_times(&[ProcessEvent::Exit { pid: exited }], BTreeMap::from([read]), read_from);
}

#[test]
fn times_that_are_still_the_same_when_the_scan_is_used_are_the_last_ones() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(100, 0));
    read_shell(&mut usage, &times(0, 0), NOW);
    usage.note_exit_times(&[ProcessEvent::Exit { pid: ROOT }], BTreeMap::from([(ROOT, times(200, 0))]), None);
    read(&mut usage, &a, id(ROOT), SHELL, &times(200, 0));
    end(&mut usage, ROOT, None);
    read_shell(&mut usage, &times(0, 1_500), NOW);
    assert_eq!(cpu_ms(&usage, &a), 200, "what the parent got besides is the time of other children");
}

#[test]
fn times_that_were_read_when_only_the_first_thread_had_exited_are_not_the_last_ones() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(100, 0));
    read_shell(&mut usage, &times(0, 0), NOW);
    note_exit(&mut usage, ROOT, (ROOT, times(200, 0)), None);
    read(&mut usage, &a, id(ROOT), SHELL, &times(900, 0));
    end(&mut usage, ROOT, None);
    read_shell(&mut usage, &times(0, 1_500), NOW);
    assert_eq!(cpu_ms(&usage, &a), 1500);
}

#[test]
fn a_process_that_was_read_at_the_exit_of_its_child_can_have_run_only_since_then() {
    // At 10 s, its parent has 6999 ms of children that were not read before. A process that was read at 9 s can have
    // used at most 1500 ms of them: the second since then and the margin of 500 ms.
    for (read_from, found_ms) in [(None, 8_005), (Some(at(2)), 8_005), (Some(at(9)), 1_006)] {
        let (mut usage, a) = begun();
        usage.record_process_times(&a, id(ROOT), SHELL, &times(5, 1000), at(2));
        usage.record_outside_parent_times(SHELL, &times(0, 0), at(2), |_| 1);
        note_exit(&mut usage, CHILD, (ROOT, times(6, 1000)), read_from);
        usage.record_process_end(ROOT, None, None, at(10));
        usage.record_outside_parent_times(SHELL, &times(0, 8_005), at(10), |_| 1);
        assert_eq!(cpu_ms(&usage, &a), found_ms);
    }
}

#[test]
fn what_was_read_right_after_an_exit_counts_if_the_next_scan_finds_neither_the_process_nor_its_parent() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 1000));
    read_shell(&mut usage, &times(0, 0), NOW);
    let events = [ProcessEvent::Exit { pid: Pid(99) }, ProcessEvent::Exit { pid: ROOT }];
    assert_eq!(usage.pids_with_exit_times_to_read(&events), BTreeSet::from([SHELL, ROOT]));
    usage.note_exit_times(&events, BTreeMap::from([(ROOT, times(8, 1200))]), None);
    end(&mut usage, ROOT, None);
    assert_eq!(cpu_ms(&usage, &a), 1208, "it was a zombie");

    read(&mut usage, &a, id(CHILD), SHELL, &times(5, 0));
    note_exit(&mut usage, CHILD, (SHELL, times(0, 1308)), None);
    end(&mut usage, CHILD, None);
    let parents = usage.take_exit_times_of_parents();
    assert_eq!(parents, [(SHELL, times(0, 1308))]);
    parents.iter().for_each(|(_, times)| read_shell(&mut usage, times, NOW));
    assert_eq!(cpu_ms(&usage, &a), 1308, "its parent had waited for it");
    assert_eq!(usage.take_exit_times_of_parents(), []);
}

#[test]
fn what_was_read_of_a_parent_after_the_exit_of_its_child_is_not_taken_for_the_last_time_of_the_parent() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 1000));
    read_shell(&mut usage, &times(0, 0), NOW);
    note_exit(&mut usage, CHILD, (ROOT, times(6, 1200)), None);
    end(&mut usage, ROOT, None);
    assert_eq!(cpu_ms(&usage, &a), 1206);
    read_shell(&mut usage, &times(0, 1900), NOW);
    assert_eq!(cpu_ms(&usage, &a), 1900);
}
