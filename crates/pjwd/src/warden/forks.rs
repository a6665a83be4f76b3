//! The probe for forked processes outside of their job's cores. It is quick, so it comes before each scan.

use pjw_core::fork_fastpath::{expected_masks, snapshot_of_mismatches};
use pjw_core::{ports::Node, snapshot::Snapshot, state::WardenState};

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
