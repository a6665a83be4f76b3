//! Free cores and lent cores of one borrower: it gives back lent ones first, and exchanges them for free ones.

use pjw_core::event::Event;

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

/// The events that tell the job `id` that its cores change: their kinds, CPUs and texts.
fn core_events(m: &Machine, id: &str) -> Vec<(EventKind, String, String)> {
    let kinds = [EventKind::Revoked, EventKind::Resized, EventKind::Lent, EventKind::Returned];
    let is_wanted = |event: &&Event| event.job.as_ref() == Some(&job(id)) && kinds.contains(&event.kind);
    let facts = |event: &Event| {
        (event.kind, event.cpus.as_ref().map(CpuSet::to_string).unwrap_or_default(), event.text.clone())
    };
    m.events.iter().filter(is_wanted).map(facts).collect()
}

fn core_event(kind: EventKind, cpus: &str, text: &str) -> (EventKind, String, String) {
    (kind, cpus.to_owned(), text.to_owned())
}

#[test]
fn the_loss_of_a_free_core_to_another_job_is_reported() {
    let mut m = web_and_batch();
    m.spawn(30, 1, 0);
    m.spawn(31, 1, 0);
    m.assign("normal", 1, &[30]).unwrap();
    assert_eq!((m.grant("normal").as_str(), m.grant("batch").as_str()), ("6", "7"));
    let taken =
        core_event(EventKind::Revoked, "6", "manual:normal gets CPU 6: CPU 6 taken from manual:batch");
    assert_eq!(core_events(&m, "batch"), [taken]);
    // Without a core, it is frozen, and another event says so.
    m.assign("last", 1, &[31]).unwrap();
    assert_eq!(ownership(&m, "batch"), Some(Ownership::Frozen));
    let taken = core_event(EventKind::Revoked, "7", "manual:last gets CPU 7: CPU 7 taken from manual:batch");
    let frozen = "no CPU instead of CPU 7: no core can be borrowed: it is frozen until there is one";
    assert_eq!(core_events(&m, "batch"), [taken, core_event(EventKind::Resized, "", frozen)]);
    assert_eq!((core_events(&m, "normal"), core_events(&m, "web")), (Vec::new(), Vec::new()));
    assert_sound(&m);
}

#[test]
fn the_loss_of_free_and_lent_cores_is_reported_once() {
    let mut m = web_and_batch();
    web_uses(&mut m, 1, 2);
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("2-7", "2-5"));
    // Of six cores, three are in use and one is the buffer: two may be lent.
    sample(&mut m, 3, "");
    m.spawn(30, 1, 0);
    m.assign("normal", 2, &[30]).unwrap();
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("2-3", "2-3"));
    let free = "manual:normal gets CPUs 6-7: CPUs 6-7 taken from manual:batch";
    let expected = [
        core_event(EventKind::Revoked, "6-7", free),
        core_event(EventKind::Revoked, "4-5", "manual:web needs CPUs 4-5: taken back"),
    ];
    assert_eq!(core_events(&m, "batch"), expected);
    assert_eq!(texts(&m, EventKind::Returned), ["CPUs 4-5 back from manual:batch"]);
    assert_sound(&m);
}

#[test]
fn the_loss_of_a_core_of_which_another_job_gets_a_part_is_reported_once() {
    let mut m = machine_with(regular_topology(1, 1, 1, 4, 2), lending_policy());
    m.policy.share_smt = true;
    m.spawn(20, 1, 0);
    m.spawn(30, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 4, &[20]).unwrap();
    let request = assign_of("normal", Some(CpuRequest::Exactly(cpu_set("4"))));
    m.command(Command::Assign(AssignCommand { pids: vec![Pid(30)], ..request })).unwrap();
    assert_eq!(m.grant("batch"), "1-3,5-7");
    let text = "manual:normal gets CPU 4, and only whole cores can be borrowed: CPUs 0,4 taken from \
                manual:batch";
    assert_eq!(core_events(&m, "batch"), [core_event(EventKind::Revoked, "0,4", text)]);
    assert_sound(&m);
}

#[test]
fn the_loss_of_free_cores_to_another_borrower_is_reported_once() {
    let mut m = lending_machine();
    m.spawn(20, 1, 0);
    m.spawn(21, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    assign_class(&mut m, "other", PriorityClass::Besteffort, 8, &[21]).unwrap();
    assert_eq!((m.grant("batch").as_str(), m.grant("other").as_str()), ("0-3", "4-7"));
    let passed_on = [
        core_event(EventKind::Revoked, "7", "manual:other borrows CPU 7 now"),
        core_event(EventKind::Revoked, "4-6", "manual:other borrows CPUs 4-6 now"),
    ];
    assert_eq!(core_events(&m, "batch"), passed_on, "each core once");
    assert_sound(&m);
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
