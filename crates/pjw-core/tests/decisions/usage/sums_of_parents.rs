//! The CPU time of children, which the kernel adds to that of their parents when these have waited for them.

use super::*;

#[test]
fn children_count_whether_a_scan_found_them_or_not() {
    let mut machine = with_job(2);
    run(&mut machine, 1, &[20]);
    machine.spawn(30, 20, 1001);
    run(&mut machine, 3, &[30]);
    machine.exit(30);
    // This one starts and ends between two scans.
    machine.spawn(31, 20, 1001);
    machine.run(&[31, 20]);
    machine.exit(31);
    run(&mut machine, 1, &[20]);
    let report = end(&mut machine);
    assert_eq!(seconds(report.usage.cpu_ns), 7, "{report:?}");
}

#[test]
fn an_orphan_counts_by_itself_and_its_earlier_ancestor_is_not_charged_for_it() {
    let mut machine = with_job(2);
    machine.spawn(30, 20, 1001);
    machine.spawn(31, 30, 1001);
    machine.settle();
    machine.exit(30);
    run(&mut machine, 4, &[31]);
    machine.exit(31);
    run(&mut machine, 1, &[20]);
    machine.spawn(32, 20, 1001);
    run(&mut machine, 2, &[32]);
    machine.exit(32);
    run(&mut machine, 1, &[20]);
    assert_eq!(seconds(end(&mut machine).usage.cpu_ns), 8);
}

/// A machine with the shell 10, and jobs of one core each whose process is a child of the shell.
fn with_jobs_of_a_shell(jobs: &[(u32, &str)]) -> Machine {
    let mut machine = machine();
    machine.advance(5 * SECOND);
    machine.spawn(10, 1, 1001);
    for &(pid, name) in jobs {
        machine.spawn(pid, 10, 1001);
        machine.assign(name, 1, &[pid]).unwrap();
    }
    machine
}

/// A scan of the processes `scanned` and a decision. Process `ending` ends right after the CPU times were read for the
/// first time, and its parent waits for it.
fn cycle_with_end_after_first_reading(machine: &mut Machine, scanned: &[u32], ending: u32) {
    let mut snapshot = machine.scan_only(scanned);
    let state = machine.state.clone();
    let mut is_first = true;
    read_cpu_times(&state, &mut snapshot, |pids| {
        let mut found = machine.node.read_cpu_times(pids);
        if core::mem::take(&mut is_first) {
            machine.exit(ending);
            // The parent was read before it waited for its child, and the child after it was gone.
            if scanned.contains(&ending) {
                found.insert(Pid(ending), Observed::Gone);
            }
        }
        found
    });
    let _ = machine.decide(&snapshot, &[]);
}

#[test]
fn a_process_that_ends_between_the_readings_of_its_parent_and_of_itself_counts_in_full() {
    let mut machine = with_jobs_of_a_shell(&[(20, "a")]);
    run(&mut machine, 3, &[20]);
    machine.run(&[20]);
    cycle_with_end_after_first_reading(&mut machine, &[20], 20);
    machine.settle();
    assert_eq!(seconds(machine.reports.remove(0).usage.cpu_ns), 4);
}

#[test]
fn the_time_of_another_job_that_its_shell_has_just_got_is_not_the_time_of_a_job_that_ends() {
    let mut machine = with_jobs_of_a_shell(&[(20, "a"), (30, "b")]);
    run(&mut machine, 6, &[20, 30]);
    machine.run(&[20, 30]);
    // The scan is about job a only. The shell is read once more because its child 20 has ended, and has waited for 30
    // too.
    machine.exit(20);
    let mut snapshot = machine.scan_only(&[20]);
    let state = machine.state.clone();
    machine.exit(30);
    read_cpu_times(&state, &mut snapshot, |pids| machine.node.read_cpu_times(pids));
    assert_eq!(snapshot.reaped, [Pid(20), Pid(30)].into());
    let decision = machine.decide(&snapshot, &[]);
    machine.reports.extend(decision.reports);
    machine.settle();
    let used = machine.reports.iter().map(|report| (report.id.to_string(), seconds(report.usage.cpu_ns)));
    let used: Vec<_> = used.collect();
    // The last second of both is in one sum.
    assert_eq!(used, [("manual:a".to_owned(), 6), ("manual:b".to_owned(), 6)]);
}

#[test]
fn a_child_that_a_scan_is_not_about_counts_once_when_its_parent_has_waited_for_it() {
    let mut machine = with_jobs_of_a_shell(&[(20, "a")]);
    machine.spawn(30, 20, 1001);
    machine.spawn(40, 30, 1001);
    machine.settle();
    run(&mut machine, 3, &[20, 30, 40]);
    machine.exit(40);
    machine.exit(30);
    // The parent of the two goes on.
    machine.run(&[20]);
    let mut snapshot = machine.scan_only(&[20]);
    read_cpu_times(&machine.state, &mut snapshot, |pids| machine.node.read_cpu_times(pids));
    assert_eq!(snapshot.reaped, [Pid(30), Pid(40)].into());
    let _ = machine.decide(&snapshot, &[]);
    machine.exit(20);
    machine.settle();
    assert_eq!(seconds(machine.reports.remove(0).usage.cpu_ns), 10);
}

