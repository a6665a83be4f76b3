//! A cycle costs what happened: sleepers are only named, and what nobody looked at stays as it is.

use std::collections::BTreeSet;

use pjw_core::command::Command;
use pjw_core::policy::OnExhausted;
use pjw_core::process::Pid;
use pjw_core::reconcile::{Decision, reconcile};
use pjw_core::snapshot::{Look, Nanos, Scope, Seen, Snapshot};
use pjw_core::stirred::Part;

use super::machine::{Machine, ROOT, job, machine};

/// A job on two cores: process 7 runs, process 8 sleeps.
fn with_a_sleeper() -> Machine {
    let mut machine = machine();
    machine.spawn(7, 1, 1000);
    machine.spawn(8, 7, 1000);
    machine.assign("a", 2, &[7, 8]).unwrap();
    for _ in 0..3 {
        machine.run(&[7]);
        machine.settle();
    }
    machine
}

/// A look that saw these processes and nobody else.
fn glance(machine: &mut Machine, pids: &[u32]) -> Decision {
    let Snapshot { mut processes, taken, online, cgroups, .. } = machine.look();
    processes.retain(|pid, _| pids.contains(&pid.0));
    let scope = Scope::Partial(processes.keys().copied().collect());
    let snapshot = Snapshot { scope, taken, online, processes, cgroups, asked: Vec::new(), blind: None };
    reconcile(&mut machine.state, &snapshot, &[], &machine.policy)
}

fn asleep(machine: &Machine) -> Vec<Pid> {
    let look = machine.state.regular_look(false);
    look.watch.groups.iter().flat_map(|group| group.pids.clone()).collect()
}

#[test]
fn who_runs_is_looked_at_and_who_sleeps_is_named() {
    let machine = with_a_sleeper();
    let look = machine.state.regular_look(false);
    assert!(look.threads_of.contains(&Pid(7)) && !look.threads_of.contains(&Pid(8)), "{look:?}");
    assert_eq!(asleep(&machine), [Pid(8)]);
}

#[test]
fn who_wakes_up_is_no_sleeper_and_who_stays_quiet_becomes_one() {
    let mut machine = with_a_sleeper();
    machine.run(&[8]);
    machine.settle();
    assert_eq!(asleep(&machine), [], "8 runs, and 7 ran a second ago");
    for _ in 0..12 {
        machine.run(&[]);
        machine.settle();
    }
    assert_eq!(asleep(&machine), [Pid(7), Pid(8)]);
}

#[test]
fn where_nobody_was_looked_at_nothing_is_planned_or_counted_anew() {
    let mut machine = with_a_sleeper();
    let before = machine.state.members.len();
    let decision = glance(&mut machine, &[]);
    assert!(decision.plan.actions.is_empty() && decision.records.is_empty(), "{decision:?}");
    assert!(!decision.stirred.is_everything());
    assert_eq!(decision.stirred.parts().count(), 0);
    assert_eq!(machine.state.members.len(), before);
}

#[test]
fn a_child_is_put_inside_though_nobody_looked_at_the_rest_of_its_job() {
    let mut machine = with_a_sleeper();
    let all = machine.state.topology.cpus().clone();
    machine.spawn(9, 8, 1000);
    machine.bind(9, 9, &all.to_string());
    let decision = glance(&mut machine, &[9]);
    let put: Vec<u32> = decision.plan.actions.iter().map(|action| action.thread.process.pid.0).collect();
    assert_eq!(put, [9]);
    assert_eq!(decision.plan.actions[0].to.to_string(), "0-1");
}

#[test]
fn what_was_planned_is_planned_again_until_it_is_seen_to_be_done() {
    let mut machine = with_a_sleeper();
    machine.bind(7, 7, "5");
    assert_eq!(glance(&mut machine, &[7]).plan.actions.len(), 1);
    let again = glance(&mut machine, &[]);
    assert_eq!(again.plan.actions.len(), 1, "nobody has carried it out: {again:?}");
}

/// A rescan in which these processes sleep on: their threads are not read again.
fn rescan(machine: &mut Machine, sleep_on: &[u32]) -> Decision {
    let mut snapshot = machine.look();
    for (pid, seen) in &mut snapshot.processes {
        if let Seen::Here(process) = seen
            && sleep_on.contains(&pid.0)
        {
            process.threads = None;
        }
    }
    reconcile(&mut machine.state, &snapshot, &[], &machine.policy)
}

