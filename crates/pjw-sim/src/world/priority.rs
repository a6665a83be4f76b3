//! Frozen cgroups, and cgroups at idle priority.

use pjw_core::cpuset_group::CpusetSpec;

use super::{SimProcess, World, is_in_any};

impl World {
    /// Freezes or thaws the cgroup at `path`, and gives its processes idle priority or the usual one, as `spec` says.
    pub fn set_priority(&mut self, path: &str, spec: &CpusetSpec) {
        for (groups, is_set) in [(&mut self.frozen_cgroups, spec.frozen), (&mut self.idle_cgroups, spec.idle)]
        {
            if is_set {
                groups.insert(path.to_owned());
            } else {
                groups.remove(path);
            }
        }
        self.log(|| format!("  cgroup {path}: frozen {}, idle {}", spec.frozen, spec.idle));
    }

    /// Thaws the cgroup at `path`, as pjw does before it lifts the limits of a cpuset. Has no effect if the cgroup is not frozen.
    pub fn thaw(&mut self, path: &str) {
        self.frozen_cgroups.remove(path);
    }

    /// Returns whether no thread of the process runs, because its cgroup or one above is frozen.
    #[must_use]
    pub fn is_frozen(&self, process: &SimProcess) -> bool {
        is_in_any(&process.cgroup, &self.frozen_cgroups)
    }

    /// Returns whether the process runs at idle priority.
    #[must_use]
    pub fn is_idle_priority(&self, process: &SimProcess) -> bool {
        is_in_any(&process.cgroup, &self.idle_cgroups)
    }
}
