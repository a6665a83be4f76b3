//! The cost of a decision: it visits the jobs that it concerns, and the number of other jobs does not matter.

use std::sync::Arc;

use pjw_core::audit::{GrantAudit, audit_actions};
use pjw_core::command::{AssignCommand, Command};
use pjw_core::command_scan::command_scan_request;
use pjw_core::cpuset_group::CpusetHierarchy;
use pjw_core::ids::Pid;
use pjw_core::job::CpuRequest;
use pjw_core::policy::{ExhaustionPolicy, Policy};
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::testing::{job, regular_topology};
use pjw_core::time::Nanos;

use crate::machine::{Machine, ROOT, assign_of, in_cgroup, machine_with, policy_with_cpusets};

/// The pid of the first process that belongs to no job.
const OUTSIDE: u32 = 50;

/// A machine with this number of jobs of one core and one process each, which are all idle. Fork events are monitored.
/// The machine has this number of cores; if it has fewer cores than jobs, the jobs share them. Each job belongs to
/// another user, who has a process outside of the job too.
fn with_jobs(jobs: u32, cores: u32, hierarchy: CpusetHierarchy) -> Machine {
    with_jobs_that(ExhaustionPolicy::Share, jobs, cores, hierarchy)
}

/// The same, where the jobs for which the machine has no cores share them, or wait.
fn with_jobs_that(
    exhaustion_policy: ExhaustionPolicy,
    jobs: u32,
    cores: u32,
    hierarchy: CpusetHierarchy,
) -> Machine {
    let policy = Policy { exhaustion_policy, ..policy_with_cpusets(hierarchy, true) };
    let mut machine = machine_with(regular_topology(1, 1, 1, cores, 1), policy);
    machine.audits_plans = false;
    machine.world().pid_max = 10_000;
    machine.spawn(OUTSIDE, 1, 1000);
    let assign = |n: u32| {
        machine.spawn(100 + n, 1, 1001 + n);
        machine.spawn(2000 + n, 1, 1001 + n);
        let assign = assign_of(&format!("idle-{n}"), Some(CpuRequest::Cores(1)));
        Command::Assign(AssignCommand { pids: vec![Pid(100 + n)], caller: ROOT, ..assign })
    };
    let commands: Vec<Command> = (0..jobs).map(assign).collect();
    assert!(machine.settle_with(&commands).0.iter().all(Result::is_ok));
    for _ in 0..2 {
        machine.run(&[]);
        machine.settle();
    }
    let strays = machine.warnings().into_iter().filter(|code| *code == "stray").count();
    assert_eq!(strays, jobs as usize);
    machine.state.fork_events_complete_since = Some(Nanos(0));
    machine.state.full_scan_due = false;
    // The node learns the CPU times of the idle processes.
    for _ in 0..2 {
        let scan = machine.state.scan_request(false);
        let _ = machine.cycle(&scan, &[]);
    }
    machine
}

/// The jobs that are visited until the cycles have nothing left to do, by the decisions and by their audit. The first
/// cycle has this scan and these commands. Each decision plans at most `most_changed` jobs because they changed.
fn visits(machine: &mut Machine, scan: ScanRequest, commands: &[Command], most_changed: usize) -> usize {
    let mut audit = GrantAudit::new(&machine.state, &machine.policy);
    machine.state.jobs.take_changed_ids();
    machine.state.jobs.take_read_count();
    let (mut scan, mut commands) = (Some(scan), commands);
    while let Some(request) = scan.take() {
        assert_ne!(request.scope, ScanScope::Full);
        let decision = machine.cycle(&request, std::mem::take(&mut commands));
        let changed = machine.state.jobs.take_changed_ids();
        audit.update(&machine.state, &changed, &machine.policy);
        assert_eq!(audit.violations().next(), None);
        // The actions are carried out already. To audit them visits the same jobs as before.
        let _ = audit_actions(&machine.state, &decision.plan, &machine.policy);
        assert!(decision.replies.iter().all(Result::is_ok), "{:?}", decision.replies);
        let dirty: Vec<_> = decision.newly_planned.listed_jobs().map(|(job, _)| job.to_string()).collect();
        assert!(!decision.newly_planned.contains_everything() && dirty.len() <= most_changed, "{dirty:?}");
        scan.clone_from(&decision.next_scan);
        machine.last = Some(decision);
    }
    machine.state.jobs.take_read_count()
}

fn visits_of_command(machine: &mut Machine, command: Command, most_changed: usize) -> usize {
    let commands = [command];
    let scan = command_scan_request(&mut machine.state, &commands);
    visits(machine, scan, &commands, most_changed)
}

