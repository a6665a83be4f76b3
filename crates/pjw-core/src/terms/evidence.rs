//! The evidence that a process belongs to a job.

use serde::{Deserialize, Serialize};

/// The evidence that a process belongs to a job, such as its cgroup or its parent. The order is from weak to
/// strong evidence, so `max` returns the stronger of two.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Evidence {
    /// The user of the process has exactly one job here, and unassigned processes are adopted (`adopt_strays`).
    Adopted,
    /// A variable in the environment of the process, confirmed by its user and by stronger evidence for the job.
    Environment,
    /// The process group or session of the process belongs to the job.
    Session,
    /// The parent of the process is a member.
    Parent,
    /// The process is in the cgroup that pjw made for the job.
    #[serde(rename = "enclosure")]
    #[strum(serialize = "cgroup")]
    JobCpuset,
    /// The process is in the scheduler's cgroup, or has Grid Engine's group id for the job.
    Cgroup,
    /// A client with the permission to do so named the process over the socket.
    Registered,
}
