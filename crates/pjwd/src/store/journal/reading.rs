//! The format of the two files of the journal, and how a daemon reads the records that an earlier daemon left in them.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use pjw_core::record::Record;
use serde::{Deserialize, Serialize};

use crate::host::directories;

pub(super) const LINES: &str = "journal.jsonl";
pub(super) const STATE: &str = "state.json";
/// The format of both files. A file with another schema is set aside.
pub(super) const SCHEMA: u32 = 1;
/// The first bytes of each line of `journal.jsonl`.
const BATCH_PREFIX: &[u8] = b"{\"boot_id\":\"";
/// The largest state file in bytes. This program writes no larger file.
const MAX_STATE_BYTES: u64 = 256 << 20;

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
    /// Whether at least one file of the journal had readable content. The content may be of this boot or of an earlier
    /// boot.
    pub is_found: bool,
}

/// The content of `state.json`.
#[derive(Serialize, Deserialize)]
pub(super) struct StateFile<'a> {
    pub(super) schema: u32,
    pub(super) boot_id: Cow<'a, str>,
    /// The number of the last batch that the file includes.
    pub(super) last: u64,
    /// Whether a batch follows this file in any case. False in files of earlier versions.
    #[serde(default)]
    pub(super) is_followed: bool,
    pub(super) records: Cow<'a, [Record]>,
}

/// What `state.json` says about the batches.
#[derive(Default)]
pub(super) struct Expected {
    /// The number of the last batch that the file includes.
    pub(super) last: u64,
    /// Whether `journal.jsonl` must have this batch or a later one.
    pub(super) is_followed: bool,
}

/// One line of `journal.jsonl`.
#[derive(Serialize, Deserialize)]
pub(super) struct Batch<'a> {
    pub(super) boot_id: Cow<'a, str>,
    pub(super) number: u64,
    pub(super) records: Cow<'a, [Record]>,
}

/// Returns whether the directory `dir` contains the journal of an earlier daemon: the files `state.json` and
/// `journal.jsonl`, in which pjwd records its changes. `has_state_file` says whether the earlier daemon is known to
/// have written `state.json`. If true, this file must exist. If false, one of the two files is enough, because earlier
/// versions of pjwd write `state.json` later. A symbolic link counts as a file, also if its target does not exist:
/// [`FileJournal::open`](super::FileJournal::open) does not follow it.
#[must_use]
pub fn has_journal_files(dir: &Path, has_state_file: bool) -> bool {
    let exists = |name: &str| std::fs::symlink_metadata(dir.join(name)).is_ok();
    exists(STATE) || (!has_state_file && exists(LINES))
}

/// Returns whether the journal in the directory `dir` (the files in which pjwd records its changes) has records of the
/// boot `boot_id`. If a file can't be read, is damaged or is incomplete, the journal possibly has such records, and the
/// result is true. Changes nothing and takes no lock, so `dir` may be the state directory of another daemon.
#[must_use]
pub fn has_records(dir: &Path, boot_id: &str) -> bool {
    let read_file = |name: &str| {
        let mut text = Vec::new();
        let opened = directories::open_own_file(&dir.join(name), OpenOptions::new().read(true));
        opened.and_then(|file| file.take(MAX_STATE_BYTES).read_to_end(&mut text)).map(|_| text)
    };
    let is_missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let lines = match read_file(LINES) {
        Err(error) if !is_missing(&error) => return true,
        lines => lines.unwrap_or_default(),
    };
    let is_empty_state = |text: &[u8]| {
        serde_json::from_slice::<StateFile<'_>>(text).is_ok_and(|state| {
            let is_complete = !state.is_followed || !lines.is_empty();
            state.schema == SCHEMA && (state.boot_id != boot_id || (state.records.is_empty() && is_complete))
        })
    };
    let is_empty_batch = |line: &[u8]| {
        let batch = serde_json::from_slice::<Batch<'_>>(line);
        batch.is_ok_and(|batch| batch.boot_id != boot_id || batch.records.is_empty())
    };
    let has_state_records = match read_file(STATE) {
        Err(error) => !is_missing(&error),
        Ok(text) => !is_empty_state(&text),
    };
    let mut batches = lines.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    has_state_records || !batches.all(is_empty_batch)
}