fn was_planned(decision: &Decision, pid: u32) -> bool {
    let of = |part: &Part| match part {
        Part::Whole => true,
        Part::Processes(pids) => pids.contains(&Pid(pid)),
    };
    decision.stirred.is_everything() || decision.stirred.parts().any(|(_, part)| of(part))
}

#[test]
fn a_rescan_plans_whoever_was_awake_and_now_and_then_everything() {
    let mut machine = with_a_sleeper();
    let rescans: Vec<Decision> = (0..16).map(|_| rescan(&mut machine, &[8])).collect();
    assert!(rescans.iter().all(|decision| was_planned(decision, 7)));
    let whole = rescans.iter().filter(|decision| decision.stirred.is_everything()).count();
    let sleeper = rescans.iter().filter(|decision| was_planned(decision, 8)).count();
    assert_eq!((whole, sleeper), (2, 2), "one rescan of eight");
}

#[test]
fn a_rescan_plans_a_sleeper_that_somebody_moved() {
    let mut machine = with_a_sleeper();
    while rescan(&mut machine, &[8]).stirred.is_everything() {}
    machine.processes.get_mut(&Pid(8)).unwrap().cgroup = Some("/elsewhere".into());
    assert!(was_planned(&rescan(&mut machine, &[8]), 8));
    assert!(!was_planned(&rescan(&mut machine, &[8]), 8));
}

/// The same, where every birth is heard of, and nobody sleeps whom only masks keep inside.
fn heard() -> Machine {
    let mut machine = with_a_sleeper();
    machine.spawn(20, 1, 1001);
    machine.run(&[7, 8]);
    machine.settle();
    machine.state.births_heard_since = Some(Nanos(0));
    machine
}

fn strangers(look: &Look) -> Vec<u32> {
    look.watch.strangers.iter().map(|pid| pid.0).collect()
}

#[test]
fn a_rescan_names_strangers_where_events_tell_of_births_and_one_of_eight_looks_at_everything() {
    let mut machine = heard();
    let at = machine.state.processes.len() - 2;
    let mut full = 0;
    for _ in 0..16 {
        let look = machine.state.rescan();
        if look.scope == Scope::Full {
            full += 1;
            machine.settle();
            continue;
        }
        assert!(strangers(&look).contains(&20) && strangers(&look).len() == at, "{look:?}");
        assert!(look.threads_of.contains(&Pid(7)) && !look.threads_of.contains(&Pid(20)), "{look:?}");
    }
    assert_eq!(full, 2);
}

fn fall_asleep(machine: &mut Machine) {
    for _ in 0..12 {
        machine.run(&[]);
        machine.settle();
    }
    machine.state.rescans_left = 7;
}

fn ask_for_too_much(machine: &mut Machine) {
    machine.policy.on_exhausted = OnExhausted::Wait;
    machine.assign("b", 8, &[20]).unwrap();
}

fn go_blind(machine: &mut Machine) {
    let snapshot = machine.look();
    let snapshot =
        Snapshot { scope: Scope::Partial(BTreeSet::new()), blind: Some("no file".to_owned()), ..snapshot };
    let decision = reconcile(&mut machine.state, &snapshot, &[], &machine.policy);
    assert!(decision.abstained.iter().any(|abstained| abstained.code == "unseen"), "{decision:?}");
}

fn begin_to_release(machine: &mut Machine) {
    let order = Command::Release { job: job("manual:a"), caller: ROOT };
    let snapshot = machine.look();
    let decision = reconcile(&mut machine.state, &snapshot, &[order], &machine.policy);
    assert!(decision.replies.iter().all(Result::is_ok) && !decision.plan.actions.is_empty(), "{decision:?}");
}

#[test]
fn a_rescan_is_full_while_something_is_open() {
    let is_full = |change: fn(&mut Machine)| {
        let mut machine = heard();
        machine.state.rescans_left = 7;
        change(&mut machine);
        machine.state.rescan().scope == Scope::Full
    };
    assert!(!is_full(|_| {}));
    assert!(is_full(|machine| machine.state.births_heard_since = None), "nobody tells of births");
    assert!(is_full(|machine| machine.state.rescans_left = 0), "it is time");
    assert!(is_full(|machine| machine.state.full_look_due = true), "events were lost");
    assert!(is_full(fall_asleep), "masks can be changed by others");
    assert!(is_full(ask_for_too_much), "a job waits for cores");
    assert!(is_full(go_blind), "somebody could not be looked at");
    assert!(is_full(begin_to_release), "masks are to be put back");
}
