//! The files of each job in `STATE_DIR/jobs/ID`: the CPUs of the job, for the programs in it, and the file into
//! which they write how many cores they want. `docs/coremap.md` describes the files.
//!
//! The files are written only when the core map of a job changes. inotify(7) reports what programs write into `want`,
//! and files that somebody removes. A file that can't be written is a warning, and is tried again: jobs keep their
//! cores without it.

mod directory;
mod fault;
mod wanted;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use pjw_core::core_map::CoreMap;
use pjw_core::ids::Uid;
use pjw_core::job::JobId;
use pjw_core::plan::Warning;
use tracing::{debug, warn};

use directory::{JobDirectory, JobsDirectory};
use fault::{FileFault, UnpublishedPart, file_fault};
use wanted::WantedFile;
use watch::{FileChange, FileWatch};

pub use directory::remove_files_of_all_jobs;

/// How often the files of a job are tried again on a full file system. A program may fill it again at once.
const ATTEMPTS_WITHOUT_SPACE: usize = 3;
/// The time from a change of a file to the reading. A program that truncates a file writes it next.
const SETTLE_TIME: Duration = Duration::from_millis(5);
/// The time after which an empty file counts as such. Before, a program may be about to write.
const EMPTY_TIME: Duration = Duration::from_millis(20);
/// The least time between two readings of the files: programs may write all the time.
const READ_INTERVAL: Duration = Duration::from_millis(200);

/// The values that the daemon publishes about one job. The daemon writes the values to files in the directory
/// `STATE_DIR/jobs/ID`. STATE_DIR is the state directory of the daemon, and ID is the id of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobFilesContent {
    /// The user who owns the job. The file `want` belongs to this user. Of all other users, only root can write the
    /// file.
    pub owner: Uid,
    /// The core map of the job: its CPUs, as the daemon publishes them in the files `cpus`, `coremap.json`
    /// and `coremap`.
    pub core_map: CoreMap,
    /// The number of cores that the job wants, as a program or a command last told the daemon. This number can be
    /// larger than the number of cores that the job may have. `None` if no number was given: the job then wants the
    /// cores that it was granted.
    pub wanted: Option<u32>,
}

/// A change of the number of cores that a job wants. A program of the user who owns the job wrote the new number into
/// the file `want` in the directory of the job. The daemon then read the number from this file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedCoresUpdate {
    /// The job in whose directory the file `want` is.
    pub job: JobId,
    /// The user who owns the job. The file `want` in the directory of the job belongs to this user.
    pub owner: Uid,
    /// The number in the file. `None` if the file is empty: the job wants the cores that it was granted.
    pub cores: Option<u32>,
}

/// The files of all jobs: one directory `STATE_DIR/jobs/ID` for each job, where STATE_DIR is the state directory of the
/// daemon and ID is the id of the job. pjwd writes the cores of the job to files there. The programs of the job write
/// the number of cores that the job wants to the file `want`.
#[derive(Debug)]
pub struct JobFiles {
    /// The directory `STATE_DIR/jobs`.
    root: JobsDirectory,
    jobs: BTreeMap<JobId, PublishedJob>,
    /// The jobs whose files could not be written, or removed after the end of the job, because pjwd had no free file
    /// descriptor.
    without_descriptor: BTreeSet<JobId>,
    /// The warnings about the files of each job that has one.
    warnings: BTreeMap<JobId, Vec<Warning>>,
    /// Watches the files with inotify(7).
    watch: FileWatch,
    /// The jobs with changed files, which are read at the time `due`.
    changed: BTreeSet<JobId>,
    /// The time at which the changed files are read. `None` if no file is known to have changed.
    due: Option<Instant>,
    /// The time at which changed files were last read.
    last_read: Option<Instant>,
}

/// A job with its files.
#[derive(Debug)]
struct PublishedJob {
    content: JobFilesContent,
    /// `None` if the directory could not be made yet.
    directory: Option<JobDirectory>,
    wanted_file: WantedFile,
    /// Whether the files are watched. If not, they are read in each rescan.
    is_watched: bool,
    /// Whether an earlier daemon left the file `want`, and this daemon has still to read it. It has not done so because
    /// another file of the job could not be written.
    is_want_unread: bool,
    /// Whether the files of an ended job with the same id are left. They are removed before the first write.
    has_files_of_ended_job: bool,
    /// The sentence for the warning that a file is not as it should be. `None` if all are.
    fault: Option<String>,
}

