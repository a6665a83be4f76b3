//! The next scan of the same cycle: what must be read again before the cycle ends.

use alloc::sync::Arc;

use crate::basics::{Pid, prelude::*};
use crate::state::{Member, WardenState};
use crate::terms::{CpusetAction, CpusetChange, CpusetOutcome, Plan, Record, ScanRequest, ScanScope};

/// Returns the request for the next scan of this cycle, or `None` if nothing must be read. A cycle has one or more
/// scans, a decision after each scan, and the decided changes. The next scan reads:
///
/// - the processes of jobs whose threads are not known yet,
/// - the processes whose threads, masks or cgroups `plan` changes, to verify the change and to find new children,
/// - the cgroups that `plan` changes, and the cgroups of jobs that no scan has read yet,
/// - the processes whose affinity masks an earlier run of the daemon may have set, if pjw searches for such
///   processes.
///
/// `full` says whether this cycle has read every process. `records` has the journal records of this cycle.
pub(crate) fn next_scan(
    state: &mut WardenState,
    plan: &Plan,
    full: bool,
    records: &[Record],
) -> Option<ScanRequest> {
    let pids_to_reread = state.members.take_pids_to_reread();
    let state = &*state;
    let has_unread_threads = |member: &&Member| member.threads.is_empty();
    let joined_or_left = records.iter().filter_map(Record::joined_or_left_process);
    let joined_or_left = joined_or_left.filter_map(|process| state.tracked_process(process.pid));
    let mut pids: BTreeSet<Pid> =
        joined_or_left.filter(has_unread_threads).map(|member| member.id.pid).collect();
    pids.extend(plan.mask_actions.iter().map(|action| action.thread.process.pid));
    pids.extend(pids_to_reread);
    pids.extend(pids_changed_by(state, plan.cpuset_actions.iter()));
    let mut cgroups = state.unread_cgroups();
    if full {
        let tracked = state.members.values().chain(state.processes_to_restore.values());
        pids.extend(tracked.filter(has_unread_threads).map(|member| member.id.pid));
        pids.extend(state.unknown_masks.unread_pids());
        cgroups.extend(state.cgroups_with_ancestors(state.unknown_masks.unread_pids()));
    }
    cgroups.extend(plan.cpuset_actions.iter().map(|action| action.cgroup_path().to_owned()));
    (!pids.is_empty() || !cgroups.is_empty()).then(|| ScanRequest {
        scope: ScanScope::Partial(pids.clone()),
        pids_to_read_threads_of: pids,
        active_threads: BTreeMap::new(),
        cgroups,
        idle_watch: Arc::default(),
    })
}

/// Returns the pids of the processes whose affinity masks or cgroups the planned cpuset changes `actions` may change:
/// all processes in these cpusets, and the processes that are moved.
fn pids_changed_by<'a>(
    state: &WardenState,
    actions: impl Iterator<Item = &'a CpusetAction> + Clone,
) -> BTreeSet<Pid> {
    let cpusets: BTreeSet<_> = actions.clone().map(|action| (&action.job, action.cgroup_path())).collect();
    let in_cpuset = cpusets.into_iter().flat_map(|(job, path)| state.processes_affected_by_cpuset(job, path));
    let initial = actions.clone().filter_map(|action| match &action.change {
        CpusetChange::Create { initial_processes, .. } => Some(initial_processes),
        _ => None,
    });
    let moved = actions.filter_map(CpusetAction::moved_process).chain(initial.flatten().copied());
    in_cpuset.map(|member| member.id).chain(moved).map(|process| process.pid).collect()
}

impl WardenState {
    /// Records the outcomes of delayed changes of cpusets. A change is delayed if the kernel or systemd began the
    /// change and did not complete it at once. `finished` lists the delayed changes that are now completed or refused,
    /// each with its outcome.
    ///
    /// Marks the jobs of these cpusets as changed, so that the next decision of the daemon also covers these jobs.
    /// `request` is the request for the next scan. The function adds the cgroups of these cpusets to the request, and
    /// the processes whose masks or cgroups may have changed.
    pub fn note_finished_cpuset_changes(
        &mut self,
        finished: &[(CpusetAction, CpusetOutcome)],
        request: &mut ScanRequest,
    ) {
        for (action, outcome) in finished {
            // While the list has the change, `record_outcome` knows that it was delayed.
            self.cpusets.record_outcome(action, outcome);
            self.cpusets.delayed_changes.remove(action);
            self.dirty.add_job(&action.job);
            // The process may belong to another job by now, which waited for the end of this move.
            let process = action.moved_process().and_then(|process| self.members.get(&process.pid));
            if let Some((job, pid)) = process.map(|member| (member.job.clone(), member.id.pid)) {
                self.dirty.add_process(&job, pid);
            }
        }
        let actions = finished.iter().map(|(action, _)| action);
        let pids = pids_changed_by(self, actions.clone());
        request.cgroups.extend(actions.map(|action| action.cgroup_path().to_owned()));
        request.pids_to_read_threads_of.extend(&pids);
        request.active_threads.retain(|pid, _| !pids.contains(pid));
        if let ScanScope::Partial(scanned) = &mut request.scope {
            scanned.extend(pids);
        }
    }
}
