//! The cgroup hierarchy with the cpuset controller, and the files of one cgroup.
//!
//! v2: Documentation/admin-guide/cgroup-v2.rst. v1: Documentation/admin-guide/cgroup-v1/cpusets.rst.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;

use nix::errno::Errno;
use pjw_core::{cpuset::CpuSet, cpuset_group::CpusetHierarchy};

use super::mounts::CgroupMounts;
use crate::sys::errno::{from_io, is_gone};

/// The file of a v2 cgroup that lists the controllers enabled for its children.
pub(crate) const SUBTREE_CONTROL: &str = "cgroup.subtree_control";

/// The mounted cgroup hierarchy, v1 or v2, that has the cpuset controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpusetMount {
    /// The directory at which the hierarchy is mounted.
    pub mount_point: PathBuf,
    /// Whether the hierarchy is cgroup v2 (also called the unified hierarchy). Otherwise it is cgroup v1.
    pub is_unified: bool,
}

impl CpusetMount {
    /// Chooses the hierarchy with the cpuset controller among `mounts`: the v1 cpuset hierarchy if it is mounted,
    /// else the v2 hierarchy. `None` if neither is mounted.
    #[must_use]
    pub fn choose(mounts: &CgroupMounts) -> Option<Self> {
        match mounts.v1_cpuset_mount() {
            Some(root) => Some(Self { mount_point: root.to_owned(), is_unified: false }),
            None => mounts.v2_mount_point.clone().map(|mount_point| Self { mount_point, is_unified: true }),
        }
    }

    /// Returns the directory of the cgroup at `path` in this hierarchy. The directory need not exist. `path`
    /// has the form of `/proc/PID/cgroup`. `None` if `path` does not begin with `/`, or has a component `.` or
    /// `..`: a cgroup outside of this cgroup namespace has such a path.
    #[must_use]
    pub fn cgroup(&self, path: &str) -> Option<CgroupDir> {
        let climbs = path.split('/').any(|part| part == ".." || part == ".");
        if climbs || !path.starts_with('/') {
            return None;
        }
        let dir = self.mount_point.join(path.trim_matches('/'));
        Some(CgroupDir { path: path.to_owned(), dir, unified: self.is_unified })
    }

    /// The kind of the hierarchy, which `with_systemd` is managed by systemd if it is v2. `None` if v2 has no cpuset
    /// controller, or its controllers can't be read.
    pub(crate) fn kind(&self, with_systemd: bool) -> Option<CpusetHierarchy> {
        if !self.is_unified {
            return Some(CpusetHierarchy::Legacy);
        }
        let kind = if with_systemd { CpusetHierarchy::Systemd } else { CpusetHierarchy::Unified };
        self.root().has_controller("cpuset").ok()?.then_some(kind)
    }

    /// Returns the directory of the root cgroup of the hierarchy, whose path is `/`.
    #[must_use]
    pub fn root(&self) -> CgroupDir {
        CgroupDir { path: "/".to_owned(), dir: self.mount_point.clone(), unified: self.is_unified }
    }
}

/// A cgroup directory in the hierarchy with the cpuset controller. The value may name a directory that does not
/// exist.
#[derive(Debug, Clone)]
pub struct CgroupDir {
    /// The path of the cgroup below the mount point, as in `/proc/PID/cgroup`.
    pub path: String,
    /// The full path of the cgroup's directory in the file system.
    pub dir: PathBuf,
    pub(super) unified: bool,
}

/// The configured values of a cgroup's cpuset, as its files contain them. The effective values may have fewer
/// PUs and NUMA nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpusetConfig {
    /// `cpuset.cpus`: the requested PUs. In cgroup v2, empty if no PUs were requested.
    pub cpus: CpuSet,
    /// `cpuset.mems`: the numbers of the requested NUMA nodes. In cgroup v2, empty if none were requested.
    pub mems: CpuSet,
    /// `cpuset.cpus.partition`: the type of the partition, such as `isolated`. Empty if there is no such file.
    pub partition: String,
}

