//! The reports of ended jobs on disk: `reports.jsonl` in the state directory, one report per line.
//!
//! A report is appended. When the file has grown to its limit, it is written again with the reports that are kept, and
//! renamed into place. Without space for that, the newest reports are written over the oldest, which needs no space.
//! The file keeps its size then: empty lines fill the room for the next reports, which another program would take
//! otherwise. The daemon may be killed at any instruction: a line that is not a report is skipped at the next start,
//! and named. A store that can't be written never stops the daemon: the reports then stay in memory.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::unistd::Uid;
use pjw_ipc::report::Report;
use tracing::warn;

use crate::host::directories;
use crate::host::inode::is_file_at_path;

/// The name of the file with the reports of ended jobs, in the state directory of pjwd.
pub const REPORTS_FILE_NAME: &str = "reports.jsonl";
/// The file is written again before it grows beyond this many bytes.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// The reports that are kept have at most this many bytes, so that the file has room for more after it is written
/// again.
const MAX_KEPT_BYTES: u64 = MAX_FILE_BYTES / 4 * 3;
/// At most this many bytes of the file are read. This program writes no larger file.
const MAX_READ_BYTES: u64 = 8 << 20;

/// The reports of the jobs that have ended, in memory and in a file in the state directory of pjwd. The store keeps
/// at most a configured number of reports, and at most 3 MiB. The oldest reports are dropped first.
#[derive(Debug)]
pub struct ReportStore {
    dir: PathBuf,
    /// `None` if the file can't be opened.
    file: Option<File>,
    /// The length of the reports in the file, in bytes, up to the end of the last complete line. Empty lines may
    /// follow.
    length: u64,
    /// The reports that are kept, oldest first, each with the length of its line.
    kept: VecDeque<(Arc<Report>, u64)>,
    kept_bytes: u64,
    /// The largest number of reports that are kept.
    max_reports: usize,
    /// Whether a report could not be written without dropping others, or not at all, since the file was last written
    /// again. This is logged once.
    is_short_of_space: bool,
}

impl ReportStore {
    /// Opens the store of job reports in `dir`, the state directory of pjwd, and reads the stored reports.
    /// `max_reports` is the maximum number of reports that the store keeps. If the file with the reports can't be
    /// used, the store keeps the reports in memory only. Also returns remarks for the log: which lines of the file
    /// are no valid reports, or why the file can't be used.
    #[must_use]
    pub fn open(dir: &Path, max_reports: u32) -> (Self, Vec<String>) {
        let mut store = Self {
            dir: dir.to_owned(),
            file: None,
            length: 0,
            kept: VecDeque::new(),
            kept_bytes: 0,
            max_reports: max_reports as usize,
            is_short_of_space: false,
        };
        let mut remarks = Vec::new();
        match store.read_file() {
            Ok(unreadable) if unreadable.is_empty() => {}
            Ok(unreadable) => {
                remarks.push(unreadable_lines_remark(&store.path(), &unreadable));
                store.rewrite_or_shrink();
            }
            Err(error) => remarks.push(format!(
                "can't use {}: {error}; reports of jobs are kept in memory only",
                store.path().display()
            )),
        }
        (store, remarks)
    }

    /// Stores the report of a job that has ended. If the store then has too many reports, drops the oldest ones. Does
    /// nothing if the maximum number of reports is 0.
    ///
    /// A daemon can be killed after it stored a report and before it recorded the end of the job. The next daemon then
    /// reports the job again, with the same id and start time. The store keeps only one of the two reports: the
    /// complete one, or the first one if none is complete.
    ///
    /// The report is appended to the file. If this fails, for example because the disk is full, drops the older half
    /// of the reports (by size). Then overwrites the file from its start with the remaining reports, which needs no
    /// more disk space. If the file can't be opened, the report is stored in memory only.
    ///
    /// Logs the first failed write. Logs no further failure until the whole file was written again.
    pub fn add(&mut self, report: Report) {
        if self.max_reports == 0 {
            return;
        }
        let Ok(line) = line_of(&report) else { return };
        if !self.keep_report(report, line.len() as u64) {
            return;
        }
        if self.length + line.len() as u64 > MAX_FILE_BYTES {
            return self.rewrite_or_shrink();
        }
        if !self.is_in_place() {
            return self.make_file_again();
        }
        if let Err(error) = self.append(&line) {
            // Dropping half of the reports makes room for the next reports too.
            self.drop_oldest(self.kept_bytes / 2);
            self.log_shortage(&error);
            self.shrink();
        }
    }

