//! Frozen cgroups, and cgroups at idle priority.

use pjw_core::cpuset_group::CpusetSpec;

use super::{SimMachine, SimProcess, is_in_any};

impl SimMachine {
    /// Freezes or thaws the cgroup at `path`, and switches idle priority on or off for it. Simulates that pjw writes
    /// the files `cgroup.freeze` and `cpu.idle`. If `spec.frozen` is true, no thread in the cgroup runs. If
    /// `spec.idle` is true, the processes in the cgroup get idle priority. Otherwise they get normal priority. The
    /// other fields of `spec` are ignored.
    pub fn set_frozen_and_idle(&mut self, path: &str, spec: &CpusetSpec) {
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

    /// Thaws the cgroup at `path`: its processes can run again. Simulates that pjw writes 0 to the file
    /// `cgroup.freeze`, before pjw removes the cgroup. Has no effect if the cgroup is not frozen.
    pub fn thaw(&mut self, path: &str) {
        self.frozen_cgroups.remove(path);
    }

    /// Returns whether the cgroup of the process `process`, or a cgroup above it, is frozen. No thread of the
    /// process runs then.
    #[must_use]
    pub fn is_frozen(&self, process: &SimProcess) -> bool {
        is_in_any(&process.cgroup, &self.frozen_cgroups)
    }

    /// Returns whether the process `process` runs at idle priority: whether `cpu.idle` is set for its cgroup or for a
    /// cgroup above it.
    #[must_use]
    pub fn has_idle_priority(&self, process: &SimProcess) -> bool {
        is_in_any(&process.cgroup, &self.idle_cgroups)
    }
}
