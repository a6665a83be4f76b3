//! Free cores and lent cores of one borrower: it gives back lent ones first, and exchanges them for free ones.

use super::*;

/// A machine on which the job `normal` has CPUs 6-7. So the job `batch`, which can use two cores, borrows CPUs 4-5 of
/// `web`, which has CPUs 0-5.
fn two_lent_cores() -> Machine {
    let mut m = lending_machine();
    for pid in [10, 20, 30] {
        m.spawn(pid, 1, 0);
    }
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 2, &[20]).unwrap();
    take_free_cores(&mut m);
    web_uses(&mut m, 1, 6);
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("4-5", "4-5"));
    m
}

fn take_free_cores(m: &mut Machine) {
    m.assign("normal", 2, &[30]).unwrap();
    assert_eq!(m.grant("normal"), "6-7");
}

fn want(m: &mut Machine, cores: u32) {
    m.command(Command::Want { job: job("batch"), cores: Some(cores), caller: ROOT }).unwrap();
}

fn texts(m: &Machine, kind: EventKind) -> Vec<&str> {
    m.events.iter().filter(|event| event.kind == kind).map(|event| event.text.as_str()).collect()
}

#[test]
fn a_borrower_that_wants_fewer_cores_gives_back_lent_cores_before_free_ones() {
    let mut m = web_and_batch();
    web_uses(&mut m, 1, 2);
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("2-7", "2-5"));
    want(&mut m, 3);
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("2,6-7", "2"));
    want(&mut m, 2);
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("6-7", ""));
    assert_sound(&m);
}

#[test]
fn lent_cores_are_exchanged_for_free_cores_that_no_borrower_can_use() {
    let mut m = two_lent_cores();
    m.release("normal").unwrap();
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("6-7", ""));
    assert_eq!(
        texts(&m, EventKind::Revoked),
        ["manual:batch has free CPUs instead of CPUs 4-5 of manual:web: given back"]
    );
    assert_eq!(texts(&m, EventKind::Returned), ["CPUs 4-5 back from manual:batch"]);
    assert!(!would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    assert_sound(&m);
}

#[test]
fn a_free_core_that_another_borrower_can_use_is_not_exchanged() {
    let mut m = two_lent_cores();
    // Of six cores, three are in use and one is the buffer: two are lent.
    sample(&mut m, 3, "");
    m.spawn(21, 1, 0);
    assign_class(&mut m, "other", PriorityClass::Besteffort, 2, &[21]).unwrap();
    let borrowed = |m: &Machine| ["batch", "other"].map(|id| m.state.pool.borrowed_by(&job(id)).len());
    assert_eq!((lent(&m).as_str(), borrowed(&m)), ("4-5", [1, 1]));
    m.release("normal").unwrap();
    assert_eq!((lent(&m).as_str(), borrowed(&m)), ("4-5", [2, 2]));
    assert_sound(&m);
}

#[test]
fn a_free_core_that_comes_and_goes_moves_no_lent_core_within_lend_after() {
    let mut m = two_lent_cores();
    m.release("normal").unwrap();
    assert_eq!(lent(&m), "");
    take_free_cores(&mut m);
    assert_eq!(lent(&m), "4-5", "the owner still leaves them idle");
    for _ in 0..3 {
        m.release("normal").unwrap();
        assert_eq!(lent(&m), "4-5", "they were lent just now");
        take_free_cores(&mut m);
    }
    m.release("normal").unwrap();
    web_uses(&mut m, 1, 1);
    assert_eq!(lent(&m), "4-5");
    web_uses(&mut m, 1, 1);
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("6-7", ""));
    assert_sound(&m);
}

