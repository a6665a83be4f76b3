//! The memory of a cgroup: `memory.stat` and the limits, v1 and v2.
//!
//! v2: Documentation/admin-guide/cgroup-v2.rst. v1: Documentation/admin-guide/cgroup-v1/memory.rst. A page is charged
//! once, to the cgroup of the process that touched it first, however many processes map it.

use std::path::PathBuf;

use nix::errno::Errno;
use pjw_core::{ids::Pid, process_cgroups::ProcessCgroups};

use super::hierarchy::CgroupDir;
use super::mounts::CgroupMounts;

/// A v1 limit of at least this many bytes counts as no limit. For a cgroup without a limit, v1 shows almost 2^63.
const NO_V1_LIMIT: u64 = 1 << 62;

/// The mounted cgroup hierarchy, v1 or v2, that has the memory controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryControllerMount {
    mount_point: PathBuf,
    is_unified: bool,
}

/// The anonymous memory and the mapped pages of files that the kernel charges to a cgroup and to the cgroups below it.
/// Other charged memory is not included, such as page cache that no process maps. Also contains how much more memory
/// the kernel can charge to the cgroup. All sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CgroupMemory {
    /// The anonymous memory: heaps, stacks, and changed pages of private mappings.
    pub anonymous: u64,
    /// The pages of files and of shared memory that some process maps.
    pub mapped_files: u64,
    /// How much more memory the kernel can charge to the cgroup, until this cgroup or a cgroup above it reaches its
    /// memory limit. Page cache that was not used recently counts as free, because the kernel frees it first. `None` if
    /// there is no limit.
    pub available: Option<u64>,
}

impl MemoryControllerMount {
    /// Finds the hierarchy with the memory controller in `mounts`. If a v1 hierarchy with this controller is
    /// mounted, the result is this hierarchy. Otherwise the result is the v2 hierarchy. `None` if neither is
    /// mounted. Does not check that the v2 hierarchy has the memory controller.
    #[must_use]
    pub fn from_mounts(mounts: &CgroupMounts) -> Option<Self> {
        match mounts.v1_mount("memory") {
            Some((_, root)) => Some(Self { mount_point: root.to_owned(), is_unified: false }),
            None => mounts.v2_mount_point.clone().map(|mount_point| Self { mount_point, is_unified: true }),
        }
    }

    /// Returns the cgroup path of a process in the hierarchy with the memory controller. `process_cgroups` are
    /// all cgroups of the process, as [`ProcDir::cgroups`](crate::proc::procfs::ProcDir::cgroups) returns them.
    /// `None` if the process has no cgroup in this hierarchy.
    #[must_use]
    pub fn memory_cgroup_path<'c>(&self, process_cgroups: &'c ProcessCgroups) -> Option<&'c str> {
        if self.is_unified { process_cgroups.v2_path() } else { process_cgroups.v1_path("memory") }
    }

    /// Returns the cgroup at `path` in the hierarchy with the memory controller. `path` is relative to the root
    /// of the hierarchy and begins with `/`, as in `/proc/PID/cgroup`. The cgroup need not exist. `None` if
    /// `path` is the root, does not begin with `/`, or contains a component `.` or `..`. The kernel shows a path
    /// with `..` for a cgroup outside this process's cgroup namespace.
    #[must_use]
    pub fn cgroup(&self, path: &str) -> Option<CgroupDir> {
        let is_root = path.trim_matches('/').is_empty();
        CgroupDir::from_path(&self.mount_point, path, self.is_unified).filter(|_| !is_root)
    }
}

impl CgroupDir {
    /// Returns the ids of all processes in this cgroup and in the cgroups below it. Processes of another pid
    /// namespace are left out. The list is empty if the cgroup does not exist.
    #[must_use]
    pub fn all_processes(&self) -> Vec<Pid> {
        self.processes()
    }

    /// Reads the anonymous memory and the mapped pages of files that the kernel charges to this cgroup and to the
    /// cgroups below it (`memory.stat`). Also reads how much more memory the kernel can charge to this cgroup
    /// ([`CgroupDir::available_memory`]). Only cgroups in the hierarchy with the memory controller have the file
    /// `memory.stat`. [`MemoryControllerMount::cgroup`] returns such a cgroup.
    ///
    /// To find out how much more the kernel can charge, the function also reads the limit and the present use of this
    /// cgroup and of each cgroup above it: the files `memory.max` and `memory.current`. In cgroup v1, these files are
    /// `memory.limit_in_bytes` and `memory.usage_in_bytes`.
    ///
    /// # Errors
    /// `ENOENT` if the cgroup does not exist or has no memory controller.
    pub fn read_memory_use(&self) -> Result<CgroupMemory, Errno> {
        let stat = self.read_file("memory.stat")?;
        let names =
            if self.is_unified() { ["anon", "file_mapped"] } else { ["total_rss", "total_mapped_file"] };
        let [anonymous, mapped_files] = names.map(|name| stat_field(&stat, name).unwrap_or(0));
        Ok(CgroupMemory { anonymous, mapped_files, available: self.available_memory() })
    }

    /// Returns how much more memory the kernel can charge to this cgroup, in bytes, until this cgroup or a
    /// cgroup above it reaches its memory limit (`memory.max`, in v1 `memory.limit_in_bytes`). Page cache on the
    /// inactive list counts as free, because the kernel can reclaim it (`inactive_file` in `memory.stat`).
    /// `None` if no limit is set, or if this cgroup is not in the hierarchy with the memory controller.
    /// [`MemoryControllerMount::cgroup`] returns the cgroups of that hierarchy.
    #[must_use]
    pub fn available_memory(&self) -> Option<u64> {
        let mut least: Option<u64> = None;
        let mut cgroup = self.clone();
        loop {
            least = cgroup.left_below_limit().into_iter().chain(least).min();
            let parent = cgroup.parent();
            if parent.path == cgroup.path {
                return least;
            }
            cgroup = parent;
        }
    }

