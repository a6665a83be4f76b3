//! The cgroup hierarchy with the cpuset controller, and the files of one cgroup.
//!
//! v2: Documentation/admin-guide/cgroup-v2.rst. v1: Documentation/admin-guide/cgroup-v1/cpusets.rst.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use pjw_core::{cpuset::CpuSet, cpuset_group::CpusetHierarchy, ids::Pid};

use super::mounts::CgroupMounts;
use crate::proc::short_file::read_short_file;
use crate::sys::errno::{from_io, is_gone};

/// The name of the file in the directory of a v2 cgroup that lists the controllers which are enabled for the children
/// of the cgroup.
pub(crate) const SUBTREE_CONTROL: &str = "cgroup.subtree_control";

/// The mounted cgroup hierarchy, v1 or v2, that has the cpuset controller. pjw creates the cpusets of jobs in
/// this hierarchy. In v1, the controllers cpu and freezer can have hierarchies of their own. This value also
/// contains the mount points of those two hierarchies. If a job needs one of these controllers, pjw creates a
/// cgroup in the hierarchy of this controller, at the same path as the job's cpuset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpusetMount {
    /// The directory at which the hierarchy is mounted.
    pub mount_point: PathBuf,
    /// True if the hierarchy is cgroup v2 (the unified hierarchy). False if it is a cgroup v1 hierarchy.
    pub is_unified: bool,
    /// The directory at which the v1 hierarchy with the cpu controller is mounted. `None` in three cases: the
    /// hierarchy is v2, there is no v1 hierarchy with this controller, or it is the hierarchy with the cpuset
    /// controller.
    pub v1_cpu_mount_point: Option<PathBuf>,
    /// The directory at which the v1 hierarchy with the freezer controller is mounted. `None` in three cases:
    /// the hierarchy is v2, there is no v1 hierarchy with this controller, or it is the hierarchy with the
    /// cpuset controller.
    pub v1_freezer_mount_point: Option<PathBuf>,
}

impl CpusetMount {
    /// Finds the hierarchy with the cpuset controller in `mounts`. If a v1 hierarchy with this controller is
    /// mounted, the result is this hierarchy. Otherwise the result is the v2 hierarchy. `None` if neither is
    /// mounted. Does not check that the v2 hierarchy has the cpuset controller.
    #[must_use]
    pub fn from_mounts(mounts: &CgroupMounts) -> Option<Self> {
        let mount_of = |controller| mounts.v1_mount_without_cpusets(controller).map(Path::to_owned);
        match mounts.v1_cpuset_mount() {
            Some(root) => Some(Self {
                mount_point: root.to_owned(),
                is_unified: false,
                v1_cpu_mount_point: mount_of("cpu"),
                v1_freezer_mount_point: mount_of("freezer"),
            }),
            None => mounts.v2_mount_point.clone().map(Self::from_v2_mount_point),
        }
    }

    /// Returns the cgroup at `path` in this hierarchy. `path` is relative to the root of the hierarchy and
    /// begins with `/`, as in `/proc/PID/cgroup`. The cgroup need not exist. `None` if `path` does not begin
    /// with `/`, or contains a component `.` or `..`. The kernel shows a path with `..` for a cgroup outside
    /// this process's cgroup namespace.
    #[must_use]
    pub fn cgroup(&self, path: &str) -> Option<CgroupDir> {
        CgroupDir::from_path(&self.mount_point, path, self.is_unified)
    }

    /// Returns whether the directory of the cgroup `group` is in this hierarchy.
    pub(super) fn contains(&self, group: &CgroupDir) -> bool {
        group.unified == self.is_unified && group.dir.starts_with(&self.mount_point)
    }

    /// Returns the v2 hierarchy that is mounted at the directory `mount_point`.
    pub(crate) fn from_v2_mount_point(mount_point: PathBuf) -> Self {
        Self { mount_point, is_unified: true, v1_cpu_mount_point: None, v1_freezer_mount_point: None }
    }

    /// Returns the cgroup at `path` in the v1 hierarchy with the cpu controller. The cgroup need not exist. `None` if
    /// no such hierarchy is mounted, or if `path` is not the path of a cgroup, as for [`CpusetMount::cgroup`].
    pub(crate) fn v1_cpu_cgroup(&self, path: &str) -> Option<CgroupDir> {
        CgroupDir::from_path(self.v1_cpu_mount_point.as_ref()?, path, false)
    }

    /// Returns the cgroup at `path` in the v1 hierarchy with the freezer controller. The cgroup need not exist.
    /// `None` if no such hierarchy is mounted, or if `path` is not the path of a cgroup, as for
    /// [`CpusetMount::cgroup`].
    pub(crate) fn v1_freezer_cgroup(&self, path: &str) -> Option<CgroupDir> {
        CgroupDir::from_path(self.v1_freezer_mount_point.as_ref()?, path, false)
    }

