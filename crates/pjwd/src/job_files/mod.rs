//! The files of each job in `STATE_DIR/jobs/ID`: what programs in the job are told about its cores, and the file into
//! which they write how many cores they want. `docs/coremap.md` describes the files.
//!
//! The files are written only when the core map of a job changes. inotify(7) reports what programs write into `want`, and
//! files that somebody removes. A file that can't be written is a warning, and is tried again: jobs keep their cores
//! without it.

mod directory;
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

use directory::{FileFault, JobDirectory, JobsDirectory, failed};
use wanted::WantedFile;
use watch::{FileChange, FileWatch};

pub use directory::remove_all;

/// The time from a change of a file to the reading. A program that truncates a file writes it next.
const SETTLE_TIME: Duration = Duration::from_millis(5);
/// The time after which an empty file counts as such. Before, a program may be about to write.
const EMPTY_TIME: Duration = Duration::from_millis(20);
/// The least time between two readings of the files: programs may write all the time.
const READ_INTERVAL: Duration = Duration::from_millis(200);

/// What the files of one job are to show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobContent {
    /// The owner of the job, who may write the file `want`.
    pub owner: Uid,
    /// The cores of the job.
    pub core_map: CoreMap,
    /// The number of wanted cores in force. `None` if the job wants what it was granted.
    pub wanted: Option<u32>,
}

/// A number of wanted cores that a program wrote into the file of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenWant {
    /// The job.
    pub job: JobId,
    /// The owner of the job, who alone can write the file.
    pub owner: Uid,
    /// The number. `None` if the file was emptied: the job wants what it was granted.
    pub cores: Option<u32>,
}

/// The files of all jobs.
#[derive(Debug)]
pub struct JobFiles {
    root: JobsDirectory,
    jobs: BTreeMap<JobId, PublishedJob>,
    watch: FileWatch,
    /// The jobs whose files changed and are to be read at `due`.
    changed: BTreeSet<JobId>,
    due: Option<Instant>,
    last_read: Option<Instant>,
}

/// A job with its files.
#[derive(Debug)]
struct PublishedJob {
    content: JobContent,
    /// `None` if the directory could not be made yet.
    directory: Option<JobDirectory>,
    wanted_file: WantedFile,
    /// Whether the files are watched. If not, they are read in each rescan.
    is_watched: bool,
    /// The reason why a file is not as it should be. Empty if all are.
    fault: Option<String>,
}

impl PublishedJob {
    /// Writes the files. Returns whether the file `want` is to be read, because an earlier daemon left it.
    fn write(
        &mut self,
        id: &JobId,
        root: &mut JobsDirectory,
        watch: &mut FileWatch,
    ) -> Result<bool, FileFault> {
        root.make()?;
        let mut directory = self.directory.take();
        let is_new = directory.as_ref().is_none_or(|directory| !directory.is_in_place());
        if is_new {
            if let Some(old) = directory.take() {
                old.end();
            }
            self.is_watched = false;
        }
        let directory = match directory {
            Some(directory) => directory,
            None => root.open(id)?,
        };
        let directory = self.directory.insert(directory);
        let map_written = directory.write_map(&self.content.core_map);
        let was_there = directory.make_want(self.content.owner)?;
        if !self.is_watched {
            self.is_watched = watch.add(id, directory.path());
        }
        // What a program wrote while no daemon ran counts. Otherwise the file shows what is in force.
        let is_to_be_read = was_there && is_new;
        if !is_to_be_read {
            let path = directory.want_path();
            self.wanted_file.show(&path, self.content.wanted, was_there).map_err(failed("write", &path))?;
        }
        map_written.map(|()| is_to_be_read)
    }
}

