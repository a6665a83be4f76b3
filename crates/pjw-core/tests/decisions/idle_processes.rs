//! Cycles read and plan only the processes that changed. The scan request lists the idle ones, which are only watched.
//! Processes that were not scanned are not planned again.

use std::collections::BTreeSet;

use pjw_core::command::Command;
use pjw_core::ids::Pid;
use pjw_core::policy::ExhaustionPolicy;
use pjw_core::reconcile::Decision;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::snapshot::{Observed, Snapshot};
use pjw_core::state::dirty::DirtyScope;
use pjw_core::time::Nanos;

use super::machine::{Machine, ROOT, job, machine};

/// A job on two cores: process 7 runs, process 8 is idle.
fn job_with_idle_process() -> Machine {
    let mut machine = machine();
    machine.spawn(7, 1, 1000);
    machine.spawn(8, 7, 1000);
    machine.assign("a", 2, &[7, 8]).unwrap();
    for _ in 0..3 {
        machine.run(&[7]);
        machine.settle();
    }
    machine
}

/// Scans only these processes, and decides.
fn scan_and_decide(machine: &mut Machine, pids: &[u32]) -> Decision {
    let snapshot = machine.scan_only(pids);
    machine.decide(&snapshot, &[])
}

fn watched_pids(machine: &Machine) -> Vec<Pid> {
    let request = machine.state.scan_request(false);
    request.idle_watch.groups.iter().flat_map(|group| group.pids.clone()).collect()
}

#[test]
fn running_processes_are_scanned_and_idle_ones_are_only_watched() {
    let machine = job_with_idle_process();
    let request = machine.state.scan_request(false);
    assert!(
        request.pids_to_read_threads_of.contains(&Pid(7))
            && !request.pids_to_read_threads_of.contains(&Pid(8)),
        "{request:?}"
    );
    assert_eq!(watched_pids(&machine), [Pid(8)]);
}

#[test]
fn a_process_that_runs_is_not_idle_and_a_process_that_sleeps_for_some_seconds_is() {
    let mut machine = job_with_idle_process();
    machine.run(&[8]);
    machine.settle();
    assert_eq!(watched_pids(&machine), [], "process 8 runs, and process 7 ran a second ago");
    for _ in 0..12 {
        machine.run(&[]);
        machine.settle();
    }
    assert_eq!(watched_pids(&machine), [Pid(7), Pid(8)]);
}

#[test]
fn processes_that_were_not_scanned_are_not_planned_again() {
    let mut machine = job_with_idle_process();
    let before = machine.state.members.len();
    let decision = scan_and_decide(&mut machine, &[]);
    assert!(decision.plan.mask_actions.is_empty() && decision.records.is_empty(), "{decision:?}");
    assert!(!decision.newly_planned.contains_everything());
    assert_eq!(decision.newly_planned.listed_jobs().count(), 0);
    assert_eq!(machine.state.members.len(), before);
}

#[test]
fn a_child_is_confined_without_a_scan_of_the_rest_of_its_job() {
    let mut machine = job_with_idle_process();
    let all = machine.state.topology.cpus().clone();
    machine.spawn(9, 8, 1000);
    machine.bind(9, 9, &all.to_string());
    let decision = scan_and_decide(&mut machine, &[9]);
    let changed_pids: Vec<u32> =
        decision.plan.mask_actions.iter().map(|action| action.thread.process.pid.0).collect();
    assert_eq!(changed_pids, [9]);
    assert_eq!(decision.plan.mask_actions[0].target_mask.to_string(), "0-1");
}

#[test]
fn an_action_is_planned_again_until_a_scan_confirms_it() {
    let mut machine = job_with_idle_process();
    machine.bind(7, 7, "5");
    assert_eq!(scan_and_decide(&mut machine, &[7]).plan.mask_actions.len(), 1);
    let next_decision = scan_and_decide(&mut machine, &[]);
    assert_eq!(next_decision.plan.mask_actions.len(), 1, "the change was not carried out: {next_decision:?}");
}

/// Makes a rescan in which these processes are still idle: their threads are not read.
fn rescan(machine: &mut Machine, idle_pids: &[u32]) -> Decision {
    let mut snapshot = machine.scan();
    for (pid, seen) in &mut snapshot.processes {
        if let Observed::Present(process) = seen
            && idle_pids.contains(&pid.0)
        {
            process.threads = None;
        }
    }
    machine.decide(&snapshot, &[])
}

fn was_planned(decision: &Decision, pid: u32) -> bool {
    let of = |part: &DirtyScope| match part {
        DirtyScope::Whole => true,
        DirtyScope::Processes(pids) => pids.contains(&Pid(pid)),
    };
    decision.newly_planned.contains_everything()
        || decision.newly_planned.listed_jobs().any(|(_, part)| of(part))
}

