//! Reports which job cgroups changed, so that unchanged cgroups need not be read.
//!
//! One inotify(7) watch on the directory of a cgroup reports a write to one of its files by any program, a change of
//! `cgroup.events` (`kernfs_notify` in fs/kernfs/file.c), and the removal of the directory. The v1 hierarchies report
//! no change of the processes in a cgroup.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};

use crate::inotify::read_events;

/// Watches the directories of job cgroups with inotify(7), so that pjwd reads only the cgroups that have
/// changed. A cgroup is identified by its path, as in `/proc/PID/cgroup`.
#[derive(Debug, Default)]
pub struct CgroupWatch {
    /// The inotify file descriptor. `None` if no cgroup has been watched yet, or if the kernel refuses inotify.
    inotify: Option<Inotify>,
    /// The cgroup of each inotify watch that the kernel has not ended.
    paths: BTreeMap<WatchDescriptor, String>,
    /// The cgroups that were added and not removed.
    watched: BTreeSet<String>,
    /// The cgroups that the kernel refuses to watch, for example because there are too many watches. Each counts as
    /// changed.
    refused: BTreeSet<String>,
    /// Cgroups whose change was read from the kernel and not returned yet.
    changed: BTreeSet<String>,
}

impl CgroupWatch {
    /// Starts to watch the cgroup at `cgroup_path` for changes. Has no effect if the cgroup is already watched.
    /// Otherwise calls `directories`, which must return the directories of the cgroup in all hierarchies. Ignores a
    /// directory that does not exist. If the kernel refuses to watch one of the directories for another reason,
    /// [`CgroupWatch::take_changed`] returns the cgroup at each call, as if it had changed.
    pub fn add(&mut self, cgroup_path: &str, directories: impl FnOnce() -> Vec<PathBuf>) {
        if self.watched.contains(cgroup_path) {
            return;
        }
        self.watched.insert(cgroup_path.to_owned());
        if self.inotify.is_none() {
            self.inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok();
        }
        let flags = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_ONLYDIR;
        for dir in directories() {
            let watch = self.inotify.as_ref().ok_or(Errno::ENOSYS);
            match watch.and_then(|inotify| inotify.add_watch(&dir, flags)) {
                Ok(watch) => drop(self.paths.insert(watch, cgroup_path.to_owned())),
                Err(Errno::ENOENT | Errno::ENOTDIR) => {}
                Err(_) => drop(self.refused.insert(cgroup_path.to_owned())),
            }
        }
    }

    /// Stops watching the cgroup at `cgroup_path`, so that later changes of the cgroup are ignored. Call this function
    /// only after the directories of the cgroup were removed in all hierarchies: the kernel ends an inotify watch when
    /// its directory is removed. This function does not end the inotify watch of a directory that still exists. Such a
    /// watch continues to count against the user's limit of inotify watches.
    pub fn remove(&mut self, cgroup_path: &str) {
        self.changed.remove(cgroup_path);
        self.watched.remove(cgroup_path);
        self.refused.remove(cgroup_path);
    }

    /// Returns the paths of the watched cgroups, in alphabetical order.
    pub fn watched_paths(&self) -> impl Iterator<Item = &str> {
        self.watched.iter().map(String::as_str)
    }

    /// Returns the inotify file descriptor of the watched cgroups. poll(2) shows the descriptor as readable
    /// while there are changes that were not read yet. `None` if no cgroup has been watched yet, or if the
    /// kernel refuses inotify.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    /// Returns whether inotify has reported a change of a watched cgroup since the last call of
    /// [`CgroupWatch::take_changed`]. Also true if the kernel has dropped inotify events, because then each watched
    /// cgroup has possibly changed. A change that the kernel can't report, because it refuses to watch the directory,
    /// does not make the result true. `take_changed` returns the cgroup of such a directory at each call.
    pub fn has_changes(&mut self) -> bool {
        self.read_changes();
        !self.changed.is_empty()
    }

