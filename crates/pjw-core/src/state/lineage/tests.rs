//! Descent by process events that are read before or after the scans that they belong to.

use alloc::collections::BTreeMap;

use super::*;
use crate::basics::cpuset::{CpuSet, Pu};
use crate::basics::ids::{Comm, ProcessId, StartTime, Uid};
use crate::basics::time::UnixMillis;
use crate::state::demand::ThreadDemand;
use crate::state::lineage::scan_queue::ScanUrgency;
use crate::state::masks::entry::MaskEntry;
use crate::state::masks::request::MaskWriter;
use crate::state::members::MemberThread;
use crate::state::warden::WardenState;
use crate::terms::job::{EndCondition, Job};
use crate::testing::{cpu_set, job, regular_topology};

/// Eight PUs, and a job with process 10 of two threads: pjw requested 0-1 for thread 10 and 1 for thread 20.
fn with_a_member() -> WardenState {
    let mut state = WardenState::new(regular_topology(1, 1, 1, 8, 1), &CpuSet::new());
    state.fork_events_complete_since = Some(Nanos(0));
    state.jobs.insert(Job::new(job("a"), Uid(1), EndCondition::LastProcessExit, UnixMillis(0)));
    let start = StartTime(0);
    let thread = |mask: &str| MemberThread {
        start,
        comm: Comm::from("work"),
        state: 'S',
        last_cpu: Pu(0),
        effective_mask: cpu_set(mask),
        demand: ThreadDemand::default(),
        mask_entry: Some(MaskEntry::from_record(MaskRequest {
            mask: cpu_set(mask),
            original_mask: cpu_set("0-7"),
            writer: MaskWriter::Warden,
            requested_at: Nanos(5),
        })),
    };
    state.members.insert(Member {
        id: ProcessId { pid: Pid(10), start },
        job: job("a"),
        evidence: MembershipEvidence::Registered,
        inherited_mask: None,
        was_new_at_join: true,
        numa_node: None,
        first_seen: None,
        threads: BTreeMap::from([(Tid(10), thread("0-1")), (Tid(20), thread("1"))]),
    });
    state
}

fn fork(parent: u32, child: u32) -> ProcessEvent {
    ProcessEvent::Fork { parent: Pid(parent), creator: Tid(parent), child: Pid(child), at: Nanos(9) }
}

fn exit(pid: u32) -> ProcessEvent {
    ProcessEvent::Exit { pid: Pid(pid) }
}

fn masks(state: &WardenState, pid: u32) -> Vec<CpuSet> {
    let descendant = state.lineage.descendant(Pid(pid)).unwrap();
    assert!(
        descendant.inherited_mask_requests.iter().all(|request| request.original_mask == cpu_set("0-7")),
        "{descendant:?}"
    );
    descendant.inherited_mask_requests.iter().map(|request| request.mask.clone()).collect()
}

#[test]
fn a_child_begins_with_the_request_of_the_thread_that_created_it() {
    let mut state = with_a_member();
    let by_other = ProcessEvent::Fork { parent: Pid(10), creator: Tid(20), child: Pid(12), at: Nanos(9) };
    let by_unknown = ProcessEvent::Fork { parent: Pid(10), creator: Tid(21), child: Pid(13), at: Nanos(9) };
    assert!(!state.apply_process_events(&[fork(10, 11), by_other, by_unknown]));
    assert_eq!(masks(&state, 11), [cpu_set("0-1")]);
    assert_eq!(masks(&state, 12), [cpu_set("1")]);
    assert_eq!(masks(&state, 13), [cpu_set("1"), cpu_set("0-1")], "the first thread decides");
    let descendant = state.lineage.descendant(Pid(11)).unwrap();
    assert_eq!(
        (&descendant.job, descendant.evidence, descendant.was_ancestor_member),
        (&job("a"), MembershipEvidence::Parent, true)
    );
    assert_eq!(state.lineage.scan_queue.urgency(), Some(ScanUrgency::Immediate));
}

#[test]
fn a_child_of_a_process_that_a_scan_found_gone_before_its_exit_event_was_read_keeps_its_job_and_mask() {
    let mut state = with_a_member();
    state.remove_ended_process(Pid(10));
    assert!(state.tracked_process(Pid(10)).is_none());
    state.apply_process_events(&[fork(10, 11), exit(10)]);
    let descendant = state.lineage.descendant(Pid(11)).unwrap();
    assert_eq!(
        (&descendant.job, descendant.ancestor, descendant.was_ancestor_member),
        (&job("a"), Pid(10), true)
    );
    assert_eq!(masks(&state, 11), [cpu_set("0-1"), cpu_set("1")]);
    assert!(state.lineage.descendant(Pid(10)).is_none(), "its exit event was read");
    assert_eq!(state.lineage.unscanned_descendants().map(|(pid, _)| pid).collect::<Vec<_>>(), [Pid(11)]);
}

