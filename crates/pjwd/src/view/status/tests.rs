//! The published status of states that the tests make.

use std::collections::BTreeMap;

use pjw_core::cpuset::CpuSet;
use pjw_core::evidence::MembershipEvidence;
use pjw_core::ids::{Pid, StartTime};
use pjw_core::job::{
    CpuRequest, EndCondition, Grant, GrantedBy, Job, JobId, JobRequest, Ownership, PriorityClass,
};
use pjw_core::policy::{Policy, StarvedPolicy};
use pjw_core::snapshot::{BatchIdentity, JobIdAttribute, JobReference, Process};
use pjw_core::state::{KnownProcess, Member};
use pjw_core::testing::{process, regular_topology};
use pjw_core::time::{Nanos, UnixMillis};
use pjw_core::unassigned::unassigned_pids_by_user;

use crate::view::counts::ProcessCounts;
use crate::view::to_wire::{MAX_TEXT_BYTES, evidence_name};
use crate::view::warnings::job_warnings;

use super::*;

#[test]
fn event_texts_are_truncated_between_characters() {
    let published = |text: &str| event_to_wire(&Event::new(EventKind::Refused, text)).text;
    assert_eq!(published(&"x".repeat(MAX_TEXT_BYTES)), "x".repeat(MAX_TEXT_BYTES));
    let long = published(&"ä".repeat(50_000));
    assert!(long.len() <= MAX_TEXT_BYTES && long.ends_with("ä…"), "{} bytes", long.len());
}

/// Four cores of two PUs each: 0 and 4, 1 and 5, …
fn machine() -> Topology {
    regular_topology(1, 1, 1, 4, 2)
}

fn job(id: &str, owner: u32) -> Job {
    Job::new(id.parse().unwrap(), Uid(owner), EndCondition::LastProcessExit, UnixMillis(0))
}

fn state(jobs: Vec<Job>, processes: Vec<Process>) -> WardenState {
    let mut state = WardenState::new(machine(), &CpuSet::new());
    jobs.into_iter().for_each(|job| state.jobs.insert(job));
    let known = |process| KnownProcess {
        process,
        batch_identity: BatchIdentity::default(),
        first_seen: Nanos(0),
        was_read_once: false,
        last_cgroup_change: None,
    };
    processes.into_iter().for_each(|process| state.processes.insert(known(process)));
    state
}

fn enroll(state: &mut WardenState, pid: u32, job: &str) {
    let member = Member {
        id: state.processes[&Pid(pid)].process.id,
        job: job.parse().unwrap(),
        evidence: MembershipEvidence::Cgroup,
        inherited_mask: None,
        was_new_at_join: true,
        numa_node: None,
        first_seen: None,
        threads: BTreeMap::new(),
    };
    state.members.insert(member);
}

fn published_jobs(state: &WardenState, policy: &Policy) -> Vec<Arc<wire::Job>> {
    let mut views = JobViews::default();
    views.update(state, policy, &DirtySet::everything());
    views.jobs()
}

fn published_strays(state: &WardenState, policy: &Policy) -> Vec<u32> {
    let mut state = state.clone();
    state.unassigned_pids_by_user = unassigned_pids_by_user(&state, policy);
    published_jobs(&state, policy).iter().map(|job| job.strays).collect()
}

#[test]
fn requests_are_published_in_cores() {
    let topology = machine();
    let first = topology.pus_in_logical_order()[0];
    let cores = |amount: CpuRequest| amount.core_count(&topology);
    assert_eq!(cores(CpuRequest::Cores(3)), 3);
    assert_eq!([1, 2, 3, 4].map(|n| cores(CpuRequest::Pus(n))), [1, 1, 2, 2]);
    assert_eq!(cores(CpuRequest::Exactly(topology.core_cpus(first))), 1);
    assert_eq!(cores(CpuRequest::Exactly(CpuSet::from(first))), 1, "half a core is a core");
    assert_eq!(cores(CpuRequest::Exactly(topology.cpus().clone())), 4);
}

