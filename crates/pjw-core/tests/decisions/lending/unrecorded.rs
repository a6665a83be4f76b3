//! Loans while the journal can't be written, and in the mode observe.

use super::*;

#[test]
fn loans_change_while_no_job_can_be_granted_cores() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    assert_eq!((lent(&m).as_str(), m.grant("batch").as_str()), ("2-5", "2-7"));
    m.policy.may_grant = false;
    sample(&mut m, 6, "");
    assert!(would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    m.settle();
    assert_eq!((lent(&m).as_str(), m.grant("batch").as_str()), ("", "6-7"), "the owner needs its cores");
    m.release("web").unwrap();
    m.settle();
    assert_eq!(m.grant("batch"), "0-7", "it borrows the freed cores");
    assert_sound(&m);
}

#[test]
fn a_frozen_borrower_runs_again_while_no_job_can_be_granted_cores() {
    let mut m = web_and_batch();
    web_uses(&mut m, 6, 1);
    m.spawn(30, 1, 0);
    m.assign("normal", 2, &[30]).unwrap();
    assert_eq!(ownership(&m, "batch"), Some(Ownership::Frozen));
    m.policy.may_grant = false;
    m.release("normal").unwrap();
    assert_eq!((ownership(&m, "batch"), m.grant("batch").as_str()), (Some(Ownership::Borrowed), "6-7"));
    assert!(m.world().frozen_cgroups.is_empty());
    assert_sound(&m);
}

#[test]
fn a_restart_with_the_records_of_an_older_loan_gives_no_core_to_two_jobs_and_the_owner_gets_its_cores() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    let records: Vec<Record> = m.state.records();
    m.policy.may_grant = false;
    sample(&mut m, 6, "");
    m.settle();
    assert_eq!((lent(&m).as_str(), m.effective_mask(20, 20).as_str()), ("", "6-7"));
    let mut restarted = WardenState::new(m.state.topology.clone(), &CpuSet::new());
    records.into_iter().for_each(|record| restarted.apply_record(record));
    m.state = restarted;
    m.settle();
    assert_eq!(lent(&m), "2-5", "as the journal says, until the owner is sampled");
    assert_eq!(m.effective_mask(20, 20), "2-7", "the cpuset is written again");
    assert_sound(&m);
    sample(&mut m, 6, "");
    m.settle();
    assert_eq!((lent(&m).as_str(), m.effective_mask(20, 20).as_str()), ("", "6-7"));
    assert_sound(&m);
}

#[test]
fn loans_stay_as_they_are_in_the_mode_observe_and_no_cycle_is_due_for_them() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    assert_eq!(lent(&m), "2-5");
    m.policy.mode = DaemonMode::Observe;
    sample(&mut m, 6, "2-5");
    assert!(!would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    m.settle();
    assert_eq!(lent(&m), "2-5");
    m.policy.mode = DaemonMode::Enforce;
    sample(&mut m, 6, "2-5");
    assert!(would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    m.settle();
    assert_eq!(lent(&m), "");
    assert_sound(&m);
}
