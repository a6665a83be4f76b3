//! The CPU time of a job from the times of its processes and of their children.

use super::*;
use crate::basics::StartTime;
use crate::terms::SharedMemory;
use crate::testing::job;

mod exit_times;

const MS: u64 = 1_000_000;
/// The time of each reading that does not depend on the time.
const NOW: Nanos = Nanos(0);
const SHELL: Pid = Pid(10);
const ROOT: Pid = Pid(20);
const CHILD: Pid = Pid(30);
/// The start of the processes of the job, after its begin.
const BORN: StartTime = StartTime(200);

fn at(second: u64) -> Nanos {
    Nanos(second * 1_000 * MS)
}

fn id(pid: Pid) -> ProcessId {
    ProcessId { pid, start: BORN }
}

fn times(own_ms: u64, children_ms: u64) -> ProcessCpuTimes {
    ProcessCpuTimes { start: BORN, own_ns: own_ms * MS, children_ns: children_ms * MS }
}

fn begun() -> (UsageState, JobId) {
    let (mut usage, a) = (UsageState::default(), job("a"));
    usage.begin_recording(&a, at(1));
    (usage, a)
}

fn cpu_ms(usage: &UsageState, job: &JobId) -> u64 {
    usage.usage_of_job(job).unwrap().cpu_ns() / MS
}

/// Reads a process at the time `NOW`.
fn read(usage: &mut UsageState, job: &JobId, id: ProcessId, parent: Pid, times: &ProcessCpuTimes) {
    usage.record_process_times(job, id, parent, times, NOW);
}

/// Reads the shell. Each job has 40 PUs, so the rest of a child may be 20 s if the child was just read.
fn read_shell(usage: &mut UsageState, times: &ProcessCpuTimes, now: Nanos) {
    usage.record_outside_parent_times(SHELL, times, now, |_| 40);
}

/// Ends a process that was not idle.
fn end(usage: &mut UsageState, pid: Pid, times: Option<&ProcessCpuTimes>) {
    usage.record_process_end(pid, times, None, NOW);
}

#[test]
fn children_that_no_scan_found_count_by_the_time_that_their_parent_got() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 0));
    read(&mut usage, &a, id(ROOT), SHELL, &times(7, 1000));
    assert_eq!(cpu_ms(&usage, &a), 1007);
}

#[test]
fn what_was_read_of_a_child_counts_once_when_its_parent_gets_it() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 0));
    read(&mut usage, &a, id(CHILD), ROOT, &times(300, 40));
    assert_eq!(cpu_ms(&usage, &a), 345);
    end(&mut usage, CHILD, None);
    // The child ran for 20 ms more after it was read.
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 360));
    assert_eq!(cpu_ms(&usage, &a), 365);
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 400));
    assert_eq!(cpu_ms(&usage, &a), 405, "the next growth is of other children");
}

#[test]
fn a_parent_may_wait_for_its_child_later() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 0));
    read(&mut usage, &a, id(CHILD), ROOT, &times(300, 0));
    end(&mut usage, CHILD, Some(&times(310, 0)));
    read(&mut usage, &a, id(ROOT), SHELL, &times(6, 0));
    assert_eq!(cpu_ms(&usage, &a), 316);
    read(&mut usage, &a, id(ROOT), SHELL, &times(6, 310));
    assert_eq!(cpu_ms(&usage, &a), 316);
}

#[test]
fn a_zombie_tells_the_rest_of_its_time() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 0));
    end(&mut usage, ROOT, Some(&times(9, 2000)));
    assert_eq!(cpu_ms(&usage, &a), 2009);
    end(&mut usage, ROOT, Some(&times(9, 2000)));
    assert_eq!(cpu_ms(&usage, &a), 2009, "once");
}

