//! Which jobs of the class besteffort may borrow cores.

use crate::state::WardenState;
use crate::terms::{JobId, Policy};

/// Returns whether the job `id` of the class besteffort may borrow cores. False while the job has no process, except if
/// the policy also lends cores to jobs without processes.
pub(super) fn may_borrow(state: &WardenState, policy: &Policy, id: &JobId) -> bool {
    policy.lending.lends_to_empty_jobs || state.members_of(id).next().is_some()
}
