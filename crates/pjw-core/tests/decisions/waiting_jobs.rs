//! The jobs that wait for cores, between two rescans: the daemon looks at them when they or the free cores change.

use pjw_core::command::{AssignCommand, Command};
use pjw_core::command_scan::command_scan_request;
use pjw_core::event::{Event, EventKind};
use pjw_core::ids::Pid;
use pjw_core::job::CpuRequest;
use pjw_core::policy::ExhaustionPolicy;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::testing::job;
use pjw_core::time::Nanos;

use crate::machine::{Machine, ROOT, assign_of, in_cgroup, machine};

/// A machine of eight cores where jobs wait, and where fork events are monitored.
fn machine_with_waiting() -> Machine {
    let mut m = machine();
    m.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    m.settle();
    m.state.fork_events_complete_since = Some(Nanos(0));
    m.state.full_scan_due = false;
    m
}

fn assign(id: &str, cores: u32, pids: &[u32]) -> Command {
    let pids = pids.iter().copied().map(Pid).collect();
    Command::Assign(AssignCommand { pids, caller: ROOT, ..assign_of(id, Some(CpuRequest::Cores(cores))) })
}

fn release(id: &str) -> Command {
    Command::Release { job: job(id), caller: ROOT }
}

/// Carries out one cycle with this scan and this command, if any, without a rescan.
fn cycle(m: &mut Machine, scan: &ScanRequest, commands: &[Command]) {
    assert_ne!(scan.scope, ScanScope::Full);
    let decision = m.cycle(scan, commands);
    assert!(decision.replies.iter().all(Result::is_ok), "{:?}", decision.replies);
    assert!(!decision.newly_planned.contains_everything());
    m.last = Some(decision);
}

fn execute(m: &mut Machine, command: Command) {
    let commands = [command];
    let scan = command_scan_request(&mut m.state, &commands);
    cycle(m, &scan, &commands);
}

fn idle_cycle(m: &mut Machine) {
    let scan = m.state.scan_request(false);
    cycle(m, &scan, &[]);
}

/// The texts of the warnings `unserved` about this job in the last decision.
fn unserved(m: &Machine, id: &str) -> Vec<String> {
    let of_job = m.last.as_ref().unwrap().warnings.iter().filter(|warning| warning.job == Some(job(id)));
    of_job.filter(|warning| warning.code == "unserved").map(|warning| warning.text.clone()).collect()
}

/// Panics unless the last decision has one warning that the job waits, with this number of free cores.
#[track_caller]
fn check_waits(m: &Machine, id: &str, free: &str) {
    let texts = unserved(m, id);
    assert!(texts.len() == 1 && texts[0].contains(free), "{texts:?} instead of {free}");
}

#[test]
fn the_warning_of_a_waiting_job_follows_the_free_cores_and_ends_when_the_job_is_served() {
    let mut m = machine_with_waiting();
    execute(&mut m, assign("a", 4, &[]));
    execute(&mut m, assign("b", 2, &[]));
    execute(&mut m, assign("c", 2, &[]));
    execute(&mut m, assign("large", 6, &[]));
    m.advance(1_000_000_000);
    execute(&mut m, assign("small", 3, &[]));
    check_waits(&m, "large", "core is free");
    check_waits(&m, "small", "core is free");
    execute(&mut m, release("b"));
    check_waits(&m, "large", "2 are free");
    check_waits(&m, "small", "2 are free");
    idle_cycle(&mut m);
    check_waits(&m, "large", "2 are free");
    execute(&mut m, release("c"));
    assert_eq!((unserved(&m, "small"), m.grant("small") == "-"), (vec![], false), "it is served");
    // The older job was looked at before. The next cycle finds that fewer cores are free.
    idle_cycle(&mut m);
    check_waits(&m, "large", "1 is free");
    execute(&mut m, release("large"));
    assert_eq!(unserved(&m, "large"), Vec::<String>::new());
}

/// The job and text of each of these events that says that a job begins to wait.
fn begun_waits(events: &[Event]) -> Vec<(String, String)> {
    let events = events.iter().filter(|event| event.kind == EventKind::Queued);
    events.map(|event| (event.job.as_ref().unwrap().to_string(), event.text.clone())).collect()
}

