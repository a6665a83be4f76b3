//! Which process belongs to which job, by evidence in the order of trust.

use serde::{Deserialize, Serialize};

/// How it is known that a process belongs to its job, weakest first, so that `max` is the stronger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Evidence {
    /// A variable in its environment, confirmed by its user and by stronger evidence for the job.
    Environment,
    /// Its process group or session.
    Session,
    /// Its parent is a member.
    Parent,
    /// The scheduler's cgroup, or Grid Engine's group id.
    Cgroup,
    /// Someone who may said so over the socket.
    Registered,
}