    /// Returns the kind of this hierarchy: v1, v2, or v2 with systemd. `with_systemd` says whether systemd manages
    /// this machine. `None` if this is a v2 hierarchy without the cpuset controller, or if its controllers can't be
    /// read.
    pub(crate) fn hierarchy_kind(&self, with_systemd: bool) -> Option<CpusetHierarchy> {
        if !self.is_unified {
            return Some(CpusetHierarchy::Legacy);
        }
        let kind = if with_systemd { CpusetHierarchy::Systemd } else { CpusetHierarchy::Unified };
        self.root().has_controller("cpuset").ok()?.then_some(kind)
    }

    /// Returns the root cgroup of this hierarchy.
    #[must_use]
    pub fn root(&self) -> CgroupDir {
        CgroupDir { path: "/".to_owned(), dir: self.mount_point.clone(), unified: self.is_unified }
    }
}

/// A cgroup in the v2 hierarchy or in any v1 hierarchy, identified by its directory. The directory need not
/// exist.
#[derive(Debug, Clone)]
pub struct CgroupDir {
    /// The path of the cgroup relative to the mount point of the hierarchy, as in `/proc/PID/cgroup`. Begins
    /// with `/`.
    pub path: String,
    /// The absolute path of the cgroup's directory in the file system.
    pub dir: PathBuf,
    /// Whether the cgroup is in the v2 (unified) hierarchy.
    pub(super) unified: bool,
}

/// The configured PUs (logical CPUs), NUMA nodes and partition type of a cgroup's cpuset, read from the files
/// of the cgroup. The effective cpuset can have fewer PUs and NUMA nodes: the kernel leaves out those that are
/// offline, and those that a cgroup above does not have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpusetConfig {
    /// `cpuset.cpus`: the requested PUs. In cgroup v2, empty if no PUs were requested.
    pub cpus: CpuSet,
    /// `cpuset.mems`: the kernel's numbers of the requested NUMA nodes. In cgroup v2, empty if no NUMA nodes
    /// were requested.
    pub mems: CpuSet,
    /// `cpuset.cpus.partition`: the partition type, such as `member` or `isolated`. Empty if the file does
    /// not exist or can't be read.
    pub partition: String,
}

impl CgroupDir {
    /// Returns the cgroup at `path` in the hierarchy that is mounted at `mount_point`. `unified` says whether this is
    /// the v2 hierarchy. The cgroup need not exist. `None` if `path` does not begin with `/`, or contains a component
    /// `.` or `..`.
    pub(super) fn from_path(mount_point: &Path, path: &str, unified: bool) -> Option<Self> {
        let climbs = path.split('/').any(|part| part == ".." || part == ".");
        if climbs || !path.starts_with('/') {
            return None;
        }
        Some(Self { path: path.to_owned(), dir: mount_point.join(path.trim_matches('/')), unified })
    }

