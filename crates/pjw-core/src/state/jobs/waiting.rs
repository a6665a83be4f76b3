//! Why each waiting job got no cores. The daemon searches cores for the job again only if the search may now succeed.

use crate::terms::{JobRequest, Refusal};

/// The facts that decide whether a waiting job gets cores, apart from the facts about the job itself. While these facts
/// stay the same, the daemon searches cores only for those waiting jobs that change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ServingConditions {
    /// [`PuPool::change_count`](crate::state::pool::PuPool::change_count).
    pub(crate) pool_change_count: u64,
    /// [`Jobs::owned_grants_version`](crate::state::jobs::Jobs::owned_grants_version). `None` if jobs may not share
    /// cores. Which cores a job may share depends on all grants, and the pool has one holder for each PU.
    pub(crate) owned_grants_version: Option<u64>,
    /// [`Policy::may_grant`](crate::terms::Policy::may_grant).
    pub(crate) may_grant: bool,
}

/// The request of a job that waits for cores, and the reason why it could not be served.
#[derive(Debug, Clone)]
pub(crate) struct RefusedRequest {
    /// The conditions under which the cores were searched for.
    pub(crate) conditions: ServingConditions,
    pub(crate) request: JobRequest,
    pub(crate) refusal: Refusal,
}

impl RefusedRequest {
    /// Returns whether a search for the cores of `request` under `conditions` would fail again: the conditions and the
    /// request are the same as at the failed search.
    pub(crate) fn is_valid(&self, conditions: ServingConditions, request: &JobRequest) -> bool {
        self.conditions == conditions && self.request == *request
    }
}