impl PublishedJob {
    /// Writes the files of this job, whose id is `id`, into its directory below `root`, and watches them with
    /// `watch`. Makes missing directories.
    ///
    /// Returns true if the caller must read the file `want` (the number of cores that the job wants): an earlier
    /// daemon left this file, and a program may have written it since. The function then does not write the file.
    ///
    /// # Errors
    /// If a directory or one of the files can't be made or written.
    fn write_files(
        &mut self,
        id: &JobId,
        root: &mut JobsDirectory,
        watch: &mut FileWatch,
    ) -> Result<bool, FileFault> {
        root.create_if_missing()?;
        let mut directory = self.directory.take();
        let is_new = directory.as_ref().is_none_or(|directory| !directory.is_in_place());
        if is_new {
            if let Some(old) = directory.take() {
                old.mark_core_map_outdated();
            }
            self.is_watched = false;
        }
        let directory = match directory {
            Some(directory) => directory,
            None => root.create_or_open_job_directory(id, self.has_files_of_ended_job)?,
        };
        self.has_files_of_ended_job = false;
        let directory = self.directory.insert(directory);
        let map_written = directory.write_core_map(&self.content.core_map);
        let want_written = self.write_want_file(id, is_new || self.is_want_unread, watch);
        // The caller reads the file `want` only if both results are `Ok`.
        self.is_want_unread = map_written.is_err() && matches!(want_written, Ok(true));
        // If both fail, the core map is more important.
        map_written.and(want_written.map_err(|fault| fault.with_part(UnpublishedPart::WantFile)))
    }

    /// Makes the file `want` in the directory of this job, whose id is `id`, and watches the files of the job with
    /// `watch`. `may_be_unread` says whether a file `want` that exists already was not yet read by this daemon. Such a
    /// file is not written, and the function returns true, as [`PublishedJob::write_files`] does.
    fn write_want_file(
        &mut self,
        id: &JobId,
        may_be_unread: bool,
        watch: &mut FileWatch,
    ) -> Result<bool, FileFault> {
        let Some(directory) = &self.directory else { return Ok(false) };
        let was_there = directory.create_want_file(self.content.owner)?;
        // A new file is not watched: the watch is of the inode of the former file.
        self.is_watched &= was_there;
        if !self.is_watched {
            self.is_watched = watch.add(id, directory.path());
        }
        // What a program wrote while no daemon ran counts. Otherwise the file shows what is in force.
        let is_to_be_read = was_there && may_be_unread;
        if !is_to_be_read {
            let path = directory.want_path();
            self.wanted_file
                .write_number(&path, self.content.wanted, was_there)
                .map_err(file_fault("write", &path))?;
        }
        Ok(is_to_be_read)
    }

    /// Returns the warnings about the files of this job, whose id is `id`. There is a warning if a file can't be
    /// written, and one if the content of the file `want` (the number of cores that the job wants) is ignored.
    /// `lacks_descriptor` says whether the file can't be written because pjwd has no free file descriptor.
    fn warnings(&self, id: &JobId, lacks_descriptor: bool) -> Vec<Warning> {
        let remedy = if lacks_descriptor {
            "pjwd tries again after each scan; give it more open files (LimitNOFILE= of its unit)"
        } else {
            "pjwd tries again in each rescan; check the space and the permissions of its state directory"
        };
        let unpublished = self.fault.as_ref().map(|fault| ("core-map", fault.clone(), remedy));
        let unread = self.wanted_file.ignored_reason().map(|ignored_reason| {
            let why = format!("the number of cores in the file want of {id} is ignored: {ignored_reason}");
            ("want", why, "write one number, such as 4, or nothing")
        });
        let warning =
            |(code, why, remedy)| Warning { job: Some(id.clone()), ..Warning::new(code, why, remedy) };
        unpublished.into_iter().chain(unread).map(warning).collect()
    }
}