    /// Returns the ids of all processes in this cgroup and in the cgroups below it. Processes of another pid
    /// namespace are left out. The list is empty if the cgroup does not exist.
    pub(crate) fn processes(&self) -> Vec<Pid> {
        let listed = self.read_file("cgroup.procs").unwrap_or_default();
        let own = listed.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid != 0).map(Pid);
        let below = self.children().into_iter().flat_map(|child| child.processes());
        own.chain(below).collect()
    }

    /// Returns whether the directory of this cgroup exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.dir.is_dir()
    }

    /// Returns true if this cgroup is in the v2 (unified) hierarchy, and false if it is in a v1 hierarchy.
    #[must_use]
    pub fn is_unified(&self) -> bool {
        self.unified
    }

    /// Returns the parent of this cgroup. The root cgroup is its own parent.
    #[must_use]
    pub fn parent(&self) -> Self {
        let path = match self.path.trim_end_matches('/').rsplit_once('/') {
            Some((above, _)) if !above.is_empty() => above.to_owned(),
            _ => "/".to_owned(),
        };
        let dir = if self.path == "/" { Some(self.dir.as_path()) } else { self.dir.parent() };
        Self { path, dir: dir.unwrap_or(&self.dir).to_owned(), unified: self.unified }
    }

    /// Reads the file named `file_name` in the directory of this cgroup, such as `cpuset.cpus`. Returns the
    /// text of the file without leading and trailing white space.
    ///
    /// # Errors
    /// The error of open(2) or read(2).
    pub fn read_file(&self, file_name: &str) -> Result<String, Errno> {
        let text = read_short_file(&self.dir.join(file_name))?;
        let text = std::str::from_utf8(&text).map_err(|_| Errno::EIO)?;
        Ok(text.trim().to_owned())
    }

    /// Writes `text` and a newline to the file named `file_name` in the directory of this cgroup, with a single
    /// write(2).
    ///
    /// # Errors
    /// The error of open(2) or write(2).
    pub fn write_file(&self, file_name: &str, text: &str) -> Result<(), Errno> {
        let open = OpenOptions::new().write(true).truncate(true).open(self.dir.join(file_name));
        // The kernel ignores a write of zero bytes.
        let written = open.and_then(|mut file| file.write(format!("{text}\n").as_bytes()));
        written.map(drop).map_err(from_io)
    }

    /// Returns whether `controller` is available in this v2 cgroup: whether the file `cgroup.controllers` lists this
    /// controller.
    ///
    /// # Errors
    /// The error of open(2) or read(2).
    pub(crate) fn has_controller(&self, controller: &str) -> Result<bool, Errno> {
        self.lists("cgroup.controllers", controller)
    }

    /// Returns whether this v2 cgroup enables `controller` for its children: whether the file
    /// `cgroup.subtree_control` lists this controller. False if the file can't be read.
    pub(crate) fn enables_controller(&self, controller: &str) -> bool {
        self.lists(SUBTREE_CONTROL, controller) == Ok(true)
    }

    fn lists(&self, file: &str, controller: &str) -> Result<bool, Errno> {
        Ok(self.read_file(file)?.split_ascii_whitespace().any(|listed| listed == controller))
    }

    /// Returns whether this v2 cgroup or a cgroup below it contains a process (file `cgroup.events`). False if the
    /// cgroup does not exist. True if the file can't be read for another reason, so that pjw never ends a job or
    /// stops a scope that may still contain processes.
    pub(crate) fn is_populated(&self) -> bool {
        match self.read_file("cgroup.events") {
            Ok(text) => !text.lines().any(|line| line == "populated 0"),
            Err(errno) => !is_gone(errno),
        }
    }

    /// Reads the set of numbers in the file named `file_name` in the directory of this cgroup. These are the
    /// numbers of PUs (logical CPUs) or of NUMA nodes. The file must contain a list in the kernel's format,
    /// such as `0-3,8`.
    ///
    /// # Errors
    /// The error of open(2) or read(2). `EIO` if the text is not such a list.
    pub fn read_number_list(&self, file_name: &str) -> Result<CpuSet, Errno> {
        self.read_file(file_name)?.parse().map_err(|_| Errno::EIO)
    }

    /// Reads the configuration of this cgroup's cpuset: the PUs (logical CPUs), the NUMA nodes and the
    /// partition type. The partition type is empty if its file can't be read. A v1 cgroup has no such file.
    ///
    /// # Errors
    /// The error of open(2) or read(2) for the files of the PUs and NUMA nodes. `EIO` if one of these files is
    /// malformed.
    pub fn read_cpuset(&self) -> Result<CpusetConfig, Errno> {
        let partition = self.unified.then(|| self.read_file("cpuset.cpus.partition").ok()).flatten();
        Ok(CpusetConfig {
            cpus: self.read_number_list("cpuset.cpus")?,
            mems: self.read_number_list("cpuset.mems")?,
            partition: partition.unwrap_or_default(),
        })
    }

    /// Reads the effective PUs of this cgroup: the PUs (logical CPUs) on which the kernel allows processes of
    /// the cgroup to run.
    ///
    /// # Errors
    /// The error of open(2) or read(2). `EIO` if the file is malformed.
    pub fn effective_cpus(&self) -> Result<CpuSet, Errno> {
        if self.unified {
            return self.read_number_list("cpuset.cpus.effective");
        }
        // Before Linux 3.17 the configured value was the effective value.
        self.read_number_list("cpuset.effective_cpus").or_else(|_| self.read_number_list("cpuset.cpus"))
    }

    /// Reads the effective NUMA nodes of this cgroup: the NUMA nodes whose memory the kernel allows processes
    /// of the cgroup to use. The elements of the returned set are the kernel's numbers of these nodes, not PUs.
    ///
    /// # Errors
    /// The error of open(2) or read(2). `EIO` if the file is malformed.
    pub fn effective_mems(&self) -> Result<CpuSet, Errno> {
        if self.unified {
            return self.read_number_list("cpuset.mems.effective");
        }
        self.read_number_list("cpuset.effective_mems").or_else(|_| self.read_number_list("cpuset.mems"))
    }

    /// Returns the children of this cgroup, in no defined order. The list is empty if the directory of the
    /// cgroup can't be read.
    #[must_use]
    pub fn children(&self) -> Vec<Self> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let above = self.path.trim_end_matches('/');
        dirs.map(|entry| Self {
            path: format!("{above}/{}", entry.file_name().to_string_lossy()),
            dir: entry.path(),
            unified: self.unified,
        })
        .collect()
    }

    /// Returns how many children this cgroup has. 0 if the cgroup does not exist, or if its directory can't be read.
    /// The time of this call does not depend on the number of children: the function reads only the link count of the
    /// cgroup's directory. The link count is 2, plus 1 for each child (`kernfs_refresh_inode`, fs/kernfs/inode.c, Linux
    /// 6.18).
    #[must_use]
    pub fn child_count(&self) -> u64 {
        match fs::metadata(&self.dir) {
            Ok(directory) => directory.nlink().saturating_sub(2),
            Err(_) => 0,
        }
    }

    /// Creates this cgroup: makes its directory. Succeeds if the directory already exists. The parent cgroup
    /// must exist.
    ///
    /// # Errors
    /// The error of mkdir(2). `EEXIST` if the parent directory contains a file with the name of the cgroup.
    pub fn create(&self) -> Result<(), Errno> {
        self.create_if_missing().map(drop)
    }

    /// Creates this cgroup as [`CgroupDir::create`] does. Returns whether the cgroup is new: false if its directory
    /// already existed.
    ///
    /// # Errors
    /// The errors of [`CgroupDir::create`].
    pub(crate) fn create_if_missing(&self) -> Result<bool, Errno> {
        match fs::create_dir(&self.dir) {
            Err(fault) if fault.kind() == io::ErrorKind::AlreadyExists && self.exists() => Ok(false),
            created => created.map(|()| true).map_err(from_io),
        }
    }

    /// Removes this cgroup and all cgroups below it. Succeeds if the cgroup does not exist. Also succeeds if
    /// there is a regular file at the path of the cgroup, and does not remove the file. After an error, some of
    /// the cgroups below are possibly already removed.
    ///
    /// # Errors
    /// `EBUSY` if one of the cgroups contains a process. Otherwise the error of rmdir(2).
    pub fn remove(&self) -> Result<(), Errno> {
        let remove = || match fs::remove_dir(&self.dir).map_err(from_io) {
            Err(errno) if !is_gone(errno) => Err(errno),
            _ => Ok(()),
        };
        // Usually there is no cgroup below, and the directory, which has many files, need not be listed.
        let removed = remove();
        if !matches!(removed, Err(Errno::EBUSY | Errno::ENOTEMPTY)) {
            return removed;
        }
        for child in self.children() {
            child.remove()?;
        }
        remove()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_text_without_white_space_at_its_ends() {
        let dir = tempfile::tempdir().unwrap();
        let group = CgroupDir::from_path(dir.path(), "/job", true).unwrap();
        group.create().unwrap();
        let read_back = |content: &[u8]| {
            fs::write(group.dir.join("cpuset.cpus"), content).unwrap();
            group.read_file("cpuset.cpus")
        };
        assert_eq!(read_back(b"0-3\n"), Ok("0-3".to_owned()));
        assert_eq!([read_back(b""), read_back(b"\n")], [Ok(String::new()), Ok(String::new())]);
        assert_eq!(read_back(b"0\xff\n"), Err(Errno::EIO), "no text");
        assert_eq!(group.read_file("cpuset.mems"), Err(Errno::ENOENT));
    }

    #[test]
    fn a_cgroup_is_removed_with_those_below_it_and_says_whether_it_was_made() {
        let dir = tempfile::tempdir().unwrap();
        let group = CgroupDir::from_path(dir.path(), "/job", true).unwrap();
        assert_eq!([group.create_if_missing(), group.create_if_missing()], [Ok(true), Ok(false)]);
        fs::create_dir_all(group.dir.join("step/task")).unwrap();
        fs::create_dir(group.dir.join("other")).unwrap();
        assert_eq!(group.remove(), Ok(()));
        assert!(!group.exists());
        assert_eq!(group.remove(), Ok(()), "there is none");
        fs::create_dir_all(group.dir.join("step")).unwrap();
        fs::write(group.dir.join("step/file"), "").unwrap();
        assert_eq!(group.remove(), Err(Errno::ENOTEMPTY), "as a cgroup with a process can't be removed");
        assert!(group.exists());
    }

    #[test]
    fn files_and_cgroups_further_below_are_no_children() {
        // A file system that counts the directories in a directory as those of cgroups do.
        let Ok(top) = tempfile::tempdir_in("/dev/shm") else {
            return eprintln!("skipped: /dev/shm can't be written");
        };
        let group = CgroupDir::from_path(top.path(), "/job", true).unwrap();
        assert_eq!(group.child_count(), 0, "it does not exist");
        group.create().unwrap();
        fs::write(group.dir.join("cgroup.procs"), "").unwrap();
        assert_eq!(group.child_count(), 0);
        fs::create_dir_all(group.dir.join("step/task")).unwrap();
        fs::create_dir(group.dir.join("other")).unwrap();
        assert_eq!((group.child_count(), group.children().len()), (2, 2));
        fs::remove_dir(group.dir.join("other")).unwrap();
        assert_eq!(group.child_count(), 1);
    }
}
