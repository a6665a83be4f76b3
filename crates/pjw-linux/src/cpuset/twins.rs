//! Twins of job cpusets in other v1 hierarchies.
//!
//! In v1, each controller may have a hierarchy of its own. To use another controller than cpuset, a job needs a cgroup
//! in the hierarchy of this controller: a twin, at the path of the cpuset. A twin is created after the cpuset and
//! removed before it. So a twin without a cpuset was left behind by a pjwd that was killed.

use std::fs;

use pjw_core::ids::Pid;
use pjw_core::own_cgroups::OwnCgroupNames;

use super::context::Result;
use super::own::retry_while_parent_disappears;
use super::writing::{errno_to_outcome, remove_cgroup};
use crate::cgroup::{CgroupDir, CpusetMount};

/// The maximum number of passes in which all processes are moved out of a cgroup. Each pass lists the processes and
/// moves them. A process that is forked during a pass is moved in the next pass.
pub(super) const MAX_PASSES: usize = 64;

/// If the cgroup at `path` is the cgroup of a besteffort job or lies below such a cgroup, returns the path of the
/// job's cgroup. Otherwise returns `None`.
pub(super) fn besteffort_job_path(path: &str) -> Option<String> {
    let base = OwnCgroupNames::from_cgroup_path(path)?.besteffort_parent_path();
    let name = path.strip_prefix(&base)?.strip_prefix('/')?.split('/').next()?;
    (!name.is_empty()).then(|| format!("{base}/{name}"))
}

/// Returns `twin` if it exists, and if its path is that of a besteffort job's cgroup or of a cgroup below. Otherwise
/// returns `None`.
pub(super) fn existing_twin(twin: Option<CgroupDir>) -> Option<CgroupDir> {
    twin.filter(|twin| besteffort_job_path(&twin.path).is_some() && twin.exists())
}

/// Creates `twin`, a cgroup at the same path as the cpuset of a job, in the v1 hierarchy of another controller. First
/// creates the parent of the twin, and calls `prepare` with the parent.
pub(super) fn create_v1_cgroup(twin: &CgroupDir, prepare: impl Fn(&CgroupDir) -> Result<()>) -> Result<()> {
    let above = twin.parent();
    let create_dir = |group: &CgroupDir| group.create().map_err(errno_to_outcome(group, "be created"));
    retry_while_parent_disappears(twin, || {
        create_dir(&above)?;
        prepare(&above)?;
        create_dir(twin)
    })
}

/// Removes `twin`, a cgroup at the same path as the cpuset of a job, in the v1 hierarchy of another controller. Also
/// removes the parent of the twin if the parent is then empty. First calls `move_out` with each process in the twin.
/// `move_out` must move the process to another cgroup.
///
/// # Errors
/// The first error of `move_out`. A refusal if processes are left in the cgroup, or the kernel refuses the removal.
pub(super) fn remove_v1_cgroup(twin: &CgroupDir, mut move_out: impl FnMut(Pid) -> Result<()>) -> Result<()> {
    for _ in 0..MAX_PASSES {
        let pids = twin.processes();
        if pids.is_empty() {
            break;
        }
        pids.into_iter().try_for_each(&mut move_out)?;
    }
    remove_cgroup(twin, twin.dir.display())?;
    let above = twin.parent();
    if above.path != "/" {
        // Fails if there are other twins.
        let _ = fs::remove_dir(&above.dir);
    }
    Ok(())
}

/// Returns the twins whose cpuset does not exist. A twin is a cgroup at the same path as the cpuset of a besteffort
/// job, in the v1 hierarchy with the cpu or freezer controller. `hierarchy` is the hierarchy with the cpuset
/// controller, and `own_cgroups` has the names of the cgroups that this pjwd creates.
pub(super) fn orphaned_twins(hierarchy: &CpusetMount, own_cgroups: &OwnCgroupNames) -> Vec<CgroupDir> {
    let parent_path = own_cgroups.besteffort_parent_path();
    let parents = [hierarchy.v1_cpu_cgroup(&parent_path), hierarchy.v1_freezer_cgroup(&parent_path)];
    let twins = parents.iter().flatten().flat_map(CgroupDir::children);
    twins.filter(|twin| hierarchy.cgroup(&twin.path).is_none_or(|cpuset| !cpuset.exists())).collect()
}