#[test]
fn a_child_counts_once_if_its_parent_was_read_as_a_zombie_and_the_scan_is_not_about_the_child() {
    let mut machine = with_jobs_of_a_shell(&[(20, "a")]);
    machine.spawn(30, 20, 1001);
    machine.settle();
    run(&mut machine, 3, &[20, 30]);
    machine.exit(30);
    let zombie = machine.node.read_cpu_times(&[Pid(20)].into()).remove(&Pid(20)).unwrap();
    let zombie = [(Pid(20), *zombie.present().unwrap())].into();
    machine.state.usage.note_exit_times(&[ProcessEvent::Exit { pid: Pid(20) }], zombie, None);
    machine.exit(20);
    let mut snapshot = machine.scan_only(&[20]);
    read_cpu_times(&machine.state, &mut snapshot, |pids| machine.node.read_cpu_times(pids));
    let decision = machine.decide(&snapshot, &[]);
    machine.reports.extend(decision.reports);
    machine.settle();
    assert_eq!(seconds(machine.reports.remove(0).usage.cpu_ns), 6);
}

#[test]
fn processes_that_cannot_be_read_for_a_while_go_on_where_they_were() {
    let mut machine = with_jobs_of_a_shell(&[(20, "a")]);
    run(&mut machine, 3, &[20]);
    machine.run(&[20]);
    let mut snapshot = machine.scan_only(&[20]);
    // No file descriptor is free.
    read_cpu_times(&machine.state, &mut snapshot, |_| [].into());
    assert_eq!((snapshot.cpu_times.len(), snapshot.reaped.len()), (0, 0));
    let _ = machine.decide(&snapshot, &[]);
    run(&mut machine, 1, &[20]);
    assert_eq!(seconds(end(&mut machine).usage.cpu_ns), 5);
}

#[test]
fn only_children_for_which_their_parent_may_have_waited_are_looked_for() {
    let mut machine = with_jobs_of_a_shell(&[(20, "a"), (30, "b"), (31, "c")]);
    machine.spawn(40, 10, 1001);
    run(&mut machine, 3, &[20, 30, 31, 40]);
    // The shell gets 3 s of process 40 when that ends. Process 31 has used more, so the shell has not waited for it.
    run(&mut machine, 1, &[31]);
    let read_for = |machine: &mut Machine| {
        let mut snapshot = machine.scan_only(&[20]);
        let mut read: Vec<Vec<u32>> = Vec::new();
        read_cpu_times(&machine.state, &mut snapshot, |pids| {
            read.push(pids.iter().map(|pid| pid.0).collect());
            machine.node.read_cpu_times(pids)
        });
        assert_eq!(snapshot.reaped, [].into());
        let _ = machine.decide(&snapshot, &[]);
        read
    };
    assert_eq!(read_for(&mut machine), [vec![10, 20]]);
    machine.exit(40);
    assert_eq!(read_for(&mut machine), [vec![10, 20], vec![30]]);
    assert_eq!(read_for(&mut machine), [vec![10, 20]]);
}

#[test]
fn the_time_of_a_process_since_it_was_read_counts_although_samples_of_its_job_ended_meanwhile() {
    let mut machine = with_jobs_of_a_shell(&[(20, "a")]);
    run(&mut machine, 1, &[20]);
    // The scans find children that have ended already, and do not read their parent.
    for child in 30..36 {
        machine.spawn(child, 20, 1001);
        let snapshot = machine.scan_only(&[child]);
        let _ = machine.decide(&snapshot, &[]);
        machine.exit(child);
        machine.run(&[20]);
        let mut snapshot = machine.scan_only(&[child]);
        read_cpu_times(&machine.state, &mut snapshot, |_| [].into());
        let _ = machine.decide(&snapshot, &[]);
    }
    assert_eq!(seconds(end(&mut machine).usage.cpu_ns), 7);
}

#[test]
fn a_process_that_was_idle_until_its_end_does_not_get_the_time_of_other_children_of_its_shell() {
    for (idle_for, cpu_s) in [(None, 12), (Some(1), 3)] {
        let mut machine = with_jobs_of_a_shell(&[(20, "a"), (30, "b")]);
        run(&mut machine, 3, &[20]);
        machine.spawn(40, 10, 1001);
        run(&mut machine, 20, &[]);
        run(&mut machine, 9, &[40]);
        // The scan does not read processes 20 and 40. Both end, and the shell waits for them.
        let mut snapshot = machine.scan_only(&[30]);
        machine.exit(40);
        machine.exit(20);
        read_cpu_times(&machine.state, &mut snapshot, |pids| machine.node.read_cpu_times(pids));
        let now = snapshot.taken_at.since_boot;
        let idle_until = idle_for.map(|seconds| (Pid(20), Nanos(now.0 - seconds * SECOND)));
        snapshot.ended_idle_until.extend(idle_until);
        let decision = machine.decide(&snapshot, &[]);
        machine.reports.extend(decision.reports);
        machine.settle();
        assert_eq!(seconds(machine.reports.remove(0).usage.cpu_ns), cpu_s);
    }
}
