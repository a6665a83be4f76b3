//! Cgroups: mounted hierarchies, the files of a cgroup, and the state of a job's cgroup.

mod hierarchy;
mod job_cgroup;
mod mounts;
mod populated_cache;
mod watch;

pub(crate) use hierarchy::SUBTREE_CONTROL;
pub use hierarchy::{CgroupDir, CpusetConfig, CpusetMount};
pub use mounts::CgroupMounts;
pub use populated_cache::PopulatedCache;
pub use watch::CgroupWatch;