#[test]
fn an_exchanged_core_has_the_grace_period_of_a_core_that_is_taken_back() {
    let mut m = two_lent_cores();
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    m.release("normal").unwrap();
    assert_eq!(
        texts(&m, EventKind::Revoked),
        ["manual:batch has free CPUs instead of CPUs 4-5 of manual:web: given back in 5s"]
    );
    let map = core_map(&m.state, &m.policy, &m.state.jobs[&job("batch")]).unwrap();
    assert_eq!((map.borrowed, map.leaving), (cpu_set("4-7"), cpu_set("4-5")));
    let end = m.state.lending.next_grace_period_end();
    web_uses(&mut m, 1, 4);
    assert_eq!((m.grant("batch").as_str(), m.state.lending.next_grace_period_end()), ("4-7", end));
    m.advance(SECOND);
    assert!(would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    sample(&mut m, 1, "");
    m.settle();
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("6-7", ""));
    assert_eq!(texts(&m, EventKind::Revoked), [""; 0], "the return was announced before");
    assert_eq!(m.state.lending.next_grace_period_end(), None);
    assert_sound(&m);
}

#[test]
fn the_return_of_an_exchanged_core_is_announced_again_after_a_restart() {
    let mut m = two_lent_cores();
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    m.release("normal").unwrap();
    assert_eq!(leaving(&m), "4-5");
    m.advance(SECOND);
    let records: Vec<Record> = m.state.records();
    let mut restarted = WardenState::new(m.state.topology.clone(), &CpuSet::new());
    records.into_iter().for_each(|record| restarted.apply_record(record));
    m.state = restarted;
    m.settle();
    assert_eq!([m.grant("batch"), lent(&m), leaving(&m)], ["4-7", "4-5", "4-5"]);
    assert_eq!(
        texts(&m, EventKind::Revoked),
        ["manual:batch has free CPUs instead of CPUs 4-5 of manual:web: given back in 5s"]
    );
    web_uses(&mut m, 1, 4);
    assert_eq!([m.grant("batch"), leaving(&m)], ["4-7", "4-5"]);
    m.advance(SECOND);
    sample(&mut m, 1, "");
    m.settle();
    assert_eq!([m.grant("batch"), lent(&m)], ["6-7", ""]);
    assert_eq!(texts(&m, EventKind::Revoked), [""; 0], "the return was announced before");
    assert_sound(&m);
}

#[test]
fn a_borrower_that_wants_fewer_cores_after_the_notice_gives_them_back_before_the_grace_period_ends() {
    let mut m = two_lent_cores();
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    m.release("normal").unwrap();
    m.advance(SECOND);
    want(&mut m, 1);
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("6", ""));
    assert_sound(&m);
}

#[test]
fn a_core_that_the_owner_needs_stays_for_the_grace_period_beside_the_free_core_that_replaces_it() {
    let mut m = lending_machine();
    for pid in [10, 20, 30] {
        m.spawn(pid, 1, 0);
    }
    m.assign("normal", 2, &[30]).unwrap();
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 2, &[20]).unwrap();
    web_uses(&mut m, 1, 6);
    assert_eq!((m.grant("normal").as_str(), m.grant("batch").as_str()), ("0-1", "6-7"));
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    sample(&mut m, 6, "");
    m.settle();
    m.release("normal").unwrap();
    for _ in 0..4 {
        assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("0-1,6-7", "6-7"));
        web_uses(&mut m, 6, 1);
    }
    web_uses(&mut m, 6, 1);
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("0-1", ""));
    assert_sound(&m);
}

/// The PUs that the job `batch` has only until the end of a grace period.
fn leaving(m: &Machine) -> String {
    core_map(&m.state, &m.policy, &m.state.jobs[&job("batch")]).unwrap().leaving.to_string()
}

/// A machine on which the job `batch`, which can use so many cores, borrows them of `web`, which uses `used` of the
/// CPUs 0-5. The jobs `normal` and `rest` have the other two cores. The grace period is 5 s.
fn lent_cores_with_grace(wanted: u32, used: u32) -> Machine {
    let mut m = lending_machine();
    for pid in [10, 20, 30, 31] {
        m.spawn(pid, 1, 0);
    }
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    m.assign("normal", 1, &[30]).unwrap();
    m.assign("rest", 1, &[31]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, wanted, &[20]).unwrap();
    web_uses(&mut m, used, 8);
    assert_eq!((m.state.pool.lent_cpus().len(), m.grant("batch")), (wanted as usize, lent(&m)));
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    m
}

