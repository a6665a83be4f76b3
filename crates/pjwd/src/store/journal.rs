//! The journal on disk: the records for a restart and for the restore of masks, written before each change.
//!
//! The state directory has two files. `journal.jsonl` grows by one line per batch of records. `state.json` replaces
//! all batches before it (schema, boot id, number of the last included batch). It is renamed into place, so a reader
//! finds the old file or the new one. Neither file is synced: both survive the death of the daemon at any
//! instruction, and after a reboot they are worthless in any case.
//!
//! A damaged file never stops the daemon. A file from another boot is dropped. An unreadable file is set aside. An
//! incomplete last line is a batch whose changes were never made. The numbers of the batches tell that a file was
//! removed or emptied: they have no gap, and `journal.jsonl` always has the last batch that `state.json` includes or a
//! later one. So a shorter `journal.jsonl` is renamed into place too.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, Flock, FlockArg, fallocate};
use nix::unistd::Uid;
use pjw_core::ports::Journal;
use pjw_core::record::{Record, UnknownMaskRecord};
use thiserror::Error;
use tracing::warn;

use super::lock::lock;
use crate::host::inode::{inode_of, is_file_at_path};
use crate::host::{directories, flock_holder::running_holder};
use reading::{Batch, LINES, SCHEMA, STATE, StateFile, read_batches, read_state};

mod reading;

pub use reading::{RecoveredJournal, has_journal_files, has_records};

/// The names of the two files of the journal, in the state directory of pjwd. In the journal, pjwd records its
/// changes ([`FileJournal`]). `state.json` has the records that were valid when the journal was last rewritten.
/// `journal.jsonl` has the records that were added later.
pub const JOURNAL_FILE_NAMES: [&str; 2] = [LINES, STATE];
/// The journal is rewritten after it has grown by this many bytes.
const REWRITE_BYTES: u64 = 1 << 20;
/// A removed or replaced `journal.jsonl` is opened again this many times.
const MAX_ATTEMPTS: usize = 10;
/// The space that is reserved beyond the requested bytes, so that the next requests need no system call.
const RESERVED_BYTES: u64 = 256 << 10;

/// The reason why a file of the journal (the files in which pjwd records its changes) can't be opened, read or
/// written. The error message names the file, the cause and the remedy.
#[derive(Debug, Error)]
#[error("can't {operation} {path}: {why}; {remedy}", path = path.display())]
pub struct JournalError {
    operation: &'static str,
    path: PathBuf,
    why: String,
    remedy: Cow<'static, str>,
    is_in_use: bool,
    /// The pid of the process that uses the journal, if it is known.
    user_pid: Option<u32>,
}

impl JournalError {
    /// Makes the error that `operation` on the file `path` failed with `error`. `operation` is a verb, such as `open`.
    /// The cause of `error` decides which remedy the message names.
    fn new(operation: &'static str, path: &Path, error: &io::Error) -> Self {
        let remedy = match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOSPC) => "free space there and try again",
            Some(Errno::EROFS) => "make it writable, or choose another --state-dir",
            Some(Errno::EACCES) => "run as its owner, or choose another --state-dir",
            // An error that is not the kernel's, such as a file of another type.
            None => "remove it, or choose another --state-dir",
            Some(_) => "check the directory, or choose another --state-dir",
        };
        Self::with_remedy(operation, path, error.to_string(), remedy)
    }

    /// Makes the error that `operation` on the file `path` failed for the reason `why`. `remedy` is what the user can
    /// do.
    fn with_remedy(operation: &'static str, path: &Path, why: String, remedy: &'static str) -> Self {
        let remedy = Cow::Borrowed(remedy);
        Self { operation, path: path.to_owned(), why, remedy, is_in_use: false, user_pid: None }
    }

    /// Returns whether the error is that another pjwd uses the journal (the files in which pjwd records its changes).
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        self.is_in_use
    }

    /// Returns the pid of the other pjwd that uses the journal. `None` if [`JournalError::is_in_use`] is false, or if
    /// the pid is unknown.
    #[must_use]
    pub fn user_pid(&self) -> Option<u32> {
        self.user_pid
    }

    /// Replaces the remedy in the message of the error, for example by the name of another command.
    pub(crate) fn set_remedy(&mut self, remedy: String) {
        self.remedy = remedy.into();
    }
}

