//! Cgroups: mounted hierarchies, the files of a cgroup, and the state of a job's cgroup.

mod attributes;
mod hierarchy;
mod job_cgroup;
mod memory;
mod mounts;
mod peak;
mod populated_cache;
mod watch;

pub(crate) use hierarchy::SUBTREE_CONTROL;
pub use hierarchy::{CgroupDir, CpusetConfig, CpusetMount};
pub(crate) use job_cgroup::assumed_cgroup;
pub use memory::{CgroupMemory, MemoryControllerMount};
pub use mounts::CgroupMounts;
pub(crate) use mounts::{mount_fields, read_mount_list};
pub use peak::read_memory_peak;
pub use populated_cache::PopulatedCgroupCache;
pub use watch::CgroupWatch;
