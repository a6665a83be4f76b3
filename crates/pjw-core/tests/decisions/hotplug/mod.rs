//! PUs that go offline and online while a job holds them.

mod random_order;

use pjw_core::event::EventKind;
use pjw_core::policy::Policy;

use crate::machine::{Machine, cpu_set, job, machine, machine_with, regular_topology};

/// Switches PUs off and runs a cycle. The kernel lets a thread run on all PUs if its own are all offline.
fn switch_off(m: &mut Machine, list: &str) {
    m.switch_off(list);
    m.settle();
}

fn has_hotplug_event(m: &Machine) -> bool {
    let events = &m.last.as_ref().unwrap().events;
    events.iter().any(|event| event.kind == EventKind::Hotplug && event.job.is_some())
}

#[test]
fn an_offline_core_is_replaced_from_the_pool_near_the_other_cores() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("other", 1, &[]).unwrap();
    m.assign("a", 2, &[10]).unwrap();
    assert_eq!(m.grant("a"), "1-2");
    switch_off(&mut m, "2");
    assert_eq!((m.grant("a"), m.effective_mask(10, 10)), ("1,3".into(), "1,3".into()));
    assert!(m.warnings().is_empty());
    switch_off(&mut m, "");
    assert_eq!(
        (m.grant("a"), m.state.pool.free_cpus()),
        ("1,3".into(), cpu_set("2,4-7")),
        "the core is in the pool again"
    );
    m.release("a").unwrap();
    assert_eq!(m.effective_mask(10, 10), "0-7");
}

#[test]
fn without_a_free_core_the_job_shrinks_with_a_warning_until_it_is_assigned_again() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.assign("rest", 6, &[]).unwrap();
    switch_off(&mut m, "1");
    assert_eq!((m.grant("a"), m.effective_mask(10, 10)), ("0".into(), "0".into()));
    assert_eq!(m.warnings(), ["short"]);
    switch_off(&mut m, "");
    assert_eq!((m.grant("a"), m.state.pool.free_cpus()), ("0".into(), cpu_set("1")));
    m.assign("a", 2, &[]).unwrap();
    assert_eq!((m.grant("a"), m.effective_mask(10, 10)), ("0-1".into(), "0-1".into()));
    assert!(m.warnings().is_empty());
}

#[test]
fn a_job_that_lost_all_cores_waits_and_is_served_when_cores_are_online() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.assign("rest", 6, &[]).unwrap();
    switch_off(&mut m, "0-1");
    assert_eq!(m.grant("a"), "-");
    switch_off(&mut m, "");
    assert_eq!((m.grant("a"), m.effective_mask(10, 10)), ("0-1".into(), "0-1".into()));
}

#[test]
fn switching_smt_off_moves_no_job() {
    let mut m = machine_with(regular_topology(1, 1, 1, 4, 2), Policy::default());
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    let before = m.grant("a");
    switch_off(&mut m, "4-7");
    assert_eq!(m.grant("a"), before);
    assert!(!has_hotplug_event(&m) && m.warnings().is_empty());
    assert_eq!(m.state.pool.pus_of(&job("a")).to_string(), before);
}
