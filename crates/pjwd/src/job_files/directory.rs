//! The directory of one job, and the directory above it. The daemon makes every file under a temporary name and then
//! renames it, so that a reader never finds half of a file.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use nix::unistd::Uid as UnixUid;
use pjw_core::core_map::CoreMap;
use pjw_core::ids::Uid;
use pjw_core::job::JobId;
use pjw_core::time::Nanos;
use pjw_job::layout::CoreMapContent;
use pjw_job::{CORE_MAP_FILE_NAME, CoreMapWriter, FILE_MODE, WANTED_CORES_FILE_NAME};
use pjw_linux::sys::clock;
use serde::{Deserialize, Serialize};

use super::fault::{FileFault, UnpublishedPart, file_fault};
use crate::host::{directories, inode::inode_of};

/// The directory of the jobs, below the state directory.
const JOBS_DIRECTORY: &str = "jobs";
/// The name under which files are made. No job id is equal to it, because an id has a colon.
const TEMPORARY_NAME: &str = ".new";
const CPUS_FILE_NAME: &str = "cpus";
const JSON_FILE_NAME: &str = "coremap.json";
/// The files in the directory of a job.
const FILE_NAMES: [&str; 4] = [CPUS_FILE_NAME, JSON_FILE_NAME, CORE_MAP_FILE_NAME, WANTED_CORES_FILE_NAME];
const DIRECTORY_MODE: u32 = 0o755;
const WANT_MODE: u32 = 0o600;
/// The most bytes that are read from `coremap.json`. This program writes no longer file.
const MAX_JSON_BYTES: u64 = 1 << 20;

/// The content of `coremap.json`.
#[derive(Debug, Serialize, Deserialize, PartialEq, Eq)]
struct CoreMapFile {
    schema: u32,
    epoch: u64,
    cpus: String,
    own: String,
    borrowed: String,
    leaving: String,
    leaving_at_ns: Option<u64>,
    lent: String,
    cores: u32,
}

impl CoreMapFile {
    fn new(content: &CoreMapContent) -> Self {
        Self {
            schema: 1,
            epoch: content.epoch,
            cpus: content.cpus().to_string(),
            own: content.own.to_string(),
            borrowed: content.borrowed.to_string(),
            leaving: content.leaving.to_string(),
            leaving_at_ns: content.leaving_at_ns,
            lent: content.lent.to_string(),
            cores: content.core_count,
        }
    }
}

/// The directory `STATE_DIR/jobs`, where STATE_DIR is the state directory of pjwd. Each job has a subdirectory there.
#[derive(Debug)]
pub(super) struct JobsDirectory {
    path: PathBuf,
    inode: Option<(u64, u64)>,
}

impl JobsDirectory {
    /// Makes the value that stands for the directory `state_dir/jobs`. `state_dir` is the state directory of pjwd.
    /// Creates no directory.
    pub(super) fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join(JOBS_DIRECTORY), inode: None }
    }

    /// Returns the path of the directory `STATE_DIR/jobs`.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of a job. An id has no slash, is neither `.` nor `..`, and is shorter than a name may be.
    fn path_of(&self, id: &JobId) -> PathBuf {
        self.path.join(id.to_string())
    }

    /// Creates the directory `STATE_DIR/jobs` if it is missing. If something else has this path (a file, or a directory
    /// that belongs to another user), removes it first.
    ///
    /// # Errors
    /// If the directory can't be created.
    pub(super) fn create_if_missing(&mut self) -> Result<(), FileFault> {
        if !self.is_in_place() {
            make_directory(&self.path)?;
            self.inode = inode_of(&self.path);
        }
        Ok(())
    }

    /// Returns whether the directory `STATE_DIR/jobs` is still the one that [`JobsDirectory::create_if_missing`] found
    /// or created. False if another program has removed or replaced the directory.
    pub(super) fn is_in_place(&self) -> bool {
        self.inode.is_some() && inode_of(&self.path) == self.inode
    }

    /// Creates the subdirectory of the job `id`, or opens the one that an earlier daemon left, and returns it. Keeps
    /// the file `coremap` (the CPUs of the job) of an earlier daemon, because programs may have mapped this file into
    /// memory. If `has_files_of_ended_job` is true, the subdirectory is that of an ended job with the same id, and is
    /// removed first.
    ///
    /// # Errors
    /// If the subdirectory can't be created, or if pjwd has no free file descriptor for the file `coremap`.
    pub(super) fn create_or_open_job_directory(
        &self,
        id: &JobId,
        has_files_of_ended_job: bool,
    ) -> Result<JobDirectory, FileFault> {
        let path = self.path_of(id);
        if has_files_of_ended_job {
            self.remove_directory(id).map_err(|fault| fault.with_part(UnpublishedPart::FormerCoreMap))?;
        }
        let was_made = make_directory(&path)?;
        let page_path = path.join(CORE_MAP_FILE_NAME);
        let page = if was_made { Ok(None) } else { CoreMapWriter::open(&page_path) };
        let page_fault =
            |error| file_fault("open", &page_path)(error).with_part(UnpublishedPart::FormerCoreMap);
        let page = page.map_err(page_fault)?;
        let temporary = self.path.join(TEMPORARY_NAME);
        let inode = inode_of(&path);
        Ok(JobDirectory { path, inode, temporary, page, published: None, is_empty: was_made })
    }

    /// Removes all entries of `STATE_DIR/jobs` except the subdirectories of the jobs in `jobs`. Wakes the programs that
    /// wait for a change of a removed file `coremap` (the CPUs of a job).
    pub(super) fn remove_others<'a>(&self, jobs: impl Iterator<Item = &'a JobId>) {
        let names: BTreeSet<String> = jobs.map(ToString::to_string).collect();
        for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
            if !entry.file_name().to_str().is_some_and(|name| names.contains(name)) {
                let _ = remove(&entry.path());
            }
        }
    }

    /// Removes the subdirectory of the job `id`, for which there is no [`JobDirectory`] because
    /// [`JobsDirectory::create_or_open_job_directory`] failed.
    ///
    /// # Errors
    /// If the subdirectory stays because pjwd has no free file descriptor.
    pub(super) fn remove_directory(&self, id: &JobId) -> Result<(), FileFault> {
        remove(&self.path_of(id))
    }
}

