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
/// `action` before the daemon makes this change. `unrecorded` has the threads whose masks could not be written to the
/// journal. False in these cases:
///
/// - The change takes back what an earlier change of a cpuset did: it moves a process back, or removes a cpuset or its
///   limits.
/// - The change writes the settings of the cpuset of a borrower (a job of the class besteffort). The cgroup exists, and
///   the journal has the mask of each thread that the change may affect. Before Linux 6.2, no thread has such a mask,
///   because the kernel replaces the masks at each write of the cpuset.
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
