//! The largest amount of memory that a cgroup has used.

use super::hierarchy::CgroupDir;

/// Reads the largest amount of memory, in bytes, that the kernel has ever charged to a cgroup and to the
/// cgroups below it. The value is in the file `memory.peak` (v2, Linux 5.19) or `memory.max_usage_in_bytes`
/// (v1). `cgroup` must be in the hierarchy with the memory controller. `None` if the kernel has no such file,
/// or if the cgroup does not exist.
#[must_use]
pub fn read_memory_peak(cgroup: &CgroupDir) -> Option<u64> {
    let file = if cgroup.is_unified() { "memory.peak" } else { "memory.max_usage_in_bytes" };
    cgroup.read_file(file).ok()?.parse().ok()
}
