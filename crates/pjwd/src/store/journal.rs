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
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, Flock, fallocate};
use nix::unistd::Uid;
use pjw_core::ports::Journal;
use pjw_core::record::{Record, UnknownMaskRecord};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tracing::warn;

use super::lock::lock;
use crate::host::directories;
use crate::host::inode::{inode_of, is_file_at_path};

/// The names of the two files of the journal, in the state directory of pjwd. In the journal, pjwd records its
/// changes ([`FileJournal`]). `state.json` has the records that were valid when the journal was last rewritten.
/// `journal.jsonl` has the records that were added later.
pub const JOURNAL_FILE_NAMES: [&str; 2] = [LINES, STATE];
const LINES: &str = "journal.jsonl";
const STATE: &str = "state.json";
/// The format of both files. A file with another schema is set aside.
const SCHEMA: u32 = 1;
/// The begin of each line of `journal.jsonl`.
const BEGIN_OF_BATCH: &[u8] = b"{\"boot_id\":\"";
/// The journal is rewritten after it has grown by this many bytes.
const REWRITE_BYTES: u64 = 1 << 20;
/// A removed or replaced `journal.jsonl` is opened again this many times.
const MAX_ATTEMPTS: usize = 10;
/// The space that is reserved at once, beside what is needed.
const RESERVED_BYTES: u64 = 256 << 10;
/// The largest state file in bytes. This program writes no larger file.
const MAX_STATE_BYTES: u64 = 256 << 20;

/// The reason why a file of the journal (the files in which pjwd records its changes) can't be opened, read or
/// written. The error message names the file, the cause and the remedy.
#[derive(Debug, Error)]
#[error("can't {operation} {path}: {why}; {remedy}", path = path.display())]
pub struct JournalError {
    operation: &'static str,
    path: PathBuf,
    why: String,
    remedy: &'static str,
    is_in_use: bool,
}

impl JournalError {
    fn new(operation: &'static str, path: &Path, error: &io::Error) -> Self {
        let remedy = match error.raw_os_error() {
            Some(libc_enospc) if libc_enospc == nix::libc::ENOSPC => "free space there and try again",
            Some(libc_erofs) if libc_erofs == nix::libc::EROFS => {
                "make it writable, or choose another --state-dir"
            }
            Some(libc_eacces) if libc_eacces == nix::libc::EACCES => {
                "run as its owner, or choose another --state-dir"
            }
            None => "remove it, or choose another --state-dir",
            _ => "check the directory, or choose another --state-dir",
        };
        Self { operation, path: path.to_owned(), why: error.to_string(), remedy, is_in_use: false }
    }

    /// Returns whether the error is that another pjwd uses the journal (the files in which pjwd records its changes).
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        self.is_in_use
    }
}

/// The journal of pjwd: two files in the state directory, in which pjwd records each change before it makes the
/// change. A restarted pjwd reads from the journal which jobs exist, which cores the jobs hold, and which affinity
/// masks the threads of the jobs had originally. A lock prevents another daemon from writing the journal.
#[derive(Debug)]
pub struct FileJournal {
    dir: PathBuf,
    boot_id: String,
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

/// The records that an earlier daemon left in its journal: the cores granted to jobs, the original affinity masks of
/// threads, and the cpusets of jobs.
#[derive(Debug, Default)]
pub struct RecoveredJournal {
    /// The records of the journal, oldest first.
    pub records: Vec<Record>,
    /// Sentences for the log about files and records that could not be used: what was wrong with each, and
    /// what pjwd did with it.
    pub remarks: Vec<String>,
    /// Whether records were lost. An incomplete last line of the journal does not count as a loss. pjwd
    /// writes a line completely before it makes the changes that the line records. So the changes of an
    /// incomplete line were never made.
    pub has_lost_records: bool,
    /// Whether a file of the journal had content that could be read, of this boot or of an earlier one.
    pub is_found: bool,
}

#[derive(Serialize, Deserialize)]
struct StateFile<'a> {
    schema: u32,
    boot_id: Cow<'a, str>,
    last: u64,
    /// Whether a batch follows this file in any case. False in files of earlier versions.
    #[serde(default)]
    is_followed: bool,
    records: Cow<'a, [Record]>,
}

