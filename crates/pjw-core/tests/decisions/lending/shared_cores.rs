//! Cores that several jobs share are not lent.

use pjw_core::policy::ExhaustionPolicy;

use super::*;

/// A machine of eight cores on which the job `normal` shares two of the six cores of `web`.
fn with_shared_cores() -> (Machine, CpuSet) {
    let mut m = web_and_batch();
    m.policy.exhaustion_policy = ExhaustionPolicy::Share;
    m.spawn(30, 1, 0);
    assign_class(&mut m, "normal", PriorityClass::Normal, 4, &[30]).unwrap();
    let grant = m.state.grant_of(&job("normal")).unwrap().clone();
    assert!(grant.is_shared);
    (m, grant.cpus)
}

#[test]
fn a_core_that_another_job_shares_is_not_lent() {
    let (mut m, shared) = with_shared_cores();
    web_uses(&mut m, 0, 6);
    let lent = cpu_set(&lent(&m));
    assert!(!lent.is_empty() && !lent.intersects(&shared), "{lent} of web, {shared} of normal");
    assert_sound(&m);
}

#[test]
fn a_lent_core_comes_back_when_another_job_begins_to_share_it() {
    let mut m = web_and_batch();
    m.policy.lending.buffer_cores = 0;
    web_uses(&mut m, 0, 6);
    assert_eq!(cpu_set(&lent(&m)).len(), 6);
    m.policy.exhaustion_policy = ExhaustionPolicy::Share;
    m.spawn(30, 1, 0);
    assign_class(&mut m, "normal", PriorityClass::Normal, 4, &[30]).unwrap();
    let grant = m.state.grant_of(&job("normal")).unwrap().clone();
    web_uses(&mut m, 0, 3);
    let lent = cpu_set(&lent(&m));
    assert!(!lent.is_empty() && !lent.intersects(&grant.cpus), "{lent} of web, {} of normal", grant.cpus);
    assert_sound(&m);
}
