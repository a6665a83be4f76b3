//! The state of a cgroup, and the cgroups of a process, as a scan reads them.

use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::CpusetHierarchy;
use pjw_core::ids::CgroupId;
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_core::process_cgroups::ProcessCgroups;
use pjw_core::snapshot::{Cgroup, CgroupUsage, Cpuset, Observed};

use crate::world::{SimMachine, SimProcess};

/// Returns the state of the simulated cgroup at `path`, as a scan reads it. Returns [`Observed::Gone`] if the cgroup
/// does not exist (any more). A cgroup without processes exists only if pjw created the cgroup, or if `path` is in the
/// set `persistent_cgroups` of `world`.
pub(super) fn read_cgroup(world: &SimMachine, path: &str) -> Observed<Cgroup> {
    let populated = world.is_cgroup_populated(path);
    // An empty cgroup stays only if pjw created it as a directory (not as a scope of systemd), or if it is persistent.
    let makes_directories =
        matches!(world.cpuset_support.hierarchy, CpusetHierarchy::Unified | CpusetHierarchy::Legacy);
    let is_own = makes_directories
        && OwnCgroupNames::from_cgroup_path(path).is_some()
        && world.cpusets.contains_key(path);
    if !populated && !is_own && !world.persistent_cgroups.contains(path) {
        return Observed::Gone;
    }
    let has_controller = !matches!(world.cpuset_support.hierarchy, CpusetHierarchy::Unavailable { .. })
        && !world.without_cpuset_controller.contains(path);
    let restricted_cpus = world.cpusets.get(path).cloned();
    let cpuset = has_controller.then(|| Cpuset {
        cpus: restricted_cpus.clone().unwrap_or_default(),
        effective_cpus: world.effective_cpus(path),
        mems: CpuSet::new(),
        isolated: world.isolated_partitions.contains(path),
    });
    Observed::Present(Cgroup {
        id: CgroupId { inode: 1, path: path.to_owned() },
        restricted_cpus,
        populated,
        cpuset,
        usage: CgroupUsage::default(),
    })
}

/// Returns the cgroups of `process`, as in the simulated file `/proc/PID/cgroup`. If `hierarchy` is cgroup v1, the line
/// of the controller `cpuset` has the present cgroup, and the line of the controller `freezer` has the original cgroup:
/// pjw moves processes only for `cpuset`.
pub(super) fn process_cgroups(process: &SimProcess, hierarchy: &CpusetHierarchy) -> ProcessCgroups {
    let line = |controllers: &str, path: &String| (controllers.to_owned(), path.clone());
    let lines = match hierarchy {
        CpusetHierarchy::Legacy => {
            vec![line("cpuset", &process.cgroup), line("freezer", &process.original_cgroup)]
        }
        _ => vec![line("", &process.cgroup)],
    };
    ProcessCgroups { lines }
}
