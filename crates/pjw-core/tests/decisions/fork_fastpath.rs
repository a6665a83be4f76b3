//! The fork fast path: a child that is born with a mask outside of the cores of its job is confined before the next
//! scan.

use std::collections::BTreeMap;

use pjw_core::event::EventKind;
use pjw_core::fork_fastpath::{
    FirstMaskWrites, defer_scans_if_masks_match, expected_fork_masks, expected_masks_of_unverified_forks,
    forked_with_unexplained_masks, plan_first_mask_writes, snapshot_of_mismatches,
};
use pjw_core::ids::{Pid, ProcessId, StartTime, Tid};
use pjw_core::plan::{MaskAction, MaskActionKind};
use pjw_core::policy::DaemonMode;
use pjw_core::snapshot::Observed;
use pjw_core::snapshot::{ExpectedMask, ForkMaskMismatch, MaskProbeResult, ProcessEvent};
use pjw_core::state::lineage::scan_queue::ScanUrgency;
use pjw_core::time::Nanos;

use super::machine::{Machine, cpu_set, job, machine};

/// A job on the first two cores, with process 7.
fn job_with_parent() -> Machine {
    let mut machine = machine();
    machine.spawn(7, 1, 1000);
    machine.assign("a", 2, &[7]).unwrap();
    machine
}

/// The same with the processes 7 and 8, whose threads are hot. Returns also the PU to which process 7 is pinned.
fn job_with_pinned_parent() -> (Machine, String) {
    let mut machine = job_with_parent();
    machine.spawn(8, 7, 1000);
    for _ in 0..4 {
        machine.run(&[7, 8]);
        machine.settle();
    }
    let pin = machine.effective_mask(7, 7);
    assert_eq!(cpu_set(&pin).len(), 1, "two hot threads on two cores are pinned");
    (machine, pin)
}

/// Lets the daemon read the fork event of a child.
fn fork(machine: &mut Machine, child: u32, parent: u32) {
    let at = Nanos(machine.now());
    let event = ProcessEvent::Fork { parent: Pid(parent), creator: Tid(parent), child: Pid(child), at };
    machine.state.apply_process_events(&[event]);
}

/// The result of a probe that finds a forked child with this mask.
fn probe_result(machine: &mut Machine, child: u32, mask: &str) -> MaskProbeResult {
    let snapshot = machine.scan();
    let start = StartTime(machine.now() / 10_000_000);
    let forked = ForkMaskMismatch { id: ProcessId { pid: Pid(child), start }, effective_mask: cpu_set(mask) };
    MaskProbeResult { taken_at: snapshot.taken_at, online: snapshot.online, mismatches: vec![forked] }
}

/// Decides about a forked child of process 7 that has this mask. Returns the actions.
fn decide_about_child(machine: &mut Machine, child: u32, mask: &str) -> Vec<MaskAction> {
    let probe = probe_result(machine, child, mask);
    fork(machine, child, 7);
    let snapshot = snapshot_of_mismatches(&machine.state, probe, &BTreeMap::new());
    machine.decide_about_forks(&snapshot).plan.mask_actions
}

#[test]
fn the_expected_mask_of_an_unscanned_child_of_a_member_is_the_grant_of_the_job() {
    let mut machine = job_with_parent();
    machine.spawn(8, 7, 1000);
    machine.settle();
    machine.spawn(50, 1, 1000);
    machine.settle();
    for (child, parent) in [(8, 7), (9, 7), (51, 50)] {
        fork(&mut machine, child, parent);
    }
    let expected = expected_fork_masks(&machine.state);
    let mask_of_9 = ExpectedMask { mask: cpu_set("0-1"), forked_at: Nanos(machine.now()) };
    assert_eq!(
        expected,
        BTreeMap::from([(Pid(9), mask_of_9)]),
        "process 8 was scanned, and process 51 is in no job"
    );
}

#[test]
fn a_child_in_a_job_without_a_grant_has_no_expected_mask() {
    let mut machine = job_with_parent();
    machine.state.jobs.update(&job("a"), |job| job.grant = None);
    fork(&mut machine, 9, 7);
    assert!(expected_fork_masks(&machine.state).is_empty());
}

#[test]
fn a_child_born_outside_of_the_cores_is_confined_at_once() {
    let mut machine = job_with_parent();
    let actions = decide_about_child(&mut machine, 9, "0-7");
    let changes: Vec<_> =
        actions.iter().map(|action| (action.kind, action.target_mask.to_string())).collect();
    assert_eq!(changes, [(MaskActionKind::Confine, "0-1".to_owned())]);
    assert_eq!(machine.member(9), "manual:a by Parent");
}