#[test]
fn a_process_that_a_scan_finds_gone_after_its_exit_event_has_no_more_children() {
    let mut state = with_a_member();
    state.apply_process_events(&[fork(10, 11), exit(10)]);
    state.remove_ended_process(Pid(10));
    assert!(state.lineage.descendant(Pid(10)).is_none());
    state.apply_process_events(&[fork(1, 10), fork(10, 12)]);
    assert!(state.lineage.descendant(Pid(12)).is_none(), "the number is used again");
    assert!(state.lineage.descendant(Pid(11)).is_some());
}

#[test]
fn a_number_that_is_used_again_says_nothing_of_its_last_process() {
    let mut state = with_a_member();
    state.apply_process_events(&[fork(10, 11), exit(11), fork(1, 11), fork(11, 12)]);
    assert!(state.lineage.descendant(Pid(11)).is_none() && state.lineage.descendant(Pid(12)).is_none());
    // The exit event of the last process is missing.
    state.apply_process_events(&[fork(10, 13), fork(1, 13), fork(13, 14)]);
    assert!(state.lineage.descendant(Pid(13)).is_none() && state.lineage.descendant(Pid(14)).is_none());
    assert_eq!(state.lineage.unscanned_descendants().count(), 0);
    assert_eq!(
        state.lineage.scan_queue.take_unassigned_pids().collect::<Vec<_>>(),
        [11, 12, 13, 14].map(Pid)
    );
}

#[test]
fn a_child_of_a_tracked_process_whose_masks_are_unread_begins_with_a_request_that_its_parent_inherited() {
    let mut state = with_a_member();
    state.apply_process_events(&[fork(10, 11)]);
    let member = state.members[&Pid(10)].clone();
    let id = ProcessId { pid: Pid(11), ..member.id };
    state.members.insert(Member { id, threads: BTreeMap::new(), ..member });
    state.apply_process_events(&[fork(11, 12)]);
    assert_eq!(state.lineage.descendant(Pid(12)).unwrap().ancestor, Pid(11));
    assert_eq!(masks(&state, 12), [cpu_set("0-1")]);
    let released = state.members[&Pid(11)].clone();
    state.lineage.record_masks_restored(&released, true);
    state.apply_process_events(&[fork(11, 13)]);
    assert_eq!(masks(&state, 13), [], "the masks of its parent were restored");
}

#[test]
fn the_children_of_a_restored_process_are_descendants_until_the_release_is_settled() {
    let mut state = with_a_member();
    let released = state.members.remove(Pid(10)).unwrap();
    state.lineage.record_masks_restored(&released, false);
    state.apply_process_events(&[fork(10, 11)]);
    let child = state.lineage.descendant(Pid(11)).unwrap();
    assert!(!child.was_ancestor_member && child.job == job("a"));
    assert_eq!(masks(&state, 11), [cpu_set("0-1"), cpu_set("1")], "the requests in force after the restore");
    state.lineage.record_scanned(Pid(11));
    state.apply_process_events(&[fork(11, 12)]);
    state.lineage.forget_released_descendants(&job("a"));
    assert!(state.lineage.descendant(Pid(10)).is_none() && state.lineage.descendant(Pid(11)).is_none());
    assert!(state.lineage.descendant(Pid(12)).is_some(), "no scan has read its mask");
}

#[test]
fn a_grandchild_of_a_child_that_no_scan_has_seen_descends_from_the_member() {
    let mut state = with_a_member();
    state.apply_process_events(&[fork(10, 11), fork(11, 12), exit(11), fork(12, 13)]);
    for pid in [12, 13] {
        let descendant = state.lineage.descendant(Pid(pid)).unwrap();
        assert_eq!(
            (&descendant.job, descendant.ancestor, descendant.evidence),
            (&job("a"), Pid(10), MembershipEvidence::Parent)
        );
        assert_eq!(masks(&state, pid), [cpu_set("0-1")]);
    }
    assert!(state.lineage.descendant(Pid(11)).is_none());
}

#[test]
fn the_child_of_an_adopted_process_is_adopted() {
    let mut state = with_a_member();
    let mut member = state.members.remove(Pid(10)).unwrap();
    member.evidence = MembershipEvidence::Adopted;
    state.processes_to_restore.insert(Pid(10), member);
    state.apply_process_events(&[fork(10, 11)]);
    let descendant = state.lineage.descendant(Pid(11)).unwrap();
    assert_eq!((descendant.evidence, descendant.was_ancestor_member), (MembershipEvidence::Adopted, false));
}