#[test]
fn a_parent_outside_of_the_job_tells_the_rest_of_a_child_that_ended_unread() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 1000));
    read_shell(&mut usage, &times(0, 50_000), NOW);
    read_shell(&mut usage, &times(0, 50_000), NOW);
    end(&mut usage, ROOT, None);
    read_shell(&mut usage, &times(0, 50_000), NOW);
    assert_eq!(cpu_ms(&usage, &a), 1005, "it has not waited yet");
    read_shell(&mut usage, &times(0, 52_505), NOW);
    assert_eq!(cpu_ms(&usage, &a), 2505);
    read_shell(&mut usage, &times(0, 53_000), NOW);
    assert_eq!(cpu_ms(&usage, &a), 2505, "no child of the job has ended since");
}

#[test]
fn what_a_parent_outside_got_before_the_end_of_its_child_is_found_is_the_time_of_this_child() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 1000));
    read_shell(&mut usage, &times(0, 50_000), NOW);
    usage.store_other_child_time_of_parent(ROOT);
    // Read for another child of the shell, after the shell has waited for this one.
    read_shell(&mut usage, &times(0, 51_505), NOW);
    end(&mut usage, ROOT, None);
    read_shell(&mut usage, &times(0, 51_505), NOW);
    assert_eq!(cpu_ms(&usage, &a), 1505);
}

#[test]
fn each_of_two_children_that_ended_unread_gets_its_rest_once() {
    let (mut usage, a) = begun();
    for (pid, own_ms) in [(ROOT, 100), (CHILD, 200)] {
        read(&mut usage, &a, id(pid), SHELL, &times(own_ms, 0));
        read_shell(&mut usage, &times(0, 0), NOW);
        usage.store_other_child_time_of_parent(pid);
    }
    end(&mut usage, ROOT, None);
    end(&mut usage, CHILD, None);
    read_shell(&mut usage, &times(0, 120), NOW);
    assert_eq!(cpu_ms(&usage, &a), 300, "the shell has waited for one of them");
    read_shell(&mut usage, &times(0, 350), NOW);
    assert_eq!(cpu_ms(&usage, &a), 350);
    assert_eq!(usage.expected_parents().count(), 0);
}

#[test]
fn an_end_is_settled_although_the_kernel_cuts_the_times_of_the_parent() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(105, 0));
    read_shell(&mut usage, &times(0, 50_000), NOW);
    usage.store_other_child_time_of_parent(ROOT);
    end(&mut usage, ROOT, None);
    // The shell has got 105 ms, of which user and system time are cut to ticks.
    read_shell(&mut usage, &times(0, 50_090), NOW);
    assert_eq!(usage.expected_parents().count(), 0);
    read_shell(&mut usage, &times(0, 60_000), NOW);
    assert_eq!(cpu_ms(&usage, &a), 105, "what follows is the time of other children");
}

#[test]
fn what_the_parent_got_while_its_child_was_idle_is_the_time_of_other_children() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(100, 0));
    read_shell(&mut usage, &times(0, 0), at(1));
    usage.store_other_child_time_of_parent(ROOT);
    // Read for a busy child of the shell, of another job.
    for second in 2..=10 {
        read_shell(&mut usage, &times(0, 1_000), at(second));
    }
    end(&mut usage, ROOT, None);
    read_shell(&mut usage, &times(0, 1_130), at(11));
    assert_eq!(cpu_ms(&usage, &a), 130);
}

#[test]
fn the_end_of_a_child_may_be_found_seconds_after_its_parent_got_its_time() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(10_000, 0));
    read_shell(&mut usage, &times(0, 0), at(1));
    usage.store_other_child_time_of_parent(ROOT);
    for second in 2..=8 {
        read_shell(&mut usage, &times(0, 10_050), at(second));
    }
    end(&mut usage, ROOT, None);
    read_shell(&mut usage, &times(0, 10_050), at(9));
    assert_eq!((cpu_ms(&usage, &a), usage.expected_parents().count()), (10_050, 0));
    read_shell(&mut usage, &times(0, 30_000), at(10));
    assert_eq!(cpu_ms(&usage, &a), 10_050);
}

