//! The cgroups to which processes return when the cpuset of their job is removed, and the first move out of them.

use std::time::Duration;

use pjw_core::command::Command;
use pjw_core::cpuset_group::CpusetChange;
use pjw_core::event::EventKind;
use pjw_core::ports::MachineInterface;

use crate::machine::{ROOT, SECOND, job, machine_with_cpusets};
use crate::restore::restart;

#[test]
fn a_child_that_was_born_in_the_cpuset_returns_to_the_original_cgroup_of_its_parent() {
    let session = "/user.slice/user-1001.slice/session-1.scope";
    let mut m = machine_with_cpusets(true);
    m.spawn(6, 1, 0);
    m.spawn(7, 1, 0).cgroup = session.to_owned();
    m.assign("a", 2, &[6, 7]).unwrap();
    // Process 8 was born in the cpuset. The decision that releases the job finds it.
    m.spawn(8, 7, 0);
    let snapshot = m.scan();
    let decision = m.decide(&snapshot, &[Command::Release { job: job("a"), caller: ROOT }]);
    m.spawn(9, 8, 0);
    m.exit(7);
    let actions = &decision.plan.cpuset_actions;
    let outcomes = m.node.change_cpusets(actions, Duration::MAX);
    for (action, outcome) in actions.iter().zip(&outcomes) {
        m.state.cpusets.record_outcome(action, outcome);
    }
    m.settle();
    assert_eq!([6, 8, 9].map(|pid| m.process(pid).cgroup.clone()), ["/", session, session]);
}

#[test]
fn each_of_hundreds_of_nested_processes_returns_to_the_original_cgroup_of_the_first() {
    let session = "/user.slice/user-1001.slice/session-1.scope";
    let mut m = machine_with_cpusets(true);
    m.spawn(6, 1, 0);
    m.spawn(7, 1, 0).cgroup = session.to_owned();
    m.assign("a", 2, &[6, 7]).unwrap();
    let nested = 10..390;
    for pid in nested.clone() {
        m.spawn(pid, if pid == nested.start { 7 } else { pid - 1 }, 0);
    }
    let snapshot = m.scan();
    let decision = m.decide(&snapshot, &[Command::Release { job: job("a"), caller: ROOT }]);
    let returns = decision.plan.cpuset_actions.iter().filter(|action| {
        matches!(&action.change, CpusetChange::MoveBack { process, to, .. }
            if nested.contains(&process.pid.0) && to == session)
    });
    assert_eq!(returns.count(), nested.len());
}

#[test]
fn a_process_does_not_return_to_the_original_cgroup_of_a_later_process_with_the_pid_of_its_parent() {
    let [first, second] = [1, 2].map(|id| format!("/user.slice/user-1001.slice/session-{id}.scope"));
    let mut m = machine_with_cpusets(true);
    m.spawn(6, 1, 0).cgroup.clone_from(&first);
    m.assign("a", 2, &[6]).unwrap();
    m.advance(SECOND);
    m.spawn(7, 1, 0).cgroup.clone_from(&second);
    m.assign("a", 2, &[7]).unwrap();
    let inside = m.process(7).cgroup.clone();
    assert_ne!(inside, second);
    // Process 8 was born in the cpuset before process 7 began: its parent was an earlier process 7, which has ended.
    let start = m.process(6).id.start;
    m.spawn(8, 7, 0).id.start = start;
    assert_eq!(m.process(8).cgroup, inside);
    m.release("a").unwrap();
    assert_eq!([6, 7, 8].map(|pid| m.process(pid).cgroup.clone()), [first.clone(), second, first]);
}

#[test]
fn after_a_restart_the_first_move_of_a_process_is_no_repair() {
    let [session, other] = [1, 2].map(|id| format!("/user.slice/user-1001.slice/session-{id}.scope"));
    let moved_by_others = vec![EventKind::Stray, EventKind::Repaired];
    for (found_in, expected) in [(&session, vec![]), (&other, moved_by_others)] {
        let mut m = machine_with_cpusets(true);
        m.spawn(7, 1, 0).cgroup.clone_from(&session);
        m.assign("a", 2, &[7]).unwrap();
        m.settle();
        let inside = m.process(7).cgroup.clone();
        assert_ne!(inside, session);
        // In the cgroup before the move, as if the daemon had been killed between the record and the move.
        m.process(7).cgroup.clone_from(found_in);
        restart(&mut m, 2);
        m.settle();
        assert_eq!(m.process(7).cgroup.clone(), inside);
        let kinds: Vec<EventKind> = m.cpuset_events.iter().map(|event| event.kind).collect();
        assert_eq!(kinds, expected, "it was in {found_in}");
    }
}