#[test]
fn a_job_without_cores_waits_unless_it_is_a_borrower_without_a_process() {
    let with_class = |id: &str, class: PriorityClass| {
        let request = JobRequest { class, ..JobRequest::with_core_count(1) };
        Job { request: Some(request), ..job(id, 500) }
    };
    let jobs = vec![
        with_class("a", PriorityClass::Normal),
        with_class("b", PriorityClass::Besteffort),
        with_class("c", PriorityClass::Besteffort),
    ];
    let mut state = state(jobs, vec![process(10, 500)]);
    enroll(&mut state, 10, "c");
    let published = published_jobs(&state, &Policy::default());
    let states: Vec<&str> = published.iter().map(|job| job.state.as_str()).collect();
    assert_eq!(states, ["waiting", "reserved", "waiting"]);
}

#[test]
fn strays_are_counted_by_the_policy_in_force() {
    let processes = vec![process(10, 500), process(11, 500), process(12, 501), process(13, 500)];
    let mut state = state(vec![job("a", 500)], processes);
    enroll(&mut state, 10, "a");
    let usual = Policy::default();
    assert_eq!(published_strays(&state, &usual), [0], "below first_person_uid nobody is a person");
    let own = Policy { first_person_uid: 500, own_pid: Some(Pid(13)), ..Policy::default() };
    assert_eq!(published_strays(&state, &own), [1], "the members, the warden and others' processes are none");
}

fn holding(name: &str, cpus: &str, shared: bool) -> Job {
    let grant = Grant {
        cpus: cpus.parse().unwrap(),
        granted_by: GrantedBy::Warden,
        is_shared: shared,
        may_split_cores: false,
        granted_at: Nanos(0),
        reasons: Vec::new(),
        second_best: String::new(),
        ownership: Ownership::Owned,
    };
    Job { grant: Some(grant), ..job(name, 0) }
}

#[test]
fn both_jobs_that_hold_a_cpu_are_marked_as_shared() {
    let jobs_held = vec![holding("a", "0-1", false), holding("b", "1", true), holding("c", "2", false)];
    let state = state(jobs_held, Vec::new());
    let published = published_jobs(&state, &Policy::default());
    assert_eq!(published.iter().map(|job| job.shared).collect::<Vec<_>>(), [true, true, false]);
}

#[test]
fn a_job_that_holds_housekeeping_cpus_causes_a_warning() {
    let state = state(vec![holding("a", "0-1", false), holding("b", "2", false)], Vec::new());
    let policy = Policy { housekeeping_cpus: "1".parse().unwrap(), ..Policy::default() };
    let mut views = JobViews::default();
    views.update(&state, &policy, &DirtySet::everything());
    let published = views.warnings().map(|published| (published.code.as_str(), published.job.as_str()));
    assert_eq!(published.collect::<Vec<_>>(), [("housekeeping", "manual:a")]);
}

#[test]
fn a_borrower_that_shares_housekeeping_cpus_or_is_frozen_does_not_hold_them() {
    let policy = Policy { housekeeping_cpus: "1".parse().unwrap(), ..Policy::default() };
    let codes = |ownership| {
        let mut job = holding("a", "0-1", false);
        job.grant.as_mut().unwrap().ownership = ownership;
        let warnings = job_warnings(&job, &policy, ProcessCounts::default());
        warnings.into_iter().map(|warning| warning.code).collect::<Vec<_>>()
    };
    assert_eq!(codes(Ownership::Owned), ["housekeeping"]);
    assert_eq!(codes(Ownership::Squeezed), Vec::<String>::new());
    assert_eq!(codes(Ownership::Borrowed), Vec::<String>::new());
    assert_eq!(codes(Ownership::Frozen), ["frozen"]);
}