#[test]
fn a_child_born_on_the_pin_of_its_parent_gets_the_grant_and_later_the_original_mask() {
    let (mut machine, pin) = job_with_pinned_parent();
    let actions = decide_about_child(&mut machine, 9, &pin);
    let changes: Vec<_> =
        actions.iter().map(|action| (action.kind, action.target_mask.to_string())).collect();
    assert_eq!(changes, [(MaskActionKind::Float, "0-1".to_owned())]);
    assert_eq!(machine.state.mask_entry(&actions[0].thread).unwrap().original_mask(), &cpu_set("0-7"));
}

#[test]
fn the_decision_about_a_forked_child_plans_no_other_process_and_leaves_the_rest_to_the_next_decision() {
    let mut machine = job_with_parent();
    machine.spawn(8, 7, 1000);
    machine.spawn(50, 1, 1000);
    machine.settle();
    let before = machine.last.as_ref().unwrap().warnings.clone();
    assert_eq!(machine.warnings(), ["stray"], "process 50 belongs to no job");
    let probe = probe_result(&mut machine, 9, "0-7");
    machine.spawn(9, 7, 1000);
    fork(&mut machine, 9, 7);
    machine.state.dirty.add_job(&job("a"));
    let snapshot = snapshot_of_mismatches(&machine.state, probe, &BTreeMap::new());
    let decision = machine.decide_about_forks(&snapshot);
    let planned: Vec<_> = decision.plan.mask_actions.iter().map(|action| action.thread.process.pid).collect();
    assert_eq!(planned, [Pid(9)]);
    assert_eq!(decision.warnings, before);
    let dirty: Vec<_> = machine.state.dirty.listed_jobs().map(|(job, _)| job.to_string()).collect();
    assert_eq!(dirty, ["manual:a"]);
}

#[test]
fn a_forked_child_that_the_next_scan_does_not_find_is_forgotten() {
    let mut machine = job_with_parent();
    let _ = decide_about_child(&mut machine, 9, "0-7");
    // The child has exited before the next scan.
    machine.settle();
    assert!(!machine.state.processes.contains_key(&Pid(9)));
    assert!(machine.journaled_threads().iter().all(|thread| thread.process.pid != Pid(9)));
}

#[test]
fn a_start_time_one_tick_late_is_corrected_and_the_mask_entry_kept() {
    let (mut machine, pin) = job_with_pinned_parent();
    machine.spawn(9, 7, 1000);
    let actual_id = machine.process(9).id;
    machine.advance(StartTime::TICK.0);
    let actions = decide_about_child(&mut machine, 9, &pin);
    let thread = actions[0].thread;
    assert_eq!(thread.process.start.0, actual_id.start.0 + 1);
    machine.carry_out(&actions[0]);
    machine.state.record_mask_applied_during_fork(&actions[0]);
    machine.settle();
    let journaled_threads: Vec<_> =
        machine.journaled_threads().into_iter().filter(|thread| thread.tid.0 == 9).collect();
    let [thread] = journaled_threads.as_slice() else { panic!("{journaled_threads:?}") };
    let entry = machine.state.mask_entry(thread).unwrap();
    assert_eq!(
        (thread.process, thread.start, entry.original_mask()),
        (actual_id, actual_id.start, &cpu_set("0-7"))
    );
    assert!(entry.requested_mask().is_some() && machine.events.is_empty(), "{entry:?} {:?}", machine.events);
    machine.release("a").unwrap();
    assert_eq!(machine.effective_mask(9, 9), "0-7");
}

#[test]
fn a_forked_child_is_reported_with_its_known_ancestor_as_the_parent() {
    let mut machine = job_with_parent();
    fork(&mut machine, 9, 7);
    let snapshot = machine.scan();
    let forked = ForkMaskMismatch {
        id: ProcessId { pid: Pid(9), start: StartTime(200) },
        effective_mask: cpu_set("0-7"),
    };
    let probe =
        MaskProbeResult { taken_at: snapshot.taken_at, online: snapshot.online, mismatches: vec![forked] };
    let observed = snapshot_of_mismatches(&machine.state, probe, &BTreeMap::new()).processes.remove(&Pid(9));
    let Some(Observed::Present(process)) = observed else { panic!("it was not reported") };
    assert_eq!((process.parent, process.uid.0, process.threads.unwrap().len()), (Pid(7), 1000, 1));
}

