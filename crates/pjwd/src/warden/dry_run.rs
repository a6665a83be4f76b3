//! The dry run: what the next cycle would do.

use std::collections::BTreeSet;
use std::sync::Arc;

use pjw_core::plan::{Plan, Warning};
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::reconcile::reconcile;
use pjw_core::scan::ScanScope;

use super::cycle::Warden;

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Returns the changes that the next cycle (scan, decision and changes) would make, and warnings for users. Each
    /// warning describes a needed change that the cycle would not make, or a state that needs attention. Scans the
    /// machine, but changes no affinity masks or cpusets.
    pub fn dry_run(&mut self) -> (Plan, Arc<[Arc<Warning>]>) {
        let mut snapshot = self.scan_processes(&self.state.scan_request(true));
        self.affinity_requests.extend(std::mem::take(&mut snapshot.affinity_requests));
        let mut state = self.state.clone();
        let mut decision = reconcile(&mut state, &snapshot, &[], &self.policy);
        let Plan { cpuset_actions, mut mask_actions } = std::mem::take(&mut decision.plan);
        // Scan the processes without a planned action again, with their threads. Processes with a planned action
        // would look different after the action.
        let planned: BTreeSet<_> = mask_actions.iter().map(|action| action.thread.process.pid).collect();
        if let Some(mut next_scan) = decision.next_scan.take() {
            next_scan.pids_to_read_threads_of.retain(|pid| !planned.contains(pid));
            next_scan.scope = ScanScope::Partial(next_scan.pids_to_read_threads_of.clone());
            snapshot = self.scan_processes(&next_scan);
            self.affinity_requests.extend(std::mem::take(&mut snapshot.affinity_requests));
            decision = reconcile(&mut state, &snapshot, &[], &self.policy);
            mask_actions.extend(
                decision
                    .plan
                    .mask_actions
                    .into_iter()
                    .filter(|action| !planned.contains(&action.thread.process.pid)),
            );
        }
        (Plan { cpuset_actions, mask_actions }, decision.warnings)
    }
}