#[test]
fn jobs_that_did_not_change_are_neither_computed_nor_copied_again() {
    let mut state = state((0..3).map(|n| holding(&format!("{n}"), "0", true)).collect(), Vec::new());
    let (policy, mut views) = (Policy::default(), JobViews::default());
    let codes = |warnings: &[Arc<wire::Warning>]| {
        warnings.iter().map(|warning| format!("{} {}", warning.code, warning.job)).collect::<Vec<_>>()
    };
    let first = views.update(&state, &policy, &DirtySet::everything());
    assert_eq!(codes(&first.begun), ["overlap manual:0", "overlap manual:1", "overlap manual:2"]);
    let before = views.jobs();
    let id: JobId = "1".parse().unwrap();
    state.jobs.update(&id, |job| job.grant.iter_mut().for_each(|grant| grant.is_shared = false));
    let mut dirty = DirtySet::default();
    dirty.add_job(&id);
    let changes = views.update(&state, &policy, &dirty);
    assert_eq!(
        (codes(&changes.begun), codes(&changes.ended)),
        (Vec::new(), vec!["overlap manual:1".to_owned()])
    );
    let same = before.iter().zip(&views.jobs()).map(|(old, new)| Arc::ptr_eq(old, new)).collect::<Vec<_>>();
    assert_eq!(same, [true, false, true]);
    let nothing = views.update(&state, &policy, &DirtySet::default());
    assert!(!nothing.is_any && nothing.begun.is_empty() && nothing.ended.is_empty());
}

#[test]
fn a_member_outside_its_schedulers_cgroup_is_a_stray() {
    let there = Job { cgroup: Some("/slurm/job_7".to_owned()), ..job("slurm:7", 0) };
    let mut state = state(vec![there], vec![process(10, 0), process(11, 0)]);
    for pid in [10, 11] {
        enroll(&mut state, pid, "slurm:7");
    }
    let kind = JobIdAttribute::Cgroup("/slurm/job_7".to_owned());
    let claim = JobReference { job: "slurm:7".parse().unwrap(), kind, cpu_request: None, tasks: None };
    let mut known = state.processes[&Pid(10)].clone();
    known.batch_identity.job_references.push(claim);
    state.processes.insert(known);
    assert_eq!(published_strays(&state, &Policy::default()), [1]);
}

fn stray(pid: u32) -> Warning {
    Warning {
        job: None,
        pid: Some(Pid(pid)),
        code: "stray",
        text: format!("strays such as {pid}"),
        remedy: String::new(),
    }
}

#[test]
fn the_oldest_unassigned_process_of_a_user_is_reported() {
    let started_at = |pid, start| {
        let mut process = process(pid, 1000);
        process.id.start = StartTime(start);
        process
    };
    // The pids have wrapped around, so the youngest process has the lowest one.
    let (command, shell, server) = (started_at(10, 900), started_at(50, 100), started_at(60, 200));
    let mut state = state(vec![job("a", 1000)], vec![command, shell, server]);
    state.unassigned_pids_by_user.insert(Uid(1000), [10, 50, 60].map(Pid).into());
    state.login_pids_by_user.insert(Uid(1000), [Pid(50)].into());
    let (mut publisher, mut published) = StatusPublisher::new("here".to_owned(), &state.topology);
    publisher.report_unassigned(&state, &[Arc::new(stray(10))]);
    assert_eq!(published.events.try_recv().unwrap().pid, Some(60));
}