#[test]
fn a_rescan_plans_active_processes_and_sometimes_everything() {
    let mut machine = job_with_idle_process();
    let rescans: Vec<Decision> = (0..16).map(|_| rescan(&mut machine, &[8])).collect();
    assert!(rescans.iter().all(|decision| was_planned(decision, 7)));
    let whole = rescans.iter().filter(|decision| decision.newly_planned.contains_everything()).count();
    let idle_process = rescans.iter().filter(|decision| was_planned(decision, 8)).count();
    assert_eq!((whole, idle_process), (2, 2), "one rescan of eight");
}

#[test]
fn a_rescan_plans_an_idle_process_whose_mask_changed() {
    let mut machine = job_with_idle_process();
    // The seven rescans after one that plans everything plan only what changed.
    while !rescan(&mut machine, &[8]).newly_planned.contains_everything() {}
    machine.process(8).cgroup = "/elsewhere".into();
    assert!(was_planned(&rescan(&mut machine, &[8]), 8));
    assert!(!was_planned(&rescan(&mut machine, &[8]), 8));
}

/// The same with fork events.
fn with_fork_events() -> Machine {
    let mut machine = job_with_idle_process();
    machine.spawn(20, 1, 1001);
    machine.run(&[7, 8]);
    machine.settle();
    machine.state.fork_events_complete_since = Some(Nanos(0));
    machine
}

fn unassigned(request: &ScanRequest) -> Vec<u32> {
    request.idle_watch.unassigned_pids.iter().map(|pid| pid.0).collect()
}

#[test]
fn with_fork_events_seven_of_eight_rescans_only_watch_unassigned_processes() {
    let mut machine = with_fork_events();
    let at = machine.state.processes.len() - 2;
    let mut full = 0;
    for _ in 0..16 {
        let request = machine.state.periodic_scan_request();
        if request.scope == ScanScope::Full {
            full += 1;
            machine.settle();
            continue;
        }
        assert!(unassigned(&request).contains(&20) && unassigned(&request).len() == at, "{request:?}");
        assert!(
            request.pids_to_read_threads_of.contains(&Pid(7))
                && !request.pids_to_read_threads_of.contains(&Pid(20)),
            "{request:?}"
        );
    }
    assert_eq!(full, 2);
}

fn let_all_processes_sleep(machine: &mut Machine) {
    for _ in 0..12 {
        machine.run(&[]);
        machine.settle();
    }
    machine.state.periodic_scans_until_full = 7;
}

fn let_a_job_wait_for_cores(machine: &mut Machine) {
    machine.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    machine.assign("b", 8, &[20]).unwrap();
}

fn fail_to_read_a_process(machine: &mut Machine) {
    let snapshot = machine.scan();
    let snapshot = Snapshot {
        scope: ScanScope::Partial(BTreeSet::new()),
        incomplete_reason: Some("no file".to_owned()),
        ..snapshot
    };
    let decision = machine.decide(&snapshot, &[]);
    assert!(decision.warnings.iter().any(|warnings| warnings.code == "unseen"), "{decision:?}");
}

fn begin_release(machine: &mut Machine) {
    let release = Command::Release { job: job("manual:a"), caller: ROOT };
    let snapshot = machine.scan();
    let decision = machine.decide(&snapshot, &[release]);
    assert!(
        decision.replies.iter().all(Result::is_ok) && !decision.plan.mask_actions.is_empty(),
        "{decision:?}"
    );
}

#[test]
fn a_rescan_checks_the_masks_of_all_processes_that_masks_alone_keep() {
    let mut machine = with_fork_events();
    let_all_processes_sleep(&mut machine);
    assert!(!machine.state.scan_request(false).idle_watch.check_all_masks);
    let request = machine.state.periodic_scan_request();
    assert!(request.scope != ScanScope::Full && request.idle_watch.check_all_masks, "{request:?}");
    let kept_by_masks = request.idle_watch.groups.iter().filter(|group| group.expected_cpus.is_some());
    assert!(kept_by_masks.flat_map(|group| &group.pids).any(|pid| *pid == Pid(7)), "{request:?}");
}

#[test]
fn a_rescan_is_full_while_something_is_pending() {
    let is_full = |change: fn(&mut Machine)| {
        let mut machine = with_fork_events();
        machine.state.periodic_scans_until_full = 7;
        change(&mut machine);
        machine.state.periodic_scan_request().scope == ScanScope::Full
    };
    assert!(!is_full(|_| {}));
    assert!(
        is_full(|machine| machine.state.fork_events_complete_since = None),
        "fork events are not monitored"
    );
    assert!(is_full(|machine| machine.state.periodic_scans_until_full = 0), "seven rescans were not full");
    assert!(is_full(|machine| machine.state.full_scan_due = true), "events were lost");
    assert!(is_full(let_a_job_wait_for_cores), "a job waits for cores");
    assert!(is_full(fail_to_read_a_process), "a process could not be read");
    assert!(is_full(begin_release), "masks are being restored");
}
