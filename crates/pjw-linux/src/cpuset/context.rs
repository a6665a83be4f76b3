//! The interfaces that a cpuset change uses, and constructors of its outcomes.

use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CpusetChange, CpusetOutcome, JobCpuset};

use crate::cgroup::{CgroupDir, CpusetMount};
use crate::{proc::procfs::ProcDir, systemd::SystemdClient};

/// The interfaces that a cpuset change needs: `/proc`, the cpuset hierarchy and systemd.
pub(crate) struct CpusetContext<'a> {
    pub(crate) proc: &'a mut ProcDir,
    pub(crate) hierarchy: &'a CpusetMount,
    pub(crate) systemd: &'a mut SystemdClient,
}

/// The result of a step of a change. The error is the outcome of the whole change.
pub(super) type Result<T, E = CpusetOutcome> = std::result::Result<T, E>;

/// The outcome of a refused change. `reason` is text for people.
pub(super) fn refused(reason: String) -> CpusetOutcome {
    CpusetOutcome::Refused { reason }
}

/// The outcome of a change after which these CPUs are effective.
pub(super) fn done(effective: CpuSet) -> CpusetOutcome {
    CpusetOutcome::Done { effective: Some(effective) }
}

/// The cpuset that a change affects. `None` for a move of a process.
pub(super) fn changed_cpuset(change: &CpusetChange) -> Option<&JobCpuset> {
    match change {
        CpusetChange::Create { job_cpuset, .. }
        | CpusetChange::RemoveLimits { job_cpuset }
        | CpusetChange::Remove { job_cpuset } => Some(job_cpuset),
        CpusetChange::MoveIn { .. } | CpusetChange::MoveBack { .. } => None,
    }
}

impl CpusetContext<'_> {
    /// Returns the cgroup at `path`. The change is refused if the path is outside the cgroup namespace of the daemon.
    pub(super) fn cgroup(&self, path: &str) -> Result<CgroupDir> {
        self.hierarchy
            .cgroup(path)
            .ok_or_else(|| refused(format!("the cgroup {path} is of another cgroup namespace")))
    }

    /// Returns the cgroup of a job's cpuset. The change is refused if this is the root cgroup.
    pub(super) fn job_cgroup(&self, job_cpuset: &JobCpuset) -> Result<CgroupDir> {
        let group = self.cgroup(&job_cpuset.path)?;
        if group.path == "/" {
            Err(refused(format!("{}: the root cgroup can't be the cpuset of a job", job_cpuset.job)))
        } else {
            Ok(group)
        }
    }
}
