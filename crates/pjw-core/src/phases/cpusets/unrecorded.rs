//! Which changes of cpusets may be made while the journal can't be written.
//!
//! The journal must have what a release needs: the cgroups of jobs, the original cgroups of their processes, and the
//! original masks of their threads. A change that adds nothing to these facts needs no record. Such a change takes back
//! an earlier one, or it changes a loan: it writes other PUs into the cpuset of a borrower, or freezes or thaws the
//! borrower. A borrowed PU stays with its holder. So a restarted daemon that reads an older loan gives no PU to two
//! jobs. It writes the cpuset of each borrower again, and then decides about the loans as always.

use crate::basics::{ThreadId, prelude::*};
use crate::phases::cpusets::planned::bound_threads;
use crate::state::WardenState;
use crate::terms::{CgroupCreator, CpusetAction, CpusetChange, JobCpuset, Observed, Policy};

/// Returns whether the journal (the file from which a restarted daemon restores its state) must have the records of
/// `action` before the daemon makes this change. `unrecorded` has the threads whose original masks could not be written
/// to the journal. The original mask of a thread is its affinity mask without the changes by pjw. False in these cases:
///
/// - The change undoes an earlier change of a cpuset: it moves a process back, or removes a cpuset or its limits.
/// - The change only writes the settings of an existing cgroup of a borrower (a job of the class besteffort), and no
///   bound thread loses its mask by this. A thread is bound if its original mask leaves out a PU (logical CPU), or if
///   the journal has a mask of the thread. On Linux 6.2 and later, no bound thread that the change affects may be in
///   `unrecorded`. An older kernel replaces the masks of all threads in a cpuset at each write of the cpuset. On such a
///   kernel, the change must not affect any bound thread.
#[must_use]
pub fn needs_record(
    state: &WardenState,
    policy: &Policy,
    action: &CpusetAction,
    unrecorded: &BTreeSet<ThreadId>,
) -> bool {
    use CpusetChange::{Create, MoveBack, MoveIn, Remove, RemoveLimits};
    match &action.change {
        MoveBack { .. } | RemoveLimits { .. } | Remove { .. } => false,
        MoveIn { .. } => true,
        Create { job_cpuset, initial_processes, .. } => {
            let JobCpuset { job, path, creator, spec } = job_cpuset;
            let exists = state.cgroups.get(path).and_then(Observed::present).is_some();
            let is_loan = spec.idle && *creator != CgroupCreator::Scheduler && initial_processes.is_empty();
            let has_masks =
                |thread: &ThreadId| policy.cpuset_support.affinity_persists && !unrecorded.contains(thread);
            !(exists && is_loan && bound_threads(state, job, path).iter().all(has_masks))
        }
    }
}
