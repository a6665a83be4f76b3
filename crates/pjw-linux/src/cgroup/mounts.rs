//! Mounted cgroup hierarchies.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// The mount points of all cgroup hierarchies, v1 and v2, that are mounted on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CgroupMounts {
    /// The mount point of the cgroup v2 hierarchy. `None` if cgroup v2 is not mounted.
    pub v2_mount_point: Option<PathBuf>,
    /// The mounted cgroup v1 hierarchies, each as the pair (mount options, mount point). The options contain
    /// the names of the controllers. A hierarchy without controllers has the option `name=…`.
    pub v1_mounts: Vec<(String, PathBuf)>,
}

impl CgroupMounts {
    /// Reads from `/proc/self/mounts` which cgroup hierarchies are mounted in the mount namespace of this
    /// process. The result has no hierarchies if this file can't be read.
    #[must_use]
    pub fn read() -> Self {
        Self::try_read().unwrap_or_default()
    }

    /// Reads from `/proc/self/mounts` which cgroup hierarchies are mounted in the mount namespace of this process.
    /// [`CgroupMounts::read`] does the same, but returns a value without hierarchies instead of an error.
    ///
    /// # Errors
    /// If `/proc/self/mounts` can't be read.
    pub fn try_read() -> io::Result<Self> {
        Ok(Self::parse(&read_mount_list()?))
    }

    /// Parses `mounts_text`, the content of `/proc/self/mounts`, which has the format of fstab(5). Returns the
    /// mounted cgroup hierarchies. Mounts of other file systems are skipped.
    #[must_use]
    pub fn parse(mounts_text: &str) -> Self {
        let mut mounts = Self::default();
        for (target, kind, options) in mount_fields(mounts_text) {
            match kind {
                "cgroup2" => {
                    mounts.v2_mount_point.get_or_insert_with(|| PathBuf::from(target));
                }
                "cgroup" => mounts.v1_mounts.push((options.to_owned(), PathBuf::from(target))),
                _ => {}
            }
        }
        mounts
    }

    /// Returns a name for the kind of the mounted cgroup hierarchies, for display: `v1`, `v2`, `hybrid` (both
    /// v1 and v2 are mounted) or `none`.
    #[must_use]
    pub fn layout_name(&self) -> &'static str {
        match (&self.v2_mount_point, self.v1_mounts.is_empty()) {
            (Some(_), true) => "v2",
            (Some(_), false) => "hybrid",
            (None, false) => "v1",
            (None, true) => "none",
        }
    }

    /// Returns the mount point of the v1 hierarchy with the cpuset controller. `None` if no such hierarchy is
    /// mounted.
    #[must_use]
    pub fn v1_cpuset_mount(&self) -> Option<&Path> {
        self.v1_mount("cpuset").map(|(_, root)| root)
    }

    /// Returns the mount options and the mount point of the v1 hierarchy with the controller `controller`. The mount
    /// options include the names of all controllers of the hierarchy. `None` if no such hierarchy is mounted.
    pub(crate) fn v1_mount(&self, controller: &str) -> Option<(&str, &Path)> {
        let found = self.v1_mounts.iter().find(|(options, _)| has_controller(options, controller));
        found.map(|(options, root)| (options.as_str(), root.as_path()))
    }

    /// Returns the mount point of the v1 hierarchy with the controller `controller`. `None` if no such hierarchy is
    /// mounted, or if this hierarchy also has the cpuset controller.
    pub(super) fn v1_mount_without_cpusets(&self, controller: &str) -> Option<&Path> {
        let (options, root) = self.v1_mount(controller)?;
        (!has_controller(options, "cpuset")).then_some(root)
    }
}

/// Reads `/proc/self/mounts`, which has the format of fstab(5). A user can mount a file system with FUSE, and so put a
/// name that is not valid UTF-8 into this file. Invalid bytes are replaced by U+FFFD.
///
/// # Errors
/// If the file can't be read.
pub(crate) fn read_mount_list() -> io::Result<String> {
    let text = fs::read("/proc/self/mounts")?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Iterates over the mounts in `mounts_text`, the content of `/proc/self/mounts`. Returns the mount point, the type of
/// the file system and the mount options of each mount. Only a space ends a field. The kernel escapes a space in a
/// name, but does not escape a form feed or a carriage return, which a user can put into a name.
pub(crate) fn mount_fields(mounts_text: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    mounts_text.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        Some((fields.next()?, fields.next()?, fields.next()?))
    })
}

fn has_controller(options: &str, controller: &str) -> bool {
    options.split(',').any(|option| option == controller)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_of_a_user_is_no_cgroup_hierarchy_whatever_its_name_is() {
        let name = "/tmp/x\u{c}cgroup\u{c}rw,cpuset";
        let return_name = "/tmp/x\rcgroup\rrw,cpuset";
        let text =
            format!("a {name} fuse.a rw 0 0\n{name} /mnt fuse.a rw 0 0\na {return_name} fuse.a rw 0 0\n");
        assert_eq!(CgroupMounts::parse(&text), CgroupMounts::default());
    }

    #[test]
    fn the_layout_follows_from_the_mounts() {
        let v1 = "cgroup /sys/fs/cgroup/cpuset cgroup rw,relatime,cpuset 0 0\n";
        let v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        let layout = |text: &str| CgroupMounts::parse(text).layout_name();
        assert_eq!(
            [layout(""), layout(v1), layout(v2), layout(&format!("{v1}{v2}"))],
            ["none", "v1", "v2", "hybrid"]
        );
    }
}