    /// Returns stored reports of ended jobs, newest first. If `job_id` is `None`, returns the reports of all jobs.
    /// Otherwise returns only the reports of the jobs that had this id. Returns at most `max_count` reports, or all
    /// if `max_count` is `None`.
    #[must_use]
    pub fn reports(&self, job_id: Option<&str>, max_count: Option<u32>) -> Vec<Arc<Report>> {
        let newest_first = self.kept.iter().rev().map(|(report, _)| report);
        let wanted = newest_first.filter(|report| job_id.is_none_or(|job_id| report.id == job_id));
        wanted.take(max_count.map_or(usize::MAX, |count| count as usize)).cloned().collect()
    }

    /// Removes the reports for which `is_removed` returns true. If there are such reports, also removes them from the
    /// file.
    pub fn remove(&mut self, is_removed: impl Fn(&Report) -> bool) {
        let before = self.kept.len();
        self.kept.retain(|(report, _)| !is_removed(report));
        if self.kept.len() < before {
            self.kept_bytes = self.kept.iter().map(|(_, bytes)| bytes).sum();
            self.rewrite_or_shrink();
        }
    }

    /// Sets the maximum number of reports that the store keeps. If the store has more reports, drops the oldest ones.
    pub fn set_max_reports(&mut self, max_reports: u32) {
        let before = self.kept.len();
        self.max_reports = max_reports as usize;
        self.drop_excess();
        if self.kept.len() < before {
            self.rewrite_or_shrink();
        }
    }

    /// Creates the file of the store again, with all stored reports, if another program removed or replaced the file.
    /// Has no effect if the store has no open file. A failure is only logged. If the disk has no space for all reports,
    /// drops the oldest ones.
    pub fn restore_removed_file(&mut self) {
        if self.file.is_some() && !self.is_in_place() {
            self.make_file_again();
        }
    }

    fn path(&self) -> PathBuf {
        self.dir.join(REPORTS_FILE_NAME)
    }

    fn is_in_place(&self) -> bool {
        self.file.as_ref().is_some_and(|file| is_file_at_path(&self.path(), file))
    }

    /// Keeps `report`, the report on a run of a job, whose line in the file has `bytes` bytes. Drops the oldest
    /// reports if there are too many. If a report on the same run is kept already:
    ///
    /// - An incomplete report is replaced by a complete one.
    /// - Otherwise, `report` is dropped, and the function returns false.
    fn keep_report(&mut self, report: Report, bytes: u64) -> bool {
        if let Some(index) = self.kept.iter().position(|(kept, _)| is_same_run(kept, &report)) {
            let is_incomplete = self.kept.get(index).is_some_and(|(kept, _)| kept.incomplete.is_some());
            if !is_incomplete || report.incomplete.is_some() {
                return false;
            }
            if let Some((_, bytes)) = self.kept.remove(index) {
                self.kept_bytes -= bytes;
            }
        }
        self.kept.push_back((Arc::new(report), bytes));
        self.kept_bytes += bytes;
        self.drop_excess();
        true
    }

    /// Drops the oldest reports until both limits are kept: the number of reports and their size.
    fn drop_excess(&mut self) {
        while self.kept.len() > self.max_reports {
            self.drop_one();
        }
        self.drop_oldest(MAX_KEPT_BYTES);
    }

    /// Drops the oldest reports until the others have at most `max_bytes` bytes. Never drops the newest.
    fn drop_oldest(&mut self, max_bytes: u64) {
        while self.kept_bytes > max_bytes && self.kept.len() > 1 {
            self.drop_one();
        }
    }

    fn drop_one(&mut self) {
        if let Some((_, bytes)) = self.kept.pop_front() {
            self.kept_bytes -= bytes;
        }
    }

    /// Opens the file, and keeps the reports in it. Returns the numbers of the lines that are no reports, counted
    /// from 1. Empty lines do not count as such.
    fn read_file(&mut self) -> io::Result<Vec<usize>> {
        let mut text = Vec::new();
        let file = self.open_file()?;
        (&file).take(MAX_READ_BYTES).read_to_end(&mut text)?;
        let mut unreadable = Vec::new();
        let lines = (1..).zip(text.split_inclusive(|&byte| byte == b'\n'));
        for (number, line) in lines.filter(|(_, line)| *line != b"\n") {
            let complete = line.ends_with(b"\n").then_some(line);
            match complete.and_then(|line| serde_json::from_slice::<Report>(line).ok()) {
                // A report is in the file twice if a daemon was killed while it wrote over the oldest reports. It is
                // kept once.
                Some(report) => {
                    self.keep_report(report, line.len() as u64);
                }
                None => unreadable.push(number),
            }
        }
        let last = text.iter().rposition(|&byte| byte != b'\n');
        // The line ends with a line break, or is not complete.
        let length = last.map_or(0, |last| text.len().min(last + 2));
        (self.length, self.file) = (length as u64, Some(file));
        Ok(unreadable)
    }