/// What `state.json` says about the batches.
#[derive(Default)]
struct Expected {
    /// The number of the last batch that the file includes.
    last: u64,
    /// Whether `journal.jsonl` must have this batch or a later one.
    is_followed: bool,
}

#[derive(Serialize, Deserialize)]
struct Batch<'a> {
    boot_id: Cow<'a, str>,
    number: u64,
    records: Cow<'a, [Record]>,
}

impl FileJournal {
    /// Opens and locks the journal (the two files in which pjwd records its changes) in the state directory `dir`.
    /// Creates the journal if there is none. Also returns the records that an earlier daemon left in the journal.
    /// `boot_id` is the id of the current boot. Records of another boot are dropped, because the changes of that boot
    /// no longer exist.
    ///
    /// # Errors
    /// If `dir` is not writable. If another daemon holds the lock (flock(2)). If the file `journal.jsonl` can't be
    /// read, or belongs to another user. Damaged content is no error: [`RecoveredJournal::remarks`] describes it.
    pub fn open(dir: &Path, boot_id: &str) -> Result<(Self, RecoveredJournal), JournalError> {
        let (path, lines) = open_lines(dir)?;
        let mut recovered = RecoveredJournal::default();
        let expected = read_state(dir, boot_id, &mut recovered);
        let (length, last) = read_batches(&lines, dir, boot_id, &expected, &mut recovered)
            .map_err(|error| JournalError::new("read", &path, &error))?;
        let (state, dir) = (inode_of(&dir.join(STATE)), dir.to_owned());
        let boot_id = boot_id.to_owned();
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

    /// Appends a batch, also one without records.
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

    /// Puts a file with one batch without records in the place of `journal.jsonl`. A daemon that is killed meanwhile
    /// leaves the old file or the new one.
    fn replace_lines(&mut self) -> io::Result<()> {
        let fresh = self.dir.join("journal.jsonl.new");
        directories::remove_file_if_exists(&fresh)?;
        let mut options = OpenOptions::new();
        options.read(true).append(true).create_new(true).mode(0o600);
        let (boot_id, records) = (Cow::from(&self.boot_id), Cow::from(&[][..]));
        let line = line_of(&Batch { boot_id, number: self.last + 1, records })?;
        let replaced = directories::open_own_file(&fresh, &mut options).and_then(|file| {
            let mut lines = lock(file, |_| false)?;
            lines.write_all(&line)?;
            std::fs::rename(&fresh, self.path())?;
            Ok(lines)
        });
        if replaced.is_err() {
            let _ = std::fs::remove_file(&fresh);
        }
        self.lines = replaced?;
        (self.last, self.length, self.reserved) = (self.last + 1, line.len() as u64, 0);
        Ok(())
    }

    fn path(&self) -> PathBuf {
        self.dir.join(LINES)
    }

    /// Makes the directory and an empty `journal.jsonl` in it. The old file has no name any more.
    fn make_again(&mut self) -> Result<(), JournalError> {
        let unusable = |error: anyhow::Error| JournalError {
            operation: "make",
            path: self.dir.clone(),
            why: crate::error_text::error_chain_text(error.as_ref()),
            remedy: "it was removed while pjwd ran: make it again, writable for pjwd",
            is_in_use: false,
        };
        directories::make_state_directory(&self.dir, Uid::effective().as_raw()).map_err(unusable)?;
        let (_, lines) = open_lines(&self.dir)?;
        (self.lines, self.length, self.reserved) = (lines, 0, 0);
        Ok(())
    }
}

/// Returns whether the directory `dir` contains the journal of an earlier daemon: the files `state.json` and
/// `journal.jsonl`, in which pjwd records its changes. `has_state_file` says whether the earlier daemon is known to
/// have written `state.json`. If true, this file must exist. If false, one of the two files is enough, because earlier
/// versions of pjwd write `state.json` later.
#[must_use]
pub fn has_journal_files(dir: &Path, has_state_file: bool) -> bool {
    let exists = |name: &str| dir.join(name).exists();
    exists(STATE) || (!has_state_file && exists(LINES))
}

/// Locks the journal (the files in which pjwd records its changes) in the state directory `dir`, so that no daemon can
/// use the journal at the same time. Changes nothing. Returns `None` if there is no journal.
///
/// # Errors
/// If a daemon uses the journal ([`JournalError::is_in_use`]). If the journal can't be opened.
pub fn lock_existing_journal(dir: &Path) -> Result<Option<Flock<File>>, JournalError> {
    if !dir.join(LINES).exists() {
        return Ok(None);
    }
    open_lines(dir).map(|(_, lines)| Some(lines))
}

/// Opens and locks the file of the batches.
fn open_lines(dir: &Path) -> Result<(PathBuf, Flock<File>), JournalError> {
    let path = dir.join(LINES);
    let refused = |why: String, is_in_use| JournalError {
        operation: "lock",
        path: path.clone(),
        why,
        is_in_use,
        remedy: "another pjwd keeps its state there: stop it, or choose another --state-dir",
    };
    for _ in 0..MAX_ATTEMPTS {
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        let file = directories::open_own_file(&path, &mut options)
            .map_err(|error| JournalError::new("open", &path, &error))?;
        let locked = lock(file, |_| false).map_err(|errno| match errno {
            Errno::EAGAIN => refused("it is in use".to_owned(), true),
            _ => refused(errno.to_string(), false),
        })?;
        // The process that held the lock may have replaced the file.
        if is_file_at_path(&path, &locked) {
            return Ok((path, locked));
        }
    }
    Err(refused("it is replaced again and again".to_owned(), false))
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
            self.make_again()?;
        }
        let is_empty = self.length == 0;
        // Before the other file, which names this batch.
        self.append_batch(&[])?;
        let state = StateFile {
            schema: SCHEMA,
            boot_id: Cow::from(&self.boot_id),
            last: self.last,
            is_followed: true,
            records: Cow::from(records),
        };
        let path = self.dir.join(STATE);
        let fresh = self.dir.join("state.json.new");
        let written = serde_json::to_vec(&state).map_err(io::Error::from).and_then(|bytes| {
            directories::recreate_file(&fresh)?.write_all(&bytes)?;
            std::fs::rename(&fresh, &path)
        });
        if let Err(error) = written {
            let _ = std::fs::remove_file(&fresh);
            return Err(JournalError::new("write", &path, &error));
        }
        self.state = inode_of(&path);
        if !is_empty {
            self.replace_lines().map_err(|error| JournalError::new("shorten", &self.path(), &error))?;
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

/// Reads `state.json`. Returns what it says about the batches.
fn read_state(dir: &Path, boot_id: &str, recovered: &mut RecoveredJournal) -> Expected {
    let path = dir.join(STATE);
    let mut text = Vec::new();
    let opened = directories::open_own_file(&path, OpenOptions::new().read(true));
    let read = opened.and_then(|file| file.take(MAX_STATE_BYTES).read_to_end(&mut text));
    match read {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Expected::default(),
        Err(error) => {
            recovered
                .remarks
                .push(format!("can't read {}: {error}; starting from what is running", path.display()));
            recovered.has_lost_records = true;
            return Expected::default();
        }
        Ok(_) => {}
    }
    match serde_json::from_slice::<StateFile<'_>>(&text) {
        Ok(state) if state.schema != SCHEMA => {
            set_aside(&path, &format!("has schema {}", state.schema), recovered);
        }
        Ok(state) => {
            recovered.is_found = true;
            if state.boot_id == boot_id {
                recovered.records = state.records.into_owned();
                return Expected { last: state.last, is_followed: state.is_followed };
            }
        }
        Err(error) => set_aside(&path, &format!("can't be understood: {error}"), recovered),
    }
    Expected::default()
}

fn set_aside(path: &Path, why: &str, recovered: &mut RecoveredJournal) {
    recovered.has_lost_records = true;
    let aside = path.with_extension("json.unreadable");
    let kept = match std::fs::rename(path, &aside) {
        Ok(()) => format!("kept as {}", aside.display()),
        Err(error) => format!("left there ({error})"),
    };
    recovered.remarks.push(format!("{} {why}; {kept}, starting from what is running", path.display()));
}

/// Reads the batches that `state.json` does not include. Returns the length in bytes up to the last complete batch, to
/// which the file is cut, and the number of this batch. A batch that is missing is a lost record.
fn read_batches(
    lines: &File,
    dir: &Path,
    boot_id: &str,
    expected: &Expected,
    recovered: &mut RecoveredJournal,
) -> io::Result<(u64, u64)> {
    let mut reader = BufReader::new(lines);
    reader.seek(SeekFrom::Start(0))?;
    let (mut length, mut line, mut last) = (0u64, Vec::new(), expected.last);
    let (mut has_gap, mut has_later) = (false, false);
    loop {
        line.clear();
        let read = reader.by_ref().take(MAX_STATE_BYTES).read_until(b'\n', &mut line)?;
        if read == 0 {
            break;
        }
        let batch = line.ends_with(b"\n").then(|| serde_json::from_slice::<Batch<'_>>(&line).ok()).flatten();
        let Some(batch) = batch else {
            let remark = format!("the journal is damaged after {length} bytes; the rest of it is not used");
            recovered.remarks.push(remark);
            break;
        };
        (length, recovered.is_found) = (length + read as u64, true);
        has_later |= batch.boot_id == boot_id && batch.number >= expected.last;
        if batch.boot_id == boot_id && batch.number > last {
            has_gap |= batch.number > last + 1;
            last = batch.number;
            recovered.records.extend(batch.records.into_owned());
        }
    }
    if length < lines.metadata()?.len() {
        reader.seek(SeekFrom::Start(length))?;
        let mut rest = Vec::new();
        reader.take(MAX_STATE_BYTES).read_to_end(&mut rest)?;
        let saved = save_unreadable_lines(dir, &rest);
        recovered.has_lost_records |= saved.is_some();
        recovered.remarks.extend(saved);
        lines.set_len(length)?;
    }
    if has_gap || (expected.is_followed && !has_later) {
        recovered.has_lost_records = true;
        let dir = dir.display();
        recovered.remarks.push(format!("records are missing in {dir}: a file there was removed or emptied"));
    }
    Ok((length, last))
}

/// Saves lines that can't be parsed in a file of their own. Another version may have written them, and an
/// administrator may need their masks. An incomplete last line alone is not saved: it begins like a batch.
fn save_unreadable_lines(dir: &Path, rest: &[u8]) -> Option<String> {
    let has_begin_of_batch = rest.iter().zip(BEGIN_OF_BATCH).all(|(byte, expected)| byte == expected);
    if !rest.contains(&b'\n') && has_begin_of_batch {
        return None;
    }
    let path = dir.join("journal.jsonl.unreadable");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let kept = directories::open_own_file(&path, &mut options).and_then(|mut file| file.write_all(rest));
    let path = path.display();
    Some(match kept {
        Ok(()) => format!("lines of the journal that this version can't read are kept in {path}"),
        Err(error) => format!("lines of the journal that this version can't read are lost ({path}: {error})"),
    })
}

#[cfg(test)]
mod tests;
