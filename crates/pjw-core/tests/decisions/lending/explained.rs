//! `explain` says why the cores of an owner are not lent.

use super::*;

/// The sentence about lending.
fn explained(m: &Machine) -> String {
    let because = explain_job(&m.state, &m.policy, &m.state.jobs[&job("web")]);
    let mut of_lending = because.into_iter().filter(|text| text.contains("lent"));
    let text = of_lending.next().unwrap();
    assert_eq!(of_lending.next(), None, "one sentence");
    text
}

#[test]
fn explain_says_why_no_core_of_an_owner_is_lent_and_to_which_job_one_is() {
    let mut m = lending_machine();
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    assert!(explained(&m).ends_with("no job of the class besteffort wants one"), "{}", explained(&m));
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    assert!(explained(&m).ends_with("its use of them was not measured yet"), "{}", explained(&m));
    web_uses(&mut m, 5, 3);
    assert!(explained(&m).contains("it uses 5, a buffer of 1 stays free"), "{}", explained(&m));
    web_uses(&mut m, 1, 3);
    assert!(explained(&m).ends_with("lent to manual:batch"), "{}", explained(&m));
    m.command(Command::Want { job: job("web"), cores: Some(6), caller: ROOT }).unwrap();
    assert!(explained(&m).ends_with("it wants 6 of them"), "{}", explained(&m));
    m.policy.lending.enabled = false;
    assert!(explained(&m).ends_with("lending.enabled = false"), "{}", explained(&m));
}

#[test]
fn the_reason_of_a_borrower_agrees_in_number_with_its_cores_and_their_owner() {
    for (used, reason) in [
        (4, "it borrows cores: CPUs 6-7 are free, CPU 5 is left idle by its owner"),
        (1, "it borrows cores: CPUs 6-7 are free, CPUs 2-5 are left idle by their owner"),
    ] {
        let mut m = web_and_batch();
        web_uses(&mut m, used, 2);
        assert_eq!(m.state.grant_of(&job("batch")).unwrap().reasons, [reason]);
    }
}

#[test]
fn explain_says_that_a_besteffort_job_which_wants_no_core_keeps_one() {
    let mut m = web_and_batch();
    for id in ["web", "batch"] {
        m.command(Command::Want { job: job(id), cores: Some(0), caller: ROOT }).unwrap();
    }
    let explained = |id| explain_job(&m.state, &m.policy, &m.state.jobs[&job(id)]).join("\n");
    let kept = "a besteffort job keeps one core, so that it can ask for more";
    assert!(explained("batch").contains(kept), "{}", explained("batch"));
    assert!(!explained("web").contains(kept), "{}", explained("web"));
}

/// A job `web` of six cores, and a borrower that wants so many cores and has these processes.
fn idle_web_beside(cores: u32, pids: &[u32]) -> Machine {
    let mut m = lending_machine();
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, cores, pids).unwrap();
    m
}

#[test]
fn explain_says_that_no_borrower_can_take_an_idle_core() {
    let mut m = idle_web_beside(8, &[]);
    web_uses(&mut m, 1, 3);
    assert!(explained(&m).ends_with("no job of the class besteffort has a process"), "{}", explained(&m));

    let mut m = idle_web_beside(2, &[20]);
    web_uses(&mut m, 1, 3);
    assert!(explained(&m).ends_with("has as many as it wants"), "{}", explained(&m));

    let mut m = idle_web_beside(8, &[20]);
    m.state.lending.set_realtime_borrowers([job("batch")].into());
    web_uses(&mut m, 1, 3);
    assert!(
        explained(&m).contains("each job of the class besteffort would slow it down"),
        "{}",
        explained(&m)
    );
    let of_batch = explain_job(&m.state, &m.policy, &m.state.jobs[&job("batch")]).join("\n");
    assert!(of_batch.contains("it borrows free cores only"), "{of_batch}");
    assert!(of_batch.contains("a thread of it has a real-time priority"), "{of_batch}");
}

#[test]
fn explain_says_when_the_cores_are_lent_that_an_owner_does_not_want() {
    let mut m = idle_web_beside(8, &[20]);
    m.command(Command::Want { job: job("web"), cores: Some(2), caller: ROOT }).unwrap();
    let expected = "it wants 2 of them, and the rest is lent after it was idle for 2s or longer";
    assert!(explained(&m).ends_with(expected), "{}", explained(&m));
}

#[test]
fn an_event_does_not_say_that_an_owner_of_all_cores_needs_one_that_another_program_may_use() {
    let mut m = lending_machine();
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 8, &[10]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    web_uses(&mut m, 1, 3);
    assert_ne!(lent(&m), "");
    web_uses(&mut m, 8, 0);
    let revoked = m.events.iter().find(|event| event.kind == EventKind::Revoked).unwrap();
    assert!(revoked.text.starts_with("manual:web, or another program, needs CPUs"), "{}", revoked.text);
}
