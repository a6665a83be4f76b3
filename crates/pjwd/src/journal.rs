//! The journal on disk: what a restart and an undo need, written before each change.
//!
//! Two files in the state directory. `journal.jsonl` grows by one line for each batch of records; `state.json`
//! replaces everything before it (schema, boot id, the number of the last batch it holds) and is renamed into
//! place, so that a reader finds either the old or the new one. Neither is synced to disk: both outlive the
//! daemon's death at any instruction, and what doesn't outlive the machine is worthless after a boot.
//!
//! State is a hint, never a veto: a file from another boot is dropped, one that can't be read is set aside, a
//! last line cut short is a batch whose changes were never made.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use pjw_core::node::Journal;
use pjw_core::record::Record;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::places;

/// The form of both files. A file of another schema is set aside.
const SCHEMA: u32 = 1;
/// The journal is written anew when it has grown by this much.
const REWRITE_BYTES: u64 = 1 << 20;
/// A state file larger than this was not written by this program.
const LARGEST_BYTES: u64 = 256 << 20;

/// Why the journal can't be kept.
#[derive(Debug, Error)]
#[error("can't {operation} {path}: {why}; {remedy}", path = path.display())]
pub struct JournalFault {
    operation: &'static str,
    path: PathBuf,
    why: String,
    remedy: &'static str,
    #[source]
    source: Option<io::Error>,
}

impl JournalFault {
    fn new(operation: &'static str, path: &Path, source: io::Error) -> Self {
        let remedy = match source.raw_os_error() {
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
        Self { operation, path: path.to_owned(), why: source.to_string(), remedy, source: Some(source) }
    }
}

/// The journal of one state directory, locked for its life.
#[derive(Debug)]
pub struct FileJournal {
    dir: PathBuf,
    boot_id: String,
    lines: Flock<File>,
    /// The number of the last batch.
    last: u64,
    /// The length of the journal up to the last whole batch.
    length: u64,
}

/// What was found in a state directory.
#[derive(Debug, Default)]
pub struct Recovered {
    /// The records, oldest first.
    pub records: Vec<Record>,
    /// What could not be used, and what was done about it: one sentence each.
    pub remarks: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct StateFile {
    schema: u32,
    boot_id: String,
    last: u64,
    records: Vec<Record>,
}

#[derive(Serialize, Deserialize)]
struct Batch {
    boot_id: String,
    number: u64,
    records: Vec<Record>,
}

/// A daemon that was killed holds its files until the kernel has taken its BPF programs away, which waits for every task
/// to have been off its PU once.
const END_AT_MOST: Duration = Duration::from_secs(5);

fn lock(mut file: File) -> Result<Flock<File>, Errno> {
    let deadline = Instant::now() + END_AT_MOST;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return Ok(locked),
            Err((unlocked, Errno::EWOULDBLOCK)) if Instant::now() < deadline => file = unlocked,
            Err((_, errno)) => return Err(errno),
        }
        thread::sleep(Duration::from_millis(20));
    }
}

impl FileJournal {
    /// Opens the journal of a directory, and reads what was there.
    ///
    /// # Errors
    /// If the directory can't be written, another daemon holds it, or the journal isn't this daemon's own file.
    pub fn open(dir: &Path, boot_id: &str) -> Result<(Self, Recovered), JournalFault> {
        let path = dir.join("journal.jsonl");
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        let file =
            places::open_own(&path, &mut options).map_err(|error| JournalFault::new("open", &path, error))?;
        let lines = lock(file).map_err(|errno| JournalFault {
            operation: "lock",
            path: path.clone(),
            why: if errno == Errno::EAGAIN { "it is in use".to_owned() } else { errno.to_string() },
            remedy: "another pjwd keeps its state there: stop it, or choose another --state-dir",
            source: None,
        })?;
        let mut recovered = Recovered::default();
        let mut last = read_state(dir, boot_id, &mut recovered);
        let length = read_batches(&lines, dir, boot_id, &mut last, &mut recovered)
            .map_err(|error| JournalFault::new("read", &path, error))?;
        let journal = Self { dir: dir.to_owned(), boot_id: boot_id.to_owned(), lines, last, length };
        Ok((journal, recovered))
    }

    /// Whether it has grown enough to be written anew.
    #[must_use]
    pub fn is_long(&self) -> bool {
        self.length > REWRITE_BYTES
    }

    fn path(&self) -> PathBuf {
        self.dir.join("journal.jsonl")
    }
}

impl Journal for FileJournal {
    type Fault = JournalFault;

