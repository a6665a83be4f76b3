//! Healing fragmentation: on request only, by administrators only, and everything can be undone.

use pjw_core::command::{Command, Refusal, Reply};
use pjw_core::defrag::Defrag;
use pjw_core::event::EventKind;
use pjw_core::job::Amount;
use pjw_core::policy::Mode;
use pjw_core::record::Record;
use pjw_core::state::WardenState;

use crate::machine::{ALICE, Machine, ROOT, job, machine, set, wish};

/// Two jobs of two cores, each alone in a package.
fn fragmented() -> Machine {
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

fn heal(m: &mut Machine) -> Defrag {
    match m.command(Command::Defrag { caller: ROOT }) {
        Ok(Reply::Moved(healing)) => *healing,
        other => panic!("{other:?}"),
    }
}

#[test]
fn jobs_stay_until_somebody_asks() {
    let mut m = fragmented();
    assert!(m.settle().is_empty());
    assert_eq!((m.grant("a"), m.grant("b")), ("0-1".into(), "4-5".into()));
}

#[test]
fn threads_follow_their_job_at_once_and_a_release_still_puts_everything_back() {
    let mut m = fragmented();
    let healing = heal(&mut m);
    assert_eq!(healing.moves.len(), 1);
    assert_eq!((healing.fits_before.package, healing.fits_after.package), (2, 4));
    assert_eq!((m.grant("a"), m.grant("b")), ("6-7".into(), "4-5".into()));
    assert_eq!([m.mask(10, 10), m.mask(10, 11), m.mask(20, 20)], ["6-7", "7", "4-5"]);
    assert_eq!(m.state.pool.free(), set("0-3"));
    assert_eq!(heal(&mut m).moves, [], "healed is healed");
    m.release("a").unwrap();
    assert_eq!([m.mask(10, 10), m.mask(10, 11)], ["0-7", "1"]);
}

#[test]
fn the_move_is_told_with_its_reason() {
    let mut m = fragmented();
    let replies = m.settle_with(&[Command::Defrag { caller: ROOT }]);
    assert!(replies.0[0].is_ok());
    let because = &m.state.jobs[&job("a")].grant.as_ref().unwrap().because;
    assert_eq!(
        because[0],
        "moved from CPUs 0-1 to heal fragmentation: one package can then serve 4 cores instead of 2"
    );
    let told: Vec<_> = m.told.iter().filter(|event| event.kind == EventKind::Resized).collect();
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].text, format!("CPUs 6-7 instead of CPUs 0-1: {}", because[0]));
    assert_eq!((told[0].job.as_ref(), told[0].cpus.as_ref()), (Some(&job("a")), Some(&set("6-7"))));
}

#[test]
fn a_move_outlives_the_daemon() {
    let mut m = fragmented();
    heal(&mut m);
    let mut state = WardenState::new(m.state.topology.clone(), &set(""));
    m.state.records().into_iter().for_each(|record| state.replay(record));
    m.state = state;
    assert!(m.settle().is_empty());
    assert_eq!((m.grant("a"), m.mask(10, 10)), ("6-7".into(), "6-7".into()));
    m.release("a").unwrap();
    assert_eq!([m.mask(10, 10), m.mask(10, 11)], ["0-7", "1"]);
}

/// Jobs may move to where others have just been: each record must fit the ledger that those before it made.
#[test]
fn the_journal_of_moves_can_be_cut_off_anywhere() {
    let mut m = machine();
    for (name, cpus) in [("a", "0,4"), ("b", "1,5"), ("c", "2,6")] {
        m.command(Command::Assign(wish(name, Some(Amount::Exactly(set(cpus)))))).unwrap();
        m.assign(name, 2, &[]).unwrap();
    }
    let before = m.state.records();
    let moves = heal(&mut m).moves;
    let told: Vec<String> = moves.iter().map(|m| format!("{} {} -> {}", m.job, m.from, m.to)).collect();
    assert_eq!(told, ["manual:a 0,4 -> 0,3", "manual:b 1,5 -> 4-5", "manual:c 2,6 -> 1-2"]);
    let records: Vec<Record> = m.written.clone();
    let jobs = m.state.jobs.len();
    for end in 0..=records.len() {
        let mut state = WardenState::new(m.state.topology.clone(), &set(""));
        before.iter().chain(&records[..end]).for_each(|record| state.replay(record.clone()));
        let granted = state.jobs.values().filter(|job| job.grant.is_some()).count();
        assert_eq!(granted, jobs, "after {end} records every job still has its cores");
    }
}

#[test]
fn only_administrators_move_jobs_and_only_where_anything_is_changed() {
    let mut m = fragmented();
    assert_eq!(m.command(Command::Defrag { caller: ALICE }), Err(Refusal::MovesAreForAdmins));
    m.policy.mode = Mode::Observe;
    assert_eq!(m.command(Command::Defrag { caller: ROOT }), Err(Refusal::ObserveOnly));
    assert_eq!((m.grant("a"), m.mask(10, 10)), ("0-1".into(), "0-1".into()));
}