/// The journal of pjwd: two files in the state directory, in which pjwd records each change before it makes the
/// change. A restarted pjwd reads from the journal which jobs exist, which cores the jobs hold, and which affinity
/// masks the threads of the jobs had originally. A lock prevents another daemon from writing the journal.
#[derive(Debug)]
pub struct FileJournal {
    dir: PathBuf,
    boot_id: String,
    /// The file `journal.jsonl`, open and locked.
    lines: Flock<File>,
    /// The device and inode of `state.json`. `None` before the first such file is written.
    state: Option<(u64, u64)>,
    /// The number of the last line that was written to `journal.jsonl`. Lines are numbered from 1 since the journal
    /// was made.
    last: u64,
    /// The length of `journal.jsonl` in bytes, up to the end of the last complete line.
    length: u64,
    /// The length of `journal.jsonl` in bytes up to which the file system has reserved space.
    reserved: u64,
}

impl FileJournal {
    /// Opens and locks the journal (the two files in which pjwd records its changes) in the state directory `dir`.
    /// Creates the journal if there is none, and `dir` if it is missing. Also returns the records that an earlier
    /// daemon left in the journal. `boot_id` is the id of the current boot. Records of another boot are dropped,
    /// because the changes of that boot no longer exist.
    ///
    /// # Errors
    /// If `dir` is not writable. If another daemon holds the lock (flock(2)). If the file `journal.jsonl` can't be
    /// read, or belongs to another user. Damaged content is no error: [`RecoveredJournal::remarks`] describes it.
    pub fn open(dir: &Path, boot_id: &str) -> Result<(Self, RecoveredJournal), JournalError> {
        let (path, lines) = open_and_lock_jsonl(dir)?;
        let mut recovered = RecoveredJournal::default();
        let expected = read_state(dir, boot_id, &mut recovered);
        let (length, last) = read_batches(&lines, dir, boot_id, &expected, &mut recovered)
            .map_err(|error| JournalError::new("read", &path, &error))?;
        let state = inode_of(&dir.join(STATE));
        let (dir, boot_id) = (dir.to_owned(), boot_id.to_owned());
        Ok((Self { dir, boot_id, lines, state, last, length, reserved: 0 }, recovered))
    }

    /// Writes the records in `recovered`, which an earlier daemon left, to the file `state.json`. If records of the
    /// earlier daemon were lost, also adds a record of this loss to the journal and to `recovered`. After this call,
    /// [`FileJournal::open`] notices if one of the two files of the journal is removed or emptied.
    ///
    /// # Errors
    /// If a file can't be written. `recovered` contains the added record nevertheless.
    pub fn write_recovered_records(&mut self, recovered: &mut RecoveredJournal) -> Result<(), JournalError> {
        if recovered.has_lost_records {
            let lost = Record::UnknownMasks(UnknownMaskRecord::RecordsLost);
            recovered.records.push(lost.clone());
            // Damaged lines are gone from the file by now. A daemon that is killed before the rewrite leaves this
            // record.
            self.append_batch(&[lost])?;
        }
        self.rewrite(&recovered.records)
    }

    /// Returns whether the journal (the records of pjwd's changes) has grown by more than 1 MiB since the last
    /// rewrite. The caller should then call [`Warden::rewrite_journal`](crate::warden::Warden::rewrite_journal),
    /// which makes the journal shorter.
    #[must_use]
    pub fn needs_rewrite(&self) -> bool {
        self.length > REWRITE_BYTES
    }

    /// Appends `records`, which may be empty, to `journal.jsonl` as one batch (a line of this file). After a failed
    /// write, removes the incomplete line.
    fn append_batch(&mut self, records: &[Record]) -> Result<(), JournalError> {
        let (boot_id, records) = (Cow::from(&self.boot_id), Cow::from(records));
        let batch = Batch { boot_id, number: self.last + 1, records };
        let written = line_of(&batch).and_then(|line| {
            self.lines.write_all(&line)?;
            Ok(line.len() as u64)
        });
        match written {
            Ok(bytes) => {
                self.last += 1;
                self.length += bytes;
                Ok(())
            }
            Err(error) => {
                // Remove a partial line, because the next line would be appended to it.
                let _ = self.lines.set_len(self.length);
                self.reserved = 0;
                Err(JournalError::new("write", &self.path(), &error))
            }
        }
    }

