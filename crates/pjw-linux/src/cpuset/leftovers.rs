//! Lists what earlier runs of pjwd left behind: cgroups of jobs, and cgroups of schedulers whose cpuset pjwd wrote.

use pjw_core::cpuset_group::LeftoverCpuset;
use pjw_core::ids::Uid;
use pjw_core::own_cgroups::OwnCgroupNames;

use super::{marks, twins};
use crate::cgroup::{CgroupDir, CpusetMount};

/// Lists the existing cgroups of jobs that pjwd or systemd created, or whose cpuset a pjwd wrote. The list is sorted
/// by path. `own_cgroups` has the names of the cgroups in which this pjwd creates the cpusets of jobs. The list
/// contains:
///
/// - The cgroups of jobs with these names.
/// - The twins whose cpuset no longer exists. In v1, a job can have a twin: a cgroup at the same path in the
///   hierarchy of another controller.
/// - The cgroups of batch systems whose cpuset still has the PUs (logical CPUs) that a pjwd wrote. If another pjwd
///   wrote the cpuset, the entry names this other pjwd ([`LeftoverCpuset::other_writer`]).
pub(crate) fn list_job_cpusets(hierarchy: &CpusetMount, own_cgroups: &OwnCgroupNames) -> Vec<LeftoverCpuset> {
    let mut parent_paths = vec![own_cgroups.default_parent_path(), format!("/{}", own_cgroups.slice_name())];
    parent_paths.extend(own_cgroups.besteffort_parent_paths());
    let parents = parent_paths.iter().filter_map(|path| hierarchy.cgroup(path));
    let below_parents = parents.flat_map(|parent| parent.children());
    let isolated = hierarchy
        .root()
        .children()
        .into_iter()
        .filter(|group| own_cgroups.is_own_path(&group.path) && !parent_paths.contains(&group.path));
    let mut found: Vec<LeftoverCpuset> =
        below_parents.chain(isolated).map(|group| read_job_cgroup(&group)).collect();
    // The origin of a twin is a cgroup of another hierarchy.
    let orphaned_twins = twins::orphaned_twins(hierarchy, own_cgroups).into_iter();
    found.extend(orphaned_twins.map(|twin| LeftoverCpuset { origin_cgroup: None, ..read_job_cgroup(&twin) }));
    found.extend(find_scheduler_cpusets(hierarchy, own_cgroups));
    found.sort_by(|one, other| one.path.cmp(&other.path));
    found.dedup_by(|one, other| one.path == other.path);
    found
}

/// Returns the cgroups of batch systems whose cpuset still has the PUs (logical CPUs) that a pjwd wrote.
fn find_scheduler_cpusets(hierarchy: &CpusetMount, own_cgroups: &OwnCgroupNames) -> Vec<LeftoverCpuset> {
    let mut found = Vec::new();
    let mut to_search = vec![hierarchy.root()];
    while let Some(parent) = to_search.pop() {
        for group in parent.children() {
            found.extend(marks::read_scheduler_cpuset(&group).map(|(job_cpuset, writer)| LeftoverCpuset {
                path: group.path.clone(),
                owner: None,
                origin_cgroup: None,
                scheduler_cpuset: Some(job_cpuset),
                other_writer: Some(writer).filter(|writer| writer != own_cgroups.name_prefix()),
            }));
            to_search.push(group);
        }
    }
    found
}

/// Returns the entry for `group`, the cgroup of a job, with the owner and the origin in its extended attributes.
fn read_job_cgroup(group: &CgroupDir) -> LeftoverCpuset {
    let owner = group.read_attribute(marks::OWNER_ATTRIBUTE).and_then(|owner| owner.parse().ok()).map(Uid);
    let origin_cgroup =
        group.read_attribute(marks::ORIGIN_ATTRIBUTE).filter(|origin| origin.starts_with('/'));
    let path = group.path.clone();
    LeftoverCpuset { path, owner, origin_cgroup, scheduler_cpuset: None, other_writer: None }
}
