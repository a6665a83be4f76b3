//! A cgroup v2 in which processes are born.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process;
use std::thread;

use anyhow::Context;

/// A new cgroup v2 below the cgroup of the bench. It is removed when this value is dropped: its processes have ended
/// then.
#[derive(Debug)]
pub struct EmptyCgroup(PathBuf);

impl EmptyCgroup {
    /// Makes the cgroup. `None` if there is no hierarchy of v2, or if this user can make no directory in it.
    #[must_use]
    pub fn make() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "))?.split(' ').nth(4)?;
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::"))?;
        let path = format!("{mount}{}/pjw-bench-{}", own.trim_end_matches('/'), process::id());
        fs::create_dir(&path).ok()?;
        Some(Self(path.into()))
    }

    /// Opens the directory of the cgroup.
    ///
    /// # Errors
    /// If it can't be opened.
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