    /// Returns the paths of the cgroups that have possibly changed since the last call of this function:
    ///
    /// - the cgroups for which inotify reported a change,
    /// - every cgroup that the kernel refuses to watch,
    /// - all watched cgroups, if the kernel dropped inotify events.
    pub fn take_changed(&mut self) -> BTreeSet<String> {
        self.read_changes();
        let mut changed = std::mem::take(&mut self.changed);
        changed.extend(self.refused.iter().filter(|path| self.watched.contains(*path)).cloned());
        changed
    }

    /// Reads the pending inotify events, and adds the paths of the changed cgroups to `changed`. Adds the paths of all
    /// watched cgroups if the kernel dropped events. The number of events in one call is limited: the next call reads
    /// the others.
    fn read_changes(&mut self) {
        for event in self.inotify.iter().flat_map(read_events) {
            if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                self.changed.extend(self.watched.iter().cloned());
            }
            let path = if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                self.paths.remove(&event.wd)
            } else {
                self.paths.get(&event.wd).filter(|_| is_of_interest(&event)).cloned()
            };
            self.changed.extend(path.filter(|path| self.watched.contains(path)));
        }
    }
}

/// Whether an event is about the directory, or about a file that says which processes and PUs the cgroup has.
/// Some other files change many times each second, such as `memory.events`.
fn is_of_interest(event: &InotifyEvent) -> bool {
    let Some(name) = event.name.as_ref().map(|name| name.as_encoded_bytes()) else { return true };
    name.starts_with(b"cgroup.") || name.starts_with(b"cpuset.") || name == b"tasks"
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    #[test]
    fn a_write_and_the_removal_of_the_directory_are_reported_once() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().join("job");
        fs::create_dir(&group).unwrap();
        fs::write(group.join("cpuset.cpus"), "0-3").unwrap();
        let mut watch = CgroupWatch::default();
        watch.add("/job", || vec![group.clone(), dir.path().join("no such hierarchy")]);
        assert!(watch.take_changed().is_empty());
        fs::write(group.join("cpuset.cpus"), "0-1").unwrap();
        assert_eq!(watch.take_changed(), BTreeSet::from(["/job".to_owned()]));
        assert!(watch.take_changed().is_empty());
        fs::remove_dir_all(&group).unwrap();
        // The kernel reports the removal when the last descriptor of the directory is closed. A child that another
        // test has just forked has a copy of the descriptor of `remove_dir_all` until it executes its program. The
        // child of the cpuset test (`probe`) executes none, and has the copy until that test ends.
        let mut fds = [PollFd::new(watch.fd().unwrap(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::from(60_000u16)).unwrap();
        assert_eq!(watch.take_changed(), BTreeSet::from(["/job".to_owned()]));
        watch.remove("/job");
        fs::create_dir(&group).unwrap();
        watch.add("/job", || vec![group.clone()]);
        fs::write(group.join("cpuset.cpus"), "0").unwrap();
        assert_eq!(watch.take_changed(), BTreeSet::from(["/job".to_owned()]), "the cgroup was made again");
    }

    #[test]
    fn a_change_makes_the_descriptor_readable_unless_it_is_of_another_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = CgroupWatch::default();
        assert!(watch.fd().is_none());
        watch.add("/job", || vec![dir.path().to_owned()]);
        let is_readable = |watch: &CgroupWatch| {
            let mut fds = [PollFd::new(watch.fd().unwrap(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
        };
        fs::write(dir.path().join("memory.events"), "high 1").unwrap();
        assert!(is_readable(&watch));
        assert!(!watch.has_changes() && !is_readable(&watch));
        fs::write(dir.path().join("cgroup.events"), "populated 0").unwrap();
        assert!(is_readable(&watch));
        assert!(watch.has_changes() && watch.has_changes(), "until the change is taken");
        assert_eq!(watch.take_changed(), BTreeSet::from(["/job".to_owned()]));
        assert!(!watch.has_changes());
    }

    #[test]
    fn a_cgroup_that_is_no_longer_watched_is_not_reported() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = CgroupWatch::default();
        watch.add("/job", || vec![dir.path().to_owned()]);
        watch.remove("/job");
        fs::write(dir.path().join("cpuset.cpus"), "0").unwrap();
        assert!(watch.take_changed().is_empty());
    }
}
