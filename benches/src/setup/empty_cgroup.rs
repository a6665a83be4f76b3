//! A cgroup v2 in which processes are born.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process;
use std::thread;

use anyhow::Context;

/// A new cgroup v2 without processes, below the cgroup of the bench. Dropping this value removes the cgroup. All its
/// processes must have ended by then: the drop waits until the kernel counts no process in the cgroup.
#[derive(Debug)]
pub struct EmptyCgroup(PathBuf);

impl EmptyCgroup {
    /// Makes a new cgroup below the cgroup of this process. `None` if cgroup v2 is not mounted, or if this user may not
    /// make a cgroup there.
    #[must_use]
    pub fn make() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let mount_point = mounts.lines().find(|line| line.contains(" - cgroup2 "))?.split(' ').nth(4)?;
        let own_cgroups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own_path = own_cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
        let path = format!("{mount_point}{}/pjw-bench-{}", own_path.trim_end_matches('/'), process::id());
        fs::create_dir(&path).ok()?;
        Some(Self(path.into()))
    }

    /// Opens the directory of the cgroup, so that processes can be started in the cgroup.
    ///
    /// # Errors
    /// If the directory can't be opened.
    pub fn open(&self) -> anyhow::Result<OwnedFd> {
        Ok(File::open(&self.0).context("can't open the cgroup of the bench")?.into())
    }
}

impl Drop for EmptyCgroup {
    fn drop(&mut self) {
        // The kernel counts the last process for a moment after its end.
        while fs::remove_dir(&self.0).is_err_and(|error| error.kind() == ErrorKind::ResourceBusy) {
            thread::yield_now();
        }
    }
}
