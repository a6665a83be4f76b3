//! The hierarchy that has the cpusets, and the files of one cgroup in it.
//!
//! v2: Documentation/admin-guide/cgroup-v2.rst. v1: Documentation/admin-guide/cgroup-v1/cpusets.rst.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;

use crate::cgroup::Mounts;

/// The hierarchy that has the controller `cpuset`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// Its mount point.
    pub root: PathBuf,
    /// Whether it is v2.
    pub unified: bool,
}

impl Tree {
    /// The hierarchy with the cpusets: a v1 one where such a one is mounted, for then v2 can't have the controller.
    #[must_use]
    pub fn find(mounts: &Mounts) -> Option<Self> {
        match mounts.legacy_cpuset() {
            Some(root) => Some(Self { root: root.to_owned(), unified: false }),
            None => mounts.unified.clone().map(|root| Self { root, unified: true }),
        }
    }

    /// The cgroup at a path as in `/proc/PID/cgroup`; `None` if the path climbs out of the hierarchy, as those of
    /// another cgroup namespace do.
    #[must_use]
    pub fn group(&self, path: &str) -> Option<Group> {
        let climbs = path.split('/').any(|part| part == ".." || part == ".");
        if climbs || !path.starts_with('/') {
            return None;
        }
        let dir = self.root.join(path.trim_matches('/'));
        Some(Group { path: path.to_owned(), dir, unified: self.unified })
    }

    /// The cgroup at the top.
    #[must_use]
    pub fn top(&self) -> Group {
        Group { path: "/".to_owned(), dir: self.root.clone(), unified: self.unified }
    }
}

/// One cgroup of the hierarchy.
#[derive(Debug, Clone)]
pub struct Group {
    /// Its path, as in `/proc/PID/cgroup`.
    pub path: String,
    /// Its directory.
    pub dir: PathBuf,
    unified: bool,
}

/// The files of a cpuset, as they are read before they are written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files {
    /// `cpuset.cpus`.
    pub cpus: CpuSet,
    /// `cpuset.mems`.
    pub mems: CpuSet,
    /// `cpuset.cpus.partition`; empty where there is no such file.
    pub partition: String,
}

impl Group {
    /// Whether it is there.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.dir.is_dir()
    }

    /// Whether its hierarchy is v2.
    #[must_use]
    pub fn is_unified(&self) -> bool {
        self.unified
    }

    /// The cgroup above it.
    #[must_use]
    pub fn parent(&self) -> Self {
        let path = match self.path.trim_end_matches('/').rsplit_once('/') {
            Some((above, _)) if !above.is_empty() => above.to_owned(),
            _ => "/".to_owned(),
        };
        let dir = if self.path == "/" { Some(self.dir.as_path()) } else { self.dir.parent() };
        Self { path, dir: dir.unwrap_or(&self.dir).to_owned(), unified: self.unified }
    }

    /// The text of one of its files.
    ///
    /// # Errors
    /// As read(2).
    pub fn read(&self, file: &str) -> Result<String, Errno> {
        fs::read_to_string(self.dir.join(file))
            .map(|text| text.trim().to_owned())
            .map_err(|fault| number(&fault))
    }

    /// Writes one of its files, in one write as the kernel wants it.
    ///
    /// # Errors
    /// As open(2) and write(2).
    pub fn write(&self, file: &str, text: &str) -> Result<(), Errno> {
        write_at(&self.dir.join(file), text)
    }

    /// A list of numbers in one of its files.
    ///
    /// # Errors
    /// As read(2); `EIO` if it is no such list.
    pub fn list(&self, file: &str) -> Result<CpuSet, Errno> {
        self.read(file)?.parse().map_err(|_| Errno::EIO)
    }

    /// Its cpuset's files.
    ///
    /// # Errors
    /// As read(2).
    pub fn files(&self) -> Result<Files, Errno> {
        let partition = self.read("cpuset.cpus.partition").unwrap_or_default();
        Ok(Files { cpus: self.list("cpuset.cpus")?, mems: self.list("cpuset.mems")?, partition })
    }

    /// The PUs it may really use.
    ///
    /// # Errors
    /// As read(2).
    pub fn effective_cpus(&self) -> Result<CpuSet, Errno> {
        if self.unified {
            return self.list("cpuset.cpus.effective");
        }
        // Before Linux 3.17 the wish was the grant.
        self.list("cpuset.effective_cpus").or_else(|_| self.list("cpuset.cpus"))
    }

    /// The NUMA nodes whose memory it may really use.
    ///
    /// # Errors
    /// As read(2).
    pub fn effective_mems(&self) -> Result<CpuSet, Errno> {
        if self.unified {
            return self.list("cpuset.mems.effective");
        }
        self.list("cpuset.effective_mems").or_else(|_| self.list("cpuset.mems"))
    }

    /// The names of the cgroups right below it.
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

    /// Makes it; that it is there already is no error.
    ///
    /// # Errors
    /// As mkdir(2).
    pub fn make(&self) -> Result<(), Errno> {
        match fs::create_dir(&self.dir) {
            Err(fault) if fault.kind() != io::ErrorKind::AlreadyExists => Err(number(&fault)),
            _ => Ok(()),
        }
    }

    /// Removes it and the empty cgroups below it; that it is gone already is no error.
    ///
    /// # Errors
    /// `EBUSY` if there are processes in it or below.
    pub fn remove(&self) -> Result<(), Errno> {
        for child in self.children() {
            child.remove()?;
        }
        match fs::remove_dir(&self.dir) {
            Err(fault) if fault.kind() != io::ErrorKind::NotFound => Err(number(&fault)),
            _ => Ok(()),
        }
    }
}

fn write_at(path: &Path, text: &str) -> Result<(), Errno> {
    let mut file =
        OpenOptions::new().write(true).truncate(true).open(path).map_err(|fault| number(&fault))?;
    // The kernel never sees a write of nothing.
    let line = format!("{text}\n");
    file.write(line.as_bytes()).map(drop).map_err(|fault| number(&fault))
}

fn number(fault: &io::Error) -> Errno {
    fault.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
