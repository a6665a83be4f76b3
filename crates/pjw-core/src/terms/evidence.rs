//! The evidence that a process belongs to a job.

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

/// The evidence that a process belongs to a job, such as its cgroup or its ancestors. The variants are
/// ordered from weak to strong evidence, so `max` returns the stronger of two values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum MembershipEvidence {
    /// There is no other evidence, but the user of the process has exactly one job on this machine. Counts
    /// only if the setting `adopt_strays` is on.
    Adopted,
    /// A variable in the environment of the process names the job. Counts only if the user of the process
    /// owns the job, or if a daemon of the batch system started the process.
    Environment,
    /// The process matches the rule of the job. Only the job of a provision (cores that are promised to a
    /// service) has such a rule.
    Provision,
    /// The process group or session of the process belongs to the job.
    Session,
    /// The process descends from a process of the job: the parent or an earlier ancestor belongs to the job.
    Parent,
    /// The process is in the cgroup of the cpuset that pjw made for the job.
    #[serde(rename = "enclosure")]
    #[strum(serialize = "cgroup")]
    JobCpuset,
    /// The process is in the cgroup that the batch system made for the job, or has the supplementary group
    /// that Grid Engine gave to the job.
    Cgroup,
    /// A command of a client assigned the process to the job, by its pid or its session.
    Registered,
}

impl MembershipEvidence {
    /// Returns the evidence that a forked process belongs to the same job as its parent. This value is the evidence for
    /// the parent. The result is [`MembershipEvidence::Parent`], with one exception. If the parent belongs to the job
    /// only because its user has no other job ([`MembershipEvidence::Adopted`]), the result is
    /// [`MembershipEvidence::Adopted`] too.
    #[must_use]
    pub fn of_child(self) -> Self {
        if self == Self::Adopted { self } else { Self::Parent }
    }
}
