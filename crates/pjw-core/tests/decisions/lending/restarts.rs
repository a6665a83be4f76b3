//! Borrowed cores after a restart of the daemon.

use super::*;

#[test]
fn a_restart_keeps_what_is_lent_until_the_owner_is_sampled() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    let records: Vec<Record> = m.state.records();
    let topology: Topology = m.state.topology.clone();
    let mut restarted = WardenState::new(topology, &CpuSet::new());
    records.into_iter().for_each(|record| restarted.apply_record(record));
    assert!(restarted.pool == m.state.pool || restarted.pool.lent_cpus() == cpu_set("2-5"));
    m.state = restarted;
    m.settle();
    assert_eq!(lent(&m), "2-5");
    sample(&mut m, 6, "");
    m.settle();
    assert_eq!(lent(&m), "");
    assert_sound(&m);
}

#[test]
fn a_restarted_daemon_exchanges_no_core_before_the_owner_was_sampled_for_lend_after() {
    let mut m = web_and_batch();
    m.policy.lending.buffer_cores = 3;
    web_uses(&mut m, 0, 5);
    assert_eq!(lent(&m), "3-5");
    let records: Vec<Record> = m.state.records();
    let mut restarted = WardenState::new(m.state.topology.clone(), &CpuSet::new());
    records.into_iter().for_each(|record| restarted.apply_record(record));
    m.state = restarted;
    // The cores may have been lent just before the restart.
    sample(&mut m, 0, "4");
    m.settle();
    assert_eq!(lent(&m), "3-5");
    m.advance(SECOND * 5);
    sample(&mut m, 0, "4");
    m.settle();
    assert_eq!(lent(&m), "2-3,5", "core 4 for core 2");
}

#[test]
fn a_core_that_passed_from_one_borrower_to_another_is_the_last_ones_after_a_restart() {
    let mut m = lending_machine();
    for (pid, id) in [(20, "b"), (21, "a")] {
        m.spawn(pid, 1, 0);
        assign_class(&mut m, id, PriorityClass::Besteffort, 8, &[pid]).unwrap();
    }
    // Job b had all eight cores before job a came. The record of a is before that of b, which lost four.
    let jobs = || ["a", "b"].map(|id| m.state.jobs[&job(id)].clone());
    let mut before = jobs()[1].clone();
    before.grant.as_mut().unwrap().cpus = cpu_set("0-7");
    let mut restarted = WardenState::new(m.state.topology.clone(), &CpuSet::new());
    [before].into_iter().chain(jobs()).for_each(|job| restarted.apply_record(Record::Job(job)));
    assert_eq!(audit_grants(&restarted, &m.policy), []);
}

#[test]
fn a_restarted_daemon_writes_again_whether_a_borrower_is_frozen() {
    let mut m = web_and_batch();
    web_uses(&mut m, 6, 1);
    m.spawn(30, 1, 0);
    m.assign("normal", 2, &[30]).unwrap();
    assert_eq!(ownership(&m, "batch"), Some(Ownership::Frozen));
    m.release("normal").unwrap();
    assert_eq!(ownership(&m, "batch"), Some(Ownership::Borrowed));
    // The daemon was killed between the record of the thawing and the thawing.
    m.world().frozen_cgroups.insert("/pjw_besteffort/batch".to_owned());
    let records: Vec<Record> = m.state.records();
    let mut restarted = WardenState::new(m.state.topology.clone(), &CpuSet::new());
    records.into_iter().for_each(|record| restarted.apply_record(record));
    m.state = restarted;
    m.settle();
    assert!(m.world().frozen_cgroups.is_empty());
}