impl JobFiles {
    /// Makes the value for a daemon with this state directory, which exists. Nothing is written yet.
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        // Programs need a path that does not depend on their working directory.
        let absolute = state_dir.canonicalize().unwrap_or_else(|_| state_dir.to_owned());
        Self {
            root: JobsDirectory::new(&absolute),
            jobs: BTreeMap::new(),
            watch: FileWatch::new(),
            changed: BTreeSet::new(),
            due: None,
            last_read: None,
        }
    }

    /// Removes the files that an earlier daemon left for jobs that have ended since. Must be called once, after the first
    /// publication.
    pub fn remove_leftovers(&self) {
        self.root.remove_others(self.jobs.keys());
    }

    /// Returns the directory with the directories of all jobs.
    #[must_use]
    pub fn root_path(&self) -> &Path {
        self.root.path()
    }

    /// Returns the ids of the jobs whose files are published.
    pub fn job_ids(&self) -> impl Iterator<Item = &JobId> {
        self.jobs.keys()
    }

    /// Writes what changed of a job. `None` removes the files of the job, and tells the programs that wait for a change.
    pub fn publish(&mut self, id: &JobId, content: Option<JobContent>) {
        let Some(content) = content else { return self.remove(id) };
        let before = self.jobs.get(id);
        if before.is_some_and(|job| job.content == content && job.fault.is_none()) {
            return;
        }
        let is_other_owner = before.is_some_and(|job| job.content.owner != content.owner);
        if is_other_owner {
            self.remove(id);
        }
        let job = self.jobs.entry(id.clone()).or_insert_with(|| PublishedJob {
            content: content.clone(),
            directory: None,
            wanted_file: WantedFile::new(content.wanted),
            is_watched: false,
            fault: None,
        });
        job.content = content;
        if self.write(id) {
            self.schedule(id, Instant::now());
        }
    }

    /// Writes the files of a job. Returns whether its file `want` is to be read, because an earlier daemon left it.
    fn write(&mut self, id: &JobId) -> bool {
        let Some(job) = self.jobs.get_mut(id) else { return false };
        match job.write(id, &mut self.root, &mut self.watch) {
            Ok(is_to_be_read) => {
                if job.fault.take().is_some() {
                    warn!(job = %id, "the core map of {id} is published again");
                }
                is_to_be_read
            }
            Err(fault) => {
                let fault = fault.to_string();
                if job.fault.as_ref() != Some(&fault) {
                    warn!(job = %id, "the core map of {id} can't be published: {fault}");
                }
                job.fault = Some(fault);
                false
            }
        }
    }

    fn remove(&mut self, id: &JobId) {
        self.changed.remove(id);
        if let Some(job) = self.jobs.remove(id) {
            self.watch.remove(id);
            match job.directory {
                Some(directory) => directory.remove(),
                None => self.root.remove_directory(id),
            }
        }
    }

    /// Returns the descriptor that is readable when a file changed. `None` while the changed files are due to be read anyway,
    /// and if the kernel refuses inotify.
    #[must_use]
    pub fn changes_fd(&self) -> Option<BorrowedFd<'_>> {
        self.watch.fd().filter(|_| self.due.is_none())
    }

    /// Reads which files changed, after the descriptor was readable.
    pub fn note_changes(&mut self, now: Instant) {
        for change in self.watch.read() {
            match change {
                FileChange::Of(id) => self.schedule(&id, now),
                FileChange::Unknown => self.schedule_all(now),
            }
        }
    }

    /// Returns the time at which the changed files are to be read. `None` if none changed.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Looks at files that no event reports: those that could not be written, those that are not watched, and the
    /// directory of all jobs, which may have been removed with a directory above it. For each rescan.
    pub fn check(&mut self, now: Instant) {
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

    /// If the changed files are due: makes those again that are gone, and returns the new numbers of wanted cores.
    pub fn take_written(&mut self, now: Instant) -> Vec<WrittenWant> {
        if self.due.is_none_or(|due| due > now) {
            return Vec::new();
        }
        // The last event of a write often comes after the first one was read. It needs no second reading.
        self.note_changes(now);
        (self.due, self.last_read) = (None, Some(now));
        let mut written = Vec::new();
        for id in std::mem::take(&mut self.changed) {
            self.write_again(&id);
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            let Some(directory) = &job.directory else { continue };
            match job.wanted_file.read(&directory.want_path(), job.content.owner) {
                wanted::Reading::Same => {}
                wanted::Reading::MayBeUnfinished => {
                    self.changed.insert(id);
                    self.due = Some(now + EMPTY_TIME);
                }
                wanted::Reading::New(cores) => {
                    debug!(job = %id, ?cores, "a program wrote how many cores it wants");
                    written.push(WrittenWant { job: id, owner: job.content.owner, cores });
                }
            }
        }
        written
    }

    /// Makes the files of a job again if one of them is gone or could not be written.
    fn write_again(&mut self, id: &JobId) {
        let is_whole = |job: &PublishedJob| {
            let directory = job.directory.as_ref();
            job.fault.is_none() && directory.is_some_and(JobDirectory::is_complete)
        };
        if self.jobs.get(id).is_some_and(|job| !is_whole(job)) {
            self.watch.remove(id);
            if let Some(job) = self.jobs.get_mut(id) {
                job.is_watched = false;
            }
            self.write(id);
        }
    }

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

    /// Returns a warning for each job whose files are not as they should be.
    #[must_use]
    pub fn warnings(&self) -> Vec<Warning> {
        let of_job = |(id, job): (&JobId, &PublishedJob)| {
            let unpublished = job.fault.as_ref().map(|fault| {
                let why = format!("programs in {id} are not told about its cores: {fault}");
                let remedy = "pjwd tries again in each rescan; check the space and the permissions of its state directory";
                ("core-map", why, remedy)
            });
            let unread = job.wanted_file.fault().map(|fault| {
                let why = format!("the number of cores in the file want of {id} is ignored: {fault}");
                ("want", why, "write one number, such as 4, or nothing")
            });
            let warning =
                |(code, why, remedy)| Warning { job: Some(id.clone()), ..Warning::new(code, why, remedy) };
            unpublished.into_iter().chain(unread).map(warning).collect::<Vec<_>>()
        };
        self.jobs.iter().flat_map(of_job).collect()
    }
}

#[cfg(test)]
mod tests;