/// Reads `state.json` in the directory `dir`, and stores its records in `recovered` if the file is of the boot
/// `boot_id`. Returns the number of the last batch (a line of `journal.jsonl`) whose records the file includes, and
/// whether `journal.jsonl` must contain this batch or a later one. Returns the number 0 and false if the file is
/// missing, is of another boot, or can't be used.
///
/// A file that can't be read, can't be parsed, or has another schema is recorded in `recovered` as a loss of records.
/// Unless the file can't be read, it is also renamed to `state.json.unreadable`.
pub(super) fn read_state(dir: &Path, boot_id: &str, recovered: &mut RecoveredJournal) -> Expected {
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

/// Renames the file `path`, which can't be used, to `state.json.unreadable`. Records in `recovered` that records were
/// lost, with a remark. `why` is the part of the remark after the path.
fn set_aside(path: &Path, why: &str, recovered: &mut RecoveredJournal) {
    recovered.has_lost_records = true;
    let aside = path.with_extension("json.unreadable");
    let result = match std::fs::rename(path, &aside) {
        Ok(()) => format!("kept as {}", aside.display()),
        Err(error) => format!("left there ({error})"),
    };
    recovered.remarks.push(format!("{} {why}; {result}, starting from what is running", path.display()));
}

/// Reads the batches (lines with records) in `lines`, the file `journal.jsonl` in `dir`. Adds to `recovered` the
/// records of the boot `boot_id` that `state.json` does not include. Returns the new length of the file in bytes, and
/// the number of the last batch.
///
/// - `expected` has the last batch that `state.json` includes, and says whether the file must have this batch or a
///   later one. If a batch is missing, records count as lost.
/// - A line that can't be parsed and everything after it are cut off. The cut lines are saved in a file of their own,
///   and records count as lost. Only an incomplete last line, which a killed daemon leaves, is not saved and no loss.
pub(super) fn read_batches(
    lines: &File,
    dir: &Path,
    boot_id: &str,
    expected: &Expected,
    recovered: &mut RecoveredJournal,
) -> io::Result<(u64, u64)> {
    let mut reader = BufReader::new(lines);
    reader.seek(SeekFrom::Start(0))?;
    let (mut length, mut line, mut last) = (0u64, Vec::new(), expected.last);
    let (mut has_gap, mut has_expected_batch) = (false, false);
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
        has_expected_batch |= batch.boot_id == boot_id && batch.number >= expected.last;
        if batch.boot_id == boot_id && batch.number > last {
            has_gap |= batch.number > last + 1;
            last = batch.number;
            recovered.records.extend(batch.records.into_owned());
        }
    }
    if length < lines.metadata()?.len() {
        reader.seek(SeekFrom::Start(length))?;
        let mut unparsed = Vec::new();
        reader.take(MAX_STATE_BYTES).read_to_end(&mut unparsed)?;
        let remark = save_unreadable_lines(dir, &unparsed);
        recovered.has_lost_records |= remark.is_some();
        recovered.remarks.extend(remark);
        lines.set_len(length)?;
    }
    if has_gap || (expected.is_followed && !has_expected_batch) {
        recovered.has_lost_records = true;
        let dir = dir.display();
        recovered.remarks.push(format!("records are missing in {dir}: a file there was removed or emptied"));
    }
    Ok((length, last))
}

/// Saves `lines`, the lines of the journal that can't be parsed, in the file `journal.jsonl.unreadable` in `dir`.
/// Another version of pjwd may have written these lines, and an administrator may need their affinity masks. Returns a
/// remark for the log, also if the file can't be written. Returns `None` and saves nothing if `lines` is only an
/// incomplete last line that begins like a batch.
fn save_unreadable_lines(dir: &Path, lines: &[u8]) -> Option<String> {
    // The daemon may have been killed within the prefix.
    let begins_like_batch = lines.iter().zip(BATCH_PREFIX).all(|(byte, expected)| byte == expected);
    if !lines.contains(&b'\n') && begins_like_batch {
        return None;
    }
    let path = dir.join("journal.jsonl.unreadable");
    let saved = directories::recreate_file(&path).and_then(|mut file| file.write_all(lines));
    let path = path.display();
    Some(match saved {
        Ok(()) => format!("lines of the journal that this version can't read are kept in {path}"),
        Err(error) => format!("lines of the journal that this version can't read are lost ({path}: {error})"),
    })
}