#[test]
fn the_rests_of_two_jobs_in_one_sum_go_to_none() {
    let (mut usage, a) = begun();
    let b = job("b");
    usage.begin_recording(&b, Nanos(1_000 * MS));
    let third = Pid(31);
    for (job, pid) in [(&a, ROOT), (&b, CHILD), (&b, third)] {
        read(&mut usage, job, id(pid), SHELL, &times(if pid == ROOT { 100 } else { 50 }, 0));
        read_shell(&mut usage, &times(0, 0), NOW);
        usage.store_other_child_time_of_parent(pid);
    }
    for pid in [ROOT, CHILD, third] {
        end(&mut usage, pid, None);
    }
    read_shell(&mut usage, &times(0, 290), NOW);
    assert_eq!((cpu_ms(&usage, &a), cpu_ms(&usage, &b)), (100, 100));
    assert_eq!(usage.expected_parents().count(), 0);
}

/// A job with a child of the shell that ended unread, and an idle job with another child. The first job ends before the
/// shell has waited for its child.
fn idle_job_beside_an_ended_one() -> (UsageState, JobId) {
    let (mut usage, a) = begun();
    let idle = job("b");
    usage.begin_recording(&idle, Nanos(1_000 * MS));
    for (job, pid) in [(&a, ROOT), (&idle, CHILD)] {
        read(&mut usage, job, id(pid), SHELL, &times(100, 0));
        read_shell(&mut usage, &times(0, 0), NOW);
        usage.store_other_child_time_of_parent(pid);
    }
    end(&mut usage, ROOT, None);
    read_shell(&mut usage, &times(0, 0), NOW);
    usage.take_job_usage(&a);
    assert_eq!(usage.expected_parents().count(), 0, "nobody would get the rest");
    (usage, idle)
}

#[test]
fn the_rest_of_an_ended_job_is_not_the_time_of_an_idle_job_with_the_same_parent() {
    let (mut usage, idle) = idle_job_beside_an_ended_one();
    end(&mut usage, CHILD, None);
    read_shell(&mut usage, &times(0, 6_200), NOW);
    assert_eq!((cpu_ms(&usage, &idle), usage.expected_parents().count()), (100, 0));
}

#[test]
fn after_a_reading_with_the_rest_of_an_ended_job_the_next_rest_is_that_of_the_next_child() {
    let (mut usage, idle) = idle_job_beside_an_ended_one();
    read_shell(&mut usage, &times(0, 6_000), NOW);
    end(&mut usage, CHILD, None);
    read_shell(&mut usage, &times(0, 6_200), NOW);
    assert_eq!((cpu_ms(&usage, &idle), usage.expected_parents().count()), (200, 0));
}

#[test]
fn more_than_a_child_can_have_used_is_the_time_of_other_children_of_the_parent() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 1000));
    read_shell(&mut usage, &times(0, 0), NOW);
    end(&mut usage, ROOT, None);
    read_shell(&mut usage, &times(0, 90_000), NOW);
    assert_eq!(cpu_ms(&usage, &a), 1005);
}

#[test]
fn an_idle_process_can_have_used_what_fits_into_the_time_since_it_was_last_found_idle() {
    for (idle_until, found_ms) in [(None, 9_005), (Some(at(3)), 9_005), (Some(at(19)), 1_005)] {
        let (mut usage, a) = begun();
        usage.record_process_times(&a, id(ROOT), SHELL, &times(5, 1000), at(2));
        usage.record_outside_parent_times(SHELL, &times(0, 0), at(2), |_| 1);
        usage.record_process_end(ROOT, None, idle_until, at(20));
        usage.record_outside_parent_times(SHELL, &times(0, 9_005), at(20), |_| 1);
        assert_eq!(cpu_ms(&usage, &a), found_ms);
    }
}

#[test]
fn the_growing_time_of_a_child_passes_from_ended_parent_to_ended_parent() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 0));
    read_shell(&mut usage, &times(0, 0), NOW);
    read(&mut usage, &a, id(CHILD), ROOT, &times(3000, 0));
    end(&mut usage, CHILD, None);
    end(&mut usage, ROOT, None);
    read_shell(&mut usage, &times(0, 3105), NOW);
    assert_eq!(cpu_ms(&usage, &a), 3105);
}

