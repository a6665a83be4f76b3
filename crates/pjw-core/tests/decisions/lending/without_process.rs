//! A job of the class besteffort borrows nothing while it has no process. So a user can't take cores from the running
//! jobs of others with jobs that run nothing.

use super::*;

/// Makes a besteffort job for at most eight cores, without a process.
fn make_empty_job(m: &mut Machine, id: &str) {
    assign_class(m, id, PriorityClass::Besteffort, 8, &[]).unwrap();
}

/// Starts the process `pid` as the first one of the besteffort job `id`, which can use at most eight cores.
fn start_besteffort(m: &mut Machine, id: &str, pid: u32) {
    m.spawn(pid, 1, 0);
    assign_class(m, id, PriorityClass::Besteffort, 8, &[pid]).unwrap();
}

/// A machine with the guaranteed job `web` of six cores, which has the process 10.
fn machine_with_web() -> Machine {
    let mut m = lending_machine();
    m.spawn(10, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    m
}

#[test]
fn jobs_without_a_process_take_no_core_from_a_job_with_one() {
    let mut m = lending_machine();
    m.policy.lending.starved = StarvedPolicy::Freeze;
    make_empty_job(&mut m, "early");
    start_besteffort(&mut m, "batch", 20);
    for number in 0..20 {
        make_empty_job(&mut m, &format!("empty{number}"));
        assert_eq!((ownership(&m, "batch"), m.grant("batch").as_str()), (Some(Ownership::Borrowed), "0-7"));
    }
    assert_eq!((ownership(&m, "early"), ownership(&m, "empty7")), (None, None));
    assert_sound(&m);
}

#[test]
fn no_core_of_an_owner_is_lent_to_a_job_without_a_process() {
    let mut m = machine_with_web();
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
    let mut m = machine_with_web();
    m.policy.lending.starved = StarvedPolicy::Freeze;
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
    start_besteffort(&mut m, "a", 20);
    start_besteffort(&mut m, "b", 21);
    assert_eq!(["a", "b"].map(|id| m.state.grant_of(&job(id)).unwrap().cpus.len()), [4, 4]);
    m.exit(20);
    m.settle();
    assert_eq!((ownership(&m, "a"), m.grant("b").as_str()), (None, "0-7"));
    assert!(
        m.events.iter().any(|event| event.text.contains("borrows cores again once it has one")),
        "{:?}",
        m.events
    );
    start_besteffort(&mut m, "a", 22);
    assert_eq!(["a", "b"].map(|id| m.state.grant_of(&job(id)).unwrap().cpus.len()), [4, 4]);
    assert_sound(&m);
}

#[test]
fn the_end_of_a_borrowers_last_process_does_not_slow_down_the_next_lending() {
    let mut m = machine_with_web();
    make_empty_job(&mut m, "batch");
    start_besteffort(&mut m, "batch", 20);
    web_uses(&mut m, 1, 3);
    assert_eq!(lent(&m), "2-5");
    m.exit(20);
    m.settle();
    assert_eq!(lent(&m), "", "the owner needs them no more than before");
    m.advance(2 * SECOND);
    sample(&mut m, 1, "");
    start_besteffort(&mut m, "batch", 21);
    assert_eq!(lent(&m), "2-5", "lend_after is not doubled");
    assert_sound(&m);
}

#[test]
fn a_job_gets_lent_cores_at_once_when_it_has_a_process_again() {
    let mut m = machine_with_web();
    make_empty_job(&mut m, "batch");
    start_besteffort(&mut m, "batch", 20);
    web_uses(&mut m, 1, 2);
    assert_eq!(lent(&m), "2-5");
    m.exit(20);
    m.settle();
    assert_eq!(lent(&m), "");
    start_besteffort(&mut m, "batch", 21);
    m.settle();
    assert_eq!(lent(&m), "2-5", "the owner has not used more meanwhile");
    assert_sound(&m);
}

/// How a borrower ends: with its last process, or it stays as a job without a process.
#[derive(Debug, Clone, Copy)]
enum AfterLastProcess {
    Ends,
    Stays,
}

#[test]
fn lent_cores_of_a_borrower_without_a_process_go_to_another_borrower_and_stay_lent() {
    for after in [AfterLastProcess::Ends, AfterLastProcess::Stays] {
        assert_cores_go_to_another_borrower(after);
    }
}

fn assert_cores_go_to_another_borrower(after: AfterLastProcess) {
    let mut m = machine_with_web();
    if matches!(after, AfterLastProcess::Stays) {
        make_empty_job(&mut m, "a");
    }
    start_besteffort(&mut m, "a", 20);
    start_besteffort(&mut m, "b", 21);
    web_uses(&mut m, 1, 3);
    let borrowed = |m: &Machine| ["a", "b"].map(|id| m.state.pool.borrowed_by(&job(id)).len());
    assert_eq!((lent(&m).as_str(), borrowed(&m)), ("2-5", [3, 3]));
    m.exit(20);
    m.settle();
    assert_eq!((lent(&m).as_str(), m.grant("b").as_str()), ("2-5", "2-7"), "{after:?}");
    assert_eq!(m.state.jobs.contains_key(&job("a")), matches!(after, AfterLastProcess::Stays));
    let kinds = m.events.iter().map(|event| event.kind);
    assert_eq!(kinds.filter(|kind| [EventKind::Returned, EventKind::Revoked].contains(kind)).count(), 0);

    // Each new process gets half of the cores, and the owner still lends as before.
    start_besteffort(&mut m, "a", 22);
    assert_eq!((lent(&m).as_str(), borrowed(&m)), ("2-5", [3, 3]));
    let passed_on = m.events.iter().find(|event| event.kind == EventKind::Revoked).unwrap();
    assert!(passed_on.text.starts_with("manual:a borrows CPU"), "{passed_on:?}");
    assert!(m.events.iter().all(|event| event.kind != EventKind::Returned), "{:?}", m.events);
    assert_sound(&m);
}

#[test]
fn a_core_that_a_borrower_leaves_in_a_grace_period_goes_to_its_owner_who_waits_for_cores() {
    let mut m = machine_with_web();
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    start_besteffort(&mut m, "a", 20);
    start_besteffort(&mut m, "b", 21);
    web_uses(&mut m, 1, 3);
    assert_eq!(lent(&m), "2-5");
    // Of six cores, three are in use and one is the buffer: two may be lent.
    sample(&mut m, 3, "");
    m.settle();
    let core_of_a = m.state.pool.borrowed_by(&job("a")).intersection(&m.state.pool.lent_cpus());
    m.exit(20);
    m.settle();
    assert!(!m.state.pool.lent_cpus().intersects(&core_of_a), "{core_of_a} of {}", lent(&m));
    assert_sound(&m);
}

#[test]
fn cores_that_a_borrower_wants_no_more_are_no_return() {
    let mut m = machine_with_web();
    start_besteffort(&mut m, "a", 20);
    web_uses(&mut m, 1, 3);
    m.command(Command::Want { job: job("a"), cores: Some(3), caller: ROOT }).unwrap();
    let kinds = |m: &Machine| m.events.iter().map(|event| event.kind).collect::<Vec<EventKind>>();
    assert_eq!(m.state.pool.borrowed_by(&job("a")).len(), 3);
    assert!(
        kinds(&m).contains(&EventKind::Returned) && !kinds(&m).contains(&EventKind::Revoked),
        "{:?}",
        m.events
    );
}

#[test]
fn a_restarted_daemon_takes_back_what_a_job_without_a_process_borrowed() {
    let mut m = lending_machine();
    start_besteffort(&mut m, "batch", 20);
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

#[test]
fn the_short_time_in_which_a_job_had_a_process_counts_as_its_time_on_cores() {
    let mut m = lending_machine();
    make_empty_job(&mut m, "a");
    m.advance(100 * SECOND);
    start_besteffort(&mut m, "a", 20);
    m.run_for(&[20], 4 * SECOND / 10);
    m.settle();
    m.exit(20);
    m.settle();
    m.advance(100 * SECOND);
    m.release("a").unwrap();
    let usage = &m.reports[0].usage;
    assert_eq!(usage.without_pus_cpu_ns, 0, "{usage:?}");
    let tenths = |ns: u64| (ns + SECOND / 20) / (SECOND / 10);
    assert_eq!((tenths(usage.cpu_ns), tenths(usage.held_ns)), (4, 8 * 4), "{usage:?}");
    assert_eq!((usage.without_pus_ns + SECOND / 2) / SECOND, 200, "{usage:?}");
}