/// The directory of one job. pjwd writes the CPUs of the job into three files there: `cpus`, `coremap.json` and
/// `coremap`. Programs write the number of cores that the job wants into a fourth file, `want`.
#[derive(Debug)]
pub(super) struct JobDirectory {
    path: PathBuf,
    inode: Option<(u64, u64)>,
    /// The path under which a file is made, before it is renamed.
    temporary: PathBuf,
    /// The writer of the file `coremap`. `None` if there is no such file yet.
    page: Option<CoreMapWriter>,
    /// The core map that all files show.
    published: Option<CoreMap>,
    /// Whether the directory was made and no file was written since. Then no file is looked for.
    is_empty: bool,
}

impl JobDirectory {
    /// Returns the path of the directory of this job.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the file `want` in the directory of this job. Programs write the number of cores that the
    /// job wants into this file.
    pub(super) fn want_path(&self) -> PathBuf {
        self.path.join(WANTED_CORES_FILE_NAME)
    }

    /// Returns whether the directory of this job is still at its path. False if another program has removed or replaced
    /// the directory.
    pub(super) fn is_in_place(&self) -> bool {
        self.inode.is_some() && inode_of(&self.path) == self.inode
    }

    /// Returns whether the directory of this job is still at its path and contains the four files `cpus`,
    /// `coremap.json`, `coremap` and `want`.
    pub(super) fn is_complete(&self) -> bool {
        self.is_in_place() && FILE_NAMES.iter().all(|name| is_file(&self.path.join(name)))
    }

    /// Writes `core_map` (the CPUs of the job) into the files `cpus`, `coremap.json` and `coremap`. Does nothing if
    /// all three files exist and contain this core map already. Writes `coremap` last: a change of this file wakes
    /// the waiting programs, which must then find the two other files already changed.
    ///
    /// # Errors
    /// If a file can't be written. A full file system does not prevent the change of an existing file `coremap`. If
    /// pjwd has no free file descriptor, this file keeps its content, and the next call tries again.
    pub(super) fn write_core_map(&mut self, core_map: &CoreMap) -> Result<(), FileFault> {
        let page_path = self.path.join(CORE_MAP_FILE_NAME);
        let (cpus_path, json_path) = (self.path.join(CPUS_FILE_NAME), self.path.join(JSON_FILE_NAME));
        let was_empty = std::mem::take(&mut self.is_empty);
        let has_page = !was_empty && is_file(&page_path);
        let is_complete = has_page && is_file(&cpus_path) && is_file(&json_path);
        if is_complete && self.published.as_ref() == Some(core_map) {
            return Ok(());
        }
        self.published = None;
        if !has_page && let Some(old) = self.page.take() {
            // Programs that have mapped the removed page look for the new one.
            let _ = old.mark_not_live();
        }
        let last = self.page.as_ref().map(|page| page.content().clone());
        let epoch_of_file = if was_empty { 0 } else { epoch_of(&json_path) };
        let last_epoch = last.as_ref().map_or(0, |last| last.epoch).max(epoch_of_file);
        let mut content = page_content(core_map, last_epoch);
        // After a restart the same map has the same epoch.
        let is_page_current = last.as_ref() == Some(&content);
        if !is_page_current {
            content.epoch += 1;
        }
        // The page is written also where a full file system has no room for new files.
        let files_written = self.write_texts(&content);
        let written = match self.page.as_mut() {
            Some(page) if !is_page_current => page.write(&content).map_err(file_fault("write", &page_path)),
            _ => Ok(()),
        };
        let unwritten = match written {
            Ok(()) => None,
            // The page stays valid: a new page can't be made either, so programs would find none.
            Err(fault) if fault.is_lack_of_descriptors() => {
                let is_written = files_written.is_ok();
                let former =
                    if is_written { UnpublishedPart::FormerPage } else { UnpublishedPart::FormerCoreMap };
                return Err(fault.with_part(former));
            }
            // A page that was truncated or replaced is made again.
            Err(_) => self.page.take(),
        };
        if self.page.is_none() {
            let page = CoreMapWriter::create(&page_path, &self.temporary, &content);
            // Programs that have mapped the former page look for the new one.
            let _ = unwritten.map(CoreMapWriter::mark_not_live);
            let part = if files_written.is_ok() { UnpublishedPart::Page } else { UnpublishedPart::CoreMap };
            let page_fault = |error| file_fault("write", &page_path)(error).with_part(part);
            self.page = Some(page.map_err(page_fault)?);
        }
        files_written.map_err(|fault| fault.with_part(UnpublishedPart::TextFiles))?;
        self.published = Some(core_map.clone());
        Ok(())
    }

