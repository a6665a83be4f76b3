//! Loans while the journal can't be written, and in the mode observe.

use super::*;

#[test]
fn loans_stay_as_they_are_while_cores_can_t_be_granted() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    let (before, loans) = (m.grant("batch"), lent(&m));
    m.policy.may_grant = false;
    m.release("web").unwrap();
    m.settle();
    assert!(!would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    assert_eq!((m.grant("batch"), loans.as_str()), (before.clone(), "2-5"));
    m.policy.may_grant = true;
    assert!(would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    m.settle();
    assert_ne!(m.grant("batch"), before, "it borrows the freed cores");
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
