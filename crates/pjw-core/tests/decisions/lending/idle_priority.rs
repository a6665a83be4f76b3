//! A borrower gets cores of owners only while all of its processes run at idle priority.

use super::*;

#[test]
fn a_borrower_that_stays_in_its_service_gets_no_core_of_an_owner_and_explain_says_why() {
    let mut m = lending_machine();
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0).cgroup = "/system.slice/batch.service".into();
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    web_uses(&mut m, 1, 5);
    assert_eq!(m.grant("batch"), "6-7", "the free cores only");
    let because = explain_job(&m.state, &m.policy, &m.state.jobs[&job("batch")]);
    let sentence = because.iter().find(|text| text.starts_with("it borrows free cores only")).unwrap();
    assert!(
        sentence.ends_with(
            "process 20 stays in /system.slice/batch.service, by which a service or a container tracks it"
        ),
        "{sentence}"
    );
}

#[test]
fn explain_says_of_a_borrower_without_processes_only_what_it_borrows() {
    let mut m = lending_machine();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[]).unwrap();
    let because = explain_job(&m.state, &m.policy, &m.state.jobs[&job("batch")]);
    assert!(because.iter().all(|text| !text.contains("free cores only")), "{because:?}");
}

#[test]
fn a_borrower_that_can_not_be_at_idle_priority_gets_no_core_of_an_owner_although_none_is_free() {
    let mut m = lending_machine();
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0).cgroup = "/system.slice/batch.service".into();
    m.spawn(30, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    m.assign("normal", 2, &[30]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    web_uses(&mut m, 0, 5);
    assert_eq!(lent(&m), "");
    assert_sound(&m);
}

#[test]
fn lent_cores_are_taken_back_while_a_process_of_the_borrower_would_run_before_the_owner() {
    let mut m = web_and_batch();
    web_uses(&mut m, 1, 3);
    assert_eq!(lent(&m), "2-5");
    m.state.lending.set_realtime_borrowers([job("batch")].into());
    assert!(would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    m.settle();
    assert_eq!((lent(&m).as_str(), m.grant("batch").as_str()), ("", "6-7"));
    m.state.lending.set_realtime_borrowers([].into());
    web_uses(&mut m, 1, 9);
    assert_eq!(lent(&m), "2-5", "the thread has the normal policy again");

    // A process of the job is in a service.
    m.spawn(21, 20, 0).cgroup = "/system.slice/batch.service".into();
    m.settle();
    assert_eq!((lent(&m).as_str(), m.grant("batch").as_str()), ("", "6-7"));
    assert_sound(&m);
}