#[test]
fn a_mask_that_a_completed_fork_overwrites_is_repaired_and_is_no_violation() {
    for (mut machine, mask) in [(job_with_parent(), "0-7".to_owned()), job_with_pinned_parent()] {
        let actions = decide_about_child(&mut machine, 9, &mask);
        let [action] = actions.as_slice() else { panic!("{actions:?}") };
        machine.spawn(9, 7, 1000);
        machine.carry_out(action);
        machine.state.record_mask_applied_during_fork(action);
        machine.bind(9, 9, &mask);
        let start = action.thread.start;
        let mut process = machine.process(9);
        process.id.start = start;
        process.threads.get_mut(&Tid(9)).unwrap().start = start;
        drop(process);
        machine.settle();
        assert_eq!(machine.effective_mask(9, 9), "0-1", "born on {mask}");
        assert!(
            machine.events.iter().all(|event| event.kind != EventKind::Violation),
            "{:?}",
            machine.events
        );

        machine.bind(9, 9, "0-7");
        machine.settle();
        assert!(
            machine.events.iter().any(|event| event.kind == EventKind::Violation),
            "the program itself changed the mask"
        );
    }
}

/// Probes the masks of new processes as the daemon does. The masks of the processes `pids_with_wrong_masks` are not the
/// expected ones.
fn probe(machine: &mut Machine, pids_with_wrong_masks: &[u32]) {
    let expected = expected_masks_of_unverified_forks(&machine.state);
    let mismatch = |&pid: &u32| ForkMaskMismatch {
        id: ProcessId { pid: Pid(pid), start: StartTime(machine.now() / 10_000_000) },
        effective_mask: cpu_set("0-7"),
    };
    let mismatches: Vec<ForkMaskMismatch> = pids_with_wrong_masks.iter().map(mismatch).collect();
    defer_scans_if_masks_match(&mut machine.state, &expected, &mismatches);
}

fn urgency(machine: &Machine) -> Option<ScanUrgency> {
    machine.state.lineage.scan_queue.urgency()
}

#[test]
fn the_scan_of_a_child_with_the_right_mask_waits_and_that_of_another_does_not() {
    let mut machine = job_with_parent();
    fork(&mut machine, 9, 7);
    assert_eq!(urgency(&machine), Some(ScanUrgency::Immediate));
    probe(&mut machine, &[]);
    assert_eq!(urgency(&machine), Some(ScanUrgency::Batched));
    fork(&mut machine, 10, 7);
    probe(&mut machine, &[10]);
    assert_eq!(urgency(&machine), Some(ScanUrgency::Immediate));
    let scanned = machine.state.lineage.scan_queue.take_urgent_pids();
    assert_eq!(scanned, [Pid(9), Pid(10)].into(), "the next scan reads both");
    assert_eq!(urgency(&machine), None);
}

#[test]
fn the_scan_of_a_child_without_an_expected_mask_does_not_wait() {
    let mut machine = job_with_parent();
    machine.state.jobs.update(&job("a"), |job| job.grant = None);
    fork(&mut machine, 9, 7);
    probe(&mut machine, &[]);
    assert_eq!(urgency(&machine), Some(ScanUrgency::Immediate));
    machine.state.apply_process_events(&[ProcessEvent::Exit { pid: Pid(9) }]);
    assert_eq!(urgency(&machine), Some(ScanUrgency::Batched), "no mask is left to correct");
}

#[test]
fn the_scan_of_a_process_that_executes_a_program_or_exits_waits() {
    let mut machine = job_with_parent();
    machine.state.apply_process_events(&[ProcessEvent::Exec { pid: Pid(7) }]);
    assert_eq!(urgency(&machine), Some(ScanUrgency::Batched));
    machine.settle();
    machine.state.apply_process_events(&[ProcessEvent::Exit { pid: Pid(7) }]);
    assert_eq!(urgency(&machine), Some(ScanUrgency::Batched));
}

#[test]
fn a_child_whose_mask_does_not_follow_from_the_requests_of_its_parent_is_left_to_the_scan() {
    let mut machine = job_with_parent();
    fork(&mut machine, 9, 7);
    // The parent had every PU before the job got its cores.
    for (mask, is_left_out) in [("0-7", false), ("3", true)] {
        let probe = probe_result(&mut machine, 9, mask);
        let processes = snapshot_of_mismatches(&machine.state, probe, &BTreeMap::new()).processes;
        assert_eq!(processes.is_empty(), is_left_out, "{mask}");
    }
}

