//! Children that were born outside are put right before anything else is read of them.

use std::collections::BTreeMap;

use pjw_core::event::EventKind;
use pjw_core::newborn::{Birth, Expected, Glance, Newborn, as_their_parents, expectations};
use pjw_core::plan::{Action, ActionKind};
use pjw_core::process::{Pid, ProcessId, StartTime};
use pjw_core::reconcile::reconcile;
use pjw_core::snapshot::{Nanos, Seen};

use super::machine::{Machine, job, machine, set};

/// A job on the first two cores with process 7.
fn with_a_parent() -> Machine {
    let mut machine = machine();
    machine.spawn(7, 1, 1000);
    machine.assign("a", 2, &[7]).unwrap();
    machine
}

/// The same with another process, both of which run; and the PU that 7 is pinned to.
fn with_a_pinned_parent() -> (Machine, String) {
    let mut machine = with_a_parent();
    machine.spawn(8, 7, 1000);
    for _ in 0..4 {
        machine.run(&[7, 8]);
        machine.settle();
    }
    let pin = machine.mask(7, 7);
    assert_eq!(set(&pin).len(), 1, "two that run on two cores are pinned");
    (machine, pin)
}

fn births(pairs: &[(u32, u32)]) -> BTreeMap<Pid, Birth> {
    let birth = |parent| Birth { ancestor: Pid(parent), at: Nanos(5) };
    pairs.iter().map(|&(child, parent)| (Pid(child), birth(parent))).collect()
}

/// What is done for a child of process 7 that is met with this mask.
fn welcome(machine: &mut Machine, child: u32, mask: &str) -> Vec<Action> {
    let snapshot = machine.look();
    let start = StartTime(machine.now / 10_000_000);
    let newborn = Newborn { id: ProcessId { pid: Pid(child), start }, mask: set(mask) };
    let glance = Glance { taken: snapshot.taken, online: snapshot.online, newborns: vec![newborn] };
    let snapshot = as_their_parents(&machine.state, &births(&[(child, 7)]), glance);
    reconcile(&mut machine.state, &snapshot, &[], &machine.policy).plan.actions
}

#[test]
fn children_of_members_that_nobody_has_looked_at_are_expected_on_their_jobs_cores() {
    let mut machine = with_a_parent();
    machine.spawn(8, 7, 1000);
    machine.settle();
    machine.spawn(50, 1, 1000);
    machine.settle();
    let expected = expectations(&machine.state, &births(&[(8, 7), (9, 7), (51, 50)]));
    let nine = Expected { mask: set("0-1"), born: Nanos(5) };
    assert_eq!(expected, BTreeMap::from([(Pid(9), nine)]), "8 is known, 51 is nobody's");
}

#[test]
fn where_a_job_holds_nothing_nothing_is_expected() {
    let mut machine = with_a_parent();
    machine.state.jobs.get_mut(&job("a")).unwrap().grant = None;
    assert!(expectations(&machine.state, &births(&[(9, 7)])).is_empty());
}

#[test]
fn a_child_born_outside_is_put_inside_at_once() {
    let mut machine = with_a_parent();
    let actions = welcome(&mut machine, 9, "0-7");
    let told: Vec<_> = actions.iter().map(|action| (action.kind, action.to.to_string())).collect();
    assert_eq!(told, [(ActionKind::Confine, "0-1".to_owned())]);
    assert_eq!(machine.member(9), "manual:a by Parent");
}

#[test]
fn a_child_born_on_its_parents_pin_may_use_the_whole_grant_and_goes_back_to_what_its_parent_had() {
    let (mut machine, pin) = with_a_pinned_parent();
    let actions = welcome(&mut machine, 9, &pin);
    let told: Vec<_> = actions.iter().map(|action| (action.kind, action.to.to_string())).collect();
    assert_eq!(told, [(ActionKind::Float, "0-1".to_owned())]);
    let touch = machine.state.touched.values().find(|touch| touch.set == set("0-1"));
    assert_eq!(touch.unwrap().before, set("0-7"));
}

#[test]
fn the_look_that_follows_has_the_last_word() {
    let mut machine = with_a_parent();
    let _ = welcome(&mut machine, 9, "0-7");
    // It is gone before anybody looks.
    machine.settle();
    assert!(!machine.state.processes.contains_key(&Pid(9)));
    assert!(machine.state.touched.keys().all(|thread| thread.process.pid != Pid(9)));
}

#[test]
fn a_start_that_its_event_told_a_tick_late_is_corrected_and_what_was_done_is_remembered() {
    let (mut machine, pin) = with_a_pinned_parent();
    machine.spawn(9, 7, 1000);
    let real = machine.processes[&Pid(9)].id;
    machine.now += StartTime::TICK.0;
    let actions = welcome(&mut machine, 9, &pin);
    let told = actions[0].thread;
    assert_eq!(told.process.start.0, real.start.0 + 1);
    machine.bind(9, 9, &actions[0].to.to_string());
    machine.state.applied(&actions[0], &actions[0].to);
    machine.state.set_at_birth(&actions[0]);
    machine.settle();
    machine.state.is_born(told);
    let touches: Vec<_> = machine.state.touched.iter().filter(|(thread, _)| thread.tid.0 == 9).collect();
    let [(thread, touch)] = touches.as_slice() else { panic!("{touches:?}") };
    assert_eq!((thread.process, thread.start, &touch.before), (real, real.start, &set("0-7")));
    assert!(touch.settled && machine.told.is_empty(), "{touch:?} {:?}", machine.told);
    machine.release("a").unwrap();
    assert_eq!(machine.mask(9, 9), "0-7");
}

#[test]
fn an_orphan_is_taken_for_a_child_of_whom_it_descends_from() {
    let machine = with_a_parent();
    let snapshot = machine.look();
    let newborn = Newborn { id: ProcessId { pid: Pid(9), start: StartTime(200) }, mask: set("3") };
    let glance = Glance { taken: snapshot.taken, online: snapshot.online, newborns: vec![newborn] };
    let seen = as_their_parents(&machine.state, &births(&[(9, 7)]), glance).processes.remove(&Pid(9));
    let Some(Seen::Here(process)) = seen else { panic!("it was not told") };
    assert_eq!((process.parent, process.uid.0, process.threads.unwrap().len()), (Pid(7), 1000, 1));
}

#[test]
fn a_birth_that_ends_after_the_mask_was_set_accuses_nobody_and_is_put_right_once_more() {
    for (mut machine, mask) in [(with_a_parent(), "0-7".to_owned()), with_a_pinned_parent()] {
        let actions = welcome(&mut machine, 9, &mask);
        let [action] = actions.as_slice() else { panic!("{actions:?}") };
        machine.state.applied(action, &action.to);
        machine.state.set_at_birth(action);
        machine.spawn(9, 7, 1000);
        machine.bind(9, 9, &mask);
        let start = action.thread.start;
        let process = machine.processes.get_mut(&Pid(9)).unwrap();
        process.id.start = start;
        process.threads.as_mut().unwrap()[0].start = start;
        machine.settle();
        assert_eq!(machine.mask(9, 9), "0-1", "born on {mask}");
        assert!(machine.told.iter().all(|event| event.kind != EventKind::Violation), "{:?}", machine.told);

        machine.state.is_born(action.thread);
        machine.bind(9, 9, "0-7");
        machine.settle();
        assert!(machine.told.iter().any(|event| event.kind == EventKind::Violation), "that is its own doing");
    }
}
