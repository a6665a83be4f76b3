//! Defragmentation: only a command of an administrator causes it, and a release restores the masks.

use pjw_core::allocate::defrag::DefragPlan;
use pjw_core::command::{Command, Reply};
use pjw_core::event::EventKind;
use pjw_core::job::CpuRequest;
use pjw_core::policy::DaemonMode;
use pjw_core::record::Record;
use pjw_core::refusal::Refusal;
use pjw_core::state::WardenState;

use crate::machine::{ALICE, Machine, ROOT, assign_of, cpu_set, job, machine};

/// A machine with two jobs of two cores, each in a package of its own.
fn fragmented_machine() -> Machine {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.clone_thread(10, 11);
    m.bind(10, 11, "1");
    m.spawn(20, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.assign("between", 2, &[]).unwrap();
    m.assign("b", 2, &[20]).unwrap();
    m.release("between").unwrap();
    assert_eq!((m.grant("a"), m.grant("b")), ("0-1".into(), "4-5".into()));
    m
}

fn defragment(m: &mut Machine) -> DefragPlan {
    match m.command(Command::Defrag { caller: ROOT }) {
        Ok(Reply::Moved(defrag_plan)) => *defrag_plan,
        other => panic!("{other:?}"),
    }
}

#[test]
fn jobs_are_not_moved_without_a_command() {
    let mut m = fragmented_machine();
    assert!(m.settle().is_empty());
    assert_eq!((m.grant("a"), m.grant("b")), ("0-1".into(), "4-5".into()));
}

#[test]
fn threads_follow_a_moved_job_and_a_release_restores_their_masks() {
    let mut m = fragmented_machine();
    let defrag_plan = defragment(&mut m);
    assert_eq!(defrag_plan.moves.len(), 1);
    assert_eq!(
        (defrag_plan.largest_requests_before.package, defrag_plan.largest_requests_after.package),
        (2, 4)
    );
    assert_eq!((m.grant("a"), m.grant("b")), ("6-7".into(), "4-5".into()));
    assert_eq!(
        [m.effective_mask(10, 10), m.effective_mask(10, 11), m.effective_mask(20, 20)],
        ["6-7", "7", "4-5"]
    );
    assert_eq!(m.state.pool.free_cpus(), cpu_set("0-3"));
    assert_eq!(defragment(&mut m).moves, [], "a second defragmentation moves nothing");
    m.release("a").unwrap();
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(10, 11)], ["0-7", "1"]);
}

#[test]
fn a_move_is_reported_with_its_reason() {
    let mut m = fragmented_machine();
    let replies = m.settle_with(&[Command::Defrag { caller: ROOT }]);
    assert!(replies.0[0].is_ok());
    let because = &m.state.jobs[&job("a")].grant.as_ref().unwrap().reasons;
    assert_eq!(
        because[0],
        "moved from CPUs 0-1 to reduce fragmentation: one package can then serve 4 cores instead of 2"
    );
    let resized: Vec<_> = m.events.iter().filter(|event| event.kind == EventKind::Resized).collect();
    assert_eq!(resized.len(), 1);
    assert_eq!(resized[0].text, format!("CPUs 6-7 instead of CPUs 0-1: {}", because[0]));
    assert_eq!((resized[0].job.as_ref(), resized[0].cpus.as_ref()), (Some(&job("a")), Some(&cpu_set("6-7"))));
}

#[test]
fn a_moved_job_keeps_its_new_cores_after_a_restart() {
    let mut m = fragmented_machine();
    defragment(&mut m);
    let mut state = WardenState::new(m.state.topology.clone(), &cpu_set(""));
    m.state.records().into_iter().for_each(|record| state.apply_record(record));
    m.state = state;
    assert!(m.settle().is_empty());
    assert_eq!((m.grant("a"), m.effective_mask(10, 10)), ("6-7".into(), "6-7".into()));
    m.release("a").unwrap();
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(10, 11)], ["0-7", "1"]);
}

/// A job may move to cores that another job has just left. Each record must be valid for the pool that the earlier
/// records result in.
#[test]
fn a_journal_of_moves_is_valid_when_truncated_anywhere() {
    let mut m = machine();
    for (name, cpus) in [("a", "0,4"), ("b", "1,5"), ("c", "2,6")] {
        m.command(Command::Assign(assign_of(name, Some(CpuRequest::Exactly(cpu_set(cpus)))))).unwrap();
        m.assign(name, 2, &[]).unwrap();
    }
    let before = m.state.records();
    let moves = defragment(&mut m).moves;
    let moves: Vec<String> = moves.iter().map(|m| format!("{} {} -> {}", m.job, m.from, m.to)).collect();
    assert_eq!(moves, ["manual:a 0,4 -> 0,3", "manual:b 1,5 -> 4-5", "manual:c 2,6 -> 1-2"]);
    let records: Vec<Record> = m.records.clone();
    let jobs = m.state.jobs.len();
    for end in 0..=records.len() {
        let mut state = WardenState::new(m.state.topology.clone(), &cpu_set(""));
        before.iter().chain(&records[..end]).for_each(|record| state.apply_record(record.clone()));
        let granted = state.jobs.values().filter(|job| job.grant.is_some()).count();
        assert_eq!(granted, jobs, "after {end} records every job still has its cores");
    }
}

#[test]
fn only_administrators_defragment_and_only_in_enforce_mode() {
    let mut m = fragmented_machine();
    assert_eq!(m.command(Command::Defrag { caller: ALICE }), Err(Refusal::DefragNeedsAdmin));
    m.policy.mode = DaemonMode::Observe;
    assert_eq!(m.command(Command::Defrag { caller: ROOT }), Err(Refusal::ObserveOnly));
    assert_eq!((m.grant("a"), m.effective_mask(10, 10)), ("0-1".into(), "0-1".into()));
}
