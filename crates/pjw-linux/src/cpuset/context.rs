//! What each cpuset change uses: the interfaces, the time limits of systemd, and constructors of the outcomes.

use std::time::Duration;

use pjw_core::cpuset_group::{CpusetChange, CpusetOutcome, JobCpuset};
use pjw_core::own_cgroups::OwnCgroupNames;

use crate::cgroup::{CgroupDir, CpusetMount};
use crate::{proc::procfs::ProcDir, systemd::SystemdClient};

/// The maximum time until a request to systemd shows in the cgroup hierarchy.
pub(super) const SYSTEMD_TIMEOUT: Duration = Duration::from_secs(2);
/// The time between two checks whether a request to systemd shows in the cgroup hierarchy.
pub(super) const SYSTEMD_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// What a change of a cpuset needs: the open `/proc` directory, the cgroup hierarchy with the cpuset controller, the
/// D-Bus client for systemd, and the names of the cgroups of this daemon.
pub(crate) struct CpusetContext<'a> {
    pub(crate) proc: &'a mut ProcDir,
    pub(crate) hierarchy: &'a CpusetMount,
    pub(crate) systemd: &'a mut SystemdClient,
    pub(crate) own_cgroups: &'a OwnCgroupNames,
}

/// The result of one step of a cpuset change. If a step fails, the change ends, and the error is the outcome of the
/// change.
pub(super) type Result<T, E = CpusetOutcome> = std::result::Result<T, E>;

/// Returns the outcome of a cpuset change that was refused. `reason` is a sentence for users.
pub(super) fn refused_outcome(reason: String) -> CpusetOutcome {
    CpusetOutcome::Refused { reason }
}

/// Returns the cpuset whose configuration `change` changes. `None` if `change` only moves a process.
pub(super) fn changed_cpuset(change: &CpusetChange) -> Option<&JobCpuset> {
    match change {
        CpusetChange::Create { job_cpuset, .. }
        | CpusetChange::RemoveLimits { job_cpuset }
        | CpusetChange::Remove { job_cpuset } => Some(job_cpuset),
        CpusetChange::MoveIn { .. } | CpusetChange::MoveBack { .. } => None,
    }
}

impl CpusetContext<'_> {
    /// Returns the cgroup at `path` in the hierarchy with the cpuset controller. The cgroup need not exist.
    ///
    /// # Errors
    /// [`CpusetOutcome::Refused`] if `path` lies outside the cgroup namespace of pjwd.
    pub(super) fn cgroup(&self, path: &str) -> Result<CgroupDir> {
        self.hierarchy
            .cgroup(path)
            .ok_or_else(|| refused_outcome(format!("the cgroup {path} is of another cgroup namespace")))
    }

    /// Returns the cgroup of the cpuset `job_cpuset`. The cgroup need not exist.
    ///
    /// # Errors
    /// [`CpusetOutcome::Refused`] if this is the root cgroup, or if it lies outside the cgroup namespace of pjwd.
    pub(super) fn job_cgroup(&self, job_cpuset: &JobCpuset) -> Result<CgroupDir> {
        let group = self.cgroup(&job_cpuset.path)?;
        if group.path == "/" {
            Err(refused_outcome(format!("{}: the root cgroup can't be the cpuset of a job", job_cpuset.job)))
        } else {
            Ok(group)
        }
    }
}