    /// Writes `content` into the files `cpus` and `coremap.json`.
    fn write_texts(&self, content: &CoreMapContent) -> Result<(), FileFault> {
        let (cpus_path, json_path) = (self.path.join(CPUS_FILE_NAME), self.path.join(JSON_FILE_NAME));
        self.replace(&cpus_path, format!("{}\n", content.cpus()).as_bytes())?;
        let json = serde_json::to_string(&CoreMapFile::new(content)).map_err(io::Error::other);
        let json = json.map_err(file_fault("write", &json_path))? + "\n";
        self.replace(&json_path, json.as_bytes())
    }

    /// Creates the empty file `want` of the job, with the mode 0600 for the user `owner`. If this file exists already
    /// and belongs to `owner`, leaves it as it is and returns true. In its place, a file of another user, a file with
    /// a second name (hard link), or anything else that is not a regular file is replaced. The function then returns
    /// false, as for a new file.
    ///
    /// # Errors
    /// If the file can't be created, or can't be given to `owner`.
    pub(super) fn create_want_file(&self, owner: Uid) -> Result<bool, FileFault> {
        let path = self.want_path();
        if let Ok(metadata) = std::fs::symlink_metadata(&path) {
            if metadata.is_file() && metadata.uid() == owner.0 && metadata.nlink() == 1 {
                return Ok(true);
            }
            let _ = remove(&path);
        }
        let file = self.make_temporary().map_err(file_fault("make", &path))?;
        if owner.0 != UnixUid::effective().as_raw() {
            fchown(&file, Some(owner.0), None).map_err(file_fault("give to the owner of the job", &path))?;
        }
        std::fs::rename(&self.temporary, &path).map_err(file_fault("make", &path))?;
        Ok(false)
    }

    /// Makes an empty file under the temporary name, from which it is then renamed. Removes a file or directory with
    /// this name before, which an interrupted daemon may have left.
    fn make_temporary(&self) -> io::Result<File> {
        let make = || OpenOptions::new().write(true).create_new(true).mode(WANT_MODE).open(&self.temporary);
        match make() {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let _ = remove(&self.temporary);
                make()
            }
            made => made,
        }
    }

    /// Puts a new file in the place of the one at `path`.
    fn replace(&self, path: &Path, content: &[u8]) -> Result<(), FileFault> {
        let replaced = self.make_temporary().and_then(|mut file| {
            file.write_all(content)?;
            file.set_permissions(Permissions::from_mode(FILE_MODE))?;
            std::fs::rename(&self.temporary, path)
        });
        replaced.map_err(file_fault("write", path))
    }

    /// Marks the content of the file `coremap` (the CPUs of the job) as outdated, because pjwd no longer updates this
    /// file. Wakes the programs that wait for a change of the file. Removes no file.
    pub(super) fn mark_core_map_outdated(self) {
        if let Some(page) = self.page {
            // Nobody can read a page that was truncated.
            let _ = page.mark_not_live();
        }
    }

    /// Removes the directory of this job and its files, unless another program has removed or replaced the directory.
    /// Wakes the programs that wait for a change of the file `coremap` (the CPUs of the job). Returns false if the
    /// directory stays because pjwd has no free file descriptor.
    pub(super) fn remove(self) -> bool {
        let is_done = !self.is_in_place() || remove(&self.path).is_ok() || self.remove_own_files();
        self.mark_core_map_outdated();
        is_done
    }

    /// Removes the files that pjwd makes in the directory of this job, and then the directory. Needs no file
    /// descriptor. Returns false if the directory stays, for example because another program has made a file in it.
    fn remove_own_files(&self) -> bool {
        for name in FILE_NAMES {
            // If the file can't be removed, the directory can't either.
            let _ = std::fs::remove_file(self.path.join(name));
        }
        std::fs::remove_dir(&self.path).is_ok()
    }
}