impl JobFiles {
    /// Makes a [`JobFiles`] without jobs, for the directory `state_dir/jobs`. `state_dir` is the state directory of
    /// the daemon, and must exist. Writes and removes no files.
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        // Programs need a path that does not depend on their working directory.
        let absolute = state_dir.canonicalize().unwrap_or_else(|_| state_dir.to_owned());
        Self {
            root: JobsDirectory::new(&absolute),
            jobs: BTreeMap::new(),
            without_descriptor: BTreeSet::new(),
            warnings: BTreeMap::new(),
            watch: FileWatch::new(),
            changed: BTreeSet::new(),
            due: None,
            last_read: None,
        }
    }

    /// Removes the files that an earlier daemon wrote for jobs that have ended since. The files are in
    /// `STATE_DIR/jobs`, where STATE_DIR is the state directory of the daemon. Keeps only the directories of the jobs
    /// in [`JobFiles::job_ids`]. Wakes the programs that wait for a change of a removed file `coremap` (futex(2)).
    ///
    /// Must be called once, after the first cycle (scan, decision and changes) has called [`JobFiles::publish`] for
    /// all jobs. An earlier call would also remove the files of jobs that still exist.
    pub fn remove_leftovers(&self) {
        self.root.remove_others(self.jobs.keys());
    }

    /// Returns the path of the directory with the files of all jobs: the directory `jobs` in the state directory of
    /// the daemon. Each job has a subdirectory there.
    #[must_use]
    pub fn root_path(&self) -> &Path {
        self.root.path()
    }

    /// Returns the ids of the jobs that have files. A job has files from the first call of [`JobFiles::publish`] with
    /// content until a call with `None`. A job counts even if its files could not be written.
    pub fn job_ids(&self) -> impl Iterator<Item = &JobId> {
        self.jobs.keys()
    }

    /// Returns the lowest id of the jobs whose files could not be written or removed because pjwd had no free file
    /// descriptor. `None` if there is no such job. After the next scan, the caller must call [`JobFiles::publish`] for
    /// this job again, also if its content has not changed. If the files are then written or removed, this function
    /// returns the next such job, and the caller must do the same for that job.
    #[must_use]
    pub fn first_job_without_descriptor(&self) -> Option<&JobId> {
        self.without_descriptor.first()
    }

    /// Publishes `content` in the files of the job `id`. Writes only those files whose content changes. If the job
    /// now belongs to another user, removes all files of the job and recreates them. If `content` is `None`, removes
    /// the files of the job, and wakes the programs that wait for a change of the job's cores.
    ///
    /// If a file can't be written, the failure is logged, and [`JobFiles::warnings`] returns a warning about the job.
    /// Later calls of this function and of [`JobFiles::take_wanted_cores_updates`] try again.
    pub fn publish(&mut self, id: &JobId, content: Option<JobFilesContent>) {
        let Some(content) = content else { return self.remove_job(id) };
        let before = self.jobs.get(id);
        if before.is_some_and(|job| job.content == content && job.fault.is_none()) {
            return;
        }
        if before.is_some_and(|job| job.content.owner != content.owner) {
            self.remove_job(id);
        }
        let job = self.jobs.entry(id.clone()).or_insert_with(|| PublishedJob {
            content: content.clone(),
            directory: None,
            wanted_file: WantedFile::new(content.wanted),
            is_watched: false,
            is_want_unread: false,
            has_files_of_ended_job: self.without_descriptor.contains(id),
            fault: None,
        });
        job.content = content;
        if self.write_job_files(id) {
            self.schedule(id, Instant::now());
        }
    }

    /// Writes the files of the job `id`. If the file system is full, frees the space that the files `want` of all
    /// jobs take needlessly, and tries again. Logs a failure, and stores it for a warning about the job. Returns true
    /// if the caller must read the file `want` of the job, because an earlier daemon left it. Returns false after a
    /// failure, or if there is no such job.
    fn write_job_files(&mut self, id: &JobId) -> bool {
        let mut written = self.try_write(id);
        for _ in 0..ATTEMPTS_WITHOUT_SPACE {
            let is_full =
                |written: &Result<bool, FileFault>| written.as_ref().is_err_and(FileFault::is_lack_of_space);
            if !written.as_ref().is_some_and(is_full) {
                break;
            }
            self.give_back_space_of_want_files();
            written = self.try_write(id);
        }
        let (Some(written), Some(job)) = (written, self.jobs.get_mut(id)) else { return false };
        if written.as_ref().is_err_and(FileFault::is_lack_of_descriptors) {
            self.without_descriptor.insert(id.clone());
        } else {
            self.without_descriptor.remove(id);
        }
        let is_to_be_read = match written {
            Ok(is_to_be_read) => {
                if job.fault.take().is_some() {
                    warn!(job = %id, "all files of {id} are published again");
                }
                is_to_be_read
            }
            Err(fault) => {
                let effect = fault.describe_effect(id);
                if job.fault.as_ref() != Some(&effect) {
                    warn!(job = %id, "a file of {id} can't be published: {fault}");
                }
                job.fault = Some(effect);
                false
            }
        };
        self.update_warnings(id);
        is_to_be_read
    }

    /// Writes the files of the job `id` once. `None` if there is no such job.
    fn try_write(&mut self, id: &JobId) -> Option<Result<bool, FileFault>> {
        self.jobs.get_mut(id).map(|job| job.write_files(id, &mut self.root, &mut self.watch))
    }

    /// Frees the disk space that the files `want` of the jobs do not need. A program writes the number of cores that
    /// its job wants into this file, so 4096 bytes are always enough. A longer file is emptied, and the daemon ignores
    /// its content. A shorter file only loses the space that is reserved after its end (fallocate(2)). Files that are
    /// no regular files, or do not belong to the owner of the job, are not changed.
    ///
    /// Must be called when the file system is full: a program may have filled it with the file `want`, and the other
    /// jobs and the journal (the records of pjwd's changes) need the space.
    pub fn give_back_space_of_want_files(&mut self) {
        for job in self.jobs.values_mut() {
            if let Some(directory) = &job.directory {
                job.wanted_file.give_back_space(&directory.want_path(), job.content.owner);
            }
        }
    }

    /// Stores the warnings about the files of the job `id`. Must be called after the files were written or read.
    fn update_warnings(&mut self, id: &JobId) {
        let lacks_descriptor = self.without_descriptor.contains(id);
        let warnings = self.jobs.get(id).map(|job| job.warnings(id, lacks_descriptor)).unwrap_or_default();
        if warnings.is_empty() {
            self.warnings.remove(id);
        } else {
            self.warnings.insert(id.clone(), warnings);
        }
    }

    /// Removes the job `id` with its files, its watch and its warnings. If the files can't be removed because pjwd has
    /// no free file descriptor, [`JobFiles::first_job_without_descriptor`] returns the job, and the next call tries
    /// again.
    fn remove_job(&mut self, id: &JobId) {
        self.changed.remove(id);
        self.warnings.remove(id);
        let is_left = self.without_descriptor.remove(id);
        let job = self.jobs.remove(id);
        if job.is_some() {
            self.watch.remove(id);
        } else if !is_left {
            return;
        }
        let is_done = match job.and_then(|job| job.directory) {
            Some(directory) => directory.remove(),
            None => self.root.remove_directory(id).is_ok(),
        };
        if !is_done {
            self.without_descriptor.insert(id.clone());
        }
    }

    /// Returns the inotify(7) file descriptor that is readable when a program has written or removed a file of a job.
    /// The event loop waits for this descriptor. Returns `None` while a reading of the changed files is already
    /// scheduled ([`JobFiles::next_read_at`]): the event loop need not wake earlier. Also returns `None` if the
    /// kernel refuses inotify.
    #[must_use]
    pub fn changes_fd(&self) -> Option<BorrowedFd<'_>> {
        self.watch.fd().filter(|_| self.due.is_none())
    }

    /// Reads from the kernel (inotify(7)) which jobs have files that a program wrote or removed. Schedules a reading of
    /// the files of these jobs, for the time that [`JobFiles::next_read_at`] returns. Must be called when the
    /// descriptor [`JobFiles::changes_fd`] is readable. `now` is the current time. Does not block.
    pub fn schedule_reading_of_changed_files(&mut self, now: Instant) {
        for change in self.watch.read_changes() {
            match change {
                FileChange::Of(id) => self.schedule(&id, now),
                FileChange::Unknown => self.schedule_all(now),
            }
        }
    }

    /// Returns the time at which the event loop must call [`JobFiles::take_wanted_cores_updates`] to read the changed
    /// files of jobs. `None` if no file is known to have changed.
    ///
    /// The time is 5 ms after the daemon has noticed the first change, because many programs empty a file before they
    /// write the number. But the time is at least 200 ms after the last reading, because a program can write
    /// continuously. There is one exception: if the last reading found a file that a program may have emptied just
    /// then, the time is 20 ms after that reading.
    #[must_use]
    pub fn next_read_at(&self) -> Option<Instant> {
        self.due
    }

    /// Schedules the reading of those job files whose changes the kernel does not report. The files of a job are read
    /// in each of these cases:
    ///
    /// - A file of the job could not be written.
    /// - The kernel does not watch the directory of the job.
    /// - The directory with the files of all jobs was removed or replaced.
    ///
    /// Must be called in each rescan: a scan that also reads the processes that belong to no job. `now` is the
    /// current time.
    pub fn schedule_reading_of_unwatched_files(&mut self, now: Instant) {
        let is_root_gone = !self.root.is_in_place();
        let job_ids: Vec<JobId> = self
            .jobs
            .iter()
            .filter(|(_, job)| is_root_gone || job.fault.is_some() || !job.is_watched)
            .map(|(id, _)| id.clone())
            .collect();
        for id in job_ids {
            self.schedule(&id, now);
        }
    }

    /// Reads the file `want` of each job whose directory has a changed file. A program writes the number of cores that
    /// its job wants into this file. Returns the numbers that differ from those that the daemon already knew. Also
    /// recreates missing files of these jobs. Returns an empty list, without reading, if no reading is due at the time
    /// `now` ([`JobFiles::next_read_at`]).
    pub fn take_wanted_cores_updates(&mut self, now: Instant) -> Vec<WantedCoresUpdate> {
        if self.due.is_none_or(|due| due > now) {
            return Vec::new();
        }
        // The last event of a write often comes after the first one was read. It needs no second reading.
        self.schedule_reading_of_changed_files(now);
        (self.due, self.last_read) = (None, Some(now));
        let mut updates = Vec::new();
        for id in std::mem::take(&mut self.changed) {
            self.rewrite_if_incomplete(&id);
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            let Some(directory) = &job.directory else { continue };
            let reading = job.wanted_file.read(&directory.want_path(), job.content.owner);
            job.is_want_unread = false;
            let owner = job.content.owner;
            self.update_warnings(&id);
            match reading {
                wanted::WantedFileReading::Same => {}
                wanted::WantedFileReading::MayBeUnfinished => {
                    self.changed.insert(id);
                    self.due = Some(now + EMPTY_TIME);
                }
                wanted::WantedFileReading::New(cores) => {
                    debug!(job = %id, ?cores, "a program wrote how many cores it wants");
                    updates.push(WantedCoresUpdate { job: id, owner, cores });
                }
            }
        }
        updates
    }

    /// Writes all files of the job `id` again if one of them is missing, or if the last write has failed. Otherwise
    /// does nothing.
    fn rewrite_if_incomplete(&mut self, id: &JobId) {
        let is_complete = |job: &PublishedJob| {
            let directory = job.directory.as_ref();
            job.fault.is_none() && directory.is_some_and(JobDirectory::is_complete)
        };
        if self.jobs.get(id).is_some_and(|job| !is_complete(job)) {
            self.watch.remove(id);
            if let Some(job) = self.jobs.get_mut(id) {
                job.is_watched = false;
            }
            self.write_job_files(id);
        }
    }

    /// Schedules the reading of the files of the job `id`. Does nothing if there is no such job.
    fn schedule(&mut self, id: &JobId, now: Instant) {
        if self.jobs.contains_key(id) {
            self.changed.insert(id.clone());
            let earliest = self.last_read.map_or(now, |last| last + READ_INTERVAL);
            self.due.get_or_insert((now + SETTLE_TIME).max(earliest));
        }
    }

    fn schedule_all(&mut self, now: Instant) {
        let job_ids: Vec<JobId> = self.jobs.keys().cloned().collect();
        job_ids.iter().for_each(|id| self.schedule(id, now));
    }

    /// Returns the warnings about the files of jobs: one for each job with a file that could not be written, and one
    /// for each job whose file `want` is ignored. The daemon ignores the file `want` (the number of cores that the
    /// job wants) if its content is not a number, or if the file can't be read.
    pub fn warnings(&self) -> impl Iterator<Item = &Warning> {
        self.warnings.values().flatten()
    }
}

#[cfg(test)]
mod tests;
