//! Finds out whether a v1 cgroup contains a process.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use pjw_core::ids::is_cgroup_within;

use crate::proc::procfs::parse_cgroups;
use crate::proc::short_file::read_short_file;
use crate::sys::errno::{from_io, is_gone};

/// The maximum number of directories that are searched in a v1 cgroup. A cgroup with more directories counts as
/// populated.
const MAX_DIRECTORIES: usize = 256;

/// A cache with which pjwd checks quickly whether a v1 cgroup is populated. A cgroup is populated if a process is in
/// the cgroup or in a cgroup below it. For each v1 cgroup in which an earlier check has found such a process, the cache
/// has the directory of the cgroup and the pid of the process.
///
/// A v1 cgroup has no file that says whether it is populated. Without the cache, pjwd would search the cgroup and the
/// cgroups below it for a process. With the cache, pjwd reads `/proc/PID/cgroup` of the cached process, and searches
/// only if this process has left the cgroup or has ended.
#[derive(Debug, Default)]
pub struct PopulatedCgroupCache(BTreeMap<PathBuf, u32>);

impl PopulatedCgroupCache {
    /// Returns whether a v1 cgroup is populated: whether a process is in the cgroup or in a cgroup below it. `top` is
    /// the directory of the cgroup. `path` is the path of the cgroup, as in `/proc/PID/cgroup`. True if a directory
    /// can't be read, or if there are too many directories to read.
    pub(super) fn is_populated(&mut self, top: &Path, path: &str) -> bool {
        if self.0.get(top).is_some_and(|&pid| is_process_within(pid, path)) {
            return true;
        }
        match find_process(top) {
            Populated::By(pid) => drop(self.0.insert(top.to_owned(), pid)),
            Populated::Unknown => {}
            Populated::No => {
                self.0.remove(top);
                return false;
            }
        }
        true
    }

    /// Removes the entries of this cache whose cgroup directories no longer exist, to free memory. Each entry has the
    /// directory of a v1 cgroup, and the pid of one process that was found in this cgroup or in a cgroup below it.
    pub fn forget_removed_cgroups(&mut self) {
        self.0.retain(|dir, _| dir.exists());
    }
}

/// Whether the process `pid` is in the cgroup at `path` or in a cgroup below it, in some hierarchy. The kernel shows an
/// ended process in the root cgroup.
fn is_process_within(pid: u32, path: &str) -> bool {
    let lines = read_short_file(Path::new(&format!("/proc/{pid}/cgroup"))).unwrap_or_default();
    parse_cgroups(&lines).lines.iter().any(|(_, cgroup_path)| is_cgroup_within(cgroup_path, path))
}

/// Whether a process is in a cgroup or in a cgroup below it.
enum Populated {
    /// The process with this pid is there.
    By(u32),
    /// There are too many directories, or one can't be read. Counts as populated, so that a read error does
    /// not end a job.
    Unknown,
    /// No process is there.
    No,
}

/// Searches the cgroup directory `top` and the directories below it for a process, and returns the first one that is
/// found. Returns [`Populated::Unknown`] if a directory can't be read, or if no process is in the first
/// [`MAX_DIRECTORIES`] directories and there are more.
fn find_process(top: &Path) -> Populated {
    let mut unsearched = vec![top.to_owned()];
    for _ in 0..MAX_DIRECTORIES {
        let Some(dir) = unsearched.pop() else { return Populated::No };
        let pid = read_short_file(&dir.join("cgroup.procs")).map(|listed| first_pid(&listed));
        if let Ok(Some(pid)) = pid {
            return Populated::By(pid);
        }
        let below = match pid.and_then(|_| fs::read_dir(&dir).map_err(from_io)) {
            Ok(below) => below,
            // A directory that was removed meanwhile was empty.
            Err(errno) if is_gone(errno) => continue,
            Err(_) => return Populated::Unknown,
        };
        let below = below.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        unsearched.extend(below.map(|entry| entry.path()));
    }
    Populated::Unknown
}

/// Returns the first pid in the text of a file `cgroup.procs`.
fn first_pid(listed: &[u8]) -> Option<u32> {
    std::str::from_utf8(listed).ok()?.lines().find_map(|line| line.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_process_is_checked_before_the_v1_directory_is_listed() {
        let dir = tempfile::tempdir().unwrap();
        let list = |text: &str| fs::write(dir.path().join("cgroup.procs"), text).unwrap();
        let ours = fs::read_to_string("/proc/self/cgroup").unwrap();
        let ours = ours.lines().next().and_then(|line| line.splitn(3, ':').nth(2)).unwrap();
        let mut populated_cache = PopulatedCgroupCache::default();
        list("");
        assert!(!populated_cache.is_populated(dir.path(), ours));
        list(&format!("{}\n", std::process::id()));
        assert!(populated_cache.is_populated(dir.path(), ours));
        list("");
        assert!(
            populated_cache.is_populated(dir.path(), ours),
            "the known process is still in the directory"
        );
        assert!(
            !populated_cache.is_populated(dir.path(), "/moved/away"),
            "the known process is elsewhere, and the directory is empty"
        );
        assert!(!populated_cache.is_populated(dir.path(), ours), "the known process was dropped");
        fs::remove_file(dir.path().join("cgroup.procs")).unwrap();
        fs::create_dir(dir.path().join("cgroup.procs")).unwrap();
        assert!(
            populated_cache.is_populated(dir.path(), ours),
            "an unreadable directory counts as populated"
        );
    }
}