/// Removes the directory `state_dir/jobs`, in which pjwd publishes the cores of each job as files. `state_dir` is the
/// state directory of the daemon. A file that can't be removed stays, and no error is returned.
///
/// Programs can map the file `coremap` of their job into memory (mmap(2)), and wait for its changes (futex(2)). The
/// mappings of a file stay valid after the file is removed. So this function also marks the content of each `coremap`
/// as outdated, and wakes the waiting programs. The mappings show this mark.
pub fn remove_files_of_all_jobs(state_dir: &Path) {
    let jobs = state_dir.join(JOBS_DIRECTORY);
    for entry in std::fs::read_dir(&jobs).into_iter().flatten().flatten() {
        let _ = remove(&entry.path());
    }
    let _ = remove(&jobs);
}

/// Removes a file, a link, or the directory of a job with its files. For a directory, also writes into the memory of
/// the file `coremap` that its content is outdated, and wakes the waiting programs. What can't be removed stays.
///
/// # Errors
/// If a directory stays because pjwd has no free file descriptor. All other reasons are no errors.
fn remove(path: &Path) -> Result<(), FileFault> {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !metadata.is_dir() {
        let _ = std::fs::remove_file(path);
        return Ok(());
    }
    let page = CoreMapWriter::open(&path.join(CORE_MAP_FILE_NAME)).map_err(file_fault("remove", path))?;
    let removed = std::fs::remove_dir_all(path).map_err(file_fault("remove", path));
    let _ = page.map(CoreMapWriter::mark_not_live);
    removed.or_else(|fault| if fault.is_lack_of_descriptors() { Err(fault) } else { Ok(()) })
}

/// Returns `core_map` (the CPUs of a job) as content of the file `coremap`. `epoch` is the number of this content,
/// which grows with each change.
fn page_content(core_map: &CoreMap, epoch: u64) -> CoreMapContent {
    CoreMapContent {
        epoch,
        is_live: true,
        is_truncated: false,
        own: core_map.own.clone(),
        borrowed: core_map.borrowed.clone(),
        leaving: core_map.leaving.clone(),
        lent: core_map.lent.clone(),
        leaving_at_ns: core_map.leaving_at.map(monotonic),
        core_count: core_map.core_count,
    }
}

/// Converts the time `at`, in ns since boot, to a time of `CLOCK_MONOTONIC`, in ns. This clock does not count the time
/// for which the machine was suspended.
fn monotonic(at: Nanos) -> u64 {
    let suspended = clock::now().since_boot.0.saturating_sub(clock::monotonic_now().0);
    at.0.saturating_sub(suspended)
}

/// Returns the epoch in the file `coremap.json` at `path`. 0 if the file does not exist, is not a regular file of this
/// user, can't be read, or is too long.
fn epoch_of(path: &Path) -> u64 {
    let mut text = String::new();
    let opened = directories::open_own_file(path, OpenOptions::new().read(true));
    let read = opened.and_then(|file| file.take(MAX_JSON_BYTES).read_to_string(&mut text));
    let file: Option<CoreMapFile> = read.ok().and_then(|_| serde_json::from_str(&text).ok());
    file.map_or(0, |file| file.epoch)
}

/// Makes the directory `path` with the mode 0755, and returns true. If this user already owns a directory at `path`,
/// only sets its mode and returns false. Something else at `path`, such as a link or the directory of another user,
/// is removed first.
fn make_directory(path: &Path) -> Result<bool, FileFault> {
    let make = || DirBuilder::new().mode(DIRECTORY_MODE).create(path);
    let is_own =
        |metadata: &std::fs::Metadata| metadata.is_dir() && metadata.uid() == UnixUid::effective().as_raw();
    let made = match make() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if std::fs::symlink_metadata(path).is_ok_and(|metadata| is_own(&metadata)) {
                Ok(false)
            } else {
                let _ = remove(path);
                make().map(|()| true)
            }
        }
        made => made.map(|()| true),
    };
    // The mask of the process may have taken permissions.
    let set_mode =
        |is_new| std::fs::set_permissions(path, Permissions::from_mode(DIRECTORY_MODE)).map(|()| is_new);
    made.and_then(set_mode).map_err(file_fault("make", path))
}

fn is_file(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file())
}
