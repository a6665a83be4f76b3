//! The number of cores that a job wants, and the CPUs that the core map of a job has.

use pjw_core::command::{AssignCommand, Caller, Command, Reply};
use pjw_core::core_map::core_map;
use pjw_core::ids::Pid;
use pjw_core::job::{CpuRequest, Job, PriorityClass};
use pjw_core::policy::DaemonMode;
use pjw_core::record::Record;
use pjw_core::refusal::Refusal;
use pjw_core::state::WardenState;

use crate::machine::{ALICE, Machine, ROOT, assign_of, cpu_set, job, machine};

fn want(m: &mut Machine, id: &str, cores: Option<u32>, caller: Caller) -> Result<Job, Refusal> {
    match m.command(Command::Want { job: job(id), cores, caller })? {
        Reply::Wanted(job) => Ok(*job),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_wanted_number_changes_no_grant_and_counts_up_to_the_request_of_the_job() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    let granted = m.assign("a", 4, &[10]).unwrap();
    let counts = |m: &Machine| m.state.jobs[&job("a")].wanted_core_count(&m.state.topology);
    assert_eq!(counts(&m), None);
    for (given, counted) in [(2, 2), (0, 0), (64, 4)] {
        let wanting = want(&mut m, "a", Some(given), ROOT).unwrap();
        assert_eq!((counts(&m), wanting.wanted_cores.unwrap().count), (Some(counted), given));
        assert_eq!((&wanting.grant, &wanting.request), (&granted.grant, &granted.request), "{given}");
    }
    m.assign("a", 6, &[]).unwrap();
    assert_eq!(counts(&m), Some(6), "the limit grows with the request");
    want(&mut m, "a", None, ROOT).unwrap();
    assert_eq!(counts(&m), None);
}

#[test]
fn a_besteffort_job_of_root_may_want_all_cores_of_the_machine() {
    let mut m = machine();
    let class = Some(PriorityClass::Besteffort);
    let assign = AssignCommand { class, ..assign_of("a", Some(CpuRequest::Cores(1))) };
    m.command(Command::Assign(assign)).unwrap();
    let wanting = want(&mut m, "a", Some(64), ROOT).unwrap();
    assert_eq!(wanting.wanted_core_count(&m.state.topology), Some(8));
}

#[test]
fn a_besteffort_job_of_a_user_wants_at_most_the_cores_that_the_limit_of_the_user_counts() {
    let mut m = machine();
    m.policy.user_max_cores = 1;
    m.policy.housekeeping_cpus = cpu_set("0-1");
    m.state = WardenState::new(m.state.topology.clone(), &cpu_set("0-1"));
    m.spawn(10, 1, ALICE.uid.0);
    m.spawn(20, 1, 0);
    let class = Some(PriorityClass::Besteffort);
    let pids = [Pid(10)].into();
    let assign = AssignCommand { class, pids, caller: ALICE, ..assign_of("a", Some(CpuRequest::Cores(1))) };
    m.command(Command::Assign(assign)).unwrap();
    want(&mut m, "a", Some(64), ALICE).unwrap();
    let wanted = |m: &Machine| m.state.jobs[&job("a")].wanted_core_count(&m.state.topology);
    m.settle();
    assert_eq!((wanted(&m), m.grant("a").as_str()), (Some(1), "2"));
    m.assign("all", 6, &[20]).unwrap();
    assert_eq!((wanted(&m), m.grant("a").as_str()), (Some(1), "0-1"), "it shares the housekeeping PUs");
    m.release("all").unwrap();
    assert_eq!((wanted(&m), m.grant("a").as_str()), (Some(1), "2"));
}

#[test]
fn a_wanted_number_is_journaled_once_and_survives_a_restart() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 4, &[10]).unwrap();
    let first = want(&mut m, "a", Some(2), ROOT).unwrap();
    let has_job = |m: &Machine| m.records.iter().any(|record| matches!(record, Record::Job(_)));
    assert!(has_job(&m));
    assert_eq!(want(&mut m, "a", Some(2), ROOT).unwrap(), first, "the time of the first one stays");
    assert!(!has_job(&m), "the same number again is no change");
    let recorded = m.state.records().into_iter().any(|record| record == Record::Job(first.clone()));
    assert!(recorded, "the state has the record");
}

#[test]
fn only_the_owner_and_administrators_set_the_wanted_number_of_a_job() {
    let mut m = machine();
    m.spawn(10, 1, ALICE.uid.0);
    m.assign("a", 2, &[10]).unwrap();
    let other_user = Caller { uid: pjw_core::ids::Uid(4711), is_admin: false };
    assert!(matches!(want(&mut m, "a", Some(1), other_user), Err(Refusal::JobNotOwned { .. })));
    assert!(want(&mut m, "a", Some(1), ALICE).is_ok(), "the owner may set it");
    assert!(matches!(want(&mut m, "b", Some(1), ROOT), Err(Refusal::NoSuchJob { .. })));
    m.policy.mode = DaemonMode::Observe;
    assert!(matches!(want(&mut m, "a", Some(1), ROOT), Err(Refusal::ObserveOnly)));
}

#[test]
fn a_core_map_has_the_cores_of_the_grant_that_are_online_and_only_where_pjw_enforces_them() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 4, &[10]).unwrap();
    let map = |m: &Machine| core_map(&m.state, &m.policy, &m.state.jobs[&job("a")]);
    let shown = map(&m).unwrap();
    assert_eq!((&shown.own, shown.core_count, &shown.cpus()), (&cpu_set("0-3"), 4, &cpu_set("0-3")));
    m.policy.mode = DaemonMode::Observe;
    assert_eq!(map(&m), None);
    m.policy.mode = DaemonMode::Enforce;
    m.state.pool.set_online(&cpu_set("0-2,4-7"));
    let shown = map(&m).unwrap();
    assert_eq!((&shown.own, shown.core_count), (&cpu_set("0-2"), 3));
}
