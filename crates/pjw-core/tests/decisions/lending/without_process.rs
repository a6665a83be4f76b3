//! A job of the class besteffort borrows nothing while it has no process. So a user can't take cores from the running jobs
//! of others with jobs that run nothing.

use super::*;

/// Makes a besteffort job for at most eight cores, without a process.
fn make_empty_job(m: &mut Machine, id: &str) {
    assign_class(m, id, PriorityClass::Besteffort, 8, &[]).unwrap();
}

#[test]
fn jobs_without_a_process_take_no_core_from_a_job_with_one() {
    let mut m = lending_machine();
    m.policy.lending.starved = StarvedPolicy::Freeze;
    make_empty_job(&mut m, "early");
    m.spawn(20, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    for number in 0..20 {
        make_empty_job(&mut m, &format!("empty{number}"));
        assert_eq!((ownership(&m, "batch"), m.grant("batch").as_str()), (Some(Ownership::Borrowed), "0-7"));
    }
    assert_eq!((ownership(&m, "early"), ownership(&m, "empty7")), (None, None));
    assert_sound(&m);
}

#[test]
fn no_core_of_an_owner_is_lent_to_a_job_without_a_process() {
    let mut m = lending_machine();
    m.spawn(10, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    make_empty_job(&mut m, "batch");
    web_uses(&mut m, 0, 5);
    assert_eq!((lent(&m).as_str(), m.state.pool.borrowed_pus().count()), ("", 0));
    let explained = explain_job(&m.state, &m.policy, &m.state.jobs[&job("batch")]).join("\n");
    assert!(
        explained.contains("no process belongs to manual:batch: it borrows cores as soon as one does"),
        "{explained}"
    );
}

#[test]
fn the_first_process_of_a_job_has_cores_in_the_cycle_in_which_it_joins() {
    let mut m = lending_machine();
    m.policy.lending.starved = StarvedPolicy::Freeze;
    m.spawn(10, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    make_empty_job(&mut m, "batch");
    web_uses(&mut m, 0, 3);
    m.spawn(20, 1, 0);
    let reply = assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    let Reply::Assigned(job) = reply else { panic!("{reply:?}") };
    assert_eq!(
        job.grant.map(|grant| (grant.ownership, grant.cpus)),
        Some((Ownership::Borrowed, cpu_set("6-7")))
    );
    let frozen = m.events.iter().find(|event| event.text.contains("frozen"));
    assert_eq!(frozen, None, "it was never frozen");
    // The owner was sampled while the job had no process, so its idle cores follow as soon as the process is in its
    // cpuset.
    m.settle();
    assert_eq!(m.grant("batch"), "2-7");
    assert_sound(&m);
}

#[test]
fn a_job_whose_last_process_has_ended_gives_its_cores_to_the_others() {
    let mut m = lending_machine();
    make_empty_job(&mut m, "a");
    for (pid, id) in [(20, "a"), (21, "b")] {
        m.spawn(pid, 1, 0);
        assign_class(&mut m, id, PriorityClass::Besteffort, 8, &[pid]).unwrap();
    }
    assert_eq!(["a", "b"].map(|id| m.state.grant_of(&job(id)).unwrap().cpus.len()), [4, 4]);
    m.exit(20);
    m.settle();
    assert_eq!((ownership(&m, "a"), m.grant("b").as_str()), (None, "0-7"));
    assert!(
        m.events.iter().any(|event| event.text.contains("borrows cores again once it has one")),
        "{:?}",
        m.events
    );
    m.spawn(22, 1, 0);
    assign_class(&mut m, "a", PriorityClass::Besteffort, 8, &[22]).unwrap();
    assert_eq!(["a", "b"].map(|id| m.state.grant_of(&job(id)).unwrap().cpus.len()), [4, 4]);
    assert_sound(&m);
}

#[test]
fn the_end_of_a_borrowers_last_process_does_not_slow_down_the_next_lending() {
    let mut m = lending_machine();
    m.spawn(10, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    make_empty_job(&mut m, "batch");
    m.spawn(20, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    web_uses(&mut m, 1, 3);
    assert_eq!(lent(&m), "2-5");
    m.exit(20);
    m.settle();
    assert_eq!(lent(&m), "", "the owner needs them no more than before");
    m.advance(2 * SECOND);
    sample(&mut m, 1, "");
    m.spawn(21, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[21]).unwrap();
    assert_eq!(lent(&m), "2-5", "lend_after is not doubled");
    assert_sound(&m);
}

#[test]
fn a_restarted_daemon_takes_back_what_a_job_without_a_process_borrowed() {
    let mut m = lending_machine();
    m.spawn(20, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    make_empty_job(&mut m, "empty");
    // An earlier version lent cores to jobs without processes.
    let [batch, mut empty] = ["batch", "empty"].map(|id| m.state.jobs[&job(id)].clone());
    empty.grant = batch.grant;
    empty.grant.as_mut().unwrap().cpus = cpu_set("4-7");
    let mut restarted = WardenState::new(m.state.topology.clone(), &CpuSet::new());
    let records = m.state.records().into_iter().chain([Record::Job(empty)]);
    records.for_each(|record| restarted.apply_record(record));
    m.state = restarted;
    m.settle();
    assert_eq!((m.grant("batch").as_str(), ownership(&m, "empty")), ("0-7", None));
    assert_sound(&m);
}
