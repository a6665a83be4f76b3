//! Processes whose environment a scan could not read: they are scanned again soon, and then after delays that grow.

use std::collections::BTreeSet;

use pjw_core::ids::Pid;
use pjw_core::snapshot::Observed;
use pjw_core::state::lineage::scan_queue::ScanQueue;
use pjw_core::time::Nanos;

use super::machine::{Machine, machine};

const PROCESS: Pid = Pid(10);
const MS: u64 = 1_000_000;

/// A machine with a process outside of jobs, which a scan has read.
fn with_process() -> Machine {
    let mut machine = machine();
    machine.spawn(PROCESS.0, 1, 1001);
    machine.settle();
    machine
}

/// Scans the process, and decides. `is_unread` is whether the scan could not read its environment.
fn scan(machine: &mut Machine, is_unread: bool) {
    let mut snapshot = machine.scan_only(&[PROCESS.0]);
    if let Some(Observed::Present(process)) = snapshot.processes.get_mut(&PROCESS) {
        process.has_unread_environment = is_unread;
    }
    let _ = machine.decide(&snapshot, &[]);
}

fn queue(machine: &mut Machine) -> &mut ScanQueue {
    &mut machine.state.lineage.scan_queue
}

#[test]
fn a_process_whose_environment_is_never_read_is_scanned_again_after_delays_that_double() {
    let mut machine = with_process();
    scan(&mut machine, true);
    let mut delays = Vec::new();
    for _ in 0..6 {
        let due = queue(&mut machine).next_environment_retry().unwrap();
        let delay = due.0 - machine.now();
        delays.push(delay.div_ceil(MS));
        queue(&mut machine).queue_environment_retries(Nanos(due.0 - delay / 2));
        assert_eq!(queue(&mut machine).take_urgent_pids(), BTreeSet::new(), "too early");
        machine.advance(delay);
        queue(&mut machine).queue_environment_retries(due);
        assert_eq!(queue(&mut machine).take_urgent_pids(), BTreeSet::from([PROCESS]));
        scan(&mut machine, true);
    }
    assert_eq!(delays, [20, 40, 80, 160, 320, 640]);
}

#[test]
fn a_process_whose_environment_was_read_or_that_has_ended_is_not_scanned_again() {
    let mut machine = with_process();
    scan(&mut machine, true);
    scan(&mut machine, false);
    assert_eq!(queue(&mut machine).next_environment_retry(), None);
    scan(&mut machine, true);
    assert!(queue(&mut machine).next_environment_retry().is_some());
    machine.exit(PROCESS.0);
    scan(&mut machine, true);
    assert_eq!(queue(&mut machine).next_environment_retry(), None);
}