    /// Returns the memory limit of this cgroup, in bytes: `memory.max` (v2) or `memory.limit_in_bytes` (v1). The
    /// limits of the cgroups above are not considered. `None` if this cgroup has no limit of its own, or if the limit
    /// can't be read.
    #[must_use]
    pub fn memory_limit(&self) -> Option<u64> {
        let file = if self.is_unified() { "memory.max" } else { "memory.limit_in_bytes" };
        // v2 writes `max` if there is no limit.
        let limit = self.read_file(file).ok()?.parse::<u64>().ok()?;
        Some(limit).filter(|limit| self.is_unified() || *limit < NO_V1_LIMIT)
    }

    /// Returns how many bytes of memory are left until this cgroup reaches its own limit. Inactive pages of files
    /// count as free. The limits of the cgroups above are not considered. `None` if this cgroup has no limit, or if
    /// the limit or the memory use can't be read.
    fn left_below_limit(&self) -> Option<u64> {
        let (current_file, inactive_field) = if self.is_unified() {
            ("memory.current", "inactive_file")
        } else {
            ("memory.usage_in_bytes", "total_inactive_file")
        };
        let limit = self.memory_limit()?;
        let current = self.read_file(current_file).ok()?.parse::<u64>().ok()?;
        let inactive = self.read_file("memory.stat").ok().and_then(|stat| stat_field(&stat, inactive_field));
        Some(limit.saturating_sub(current.saturating_sub(inactive.unwrap_or(0))))
    }
}

/// The value of a line such as `anon 4096` in `memory.stat`.
fn stat_field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::read_memory_peak;

    fn mount(is_unified: bool, dir: &tempfile::TempDir) -> MemoryControllerMount {
        MemoryControllerMount { mount_point: dir.path().to_owned(), is_unified }
    }

    fn write(dir: &tempfile::TempDir, file: &str, text: &str) {
        let path = dir.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn the_memory_of_a_v2_cgroup_is_read_with_what_the_limits_above_leave() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir, "a/memory.max", "1000000\n");
        write(&dir, "a/memory.current", "700000\n");
        write(&dir, "a/memory.stat", "inactive_file 50000\n");
        write(&dir, "a/b/memory.max", "max\n");
        write(&dir, "a/b/memory.current", "4096\n");
        write(&dir, "a/b/memory.peak", "8192\n");
        write(&dir, "a/b/memory.stat", "anon_thp 7\nanon 1024\nfile 5\nfile_mapped 512\ninactive_file 64\n");
        let cgroup = mount(true, &dir).cgroup("/a/b").unwrap();
        let expected = CgroupMemory { anonymous: 1024, mapped_files: 512, available: Some(350_000) };
        assert_eq!(cgroup.read_memory_use(), Ok(expected));
        assert_eq!(read_memory_peak(&cgroup), Some(8192));
        assert_eq!((cgroup.memory_limit(), cgroup.parent().memory_limit()), (None, Some(1_000_000)));
    }

    #[test]
    fn the_memory_of_a_v1_cgroup_is_read_with_that_of_the_cgroups_below_it() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir, "a/memory.limit_in_bytes", "9223372036854771712\n");
        write(&dir, "a/memory.usage_in_bytes", "4096\n");
        write(&dir, "a/memory.max_usage_in_bytes", "8192\n");
        write(&dir, "a/memory.stat", "rss 1\ntotal_rss 1024\nmapped_file 1\ntotal_mapped_file 512\n");
        let cgroup = mount(false, &dir).cgroup("/a").unwrap();
        let expected = CgroupMemory { anonymous: 1024, mapped_files: 512, available: None };
        assert_eq!(cgroup.read_memory_use(), Ok(expected));
        assert_eq!((read_memory_peak(&cgroup), cgroup.memory_limit()), (Some(8192), None), "no limit");
        write(&dir, "a/memory.limit_in_bytes", "1048576\n");
        assert_eq!(cgroup.memory_limit(), Some(1 << 20));
    }

    #[test]
    fn a_cgroup_without_memory_controller_has_no_memory_and_no_peak() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir, "a/cgroup.procs", "");
        let mount = mount(true, &dir);
        let cgroup = mount.cgroup("/a").unwrap();
        assert_eq!(cgroup.read_memory_use(), Err(Errno::ENOENT));
        assert_eq!(read_memory_peak(&cgroup), None);
        write(&dir, "a/memory.stat", "nonsense\nanon x\n");
        write(&dir, "a/memory.max", "5\n");
        write(&dir, "a/memory.current", "nonsense\n");
        assert_eq!(cgroup.read_memory_use(), Ok(CgroupMemory::default()));
        for path in ["/", "//", "a", "/../x"] {
            assert!(mount.cgroup(path).is_none(), "{path}");
        }
    }

    #[test]
    fn the_path_of_a_process_is_that_of_the_hierarchy_with_the_memory_controller() {
        let dir = tempfile::tempdir().unwrap();
        let line = |controllers: &str, path: &str| (controllers.to_owned(), path.to_owned());
        let lines = vec![line("cpu,memory", "/v1"), line("memoryless", "/x"), line("", "/v2")];
        let mut cgroups = ProcessCgroups { lines };
        assert_eq!(mount(false, &dir).memory_cgroup_path(&cgroups), Some("/v1"));
        assert_eq!(mount(true, &dir).memory_cgroup_path(&cgroups), Some("/v2"));
        cgroups.lines.remove(0);
        assert_eq!(mount(false, &dir).memory_cgroup_path(&cgroups), None);
    }
}
