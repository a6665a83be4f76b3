//! Reports changes of the files of jobs by inotify(7).

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use pjw_core::job::JobId;
use pjw_job::WANTED_CORES_FILE_NAME;
use pjw_linux::inotify::read_events;
use tracing::info;

/// A change of the files of jobs that the kernel reported by inotify(7). Names the job with the changed file, or says
/// that the kernel has lost reports of changes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FileChange {
    /// A program wrote into the file `want` of this job, or removed a file of the job.
    Of(JobId),
    /// The kernel lost reports of changes: the files of any job may have changed.
    Unknown,
}

/// Watches the files of jobs by inotify(7). Each job has two watches: one of its directory, and one of the file `want`
/// in this directory.
#[derive(Debug)]
pub(super) struct FileWatch {
    /// `None` if the kernel refuses inotify.
    inotify: Option<Inotify>,
    watches_of_jobs: BTreeMap<JobId, Vec<WatchDescriptor>>,
    jobs_of_watches: BTreeMap<WatchDescriptor, JobId>,
}

impl FileWatch {
    /// Creates an inotify(7) instance without watches. If the kernel refuses inotify, no file is watched, and the
    /// reason is logged.
    pub(super) fn new() -> Self {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        let inotify = inotify
            .map_err(|errno| info!("no inotify: the files want are read in each rescan: {errno}"))
            .ok();
        Self { inotify, watches_of_jobs: BTreeMap::new(), jobs_of_watches: BTreeMap::new() }
    }

    /// Starts to watch `directory`, the directory of the job `id`, and the file `want` in it. Returns false if the
    /// kernel refuses one of the two watches, for example because the user already has the maximum number of watches.
    pub(super) fn add(&mut self, id: &JobId, directory: &Path) -> bool {
        self.remove(id);
        let Some(inotify) = &self.inotify else { return false };
        // A rename over an old file is not reported by these flags: the daemon itself replaces files in this way.
        let removals = AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        let writes = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CLOSE_WRITE;
        let watches = [(directory.to_owned(), removals), (directory.join(WANTED_CORES_FILE_NAME), writes)]
            .map(|(path, flags)| inotify.add_watch(&path, flags | AddWatchFlags::IN_DONT_FOLLOW));
        let is_complete = watches.iter().all(Result::is_ok);
        let watches: Vec<WatchDescriptor> = watches.into_iter().flatten().collect();
        self.jobs_of_watches.extend(watches.iter().map(|&watch| (watch, id.clone())));
        self.watches_of_jobs.insert(id.clone(), watches);
        is_complete
    }

    /// Ends the watches of the files of the job `id`. Does nothing if the files are not watched.
    pub(super) fn remove(&mut self, id: &JobId) {
        for watch in self.watches_of_jobs.remove(id).into_iter().flatten() {
            self.jobs_of_watches.remove(&watch);
            // The watch of a removed file has ended already.
            let _ = self.inotify.as_ref().map(|inotify| inotify.rm_watch(watch));
        }
    }

    /// Returns the inotify(7) file descriptor, which is readable when watched files of jobs have changed. `None` if the
    /// kernel refuses inotify.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    /// Returns the changes of the files of jobs that the kernel has reported since the last call, each once. Does not
    /// wait for changes. If programs write faster than this function reads, the next call returns the rest: the file
    /// descriptor of the watches stays readable until then.
    pub(super) fn read_changes(&self) -> Vec<FileChange> {
        let Some(inotify) = &self.inotify else { return Vec::new() };
        let (mut changed, mut has_lost_events) = (BTreeSet::new(), false);
        for event in read_events(inotify) {
            has_lost_events |= event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
            changed.extend(self.jobs_of_watches.get(&event.wd));
        }
        let lost = has_lost_events.then_some(FileChange::Unknown);
        lost.into_iter().chain(changed.into_iter().cloned().map(FileChange::Of)).collect()
    }
}
