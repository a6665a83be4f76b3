//! Which jobs of the class besteffort may borrow cores.

use crate::state::WardenState;
use crate::terms::{JobId, Policy};

/// Whether a job of the class besteffort may borrow cores: not while it has no process.
pub(super) fn may_borrow(state: &WardenState, policy: &Policy, id: &JobId) -> bool {
    policy.lending.lends_to_empty_jobs || state.members_of(id).next().is_some()
}
