//! The counters of a cgroup that show whether its processes ran.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::sys::resource::{Resource, getrlimit};

/// The number of descriptors that the open files of cgroups leave to the rest of the process: to the connections of its
/// clients, and to its own files.
pub(super) const DESCRIPTORS_OF_OTHERS: u64 = 384;

/// Returns the limit of open descriptors of this process (`RLIMIT_NOFILE`). The largest number if it is unknown.
pub(super) fn descriptor_limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft)
}

/// The open files of a cgroup that show whether its processes ran. They usually stay open, so that a check opens no
/// file by its path.
#[derive(Debug)]
pub(super) struct CgroupCounters {
    /// `cpu.stat`.
    stat: File,
    /// `pids.current`. `None` if the kernel does not count the tasks of the cgroup.
    tasks: Option<File>,
}

impl CgroupCounters {
    pub(super) fn open(root: &Path, path: &str) -> io::Result<Self> {
        let dir = root.join(path.trim_start_matches('/'));
        Ok(Self { stat: File::open(dir.join("cpu.stat"))?, tasks: File::open(dir.join("pids.current")).ok() })
    }

    /// Whether enough descriptors up to the limit `limit` are left to the rest of the process. open(2) returns the
    /// lowest free number, so all lower numbers were in use when the files were opened.
    pub(super) fn may_stay_open(&self, limit: u64) -> bool {
        let highest = self.stat.as_raw_fd().max(self.tasks.as_ref().map_or(-1, AsRawFd::as_raw_fd));
        u64::try_from(highest).is_ok_and(|highest| highest + DESCRIPTORS_OF_OTHERS < limit)
    }

    /// The CPU time of the cgroup in microseconds, and its number of tasks, 0 if the kernel does not count them. The
    /// number shows that a process was moved out, whose CPU time counts elsewhere from then on. `None` if the cgroup
    /// was removed.
    pub(super) fn read(&self) -> Option<(u64, u64)> {
        let mut buffer = [0; 1024];
        let stat = read_start(&self.stat, &mut buffer)?;
        let usage = stat.lines().find_map(|line| line.strip_prefix("usage_usec "))?.parse().ok()?;
        let tasks = self.tasks.as_ref().and_then(|tasks| read_start(tasks, &mut buffer)?.trim().parse().ok());
        Some((usage, tasks.unwrap_or(0)))
    }
}

/// The first part of a file, as much as fits in the buffer.
fn read_start<'a>(file: &File, buffer: &'a mut [u8]) -> Option<&'a str> {
    let length = file.read_at(buffer, 0).ok()?;
    std::str::from_utf8(&buffer[..length]).ok()
}
