//! The probe for forked processes outside of their job's cores. It is quick, so it comes before each scan.

use pjw_core::fork_fastpath::{
    defer_scans_of_right_masks, expected_masks, expected_masks_of_immediate, snapshot_of_mismatches,
};
use pjw_core::ports::{Journal, Node};
use pjw_core::{snapshot::Snapshot, state::WardenState};

use super::cycle::Warden;

impl<N: Node, J: Journal> Warden<N, J> {
    /// Reads the masks of newly forked processes of jobs. If the mask of a process is right, its scan may wait
    /// for a few milliseconds. Must be called after process events were read, unless a cycle follows at once.
    pub fn probe_forks(&mut self) {
        if self.state.lineage.scan_queue.immediate_pids().is_empty() {
            return;
        }
        let expected = expected_masks_of_immediate(&self.state);
        let mismatches =
            if expected.is_empty() { Vec::new() } else { self.node.probe_masks(&expected).mismatches };
        defer_scans_of_right_masks(&mut self.state, &expected, &mismatches);
    }
}

/// A snapshot of the forked processes whose masks are not the expected ones. `None` if there are none.
pub(super) fn probe<N: Node>(node: &mut N, state: &WardenState) -> Option<Snapshot> {
    let expected = expected_masks(state);
    if expected.is_empty() {
        return None;
    }
    let probe = node.probe_masks(&expected);
    let snapshot = snapshot_of_mismatches(state, probe);
    (!snapshot.processes.is_empty()).then_some(snapshot)
}