#[test]
fn a_process_that_is_older_than_its_job_counts_from_its_first_reading_on() {
    let (mut usage, a) = begun();
    let old = ProcessId { pid: ROOT, start: StartTime(1) };
    let old_times = |own_ms, children_ms| ProcessCpuTimes { start: old.start, ..times(own_ms, children_ms) };
    read(&mut usage, &a, old, SHELL, &old_times(500, 5000));
    read(&mut usage, &a, old, SHELL, &old_times(510, 5000));
    assert_eq!(cpu_ms(&usage, &a), 10);
    let ended_ns = usage.journal_usage_of(&a).unwrap().ended_cpu_ns;
    assert_eq!(ended_ns, 10 * MS, "a restarted daemon cannot read it again");
}

#[test]
fn another_process_with_the_same_pid_begins_anew() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(500, 0));
    let later = ProcessId { pid: ROOT, start: StartTime(900) };
    read(&mut usage, &a, later, SHELL, &ProcessCpuTimes { start: later.start, ..times(20, 0) });
    assert_eq!(cpu_ms(&usage, &a), 520);
    end(&mut usage, ROOT, Some(&times(9999, 0)));
    assert_eq!(cpu_ms(&usage, &a), 520, "the times are those of the earlier process");
}

#[test]
fn a_restarted_daemon_reads_the_living_processes_again_and_knows_the_ended_ones() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 1000));
    read(&mut usage, &a, id(CHILD), Pid(1), &times(300, 0));
    end(&mut usage, CHILD, None);
    assert_eq!(cpu_ms(&usage, &a), 1305);
    let (_, record) = usage.records().next().unwrap();
    assert_eq!((record.cpu_ns, record.ended_cpu_ns), (1305 * MS, 300 * MS));
    let mut restarted = UsageState::default();
    restarted.resume_recording(a.clone(), record);
    assert_eq!(cpu_ms(&restarted, &a), 1305, "also if nothing is left to read");
    read(&mut restarted, &a, id(ROOT), SHELL, &times(6, 1500));
    assert_eq!(cpu_ms(&restarted, &a), 1806);
    assert_eq!(restarted.usage_of_job(&a).unwrap().sample_cpu_ns, 0, "it was used before the first sample");
}

#[test]
fn the_cgroup_counts_where_it_knows_more() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 1000));
    usage.usage_of_job_mut(&a).unwrap().cgroup_cpu_ns = Some((100 * MS, 3100 * MS));
    assert_eq!(cpu_ms(&usage, &a), 3000);
}

#[test]
fn a_job_that_is_taken_leaves_nothing_behind() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 1000));
    read_shell(&mut usage, &times(0, 0), NOW);
    assert!(usage.take_job_usage(&a).is_some());
    assert_eq!(usage, UsageState::default());
}

#[test]
fn children_of_a_parent_that_waited_for_none_are_not_visited() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 0));
    for number in 0..600 {
        read(&mut usage, &a, id(Pid(1000 + number)), ROOT, &times(1, 0));
    }
    let later = times(9, 0);
    let visited = usage.children_possibly_waited_for(ROOT, &later);
    assert_eq!(visited.size_hint(), (0, Some(0)), "the sum of the ended children did not grow");
    assert_eq!(usage.children_possibly_waited_for(ROOT, &times(9, 1)).count(), 600);
}

