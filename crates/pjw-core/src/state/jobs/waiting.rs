//! What is kept about the jobs that wait for cores, so that a job is looked at only when it may get cores.

use crate::terms::{JobRequest, Refusal};

/// What decides, besides a job itself, whether a waiting job gets cores. While it stays as it is, only the waiting jobs
/// that change are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ServingConditions {
    /// [`PuPool::change_count`](crate::state::pool::PuPool::change_count).
    pub(crate) pool_version: u64,
    /// [`Policy::may_grant`](crate::terms::Policy::may_grant).
    pub(crate) may_grant: bool,
}

/// The request of a job that waits for cores, and the reason why it could not be served.
#[derive(Debug, Clone)]
pub(crate) struct RefusedRequest {
    /// [`PuPool::change_count`](crate::state::pool::PuPool::change_count) when the cores were searched for.
    pub(crate) pool_version: u64,
    pub(crate) request: JobRequest,
    pub(crate) refusal: Refusal,
}

impl RefusedRequest {
    /// Returns whether a search for the cores of `request` would fail again. `pool_version` is the present
    /// [`PuPool::change_count`](crate::state::pool::PuPool::change_count).
    pub(crate) fn is_valid(&self, pool_version: u64, request: &JobRequest) -> bool {
        self.pool_version == pool_version && self.request == *request
    }
}