#[test]
fn the_first_unassigned_process_of_a_user_is_reported() {
    let state = state(vec![job("a", 1000)], vec![process(10, 1000), process(11, 1001)]);
    let (mut publisher, mut published) = StatusPublisher::new("here".to_owned(), &state.topology);
    let mut published = |strays: &[u32]| {
        let strays: Vec<_> = strays.iter().map(|&pid| Arc::new(stray(pid))).collect();
        publisher.report_unassigned(&state, &strays);
        let events = std::iter::from_fn(|| published.events.try_recv().ok());
        events.map(|event| (event.event.clone(), event.pid.unwrap())).collect::<Vec<_>>()
    };
    let event = |pid| ("stray".to_owned(), pid);
    assert_eq!(published(&[10]), [event(10)]);
    assert_eq!(published(&[10]), [], "once");
    assert_eq!(published(&[10, 11]), [event(11)], "another user's are news");
    assert_eq!(published(&[11]), []);
    assert_eq!(published(&[10, 11]), [event(10)], "and so are those that come again");
}

#[test]
fn evidence_has_the_names_that_the_contract_lists() {
    let contract = include_str!("../../../../../docs/contract.md");
    let listed = contract.split_once("`evidence` (").and_then(|(_, rest)| rest.split_once(')')).unwrap().0;
    for evidence in [
        MembershipEvidence::Registered,
        MembershipEvidence::Cgroup,
        MembershipEvidence::Parent,
        MembershipEvidence::Session,
        MembershipEvidence::Provision,
        MembershipEvidence::Environment,
        MembershipEvidence::Adopted,
    ] {
        let name = evidence_name(evidence);
        assert!(listed.contains(&format!("`{name}`")), "{name} is not in {listed}");
    }
}

#[test]
fn a_frozen_job_has_a_warning_until_it_borrows_a_core() {
    let codes = |ownership| {
        let mut job = holding("a", "1", false);
        job.grant.as_mut().unwrap().ownership = ownership;
        let warnings = job_warnings(&job, &Policy::default(), ProcessCounts::default());
        warnings.into_iter().map(|warning| (warning.code, warning.job)).collect::<Vec<_>>()
    };
    assert_eq!(codes(Ownership::Frozen), [("frozen".to_owned(), "manual:a".to_owned())]);
    assert!(codes(Ownership::Borrowed).is_empty() && codes(Ownership::Squeezed).is_empty());
}

#[test]
fn the_remedy_for_a_frozen_job_names_no_setting_that_is_in_force() {
    let remedy = |housekeeping: &str, starved| {
        let mut job = holding("a", "1", false);
        job.grant.as_mut().unwrap().ownership = Ownership::Frozen;
        let mut policy = Policy { housekeeping_cpus: housekeeping.parse().unwrap(), ..Policy::default() };
        policy.lending.starved = starved;
        let mut warnings = job_warnings(&job, &policy, ProcessCounts::default());
        warnings.pop().unwrap().remedy
    };
    let release = "release a job (pjwctl jobs shows which hold the cores)";
    let not_set = remedy("", StarvedPolicy::Squeeze);
    assert!(not_set.contains("a CPU that a job holds becomes housekeeping when the job ends"), "{not_set}");
    let freezing = remedy("0", StarvedPolicy::Freeze);
    assert!(freezing.ends_with(&format!("{release}, or set starved = \"squeeze\"")), "{freezing}");
    let held = remedy("0", StarvedPolicy::Squeeze);
    let ending = format!("or a job that holds the housekeeping CPU 0 ends or is released; {release}");
    assert!(held.ends_with(&ending) && !held.contains("set "), "{held}");
}

#[test]
fn more_hot_threads_than_cpus_are_told_as_what_they_want_and_not_as_what_runs() {
    let texts = |job: &Job, hot| {
        let counts = ProcessCounts { hot_threads: hot, ..ProcessCounts::default() };
        let warnings = job_warnings(job, &Policy::default(), counts);
        warnings.into_iter().map(|warning| warning.text).collect::<Vec<_>>()
    };
    let holding = holding("a", "1", false);
    assert_eq!(texts(&holding, 3), ["3 threads of manual:a want a CPU most of the time, and it has 1 CPU"]);
    assert!(texts(&holding, 1).is_empty() && texts(&job("a", 0), 3).is_empty());
}