fn visits_of_each_change(jobs: u32, cores: u32, hierarchy: &CpusetHierarchy) -> [(&'static str, usize); 4] {
    let mut machine = with_jobs(jobs, cores, hierarchy.clone());
    let idle = machine.state.scan_request(false);
    let idle = visits(&mut machine, idle, &[], 1);
    let (pids, amount) = (vec![Pid(OUTSIDE)], Some(CpuRequest::Cores(1)));
    let assign = AssignCommand { pids, caller: ROOT, ..assign_of("new", amount) };
    let assign = visits_of_command(&mut machine, Command::Assign(assign), 1);
    machine.spawn(60, OUTSIDE, 1000);
    let scope = ScanScope::Partial([Pid(60)].into());
    let birth = ScanRequest { scope, cgroups: [].into(), ..machine.state.scan_request(false) };
    let birth = visits(&mut machine, birth, &[], 1);
    assert_eq!(machine.member(60), "manual:new by Parent");
    let release = visits_of_command(&mut machine, Command::Release { job: job("new"), caller: ROOT }, 1);
    [("idle scan", idle), ("assign", assign), ("birth", birth), ("release", release)]
}

/// The same visits beside 20 and beside 600 jobs.
fn check_visits(cores: u32, hierarchy: &CpusetHierarchy) {
    assert_eq!(visits_of_each_change(20, cores, hierarchy), visits_of_each_change(600, cores, hierarchy));
}

#[test]
fn an_idle_scan_a_birth_and_a_command_visit_the_same_number_of_jobs_beside_20_and_beside_600_jobs() {
    check_visits(1024, &CpusetHierarchy::Unavailable { why: "a test".to_owned() });
}

#[test]
fn the_number_of_visited_jobs_is_the_same_beside_20_and_600_jobs_that_share_the_cores() {
    check_visits(4, &CpusetHierarchy::Unavailable { why: "a test".to_owned() });
}

#[test]
fn the_number_of_visited_jobs_is_the_same_beside_20_and_600_jobs_in_cpusets() {
    check_visits(1024, &CpusetHierarchy::Unified);
}

/// The visits of the release of a job beside this number of idle jobs with cores, and of waiting jobs. One of the
/// waiting jobs gets the core.
fn visits_of_release_beside(idle: u32, waiting: u32) -> usize {
    let hierarchy = CpusetHierarchy::Unavailable { why: "a test".to_owned() };
    let mut machine = with_jobs_that(ExhaustionPolicy::Wait, idle + waiting, idle, hierarchy);
    assert_eq!(machine.state.jobs.values().filter(|job| job.grant.is_some()).count(), idle as usize);
    let visits = visits_of_command(&mut machine, Command::Release { job: job("idle-0"), caller: ROOT }, 2);
    assert_eq!(machine.state.jobs.values().filter(|job| job.grant.is_some()).count(), idle as usize);
    visits
}

#[test]
fn a_release_visits_the_waiting_jobs_a_fixed_number_of_times_and_no_idle_job() {
    let of = visits_of_release_beside;
    assert_eq!(of(20, 10), of(600, 10), "beside 20 and beside 600 idle jobs");
    let per_waiting = (of(4, 110) - of(4, 10)) / 100;
    assert_eq!(of(4, 610), of(4, 10) + 600 * per_waiting, "each waiting job costs the same");
    assert!(per_waiting <= 10, "{per_waiting} visits of each waiting job in all cycles together");
}

/// The visits of the request for a scan, of this scan, which finds nothing new, and of the birth of a process of a job.
/// On the machine, this number of jobs wait for cores, each with a warning of this code.
fn visits_of_idle_scan_and_birth(machine: &mut Machine, waiting: u32, code: &str) -> [usize; 3] {
    machine.state.jobs.take_read_count();
    let idle = machine.state.scan_request(false);
    let request = machine.state.jobs.take_read_count();
    assert!(idle.cgroups.is_empty(), "the node reads the cgroups of waiting jobs when they change: {idle:?}");
    let idle = visits(machine, idle, &[], 1);
    let warned = |machine: &Machine| machine.warnings().iter().filter(|warning| **warning == code).count();
    assert_eq!(warned(machine), waiting as usize, "the warnings stay as they are");
    let listed = Arc::clone(&machine.last.as_ref().unwrap().warnings);
    machine.spawn(60, 100, 1001);
    let scope = ScanScope::Partial([Pid(60)].into());
    let birth = ScanRequest { scope, cgroups: [].into(), ..machine.state.scan_request(false) };
    let birth = visits(machine, birth, &[], 1);
    assert_eq!(machine.member(60), "manual:idle-0 by Parent");
    assert!(Arc::ptr_eq(&listed, &machine.last.as_ref().unwrap().warnings), "the list is not copied");
    [request, idle, birth]
}

/// The same beside this number of jobs that wait for free cores.
fn visits_beside_waiting(waiting: u32) -> [usize; 3] {
    let hierarchy = CpusetHierarchy::Unavailable { why: "a test".to_owned() };
    let mut machine = with_jobs_that(ExhaustionPolicy::Wait, 4 + waiting, 4, hierarchy);
    visits_of_idle_scan_and_birth(&mut machine, waiting, "unserved")
}

/// The same where jobs share cores. The batch system does not say how many cores the waiting jobs have.
fn visits_beside_unknown_counts(waiting: u32) -> [usize; 3] {
    let hierarchy = CpusetHierarchy::Unavailable { why: "a test".to_owned() };
    let mut machine = with_jobs(4, 4, hierarchy);
    for n in 0..waiting {
        let (id, path) = (format!("slurm:{n}"), format!("/slurm/uid_1001/job_{n}"));
        in_cgroup(machine.spawn(4000 + n, 1, 5001 + n), &id, &path, None);
    }
    for _ in 0..2 {
        machine.run(&[]);
        machine.settle();
    }
    // The node learns the CPU times of the idle processes.
    for _ in 0..2 {
        let scan = machine.state.scan_request(false);
        let _ = machine.cycle(&scan, &[]);
    }
    visits_of_idle_scan_and_birth(&mut machine, waiting, "unknown-count")
}

#[test]
fn an_idle_scan_and_a_birth_visit_no_waiting_job() {
    assert_eq!(visits_beside_waiting(10), visits_beside_waiting(610));
    assert_eq!(visits_beside_unknown_counts(10), visits_beside_unknown_counts(610));
}