    fn append(&mut self, records: &[Record]) -> Result<(), JournalFault> {
        if records.is_empty() {
            return Ok(());
        }
        let batch = Batch { boot_id: self.boot_id.clone(), number: self.last + 1, records: records.to_vec() };
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
                // Half a line would swallow the next one.
                let _ = self.lines.set_len(self.length);
                Err(JournalFault::new("write", &self.path(), error))
            }
        }
    }

    fn rewrite(&mut self, records: &[Record]) -> Result<(), JournalFault> {
        let state = StateFile {
            schema: SCHEMA,
            boot_id: self.boot_id.clone(),
            last: self.last,
            records: records.to_vec(),
        };
        let path = self.dir.join("state.json");
        let fresh = self.dir.join("state.json.new");
        let written = serde_json::to_vec(&state).map_err(io::Error::from).and_then(|bytes| {
            places::fresh(&fresh)?.write_all(&bytes)?;
            std::fs::rename(&fresh, &path)
        });
        if let Err(error) = written {
            let _ = std::fs::remove_file(&fresh);
            return Err(JournalFault::new("write", &path, error));
        }
        self.lines.set_len(0).map_err(|error| JournalFault::new("shorten", &self.path(), error))?;
        self.length = 0;
        Ok(())
    }
}

fn line_of(batch: &Batch) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(batch)?;
    line.push(b'\n');
    Ok(line)
}

/// Reads `state.json`; returns the number of the last batch it holds.
fn read_state(dir: &Path, boot_id: &str, recovered: &mut Recovered) -> u64 {
    let path = dir.join("state.json");
    let mut text = Vec::new();
    let opened = places::open_own(&path, OpenOptions::new().read(true));
    let read = opened.and_then(|file| file.take(LARGEST_BYTES).read_to_end(&mut text));
    match read {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return 0,
        Err(error) => {
            recovered
                .remarks
                .push(format!("can't read {}: {error}; starting from what is running", path.display()));
            return 0;
        }
        Ok(_) => {}
    }
    match serde_json::from_slice::<StateFile>(&text) {
        Ok(state) if state.schema != SCHEMA => {
            set_aside(&path, &format!("has schema {}", state.schema), recovered)
        }
        Ok(state) if state.boot_id != boot_id => 0,
        Ok(state) => {
            recovered.records = state.records;
            state.last
        }
        Err(error) => set_aside(&path, &format!("can't be understood: {error}"), recovered),
    }
}

fn set_aside(path: &Path, why: &str, recovered: &mut Recovered) -> u64 {
    let aside = path.with_extension("json.unreadable");
    let kept = match std::fs::rename(path, &aside) {
        Ok(()) => format!("kept as {}", aside.display()),
        Err(error) => format!("left there ({error})"),
    };
    recovered.remarks.push(format!("{} {why}; {kept}, starting from what is running", path.display()));
    0
}

/// Reads the batches after `last`; returns the length up to the last whole one and cuts the rest off.
fn read_batches(
    lines: &File,
    dir: &Path,
    boot_id: &str,
    last: &mut u64,
    recovered: &mut Recovered,
) -> io::Result<u64> {
    let mut reader = BufReader::new(lines);
    reader.seek(SeekFrom::Start(0))?;
    let (mut length, mut line) = (0u64, Vec::new());
    loop {
        line.clear();
        let read = reader.by_ref().take(LARGEST_BYTES).read_until(b'\n', &mut line)?;
        if read == 0 {
            break;
        }
        let batch = line.ends_with(b"\n").then(|| serde_json::from_slice::<Batch>(&line).ok()).flatten();
        let Some(batch) = batch else {
            let remark = format!("the journal is damaged after {length} bytes; the rest of it is not used");
            recovered.remarks.push(remark);
            break;
        };
        length += read as u64;
        if batch.boot_id == boot_id && batch.number > *last {
            *last = batch.number;
            recovered.records.extend(batch.records);
        }
    }
    if length < lines.metadata()?.len() {
        reader.seek(SeekFrom::Start(length))?;
        let mut rest = Vec::new();
        reader.take(LARGEST_BYTES).read_to_end(&mut rest)?;
        recovered.remarks.extend(keep_lines(dir, &rest));
        lines.set_len(length)?;
    }
    Ok(length)
}