#[test]
fn a_parent_outside_is_forgotten_as_soon_as_nothing_is_to_be_learned_from_it() {
    let (mut usage, a) = begun();
    let b = job("b");
    usage.begin_recording(&b, Nanos(1_000 * MS));
    read(&mut usage, &b, id(Pid(40)), Pid(41), &times(1, 0));
    for pid in (100..200).map(Pid) {
        read(&mut usage, &a, id(pid), SHELL, &times(10, 0));
        read_shell(&mut usage, &times(0, 0), NOW);
    }
    (100..199).map(Pid).for_each(|pid| end(&mut usage, pid, None));
    assert_eq!(usage.expected_parents().count(), 1, "of one parent");
    read_shell(&mut usage, &times(0, 991), NOW);
    assert_eq!((cpu_ms(&usage, &a), usage.expected_parents().count()), (1001, 0));
    assert!(usage.outside_parents.contains_key(&SHELL), "a child lives");
    end(&mut usage, Pid(199), None);
    assert!(usage.outside_parents.contains_key(&SHELL), "it has not waited yet");
    read_shell(&mut usage, &times(0, 1001), NOW);
    read_shell(&mut usage, &times(0, 1002), NOW);
    assert_eq!((cpu_ms(&usage, &a), usage.outside_parents.len(), usage.expected_from.len()), (1001, 0, 0));
    assert_eq!(usage.children, BTreeMap::from([(Pid(41), BTreeSet::from([Pid(40)]))]));
}

#[test]
fn a_parent_that_never_waits_for_its_children_is_forgotten_with_the_job() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 0));
    read_shell(&mut usage, &times(0, 0), NOW);
    end(&mut usage, ROOT, Some(&times(9, 0)));
    assert!(usage.outside_parents.contains_key(&SHELL), "its time would look like that of a later child");
    assert!(usage.take_job_usage(&a).is_some());
    assert_eq!(usage, UsageState::default());
}

#[test]
fn a_parent_outside_that_ends_before_it_is_read_is_forgotten() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 0));
    read_shell(&mut usage, &times(0, 0), NOW);
    end(&mut usage, ROOT, None);
    assert_eq!(usage.expected_parents().collect::<Vec<_>>(), [SHELL]);
    usage.record_unread_parents_ended([SHELL, Pid(77)].into_iter());
    assert_eq!((usage.outside_parents.len(), usage.expected_parents().count()), (0, 0));
    assert_eq!(cpu_ms(&usage, &a), 5);
}

#[test]
fn a_process_whose_parent_ended_is_a_child_of_another_one() {
    let (mut usage, a) = begun();
    read(&mut usage, &a, id(ROOT), SHELL, &times(5, 0));
    read_shell(&mut usage, &times(0, 0), NOW);
    read(&mut usage, &a, id(ROOT), Pid(1), &times(6, 0));
    assert_eq!(usage.outside_parents.len(), 0);
    assert_eq!(usage.children, BTreeMap::from([(Pid(1), BTreeSet::from([ROOT]))]));
}

#[test]
fn the_report_has_the_last_reading_of_pages_or_else_the_last_estimate() {
    let (mut usage, a) = begun();
    let read = |permille, is_estimate| SharedMemory { permille, is_estimate };
    let note = |usage: &mut UsageState, id: &JobId, shared, pss, peak| {
        usage.note_memory(id, &MemoryReading { shared: Some(shared), pss, rss: None, peak });
    };
    note(&mut usage, &a, read(500, true), None, Some(7));
    note(&mut usage, &a, read(600, true), None, None);
    let of_job = |usage: &UsageState| {
        let usage = &usage.usage_of_job(&a).unwrap().usage;
        (usage.shared, usage.memory_peak)
    };
    assert_eq!(of_job(&usage), (Some(read(600, true)), Some(7)));
    note(&mut usage, &a, read(900, false), Some(4), Some(5));
    note(&mut usage, &a, read(800, false), Some(3), Some(5));
    note(&mut usage, &a, read(900, false), Some(2), Some(5));
    note(&mut usage, &a, read(100, true), None, Some(9));
    assert_eq!(of_job(&usage), (Some(read(900, false)), Some(9)));
    assert_eq!(usage.usage_of_job(&a).unwrap().usage.largest_pss, Some(4));
    usage.note_memory(&a, &MemoryReading { rss: Some(6), ..MemoryReading::default() });
    assert_eq!(of_job(&usage), (Some(read(900, false)), Some(9)), "a reading without them changes neither");
    assert_eq!(usage.usage_of_job(&a).unwrap().usage.largest_rss, Some(6));
    note(&mut usage, &job("b"), read(1, false), Some(1), Some(1));
    assert!(usage.usage_of_job(&job("b")).is_none(), "a job that has ended");
}
