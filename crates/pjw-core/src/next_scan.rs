//! The next scan of the same cycle: what must be read again before the cycle ends.

use alloc::sync::Arc;

use crate::basics::prelude::*;
use crate::state::WardenState;
use crate::terms::{CpusetAction, Plan, Record, ScanRequest, ScanScope};

/// Returns the next scan of this cycle; `None` if nothing must be read. The scan covers members whose threads
/// are not known yet, threads that the plan changes (to verify the change and to find their new children),
/// and job cgroups that were not read yet. `full` tells whether this cycle read every process, and `records` are
/// the records of this cycle.
pub(crate) fn next_scan(
    state: &WardenState,
    plan: &Plan,
    full: bool,
    records: &[Record],
) -> Option<ScanRequest> {
    let all_tracked = full.then(|| state.members.values().chain(state.processes_to_restore.values()));
    let all_tracked = all_tracked.into_iter().flatten();
    let new_members = records.iter().filter_map(Record::tracked_process);
    let new_members = new_members.filter_map(|process| state.tracked(process.pid));
    let unread = all_tracked.chain(new_members).filter(|member| member.threads.is_empty());
    // A change of a cpuset may change the masks and the cgroups of all its processes.
    let cpusets: BTreeSet<_> =
        plan.cpuset_actions.iter().map(|action| (&action.job, action.path())).collect();
    let in_cpuset = cpusets.into_iter().flat_map(|(job, path)| state.concerned_by_cpuset(job, path));
    let moved = plan.cpuset_actions.iter().filter_map(CpusetAction::process);
    let changed = plan.mask_actions.iter().map(|action| action.thread.process).chain(moved);
    let processes = unread.chain(in_cpuset).map(|member| member.id).chain(changed);
    let pids: BTreeSet<_> = processes.map(|process| process.pid).collect();
    let mut cgroups = state.unread_cgroups();
    cgroups.extend(plan.cpuset_actions.iter().map(|action| action.path().to_owned()));
    (!pids.is_empty() || !cgroups.is_empty()).then(|| ScanRequest {
        scope: ScanScope::Partial(pids.clone()),
        threads_of: pids,
        cgroups,
        idle_watch: Arc::default(),
    })
}
