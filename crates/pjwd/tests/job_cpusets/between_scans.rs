//! Processes that end, or change their masks, between two scans of one cycle.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use pjw_core::command::Reply;
use pjw_core::cpuset_group::{CpusetAction, CpusetOutcome, LeftoverCpuset};
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_core::plan::{MaskAction, MaskOutcome};
use pjw_core::ports;
use pjw_core::refusal::Refusal;
use pjw_core::scan::ScanRequest;
use pjw_core::snapshot::{ExpectedMask, MaskProbeResult, ProcessEventBatch, Snapshot};

use super::*;

/// How much the daemon has done so far.
#[derive(Default)]
struct WorkCounts {
    scans: Cell<usize>,
    mask_writes: Cell<usize>,
}

/// A node that counts scans and mask writes. Before each scan it calls `before` with the number of earlier scans. If
/// `loses_events` is true, an event is lost after each scan.
struct InterleavedNode<F> {
    node: SimMachineInterface,
    counts: Rc<WorkCounts>,
    before: F,
    loses_events: bool,
}

impl<F: FnMut(usize)> ports::MachineInterface for InterleavedNode<F> {
    fn scan(&mut self, request: &ScanRequest) -> Snapshot {
        (self.before)(self.counts.scans.get());
        self.counts.scans.update(|scans| scans + 1);
        self.node.scan(request)
    }

    fn probe_masks(&mut self, expected: &BTreeMap<Pid, ExpectedMask>) -> MaskProbeResult {
        self.node.probe_masks(expected)
    }

    fn read_cpuset_paths(&mut self, pids: &BTreeSet<Pid>) -> BTreeMap<Pid, String> {
        self.node.read_cpuset_paths(pids)
    }

    fn read_process_events(&mut self) -> ProcessEventBatch {
        let batch = self.node.read_process_events();
        ProcessEventBatch { events_lost: batch.events_lost || self.loses_events, ..batch }
    }

    fn list_job_cpusets(&mut self, own_cgroups: &OwnCgroupNames) -> Vec<LeftoverCpuset> {
        self.node.list_job_cpusets(own_cgroups)
    }

    fn change_mask(&mut self, action: &MaskAction) -> MaskOutcome {
        self.counts.mask_writes.update(|writes| writes + 1);
        self.node.change_mask(action)
    }

    fn change_cpusets(&mut self, actions: &[CpusetAction], max_wait: Duration) -> Vec<CpusetOutcome> {
        self.node.change_cpusets(actions, max_wait)
    }
}

type Interleaved<F> = Warden<InterleavedNode<F>, SimJournal>;

/// The daemon of a machine on which the processes 10 and 20 run, and the counts of its work. The function that `before`
/// returns is called before each scan, with the number of earlier scans.
fn daemon_with_hook<F: FnMut(usize)>(
    before: impl FnOnce(ScriptedMachine) -> F,
) -> (Interleaved<F>, Rc<WorkCounts>) {
    let kernel = ScriptedMachine::new(regular_topology(2, 1, 1, 4, 1).cpus(), CpusetSupport::default());
    for pid in [10, 20] {
        drop(kernel.spawn(pid, 1, ALICE.0));
    }
    let counts = Rc::new(WorkCounts::default());
    let (node, loses_events) = (kernel.simulated_machine(), false);
    let node = InterleavedNode { node, counts: Rc::clone(&counts), before: before(kernel), loses_events };
    let state = WardenState::new(regular_topology(2, 1, 1, 4, 1), &cpu_set(""));
    let host = pjw_sources::LocalHost { name: "n1".to_owned(), flux_user: None };
    let journal = SimJournal::new(Faults::none());
    (Warden::new(node, journal, state, Vec::new(), Policy::default(), host), counts)
}