/// Keeps what of a journal can't be read, if it is more than a line that was cut short by a death: another version
/// may have written it, and a person may want the masks in it.
fn keep_lines(dir: &Path, rest: &[u8]) -> Option<String> {
    if !rest.contains(&b'\n') {
        return None;
    }
    let path = dir.join("journal.jsonl.unreadable");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let kept = places::open_own(&path, &mut options).and_then(|mut file| file.write_all(rest));
    let path = path.display();
    Some(match kept {
        Ok(()) => format!("lines of the journal that this version can't read are kept in {path}"),
        Err(error) => format!("lines of the journal that this version can't read are lost ({path}: {error})"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pjw_core::job::JobId;

    fn ended(name: &str) -> Record {
        Record::Ended(name.parse::<JobId>().unwrap())
    }

    fn reopen(dir: &Path) -> (FileJournal, Recovered) {
        FileJournal::open(dir, "boot").unwrap()
    }

    #[test]
    fn whole_lines_of_another_form_are_kept_and_a_torn_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = reopen(dir.path());
        journal.append(&[ended("a")]).unwrap();
        drop(journal);
        let aside = dir.path().join("journal.jsonl.unreadable");
        for (rest, kept) in [("{\"torn", false), ("{\"form\":\"of another version\"}\n{\"torn", true)] {
            let mut lines = OpenOptions::new().append(true).open(dir.path().join("journal.jsonl")).unwrap();
            lines.write_all(rest.as_bytes()).unwrap();
            drop(lines);
            assert_eq!(reopen(dir.path()).1.records, [ended("a")]);
            assert_eq!(std::fs::read_to_string(&aside).is_ok_and(|text| text == rest), kept);
        }
    }

    #[test]
    fn what_was_appended_is_found_again_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, found) = reopen(dir.path());
        assert!(found.records.is_empty() && found.remarks.is_empty());
        journal.append(&[ended("a"), ended("b")]).unwrap();
        journal.append(&[ended("c")]).unwrap();
        drop(journal);
        assert_eq!(reopen(dir.path()).1.records, [ended("a"), ended("b"), ended("c")]);
    }

    #[test]
    fn a_rewrite_replaces_what_came_before_and_only_that() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = reopen(dir.path());
        journal.append(&[ended("old")]).unwrap();
        let before = std::fs::read(dir.path().join("journal.jsonl")).unwrap();
        journal.rewrite(&[ended("kept")]).unwrap();
        journal.append(&[ended("new")]).unwrap();
        drop(journal);
        assert_eq!(reopen(dir.path()).1.records, [ended("kept"), ended("new")]);
        // Killed between the rename and the cut: the old batches are still there, and must not count again.
        std::fs::write(dir.path().join("journal.jsonl"), before).unwrap();
        assert_eq!(reopen(dir.path()).1.records, [ended("kept")]);
    }

    #[test]
    fn a_last_line_cut_short_is_no_batch_and_the_next_one_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = reopen(dir.path());
        journal.append(&[ended("a")]).unwrap();
        drop(journal);
        let path = dir.path().join("journal.jsonl");
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"boot_id\":\"boot\",\"numb").unwrap();
        let (mut journal, found) = reopen(dir.path());
        assert_eq!((found.records.len(), found.remarks.len()), (1, 1));
        journal.append(&[ended("b")]).unwrap();
        drop(journal);
        assert_eq!(reopen(dir.path()).1.records, [ended("a"), ended("b")]);
    }

    #[test]
    fn another_boots_records_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = reopen(dir.path());
        journal.append(&[ended("a")]).unwrap();
        journal.rewrite(&[ended("a")]).unwrap();
        journal.append(&[ended("b")]).unwrap();
        drop(journal);
        let (_, found) = FileJournal::open(dir.path(), "next boot").unwrap();
        assert!(found.records.is_empty() && found.remarks.is_empty());
    }

    #[test]
    fn an_unreadable_state_file_is_set_aside_and_vetoes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        for (text, word) in [
            ("not json", "understood"),
            ("{\"schema\":99,\"boot_id\":\"boot\",\"last\":0,\"records\":[]}", "schema 99"),
        ] {
            std::fs::write(dir.path().join("state.json"), text).unwrap();
            let (_, found) = reopen(dir.path());
            assert!(found.remarks[0].contains(word), "{:?}", found.remarks);
            assert!(dir.path().join("state.json.unreadable").exists());
        }
    }

    #[test]
    fn a_second_daemon_on_the_same_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _first = reopen(dir.path());
        let error = FileJournal::open(dir.path(), "boot").unwrap_err().to_string();
        assert!(error.contains("another pjwd keeps its state there"), "{error}");
    }

    #[test]
    fn a_state_that_cannot_be_written_is_an_error_that_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("state.json.new")).unwrap();
        let (mut journal, _) = reopen(dir.path());
        journal.append(&[ended("a")]).unwrap();
        let error = journal.rewrite(&[ended("b")]).unwrap_err().to_string();
        assert!(error.contains("state.json") && error.contains("check the directory"), "{error}");
        drop(journal);
        assert_eq!(reopen(dir.path()).1.records, [ended("a")]);
    }

    #[test]
    fn planted_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("precious"), "precious").unwrap();
        for name in ["state.json", "state.json.new"] {
            std::os::unix::fs::symlink(path("precious"), path(name)).unwrap();
        }
        let (mut journal, found) = reopen(dir.path());
        assert!(found.remarks[0].contains("symbolic link"), "{:?}", found.remarks);
        journal.rewrite(&[ended("a")]).unwrap();
        drop(journal);
        assert_eq!(reopen(dir.path()).1.records, [ended("a")]);
        std::fs::remove_file(path("journal.jsonl")).unwrap();
        std::os::unix::fs::symlink(path("precious"), path("journal.jsonl")).unwrap();
        let refusal = FileJournal::open(dir.path(), "boot").unwrap_err().to_string();
        assert!(refusal.contains("symbolic link; remove it"), "{refusal}");
        assert_eq!(std::fs::read_to_string(path("precious")).unwrap(), "precious");
    }
}