    /// Replaces `journal.jsonl` by a new file with one batch (line) that has no records. The new file is renamed to
    /// its place: if the daemon is killed meanwhile, the old file or the new one is there.
    fn replace_jsonl(&mut self) -> io::Result<()> {
        let new_path = self.dir.join("journal.jsonl.new");
        directories::remove_file_if_exists(&new_path)?;
        let mut options = OpenOptions::new();
        options.read(true).append(true).create_new(true).mode(0o600);
        let (boot_id, records) = (Cow::from(&self.boot_id), Cow::from(&[][..]));
        let line = line_of(&Batch { boot_id, number: self.last + 1, records })?;
        let replaced = directories::open_own_file(&new_path, &mut options).and_then(|file| {
            let mut lines = lock(file, |_| false)?;
            lines.write_all(&line)?;
            std::fs::rename(&new_path, self.path())?;
            Ok(lines)
        });
        if replaced.is_err() {
            let _ = std::fs::remove_file(&new_path);
        }
        self.lines = replaced?;
        (self.last, self.length, self.reserved) = (self.last + 1, line.len() as u64, 0);
        Ok(())
    }

    fn path(&self) -> PathBuf {
        self.dir.join(LINES)
    }

    /// Makes the state directory again if it was removed. Then opens and locks `journal.jsonl` in it, and makes this
    /// file if it is missing. From then on the journal uses this file, instead of the removed one that was still
    /// open.
    fn recreate_jsonl(&mut self) -> Result<(), JournalError> {
        make_directory_again(&self.dir)?;
        let (_, lines) = open_and_lock_jsonl(&self.dir)?;
        (self.lines, self.length, self.reserved) = (lines, 0, 0);
        Ok(())
    }
}

/// Makes the state directory `dir` again if it was removed.
fn make_directory_again(dir: &Path) -> Result<(), JournalError> {
    let made = directories::make_state_directory(dir, Uid::effective().as_raw());
    made.map_err(|error| {
        let why = crate::error_text::error_chain_text(error.as_ref());
        let remedy = "it was removed while pjwd ran: make it again, writable for pjwd";
        JournalError::with_remedy("make", dir, why, remedy)
    })
}

/// Locks the journal (the files in which pjwd records its changes) in the state directory `dir`, so that no daemon can
/// use it. Does not write to the journal. If another process holds the lock, waits for the end of that process: up to
/// 0.5 s if the process is known to run and not to be stopping, and up to 5 s otherwise. Returns `None` if there is no
/// journal.
///
/// # Errors
/// If a daemon uses the journal ([`JournalError::is_in_use`]). If the journal can't be opened.
pub fn lock_existing_journal(dir: &Path) -> Result<Option<Flock<File>>, JournalError> {
    if !dir.join(LINES).exists() {
        return Ok(None);
    }
    open_and_lock_jsonl(dir).map(|(_, lines)| Some(lines))
}

/// Locks the journal (the files in which pjwd records its changes) in the state directory `dir`, as
/// [`lock_existing_journal`] does. Then marks this process as one that ends soon by itself ([`mark_as_stopping`]).
/// Another pjwd that needs the journal then waits for the lock for up to 5 s instead of 0.5 s. Meant for `pjwd --thaw`
/// and for the thaw watcher: the process that thaws frozen jobs if pjwd is killed.
///
/// # Errors
/// If a daemon uses the journal ([`JournalError::is_in_use`]). If the journal can't be opened.
pub fn lock_existing_journal_until_exit(dir: &Path) -> Result<Option<Flock<File>>, JournalError> {
    let locked = lock_existing_journal(dir)?;
    if locked.is_some() {
        // Without the mark, another pjwd waits for a shorter time.
        let _ = mark_as_stopping(dir);
    }
    Ok(locked)
}

/// Returns the pid of the running pjwd that uses the journal (the files in which pjwd records its changes) in the
/// directory `dir`. `None` if no pjwd uses this journal, or if the pid is unknown.
#[must_use]
pub fn pid_of_running_pjwd(dir: &Path) -> Option<u32> {
    let opened = directories::open_own_file(&dir.join(LINES), OpenOptions::new().read(true));
    opened.ok().as_ref().and_then(running_holder)
}

/// Marks this process, which uses the journal in the state directory `dir`, as a process that ends soon. Another pjwd
/// that is started with the same state directory then waits for the journal for up to 5 s instead of 0.5 s. The mark is
/// a shared lock on the directory (flock(2)). This lock lasts until this process ends.
///
/// # Errors
/// If the directory can't be opened, or if another program has locked it exclusively.
pub fn mark_as_stopping(dir: &Path) -> io::Result<()> {
    let directory = directories::open_directory(dir)?;
    let locked = Flock::lock(directory, FlockArg::LockSharedNonblock).map_err(|(_, errno)| errno)?;
    std::mem::forget(locked);
    Ok(())
}

/// Returns whether the process `pid`, which uses the journal in `dir`, is stopping: it has called [`mark_as_stopping`].
fn is_stopping(dir: &Path, pid: u32) -> bool {
    directories::open_directory(dir).is_ok_and(|dir| running_holder(&dir) == Some(pid))
}