#[test]
fn the_beginning_of_a_wait_is_an_event_and_its_continuation_is_none() {
    let mut m = machine_with_waiting();
    let last_begun = |m: &Machine| begun_waits(&m.last.as_ref().unwrap().events);
    execute(&mut m, assign("a", 8, &[]));
    assert!(last_begun(&m).is_empty());
    m.advance(1_000_000_000);
    execute(&mut m, assign("b", 2, &[]));
    let begun = last_begun(&m);
    assert!(
        begun.len() == 1 && begun[0].0 == "manual:b" && begun[0].1.starts_with("waits for cores: 2 cores "),
        "{begun:?}"
    );
    idle_cycle(&mut m);
    assert!(last_begun(&m).is_empty());
    execute(&mut m, assign("b", 3, &[]));
    assert!(last_begun(&m).is_empty(), "it waits for more cores");
    execute(&mut m, release("a"));
    assert_eq!((m.grant("b") == "-", last_begun(&m).len()), (false, 0));
    // A job with the same id waits again.
    execute(&mut m, release("b"));
    execute(&mut m, assign("a", 8, &[]));
    execute(&mut m, assign("b", 1, &[]));
    assert_eq!(last_begun(&m).len(), 1);
}

#[test]
fn a_wait_that_goes_on_after_a_failed_write_of_the_journal_is_no_event() {
    let mut m = machine_with_waiting();
    execute(&mut m, assign("a", 8, &[]));
    m.advance(1_000_000_000);
    execute(&mut m, assign("b", 2, &[]));
    for may_grant in [false, true, false, true] {
        m.policy.may_grant = may_grant;
        idle_cycle(&mut m);
        assert!(begun_waits(&m.last.as_ref().unwrap().events).is_empty(), "{may_grant}");
        check_waits(&m, "b", if may_grant { "is free" } else { "can't be recorded" });
    }
    m.policy.may_grant = false;
    execute(&mut m, release("a"));
    m.policy.may_grant = true;
    idle_cycle(&mut m);
    assert_ne!(m.grant("b"), "-", "the earlier refusal is not valid any more");
}

#[test]
fn a_wait_that_goes_on_after_a_restart_is_no_event() {
    let mut m = machine_with_waiting();
    m.assign("a", 8, &[]).unwrap();
    m.assign("b", 2, &[]).unwrap();
    assert_eq!(begun_waits(&m.events).len(), 1);
    m.advance(1_000_000_000);
    let records = m.state.records();
    m.lose_state();
    records.into_iter().for_each(|record| m.state.apply_record(record));
    m.settle();
    assert_eq!((m.grant("b").as_str(), begun_waits(&m.events).len()), ("-", 0));
}

#[test]
fn a_waiting_job_ends_in_the_next_cycle_if_its_last_process_joins_another_job() {
    let mut m = machine_with_waiting();
    m.spawn(10, 1, 1001);
    m.settle();
    execute(&mut m, assign("a", 6, &[]));
    execute(&mut m, assign("b", 6, &[10]));
    m.spawn(11, 10, 1001);
    m.settle();
    m.exit(10);
    m.settle();
    assert_eq!(m.member(11), "manual:b by Parent");
    let scan = m.state.scan_request(false);
    // The command moves the process after it was decided which jobs have ended.
    cycle(&mut m, &scan, &[assign("c", 1, &[11])]);
    assert_eq!(m.member(11), "manual:c by Registered");
    idle_cycle(&mut m);
    assert!(!m.state.jobs.contains_key(&job("b")), "no process of it is left");
}

#[test]
fn a_waiting_job_ends_without_a_rescan_when_its_schedulers_cgroup_is_removed() {
    let mut m = machine_with_waiting();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", "/slurm/uid_1001/job_7", None);
    m.settle();
    assert_eq!((m.grant("slurm:7").as_str(), m.member(10).as_str()), ("-", "slurm:7 by Cgroup"));
    let scan = m.state.scan_request(false);
    assert!(scan.cgroups.is_empty(), "{scan:?}");
    // The cgroup of the simulated scheduler ends with its last process.
    m.exit(10);
    idle_cycle(&mut m);
    assert!(!m.state.jobs.contains_key(&job("slurm:7")));
}