/// Assigns `pids` to the new job `a`. Process 10 ends after the scan that precedes the assignment. Returns the reply
/// and the state of the daemon after it.
fn assign_while_process_10_ends(pids: &[Pid]) -> (Result<Reply, Refusal>, WardenState) {
    let (mut warden, _) = daemon_with_hook(|kernel| {
        move |scans| {
            if scans == 1 {
                kernel.exit(10);
            }
        }
    });
    let scan = warden.state().scan_request(true);
    let mut report = warden.run_cycle(scan, &[Command::Assign(assign_command("a", 2, pids))]);
    (report.replies.remove(0), warden.state().clone())
}

#[test]
fn an_assignment_of_a_process_that_ends_meanwhile_is_refused_and_names_the_process() {
    let (reply, state) = assign_while_process_10_ends(&[Pid(10)]);
    let refusal = reply.unwrap_err();
    assert_eq!(refusal, Refusal::ProcessEnded { pid: Pid(10), job: job("a") });
    let text = refusal.to_string();
    assert!(text.starts_with("process 10 has ended, and manual:a with it: "), "{text}");
    assert!(text.contains("ps -p 10") && text.contains("pjwctl run"), "{text}");
    assert!(state.jobs.is_empty() && state.pool.free_cpus() == cpu_set("0-7"));
}

#[test]
fn a_job_is_made_with_the_other_processes_if_one_ends_while_it_is_assigned() {
    let (reply, state) = assign_while_process_10_ends(&[Pid(10), Pid(20)]);
    assert!(matches!(reply, Ok(Reply::Assigned(_))), "{reply:?}");
    assert!(state.jobs.contains_key(&job("a")));
}

#[test]
fn a_program_that_changes_its_mask_before_each_scan_causes_a_bounded_number_of_scans_writes_and_events() {
    const CYCLES: usize = 100;
    // The program requests all PUs before each scan, however often its mask is repaired.
    let (mut warden, counts) = daemon_with_hook(|kernel| {
        move |scans| {
            kernel.world().advance(1_000_000);
            if scans > 2 {
                assert!(kernel.request_mask(10, 10, "0-7"));
            }
        }
    });
    let scan = warden.state().scan_request(true);
    let report = warden.run_cycle(scan, &[Command::Assign(assign_command("a", 2, &[Pid(10)]))]);
    assert!(report.replies[0].is_ok());
    let before = (counts.scans.get(), counts.mask_writes.get());
    let mut events = 0;
    for _ in 0..CYCLES {
        let scan = warden.state().scan_request(false);
        let report = warden.run_cycle(scan, &[]);
        assert!(!report.has_unfinished_work, "the next cycle would follow at once");
        events += report.events.len();
    }
    let (scans, writes) = (counts.scans.get() - before.0, counts.mask_writes.get() - before.1);
    assert!(writes >= CYCLES, "each cycle repairs the mask: {writes} writes");
    assert!(scans <= 4 * CYCLES && writes <= 3 * CYCLES, "{scans} scans and {writes} writes");
    assert!(
        events <= 4 * CYCLES,
        "at most one violation in each cycle and one repair for each write: {events} events"
    );
}

#[test]
fn an_orphan_that_a_scan_found_before_events_were_lost_becomes_a_member_by_its_mask() {
    let (mut warden, _) = daemon_with_hook(|kernel| {
        move |scans| {
            // The orphan is born before the fifth scan.
            if kernel.world().processes.contains_key(&Pid(30)) || scans < 4 {
                return;
            }
            kernel.world().advance(1_000_000_000);
            drop(kernel.spawn(30, 1, ALICE.0));
            assert!(kernel.request_mask(30, 30, "0-1"));
        }
    });
    warden.set_fork_events_complete_since(Some(pjw_core::time::Nanos(0)));
    let scan = warden.state().scan_request(true);
    let report = warden.run_cycle(scan, &[Command::Assign(assign_command("a", 2, &[Pid(10)]))]);
    assert!(report.replies[0].is_ok());
    warden.machine_interface_mut().loses_events = true;
    for _ in 0..4 {
        let scan = warden.state().scan_request(true);
        warden.run_cycle(scan, &[]);
    }
    assert_eq!(warden.state().members[&Pid(30)].job, job("a"));
}