impl CgroupDir {
    /// Returns whether the cgroup directory exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.dir.is_dir()
    }

    /// Returns whether the cgroup is in the v2 (unified) hierarchy. Otherwise it is in the v1 cpuset
    /// hierarchy.
    #[must_use]
    pub fn is_unified(&self) -> bool {
        self.unified
    }

    /// Returns the parent cgroup. The root cgroup is its own parent.
    #[must_use]
    pub fn parent(&self) -> Self {
        let path = match self.path.trim_end_matches('/').rsplit_once('/') {
            Some((above, _)) if !above.is_empty() => above.to_owned(),
            _ => "/".to_owned(),
        };
        let dir = if self.path == "/" { Some(self.dir.as_path()) } else { self.dir.parent() };
        Self { path, dir: dir.unwrap_or(&self.dir).to_owned(), unified: self.unified }
    }

    /// Reads a file in the directory of the cgroup, such as `cpuset.cpus`. Returns its text without white space at the
    /// ends.
    ///
    /// # Errors
    /// The error of open(2) or read(2).
    pub fn read_file(&self, file: &str) -> Result<String, Errno> {
        fs::read_to_string(self.dir.join(file)).map(|text| text.trim().to_owned()).map_err(from_io)
    }

    /// Writes `text` and a newline to a file of the cgroup with a single write(2).
    ///
    /// # Errors
    /// The error of open(2) or write(2).
    pub fn write_file(&self, file: &str, text: &str) -> Result<(), Errno> {
        let open = OpenOptions::new().write(true).truncate(true).open(self.dir.join(file));
        // The kernel ignores a write of zero bytes.
        let written = open.and_then(|mut file| file.write(format!("{text}\n").as_bytes()));
        written.map(drop).map_err(from_io)
    }

    /// Whether the cgroup has a controller (v2).
    pub(crate) fn has_controller(&self, controller: &str) -> Result<bool, Errno> {
        self.lists("cgroup.controllers", controller)
    }

    /// Whether the cgroup enables a controller for its children (v2).
    pub(crate) fn enables_controller(&self, controller: &str) -> bool {
        self.lists(SUBTREE_CONTROL, controller) == Ok(true)
    }

    fn lists(&self, file: &str, controller: &str) -> Result<bool, Errno> {
        Ok(self.read_file(file)?.split_ascii_whitespace().any(|listed| listed == controller))
    }

    /// Whether the cgroup or a cgroup below it holds a process (v2). An unreadable cgroup counts as populated: else a
    /// read error would end a job, or kill the processes of a scope.
    pub(crate) fn is_populated(&self) -> bool {
        match self.read_file("cgroup.events") {
            Ok(text) => !text.lines().any(|line| line == "populated 0"),
            Err(errno) => !is_gone(errno),
        }
    }

    /// Reads a file of the cgroup that holds a list of PU numbers or NUMA node numbers, such as `0-3,8`, as a set of
    /// these numbers.
    ///
    /// # Errors
    /// The error of open(2) or read(2). `EIO` if the text is no such list.
    pub fn read_list(&self, file: &str) -> Result<CpuSet, Errno> {
        self.read_file(file)?.parse().map_err(|_| Errno::EIO)
    }

    /// Reads the configured values of the cgroup's cpuset: its PUs, its NUMA nodes and its partition type.
    ///
    /// # Errors
    /// The error of open(2) or read(2).
    pub fn read_cpuset(&self) -> Result<CpusetConfig, Errno> {
        let partition = self.read_file("cpuset.cpus.partition").unwrap_or_default();
        Ok(CpusetConfig {
            cpus: self.read_list("cpuset.cpus")?,
            mems: self.read_list("cpuset.mems")?,
            partition,
        })
    }

    /// Reads the effective PUs of the cgroup: those on which its processes may run.
    ///
    /// # Errors
    /// The error of open(2) or read(2).
    pub fn effective_cpus(&self) -> Result<CpuSet, Errno> {
        if self.unified {
            return self.read_list("cpuset.cpus.effective");
        }
        // Before Linux 3.17 the configured value was the effective value.
        self.read_list("cpuset.effective_cpus").or_else(|_| self.read_list("cpuset.cpus"))
    }

    /// Reads the effective NUMA nodes of the cgroup: those whose memory its processes may use.
    ///
    /// # Errors
    /// The error of open(2) or read(2).
    pub fn effective_mems(&self) -> Result<CpuSet, Errno> {
        if self.unified {
            return self.read_list("cpuset.mems.effective");
        }
        self.read_list("cpuset.effective_mems").or_else(|_| self.read_list("cpuset.mems"))
    }

    /// Returns the child cgroups, in no defined order. Empty if the directory can't be read.
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

    /// Creates the directory of the cgroup, by which the kernel creates the cgroup. An existing directory is
    /// no error.
    ///
    /// # Errors
    /// The error of mkdir(2). `EEXIST` if the parent directory has a file with this name.
    pub fn create(&self) -> Result<(), Errno> {
        match fs::create_dir(&self.dir) {
            Err(fault) if fault.kind() == io::ErrorKind::AlreadyExists && self.exists() => Ok(()),
            created => created.map_err(from_io),
        }
    }

    /// Removes the directory of the cgroup and the cgroups below it, if they hold no process. A missing directory is no
    /// error, and neither is a file in its place.
    ///
    /// # Errors
    /// `EBUSY` if a process is in the cgroup or below it.
    pub fn remove(&self) -> Result<(), Errno> {
        for child in self.children() {
            child.remove()?;
        }
        match fs::remove_dir(&self.dir).map_err(from_io) {
            Err(errno) if !is_gone(errno) => Err(errno),
            _ => Ok(()),
        }
    }
}