/// Opens and locks `journal.jsonl` in `dir`, and makes this file if it is missing. Also makes `dir` if it is missing:
/// another pjwd whose start fails removes the directory that it made, as long as this directory is empty. Returns the
/// path and the locked file. If another process holds the lock, waits until that process has ended: up to 0.5 s if it
/// is known to run and not to be stopping, and up to 5 s otherwise.
///
/// # Errors
/// If the process still holds the lock after the wait, or if the file can't be opened.
fn open_and_lock_jsonl(dir: &Path) -> Result<(PathBuf, Flock<File>), JournalError> {
    let path = dir.join(LINES);
    let lock_error = |why: String| {
        let remedy = "another pjwd keeps its state there: stop it, or choose another --state-dir";
        JournalError::with_remedy("lock", &path, why, remedy)
    };
    for _ in 0..MAX_ATTEMPTS {
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        let file = match directories::open_own_file(&path, &mut options) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_directory_again(dir)?;
                continue;
            }
            opened => opened.map_err(|error| JournalError::new("open", &path, &error))?,
        };
        // lock() takes the file, so the pid in the error is read through another handle.
        let handle = file.try_clone().map_err(|error| JournalError::new("open", &path, &error))?;
        let is_alive = |file: &File| running_holder(file).is_some_and(|pid| !is_stopping(dir, pid));
        let locked = lock(file, is_alive).map_err(|errno| match errno {
            Errno::EAGAIN => {
                let user_pid = running_holder(&handle);
                let by = user_pid.map(|pid| format!(" by process {pid}")).unwrap_or_default();
                JournalError { is_in_use: true, user_pid, ..lock_error(format!("it is in use{by}")) }
            }
            _ => lock_error(errno.to_string()),
        })?;
        // The process that held the lock may have replaced the file.
        if is_file_at_path(&path, &locked) {
            return Ok((path, locked));
        }
    }
    Err(lock_error("it is replaced again and again".to_owned()))
}

impl Journal for FileJournal {
    type Fault = JournalError;

    fn append(&mut self, records: &[Record]) -> Result<(), JournalError> {
        if records.is_empty() { Ok(()) } else { self.append_batch(records) }
    }

    fn is_in_place(&self) -> bool {
        let has_state = self.state.is_none() || self.state == inode_of(&self.dir.join(STATE));
        has_state && is_file_at_path(&self.path(), &self.lines)
    }

    fn reserve(&mut self, bytes: u64) -> bool {
        let end = self.length.saturating_add(bytes);
        if end <= self.reserved {
            return true;
        }
        let (begin, length) = (i64::try_from(self.length), i64::try_from(bytes + RESERVED_BYTES));
        let (Ok(begin), Ok(length)) = (begin, length) else { return false };
        // Not every file system can reserve space.
        let reserved = fallocate(&*self.lines, FallocateFlags::FALLOC_FL_KEEP_SIZE, begin, length);
        if reserved.is_ok() {
            self.reserved = end + RESERVED_BYTES;
        }
        reserved.is_ok()
    }

    fn rewrite(&mut self, records: &[Record]) -> Result<(), JournalError> {
        let was_removed = !self.is_in_place();
        if !is_file_at_path(&self.path(), &self.lines) {
            self.recreate_jsonl()?;
        }
        let was_empty = self.length == 0;
        // The batch is written before `state.json`, which names it as the last one.
        self.append_batch(&[])?;
        let state = StateFile {
            schema: SCHEMA,
            boot_id: Cow::from(&self.boot_id),
            last: self.last,
            is_followed: true,
            records: Cow::from(records),
        };
        let path = self.dir.join(STATE);
        let new_path = self.dir.join("state.json.new");
        let written = serde_json::to_vec(&state).map_err(io::Error::from).and_then(|bytes| {
            directories::recreate_file(&new_path)?.write_all(&bytes)?;
            std::fs::rename(&new_path, &path)
        });
        if let Err(error) = written {
            let _ = std::fs::remove_file(&new_path);
            return Err(JournalError::new("write", &path, &error));
        }
        self.state = inode_of(&path);
        if !was_empty {
            self.replace_jsonl().map_err(|error| JournalError::new("shorten", &self.path(), &error))?;
        }
        if was_removed {
            warn!(
                directory = %self.dir.display(),
                "files were removed from the state directory; they were made again from what pjwd knows"
            );
        }
        Ok(())
    }
}

fn line_of(batch: &Batch<'_>) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(batch)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests;
