//! The cgroup of the calling process that limits its number of processes, and the mount points of cgroups.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::kernel_files::read_text;

/// The cgroup of the calling process in the hierarchy with the pids controller, which limits the number of processes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PidsCgroup {
    pub(super) directory: PathBuf,
    /// Whether the pids controller is of version 1 of cgroups.
    pub(super) is_v1: bool,
}

/// A mount of a hierarchy of cgroups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CgroupMount {
    /// The mount point.
    pub(super) directory: PathBuf,
    /// The path of the cgroup that is mounted there. `/` for the root of the hierarchy.
    cgroup: PathBuf,
    is_v1: bool,
    has_pids_controller: bool,
}

impl CgroupMount {
    /// Returns the mounts that the calling process sees. They are read once, because a file with many mounts takes long
    /// to read. Empty if they can't be read now.
    pub(super) fn all_seen_by_caller() -> &'static [Self] {
        static MOUNTS: OnceLock<Vec<CgroupMount>> = OnceLock::new();
        Self::stored_or_read(&MOUNTS, || read_text(Path::new("/proc/self/mountinfo")))
    }

    /// Returns the mounts in `stored`. If nothing is stored yet, stores the mounts in the text that `read` returns. If
    /// `read` returns `None`, for example for lack of a descriptor, stores nothing, so that a later call reads again.
    fn stored_or_read(stored: &OnceLock<Vec<Self>>, read: impl FnOnce() -> Option<String>) -> &[Self] {
        if let Some(mounts) = stored.get() {
            return mounts;
        }
        match read() {
            Some(text) => stored.get_or_init(|| cgroup_mounts(&text)),
            None => &[],
        }
    }
}

#[cfg(test)]
impl CgroupMount {
    /// Makes a mount with this mount point, for tests.
    pub(super) fn at(directory: &str) -> Self {
        Self { directory: directory.into(), ..Self::default() }
    }
}

impl PidsCgroup {
    /// Finds the cgroup whose `pids.max` limits the calling process. `None` if it can't be found.
    pub(super) fn of_caller() -> Option<Self> {
        let cgroups = read_text(Path::new("/proc/self/cgroup"))?;
        pids_cgroup(&cgroups, CgroupMount::all_seen_by_caller())
    }
}

/// Returns whether the list `list`, which is separated by commas, has the word `pids`.
fn has_pids(list: &str) -> bool {
    list.split(',').any(|word| word == "pids")
}

/// Returns the mounts of cgroups in `mounts`, the text of /proc/PID/mountinfo: proc(5).
fn cgroup_mounts(mounts: &str) -> Vec<CgroupMount> {
    let mount = |line: &str| {
        let (mount_fields, file_system_fields) = line.split_once(" - ")?;
        let mut file_system_fields = file_system_fields.split(' ');
        let (kind, options) = (file_system_fields.next()?, file_system_fields.nth(1)?);
        let mut mount_fields = mount_fields.split(' ').skip(3);
        let (cgroup, directory) = (mount_fields.next()?.into(), mount_fields.next()?.into());
        let is_v1 = kind == "cgroup";
        (is_v1 || kind == "cgroup2").then(|| CgroupMount {
            directory,
            cgroup,
            is_v1,
            has_pids_controller: has_pids(options),
        })
    };
    mounts.lines().filter_map(mount).collect()
}

/// Finds the cgroup whose `pids.max` limits a process: its cgroup in the hierarchy of version 1 with the pids
/// controller, or otherwise its cgroup in the hierarchy of version 2. `cgroups` is the text of /proc/PID/cgroup:
/// cgroups(7). `None` if there is neither cgroup, or if none of `mounts` contains its directory.
fn pids_cgroup(cgroups: &str, mounts: &[CgroupMount]) -> Option<PidsCgroup> {
    let path_of = |is_wanted: &dyn Fn(&str, &str) -> bool| {
        cgroups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            is_wanted(number, controllers).then_some(path)
        })
    };
    let v1 = path_of(&|_, controllers| has_pids(controllers));
    let is_v1 = v1.is_some();
    let path = Path::new(v1.or_else(|| path_of(&|number, _| number == "0"))?);
    let mut mounts =
        mounts.iter().filter(|mount| mount.is_v1 == is_v1 && (mount.has_pids_controller || !is_v1));
    mounts.find_map(|mount| {
        let below = path.strip_prefix(&mount.cgroup).ok()?;
        Some(PidsCgroup { directory: mount.directory.join(below), is_v1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "35 30 0:30 / /sys/fs/cgroup/pids rw,nosuid - cgroup cgroup rw,pids\n\
                      36 30 0:31 / /sys/fs/cgroup/cpu rw shared:1 - cgroup cgroup rw,cpu,cpuacct\n";
    const V2: &str = "35 30 0:30 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn the_cgroup_of_the_pids_controller_is_found_in_both_versions() {
        let v1 = pids_cgroup("5:cpu,cpuacct:/a\n4:pids:/user/b\n0::/c\n", &cgroup_mounts(V1));
        assert_eq!(v1, Some(PidsCgroup { directory: "/sys/fs/cgroup/pids/user/b".into(), is_v1: true }));
        let v2 = pids_cgroup("0::/user/b\n", &cgroup_mounts(V2));
        assert_eq!(v2, Some(PidsCgroup { directory: "/sys/fs/cgroup/user/b".into(), is_v1: false }));
        assert_eq!(pids_cgroup("4:cpu:/a\n", &cgroup_mounts(V1)), None);
    }

    #[test]
    fn mounts_that_could_not_be_read_are_read_again_and_others_are_not() {
        let stored = OnceLock::new();
        assert!(CgroupMount::stored_or_read(&stored, || None).is_empty());
        assert_eq!(CgroupMount::stored_or_read(&stored, || Some(V1.to_owned())), cgroup_mounts(V1));
        assert_eq!(CgroupMount::stored_or_read(&stored, || Some(V2.to_owned())), cgroup_mounts(V1));
    }

    #[test]
    fn a_cgroup_outside_the_visible_tree_is_left_to_the_kernel() {
        let container = "35 30 0:30 /docker/1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(pids_cgroup("0::/other\n", &cgroup_mounts(container)), None);
        let found = pids_cgroup("0::/docker/1/x\n", &cgroup_mounts(container));
        assert_eq!(found, Some(PidsCgroup { directory: "/sys/fs/cgroup/x".into(), is_v1: false }));
    }
}
