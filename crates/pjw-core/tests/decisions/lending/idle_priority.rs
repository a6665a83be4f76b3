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

/// One cycle of the daemon: a scan, and the scans that the decisions want. Returns the kinds of its events.
fn daemon_cycle(m: &mut Machine, full: bool, commands: &[Command]) -> Vec<EventKind> {
    let (mut scan, mut commands, mut kinds) = (Some(m.state.scan_request(full)), commands, Vec::new());
    for _ in 0..8 {
        let Some(request) = scan.take() else { break };
        let decision = m.cycle(&request, std::mem::take(&mut commands));
        kinds.extend(decision.events.iter().map(|event| event.kind));
        scan = decision.next_scan;
    }
    kinds
}

#[test]
fn a_refused_cpuset_that_a_full_scan_forgets_is_tried_again_without_a_core_of_an_owner() {
    let mut m = lending_machine();
    m.policy.housekeeping_cpus = cpu_set("0");
    m.state = WardenState::new(m.state.topology.clone(), &cpu_set("0"));
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 7, &[10]).unwrap();
    m.refused_jobs.insert(job("batch"));
    let (class, pids) = (Some(PriorityClass::Besteffort), [Pid(20)].into());
    let batch = AssignCommand { class, pids, ..assign_of("batch", Some(CpuRequest::Cores(8))) };
    daemon_cycle(&mut m, false, &[Command::Assign(batch)]);
    let idle_for_a_second = |m: &mut Machine, full: bool| {
        m.advance(SECOND);
        let now = Nanos(m.now());
        m.state.lending.record_use(&job("web"), in_use(0, CpuSet::new()), 7, now);
        daemon_cycle(m, full, &[])
    };
    for second in 0..40 {
        let kinds = idle_for_a_second(&mut m, second % 5 == 0);
        assert!(!kinds.contains(&EventKind::Lent) && lent(&m).is_empty(), "second {second}: {kinds:?}");
    }
    assert_eq!((ownership(&m, "batch"), m.grant("batch").as_str()), (Some(Ownership::Squeezed), "0"));
    m.refused_jobs.clear();
    for second in 0..40 {
        idle_for_a_second(&mut m, second % 5 == 0);
    }
    assert!(!lent(&m).is_empty(), "its cpuset was made at a full scan");
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

/// Starts process 21 in a service, in the besteffort job `other` for so many cores. It gets no lent cores.
fn assign_other_in_service(m: &mut Machine, cores: u32) {
    if !m.world().processes.contains_key(&Pid(21)) {
        m.spawn(21, 1, 0).cgroup = "/system.slice/other.service".into();
    }
    assign_class(m, "other", PriorityClass::Besteffort, cores, &[21]).unwrap();
}

#[test]
fn a_borrower_that_gets_no_lent_core_gets_the_free_cores_of_one_that_has_more() {
    let mut m = web_and_batch();
    web_uses(&mut m, 1, 3);
    assert_eq!((lent(&m).as_str(), m.grant("batch").as_str()), ("2-5", "2-7"));
    assign_other_in_service(&mut m, 8);
    assert_eq!([m.grant("batch"), m.grant("other"), lent(&m)], ["2-5", "6-7", "2-5"]);
    assert!(!would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    assert_sound(&m);
}

#[test]
fn a_borrower_gets_a_lent_core_for_its_free_core_that_another_one_needs() {
    let mut m = lending_machine();
    for pid in [10, 20, 30] {
        m.spawn(pid, 1, 0);
    }
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    m.assign("normal", 1, &[30]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 1, &[20]).unwrap();
    assign_other_in_service(&mut m, 1);
    assert_eq!((m.grant("normal").as_str(), m.grant("batch").as_str()), ("6", "7"));
    assert_ne!(ownership(&m, "other"), Some(Ownership::Borrowed));
    web_uses(&mut m, 1, 1);
    assert_eq!((m.grant("batch").as_str(), lent(&m).as_str()), ("7", ""), "lend_after has not passed");
    web_uses(&mut m, 1, 1);
    assert_eq!([m.grant("batch"), m.grant("other"), lent(&m)], ["5", "7", "5"]);
    assert!(!would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    // The other job comes and goes: the lent core stays where it is.
    for _ in 0..3 {
        m.release("other").unwrap();
        assert_eq!([m.grant("batch"), lent(&m)], ["5", "5"]);
        assign_other_in_service(&mut m, 1);
        assert_eq!([m.grant("batch"), m.grant("other"), lent(&m)], ["5", "7", "5"]);
    }
    assert_sound(&m);
}