#[test]
fn a_child_whose_parent_changed_its_mask_before_the_fork_is_confined_at_once_in_the_cgroup_of_its_parent() {
    for (cgroup, mask, actions) in [("/", "0-3", 1), ("/other", "0-3", 0), ("/", "1", 0)] {
        let mut machine = job_with_parent();
        let probe = probe_result(&mut machine, 9, mask);
        fork(&mut machine, 9, 7);
        let expected = expected_fork_masks(&machine.state);
        let unknown = forked_with_unexplained_masks(&machine.state, &expected, &probe);
        let paths: BTreeMap<Pid, String> = unknown.iter().map(|&pid| (pid, cgroup.to_owned())).collect();
        assert_eq!(paths.contains_key(&Pid(9)), mask != "1", "a mask within the cores can wait for the scan");

        let snapshot = snapshot_of_mismatches(&machine.state, probe, &paths);
        let plan = machine.decide_about_forks(&snapshot).plan;
        assert_eq!(plan.mask_actions.len(), actions, "in {cgroup} with {mask}");
        for action in &plan.mask_actions {
            assert_eq!((action.kind, &action.target_mask), (MaskActionKind::Confine, &cpu_set("0-1")));
            let entry = machine.state.mask_entry(&action.thread).unwrap();
            assert_eq!(
                entry.original_mask(),
                &cpu_set("0-3"),
                "a release puts back what the program requested"
            );
        }
    }
}

/// Launchers of MPI request every PU for themselves before they fork.
#[test]
fn a_child_with_every_pu_is_confined_before_its_cgroup_is_read() {
    let mut machine = machine();
    machine.spawn(7, 1, 1000);
    machine.bind(7, 7, "0-3");
    machine.assign("a", 2, &[7]).unwrap();
    let probe = probe_result(&mut machine, 9, "0-7");
    fork(&mut machine, 9, 7);
    let expected = expected_fork_masks(&machine.state);
    assert!(forked_with_unexplained_masks(&machine.state, &expected, &probe).is_empty(), "no cgroup to read");
    let snapshot = snapshot_of_mismatches(&machine.state, probe, &BTreeMap::new());
    let actions = machine.decide_about_forks(&snapshot).plan.mask_actions;
    let [action] = actions.as_slice() else { panic!("{actions:?}") };
    assert_eq!((action.kind, &action.target_mask), (MaskActionKind::Confine, &cpu_set("0-1")));
    let entry = machine.state.mask_entry(&action.thread).unwrap();
    assert_eq!(entry.original_mask(), &cpu_set("0-7"), "a release puts back what the program requested");
}

/// The masks that are set before the decision about the forked process 9, which has this mask.
fn first_writes(machine: &mut Machine, mask: &str) -> FirstMaskWrites {
    let probe = probe_result(machine, 9, mask);
    fork(machine, 9, 7);
    let expected = expected_fork_masks(&machine.state);
    plan_first_mask_writes(&machine.state, &machine.policy, &expected, &probe)
}

#[test]
fn a_mask_that_follows_from_the_fork_is_set_before_the_decision_which_sets_the_same() {
    for (mut machine, mask) in [(job_with_parent(), "0-7".to_owned()), job_with_pinned_parent()] {
        let FirstMaskWrites { records, actions: first } = first_writes(&mut machine, &mask);
        let actions = decide_about_child(&mut machine, 9, &mask);
        let requests = |actions: &[MaskAction]| -> Vec<_> {
            actions.iter().map(|action| (action.thread, action.requested_mask.clone())).collect()
        };
        assert_eq!((records.len(), requests(&first)), (1, requests(&actions)), "born on {mask}");
    }
}

#[test]
fn only_the_decision_sets_a_mask_that_needs_more_than_the_fork() {
    let mut observing = job_with_parent();
    observing.policy.mode = DaemonMode::Observe;
    let mut older_kernel = job_with_parent();
    older_kernel.policy.cpuset_support.affinity_persists = false;
    let mut bound = machine();
    bound.spawn(7, 1, 1000);
    bound.bind(7, 7, "4");
    bound.assign("a", 2, &[7]).unwrap();
    for (mut machine, mask, why) in [
        (observing, "0-7", "the mode observe"),
        (older_kernel, "0-7", "the kernel may have set the mask"),
        (bound, "4", "the program has bound the process"),
        (job_with_parent(), "3", "the cgroup is not known"),
    ] {
        let FirstMaskWrites { records, actions } = first_writes(&mut machine, mask);
        assert!(records.is_empty() && actions.is_empty(), "{why}: {actions:?}");
    }
}

#[test]
fn a_daemon_that_is_killed_after_the_first_write_leaves_a_mask_that_the_next_one_puts_back() {
    let (mut machine, pin) = job_with_pinned_parent();
    let mut records = machine.state.records();
    let FirstMaskWrites { records: first, actions } = first_writes(&mut machine, &pin);
    records.extend(first);
    machine.spawn(9, 7, 1000);
    machine.bind(9, 9, &actions[0].requested_mask.to_string());
    machine.lose_state();
    records.into_iter().for_each(|record| machine.state.apply_record(record));
    machine.settle();
    assert_eq!(
        (machine.member(9).as_str(), machine.effective_mask(9, 9).as_str()),
        ("manual:a by Parent", "0-1")
    );
    machine.release("a").unwrap();
    assert_eq!(machine.effective_mask(9, 9), "0-7");
}
