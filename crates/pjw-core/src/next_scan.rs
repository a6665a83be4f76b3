//! The next scan of the same cycle: what must be read again before the cycle ends.

use alloc::sync::Arc;

use crate::basics::Pid;
use crate::basics::prelude::*;
use crate::state::WardenState;
use crate::terms::{CpusetAction, Plan, ScanRequest, ScanScope};

/// Returns the next scan of this cycle; `None` if nothing must be read. The scan covers members whose threads
/// are not known yet, threads that the plan changes (to verify the change and to find their new children),
/// and job cgroups that were not read yet.
pub(crate) fn next_scan(
    state: &WardenState,
    plan: &Plan,
    full: bool,
    new_members: &BTreeSet<Pid>,
) -> Option<ScanRequest> {
    let (members, restoring) = (state.members.values(), state.restoring.values());
    let everybody = members.chain(restoring).filter(|_| full);
    let new_members = new_members.iter().filter_map(|pid| state.tracked(*pid));
    let watched = everybody.chain(new_members);
    let unseen = watched.filter(|member| member.threads.is_empty()).map(|member| member.id.pid);
    let changed = plan.actions.iter().map(|action| action.thread.process.pid);
    // A change of a cpuset may change the masks and the cgroups of all its processes.
    let enclosed = plan.cpusets.iter().flat_map(|action| {
        state
            .members_of(&action.job)
            .chain(state.restoring.values().filter(|member| member.job == action.job))
    });
    let moved = plan.cpusets.iter().filter_map(CpusetAction::process);
    let enclosed = enclosed.map(|member| member.id.pid).chain(moved.map(|process| process.pid));
    let pids: BTreeSet<_> = unseen.chain(changed).chain(enclosed).collect();
    let mut cgroups = state.unread_cgroups();
    cgroups.extend(plan.cpusets.iter().map(|action| action.path().to_owned()));
    (!pids.is_empty() || !cgroups.is_empty()).then(|| ScanRequest {
        scope: ScanScope::Partial(pids.clone()),
        threads_of: pids,
        cgroups,
        idle_watch: Arc::default(),
    })
}
