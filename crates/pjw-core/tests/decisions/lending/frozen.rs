//! A borrower that can borrow no core is squeezed or frozen, and what its report says of that.

use super::*;

#[test]
fn a_borrower_without_a_core_shares_the_housekeeping_pus_or_is_frozen() {
    for (housekeeping, starved, ownerships, cpus) in [
        ("0", StarvedPolicy::Squeeze, Ownership::Squeezed, "0"),
        ("0", StarvedPolicy::Freeze, Ownership::Frozen, "1-7"),
        ("", StarvedPolicy::Squeeze, Ownership::Frozen, "0-7"),
    ] {
        let mut m = lending_machine();
        m.policy.housekeeping_cpus = set(housekeeping);
        m.state = WardenState::new(m.state.topology.clone(), &set(housekeeping));
        m.policy.lending.starved = starved;
        m.spawn(20, 1, 0);
        assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
        m.spawn(10, 1, 0);
        let all = u32::try_from(m.state.pool.free_cpus().len()).unwrap();
        m.assign("normal", all, &[10]).unwrap();
        assert_eq!((ownership(&m, "batch"), m.grant("batch").as_str()), (Some(ownerships), cpus));
        let spec = &m.state.cpusets.cpuset_of(&job("batch")).unwrap().job_cpuset.spec;
        assert_eq!((spec.idle, spec.frozen), (true, ownerships == Ownership::Frozen));
        assert_sound(&m);
        m.release("normal").unwrap();
        assert_eq!(ownership(&m, "batch"), Some(Ownership::Borrowed), "a core came free");
        assert!(!m.state.cpusets.cpuset_of(&job("batch")).unwrap().job_cpuset.spec.frozen);
    }
}

#[test]
fn a_frozen_job_holds_no_core_and_does_not_sleep() {
    let mut m = lending_machine();
    m.policy.lending.starved = StarvedPolicy::Freeze;
    m.spawn(20, 1, 0);
    m.spawn(10, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 2, &[20]).unwrap();
    for _ in 0..12 {
        m.run(&[20]);
        m.settle();
    }
    m.assign("normal", 8, &[10]).unwrap();
    assert_eq!(ownership(&m, "batch"), Some(Ownership::Frozen));
    for _ in 0..60 {
        m.advance(SECOND);
        m.settle();
    }
    m.release("normal").unwrap();
    for _ in 0..12 {
        m.run(&[20]);
        m.settle();
    }
    m.exit(20);
    m.settle();
    let report = m.reports.iter().find(|report| report.id == job("batch")).unwrap();
    assert!(report.is_borrower && report.usage.asleep_ns < 2 * SECOND, "{report:?}");
    assert!((40 * SECOND..=52 * SECOND).contains(&report.usage.held_ns), "24 s on 2 cores: {report:?}");
}