#[test]
fn where_events_were_lost_nothing_is_known_of_processes_that_only_events_told_of() {
    let mut state = with_a_member();
    state.apply_process_events(&[fork(10, 11)]);
    state.remove_ended_process(Pid(10));
    state.lineage.forget_fork_records();
    assert!(state.lineage.descendant(Pid(11)).is_none() && state.lineage.descendant(Pid(10)).is_none());
    assert_eq!(state.lineage.unscanned_descendants().count(), 0);
    state.apply_process_events(&[fork(10, 12)]);
    assert!(state.lineage.descendant(Pid(12)).is_none());
}

#[test]
fn where_no_events_are_read_a_process_that_is_gone_leaves_nothing() {
    let mut state = with_a_member();
    state.fork_events_complete_since = None;
    state.remove_ended_process(Pid(10));
    assert!(state.lineage.descendant(Pid(10)).is_none());
}

#[test]
fn threads_that_start_and_end_all_the_time_cause_no_scan_and_leave_nothing_behind() {
    let mut state = with_a_member();
    let outside = ProcessEvent::Fork { parent: Pid(1), creator: Tid(1), child: Pid(30), at: Nanos(6) };
    state.apply_process_events(&[outside]);
    for number in 100..10_100 {
        for pid in [Pid(10), Pid(30)] {
            let tid = Tid(number);
            let events = [ProcessEvent::ThreadFork { pid, tid }, ProcessEvent::ThreadExit { pid, tid }];
            assert!(!state.apply_process_events(&events), "no event is dropped");
            assert_eq!(state.lineage.scan_queue.urgency(), None, "a thread inherits the mask of its creator");
        }
    }
    assert_eq!(state.lineage.scan_queue.take_urgent_pids(), BTreeSet::new());
    assert_eq!(
        state.lineage.scan_queue.take_unassigned_pids().collect::<Vec<_>>(),
        [Pid(30)],
        "once, at the rescan"
    );
    assert_eq!((state.lineage.descendants.len(), state.lineage.exited.len()), (0, 0));
}

/// A command that names the first process of a chain outside of jobs visits each process once. A pass over the queue for
/// each generation would visit 3,600,000,000 of these.
#[test]
fn a_command_finds_the_end_of_a_chain_of_60000_forked_processes() {
    let mut state = with_a_member();
    let chain: Vec<ProcessEvent> = (30..60_030).map(|parent| fork(parent, parent + 1)).collect();
    let other = fork(1, 20);
    assert!(!state.apply_process_events(&chain) && !state.apply_process_events(&[other]));
    let queue = &mut state.lineage.scan_queue;
    let found = queue.take_descendants_of(&BTreeSet::from([Pid(30)]));
    assert_eq!((found.len(), found.last()), (60_000, Some(&Pid(60_030))));
    assert_eq!(queue.take_descendants_of(&BTreeSet::from([Pid(30)])), BTreeSet::new(), "they are taken");
    assert_eq!(queue.take_unassigned_pids().collect::<Vec<_>>(), [Pid(20)], "the others stay");
}

#[test]
fn a_process_whose_first_thread_exits_before_the_others_is_scanned_again_until_it_has_ended() {
    let mut state = with_a_member();
    let queue = |state: &mut WardenState| state.lineage.scan_queue.take_urgent_pids();
    let mut scans = 0;
    state.apply_process_events(&[exit(10)]);
    while queue(&mut state).contains(&Pid(10)) {
        state.lineage.scan_queue.record_running(Pid(10));
        scans += 1;
    }
    assert_eq!(scans, 9, "one for the event, and eight while other threads run");

    state.apply_process_events(&[exit(10)]);
    assert_eq!(queue(&mut state), BTreeSet::from([Pid(10)]));
    state.lineage.scan_queue.record_running(Pid(10));
    assert_eq!(queue(&mut state), BTreeSet::from([Pid(10)]));
    state.remove_ended_process(Pid(10));
    state.lineage.scan_queue.record_running(Pid(10));
    assert_eq!(queue(&mut state), BTreeSet::new(), "another process has the pid");
}

#[test]
fn a_user_who_locks_the_memory_of_many_processes_causes_few_scans() {
    let mut state = with_a_member();
    let queue = &mut state.lineage.scan_queue;
    for pid in 1000..2000 {
        queue.record_environment(Pid(pid), true, Nanos(0));
    }
    queue.queue_environment_retries(Nanos(u64::MAX));
    assert_eq!(queue.take_urgent_pids().len(), 256);
}

#[test]
fn processes_whose_environments_were_not_read_at_nearly_the_same_time_are_scanned_together() {
    const MS: u64 = 1_000_000;
    let mut state = with_a_member();
    let queue = &mut state.lineage.scan_queue;
    for (pid, at) in [(1000, 0), (1001, 4 * MS), (1002, 10 * MS)] {
        queue.record_environment(Pid(pid), true, Nanos(at));
    }
    queue.queue_environment_retries(queue.next_environment_retry().unwrap());
    assert_eq!(queue.take_urgent_pids(), BTreeSet::from([Pid(1000), Pid(1001)]));
}