#[test]
fn an_owner_that_needs_cores_gets_those_first_that_are_exchanged_already() {
    let mut m = lent_cores_with_grace(4, 1);
    m.release("normal").unwrap();
    m.release("rest").unwrap();
    assert_eq!((lent(&m).as_str(), leaving(&m).as_str()), ("2-5", "2-3"));
    let end = m.state.lending.next_grace_period_end();
    m.advance(SECOND);
    // Of six cores, three are in use and one is the buffer: two may be lent.
    sample(&mut m, 3, "");
    m.settle();
    assert_eq!((leaving(&m).as_str(), m.state.lending.next_grace_period_end()), ("2-3", end));
    assert_eq!((texts(&m, EventKind::Revoked).len(), texts(&m, EventKind::Lent).len()), (0, 0));
    m.advance(4 * SECOND);
    sample(&mut m, 3, "");
    m.settle();
    assert_eq!((lent(&m).as_str(), leaving(&m).as_str()), ("4-5", ""));
    assert_sound(&m);
}

#[test]
fn a_borrower_that_comes_in_the_grace_period_of_an_exchange_gets_the_free_core() {
    let mut m = lent_cores_with_grace(1, 4);
    assert_eq!(lent(&m), "5");
    let free = m.grant("rest");
    m.release("rest").unwrap();
    assert_eq!((m.state.pool.free_cpus().to_string(), leaving(&m).as_str()), (free.clone(), "5"));
    assert_eq!(m.state.pool.borrowed_by(&job("batch")), cpu_set(&format!("5,{free}")));
    m.advance(SECOND);
    m.spawn(21, 1, 0);
    assign_class(&mut m, "other", PriorityClass::Besteffort, 1, &[21]).unwrap();
    assert_eq!((m.grant("other"), m.grant("batch"), leaving(&m)), (free, "5".to_owned(), String::new()));
    assert_eq!(ownership(&m, "other"), Some(Ownership::Borrowed), "it is not frozen for the grace period");
    assert_eq!(
        texts(&m, EventKind::Lent),
        ["manual:batch can use CPU 5 of manual:web again: not given back"]
    );
    assert!(!would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    assert_sound(&m);
}

#[test]
fn the_end_of_an_exchange_does_not_slow_down_the_next_lending() {
    let mut m = two_lent_cores();
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    m.release("normal").unwrap();
    assert_eq!(leaving(&m), "4-5");
    sample(&mut m, 3, "");
    take_free_cores(&mut m);
    assert_eq!((lent(&m).as_str(), leaving(&m).as_str()), ("4-5", ""));
    assert_eq!(
        texts(&m, EventKind::Lent),
        ["manual:batch can use CPUs 4-5 of manual:web again: not given back"]
    );
    want(&mut m, 4);
    web_uses(&mut m, 1, 2);
    assert_eq!(lent(&m), "2-5", "lend_after is not doubled");
    assert_sound(&m);
}

#[test]
fn a_core_that_the_borrower_wants_no_more_has_no_grace_period() {
    let mut m = two_lent_cores();
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    // The owner needs all cores in the same cycle.
    sample(&mut m, 6, "");
    want(&mut m, 1);
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str(), leaving(&m).as_str()), ("4", "4", "4"));
    assert_sound(&m);
}

#[test]
fn a_core_on_which_the_owner_runs_goes_back_instead_of_an_exchanged_one() {
    let mut m = lent_cores_with_grace(3, 2);
    assert_eq!(lent(&m), "3-5");
    m.release("rest").unwrap();
    assert_eq!(leaving(&m), "3");
    sample(&mut m, 2, "4");
    m.settle();
    assert_eq!((lent(&m).as_str(), leaving(&m).as_str()), ("3-5", "4"));
    assert_sound(&m);
}
