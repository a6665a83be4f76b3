//! Reports which job cgroups changed, so that unchanged cgroups need not be read.
//!
//! One inotify(7) watch on the directory of a cgroup reports a write to one of its files by any program, a change of
//! `cgroup.events` (`kernfs_notify` in fs/kernfs/file.c), and the removal of the directory. The v1 hierarchies report no
//! change of the processes in a cgroup.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};

/// Watches the cgroups of jobs for changes, so that pjwd reads only those that changed. The kernel reports changes
/// by inotify(7).
#[derive(Debug, Default)]
pub struct CgroupWatch {
    /// `None` before the first watch, and if the kernel refuses inotify.
    inotify: Option<Inotify>,
    paths: BTreeMap<WatchDescriptor, String>,
    watched: BTreeSet<String>,
    /// Cgroups whose watch the kernel refused (too many watches): each counts as changed.
    refused: BTreeSet<String>,
}

impl CgroupWatch {
    /// Starts to watch the cgroup at `path`, if it is not watched yet. `dirs` returns the directories that belong
    /// to the cgroup.
    pub fn add(&mut self, path: &str, dirs: impl FnOnce() -> Vec<PathBuf>) {
        if self.watched.contains(path) {
            return;
        }
        self.watched.insert(path.to_owned());
        if self.inotify.is_none() {
            self.inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok();
        }
        let flags = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_ONLYDIR;
        for dir in dirs() {
            let watch = self.inotify.as_ref().ok_or(Errno::ENOSYS);
            match watch.and_then(|inotify| inotify.add_watch(&dir, flags)) {
                Ok(watch) => drop(self.paths.insert(watch, path.to_owned())),
                Err(Errno::ENOENT | Errno::ENOTDIR) => {}
                Err(_) => drop(self.refused.insert(path.to_owned())),
            }
        }
    }

    /// Stops watching the cgroup at `path`, which no longer exists. The kernel has ended its watches together with
    /// the directories.
    pub fn remove(&mut self, path: &str) {
        self.watched.remove(path);
        self.refused.remove(path);
    }

    /// Iterates over the paths of the watched cgroups.
    pub fn watched(&self) -> impl Iterator<Item = &str> {
        self.watched.iter().map(String::as_str)
    }

    /// Returns the paths of the cgroups that changed since the last call, and of those that can't be watched. If
    /// the kernel dropped events, all watched cgroups are returned.
    pub fn take_changed(&mut self) -> BTreeSet<String> {
        let mut changed = self.refused.clone();
        while let Some(Ok(events)) = self.inotify.as_ref().map(Inotify::read_events) {
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    changed.extend(self.watched.iter().cloned());
                }
                if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    changed.extend(self.paths.remove(&event.wd));
                } else {
                    changed.extend(self.paths.get(&event.wd).cloned());
                }
            }
        }
        changed.retain(|path| self.watched.contains(path));
        changed
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

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
        assert_eq!(watch.take_changed(), BTreeSet::from(["/job".to_owned()]));
        watch.remove("/job");
        fs::create_dir(&group).unwrap();
        watch.add("/job", || vec![group.clone()]);
        fs::write(group.join("cpuset.cpus"), "0").unwrap();
        assert_eq!(watch.take_changed(), BTreeSet::from(["/job".to_owned()]), "the cgroup was made again");
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