    fn open_file(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        directories::open_own_file(&self.path(), &mut options)
    }

    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        let Some(file) = &self.file else { return Err(io::Error::other("it could not be opened")) };
        // After an error, the file may have a part of the line. The file is not cut, because its space is needed.
        file.write_all_at(line, self.length)?;
        self.length += line.len() as u64;
        Ok(())
    }

    /// Makes the directory and the file again, after another program removed them, and writes the kept reports into
    /// the file. If this fails, logs it once.
    fn make_file_again(&mut self) {
        let made = directories::make_state_directory(&self.dir, Uid::effective().as_raw());
        let opened = made.map_err(io::Error::other).and_then(|()| self.open_file());
        match opened {
            Ok(file) => {
                (self.file, self.length) = (Some(file), 0);
                self.rewrite_or_shrink();
            }
            Err(error) => self.log_shortage(&error),
        }
    }

    /// Writes the file again with the reports that are kept. Without space for that, writes over its oldest reports.
    fn rewrite_or_shrink(&mut self) {
        match self.rewrite() {
            Ok(()) => self.is_short_of_space = false,
            Err(error) => {
                self.log_shortage(&error);
                self.shrink();
            }
        }
    }

    /// Replaces the file by a new one with all kept reports. If this fails, the old file stays.
    fn rewrite(&mut self) -> io::Result<()> {
        let text = self.text()?;
        let new_path = self.dir.join("reports.jsonl.new");
        let written = directories::recreate_file(&new_path)
            .and_then(|mut file| file.write_all(&text))
            .and_then(|()| std::fs::rename(&new_path, self.path()));
        if let Err(error) = written {
            let _ = std::fs::remove_file(&new_path);
            return Err(error);
        }
        (self.file, self.length) = (Some(self.open_file()?), text.len() as u64);
        Ok(())
    }

    /// Writes as many of the kept reports as possible into the space that the file already has, because there is no
    /// free space for a new file. Drops the oldest reports that do not fit. Fills the rest of the file with empty
    /// lines. Does nothing if the file is not open or is empty: the reports then stay in memory.
    fn shrink(&mut self) {
        let size = self.file.as_ref().and_then(|file| file.metadata().ok()).map_or(0, |meta| meta.len());
        if size == 0 {
            return;
        }
        self.drop_oldest(size);
        let text = self.text().ok().filter(|text| text.len() as u64 <= size);
        let (Some(file), Some(mut text)) = (&self.file, text) else { return };
        let length = text.len() as u64;
        text.resize(usize::try_from(size).unwrap_or(text.len()), b'\n');
        if file.write_all_at(&text, 0).is_ok() {
            self.length = length;
        }
    }

    fn text(&self) -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        for (report, _) in &self.kept {
            text.extend(line_of(report)?);
        }
        Ok(text)
    }

    /// Logs that reports are lost or in memory only. Logs this once, until the whole file was written again.
    fn log_shortage(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.is_short_of_space, true) {
            warn!(
                file = %self.path().display(),
                %error,
                "the reports of ended jobs can't all be written: the oldest are dropped; free space there"
            );
        }
    }
}

/// Whether two reports are on the same run of a job. Two complete reports with different ends are on two runs that
/// began in the same millisecond.
fn is_same_run(one: &Report, other: &Report) -> bool {
    let has_same_start = one.id == other.id && one.started == other.started;
    let are_both_complete = one.incomplete.is_none() && other.incomplete.is_none();
    has_same_start && (!are_both_complete || one.ended == other.ended)
}

fn line_of(report: &Report) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    Ok(line)
}

fn unreadable_lines_remark(path: &Path, lines: &[usize]) -> String {
    const MAX_NAMED: usize = 5;
    let named: Vec<String> = lines.iter().take(MAX_NAMED).map(ToString::to_string).collect();
    let more = lines.len().saturating_sub(MAX_NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let noun = if lines.len() == 1 { "line" } else { "lines" };
    format!(
        "{noun} {}{more} of {} can't be read as reports of jobs and were skipped",
        named.join(", "),
        path.display()
    )
}

#[cfg(test)]
mod tests;
