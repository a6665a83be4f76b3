//! The probe for forked processes with a mask outside of their job's cores. The probe is quick, so it comes before each
//! scan.

use std::collections::BTreeMap;

use pjw_core::command::Command;
use pjw_core::fork_fastpath::{
    defer_scans_if_masks_match, expected_fork_masks, expected_masks_of_unverified_forks,
    forked_with_unexplained_masks, snapshot_of_mismatches,
};
use pjw_core::{ports::MachineInterface, snapshot::Snapshot, state::WardenState};

/// Reads the affinity masks of the newly forked processes of jobs whose masks are not verified yet. If a mask is the
/// expected one (the online PUs that the job holds), the scan of the process is deferred by a few milliseconds. The
/// scan of a process that was forked in the cpuset of its job is deferred too. `node` is the interface to the machine.
pub(super) fn defer_scans_of_expected_masks<N: MachineInterface>(node: &mut N, state: &mut WardenState) {
    if state.lineage.scan_queue.immediate_pids().is_empty() {
        return;
    }
    let expected = expected_masks_of_unverified_forks(state);
    let mismatches = if expected.is_empty() { Vec::new() } else { node.probe_masks(&expected).mismatches };
    defer_scans_if_masks_match(state, &expected, &mismatches);
}

/// Reads the affinity masks of newly forked processes of jobs. Returns a snapshot of the processes whose mask is wrong,
/// because it is not the set of online PUs that the job holds. `None` if there are no such processes. `node` is the
/// interface to the machine.
pub(super) fn find_wrong_fork_masks<N: MachineInterface>(
    node: &mut N,
    state: &WardenState,
) -> Option<Snapshot> {
    let expected = expected_fork_masks(state);
    if expected.is_empty() {
        return None;
    }
    let probe = node.probe_masks(&expected);
    let unknown = forked_with_unexplained_masks(state, &expected, &probe);
    let cpuset_paths = if unknown.is_empty() { BTreeMap::new() } else { node.read_cpuset_paths(&unknown) };
    let snapshot = snapshot_of_mismatches(state, probe, &cpuset_paths);
    (!snapshot.processes.is_empty()).then_some(snapshot)
}

/// Returns whether `command` changes the affinity masks of running processes. If true, another scan must follow,
/// because such a process can fork during the change.
pub(super) fn changes_process_masks(command: &Command) -> bool {
    match command {
        Command::Assign(assign) => !assign.pids.is_empty() || assign.session.is_some(),
        Command::Want { .. } => false,
        // Processes that a changed rule no longer recognises leave their job.
        Command::Provision(_)
        | Command::Release { .. }
        | Command::Undo { .. }
        | Command::ReleaseAll { .. }
        | Command::Defrag { .. } => true,
    }
}
