//! The file `want` of a job: the owner's programs write a number of cores into it. Its content may be anything.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc::{O_NOFOLLOW, O_NONBLOCK};
use pjw_core::ids::Uid;

/// The longest content that can be a number.
const MAX_BYTES: u64 = 32;
/// A file that is longer is truncated: it takes memory from a file system that the system needs.
const MAX_FILE_BYTES: u64 = 4096;
/// The unit of the number of blocks of a file (stat(2)).
const BLOCK_BYTES: u64 = 512;
/// The length of a hole that gives back reserved space. File systems with smaller files refuse a longer one.
const HOLE_BYTES: i64 = 1 << 40;

/// The last known content of the file `want` of one job: the number of cores that the job wants. If the present content
/// is ignored, also contains the reason.
#[derive(Debug)]
pub(super) struct WantedFile {
    /// The number that the file had when it was read or written last.
    last: Option<u32>,
    /// Whether the file was empty at the last reading, and may be about to be written.
    was_empty: bool,
    /// Whether the file is empty because it was too long and the daemon emptied it.
    is_emptied: bool,
    /// The reason why the content is ignored.
    fault: Option<String>,
}

/// The result of reading the file `want` of a job: whether the number of wanted cores has changed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum WantedFileReading {
    /// Nothing new: the number is the known one, or the content is ignored and the known number stays.
    Same,
    /// The file is empty, and was not at the reading before. A program may have truncated it and be about to
    /// write, so the file must be read again.
    MayBeUnfinished,
    /// Another number than the known one. `None`: the file is empty, and no longer has the number that was
    /// known.
    New(Option<u32>),
}

impl WantedFile {
    /// Makes a [`WantedFile`] for a job that wants `last` cores. `None` means that the job wants exactly the cores that
    /// it was granted.
    pub(super) fn new(last: Option<u32>) -> Self {
        Self { last, was_empty: false, is_emptied: false, fault: None }
    }

    /// Returns the reason why the content of the file `want` is ignored. `None` if the content is used.
    pub(super) fn ignored_reason(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    /// Reads the file `want` of a job at `path`, and returns the number of wanted cores if it has changed. Keeps the
    /// last number, and stores the reason, in these cases:
    ///
    /// - The content is not a number.
    /// - The file is not a regular file of the user `owner`, or has a second name (hard link).
    ///
    /// Also reduces the disk space that the file takes: empties a file of more than 4096 bytes, and gives back space
    /// that a program has reserved behind the end.
    pub(super) fn read(&mut self, path: &Path, owner: Uid) -> WantedFileReading {
        let number = read_text(path, owner).and_then(|text| parse(&text));
        let is_empty = number == Ok(None);
        if is_empty && self.is_emptied {
            return WantedFileReading::Same;
        }
        self.is_emptied = shrink(path, owner);
        let became_empty = is_empty && !self.was_empty;
        self.was_empty = is_empty;
        if became_empty && self.last.is_some() {
            return WantedFileReading::MayBeUnfinished;
        }
        match number {
            Ok(number) => {
                self.fault = None;
                if std::mem::replace(&mut self.last, number) == number {
                    WantedFileReading::Same
                } else {
                    WantedFileReading::New(number)
                }
            }
            Err(fault) => {
                self.fault = Some(fault);
                WantedFileReading::Same
            }
        }
    }

    /// Gives back the space of the file `want` at `path` if it takes more than a number needs. A file of more than 4096
    /// bytes is then empty, and its content counts as ignored. Leaves a file that does not belong to the user `owner`.
    pub(super) fn give_back_space(&mut self, path: &Path, owner: Uid) {
        if shrink(path, owner) {
            self.is_emptied = true;
            self.fault = Some(format!("it had more than {MAX_FILE_BYTES} bytes, and a number has less"));
        }
    }

    /// Writes the number of cores `wanted` into the file `want` at `path`. `None` empties the file. `was_there` says
    /// whether the file existed before; otherwise it is new and empty. Does nothing if the file already has this
    /// number, as far as is known.
    ///
    /// # Errors
    /// If the file can't be written. It keeps its former number then, and the next call tries again.
    pub(super) fn write_number(
        &mut self,
        path: &Path,
        wanted: Option<u32>,
        was_there: bool,
    ) -> io::Result<()> {
        let shown = if was_there { self.last } else { None };
        self.last = shown;
        if shown == wanted {
            return Ok(());
        }
        let mut file = options().write(true).open(path)?;
        match wanted {
            Some(cores) => overwrite(&mut file, cores)?,
            None => file.set_len(0)?,
        }
        (self.last, self.fault, self.is_emptied) = (wanted, None, false);
        Ok(())
    }
}

/// Writes the number `cores` into `file`, a file `want`. Newlines replace the rest of its former content: a cut could
/// leave only the first digits of a number that a program writes at the same time. Except if the file is too long for a
/// number: the rest is cut.
///
/// # Errors
/// If the file can't be written. A full file system takes no number from it.
fn overwrite(file: &mut File, cores: u32) -> io::Result<()> {
    let length = file.metadata()?.len();
    let mut text = format!("{cores}\n").into_bytes();
    let former_length = usize::try_from(length.min(MAX_BYTES)).unwrap_or(0);
    text.resize(text.len().max(former_length), b'\n');
    file.write_all(&text)?;
    if length > MAX_BYTES { file.set_len(MAX_BYTES) } else { Ok(()) }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.custom_flags(O_NOFOLLOW | O_NONBLOCK);
    options
}

/// Reduces the space that the file at `path` takes on its file system, if the file belongs to the user `owner`. A file
/// of more than 4096 bytes is emptied. A shorter file loses the space that a program reserved behind its end
/// (fallocate(2)). Returns whether the file was emptied.
fn shrink(path: &Path, owner: Uid) -> bool {
    // Each opening for writing is reported as a change, so a file that takes little is not opened.
    if !std::fs::symlink_metadata(path).is_ok_and(|metadata| takes_much_space(&metadata, owner)) {
        return false;
    }
    // A failure leaves the file as it is.
    options().write(true).open(path).and_then(|file| shrink_opened(&file, owner)).unwrap_or(false)
}

/// Returns whether the file is a regular file of the user `owner` that takes more space than a number needs. The file
/// may have a second name (hard link), by which its owner can write it too. A file of another user is left alone,
/// because it may be a link by which the owner of the job would destroy that file.
fn takes_much_space(metadata: &Metadata, owner: Uid) -> bool {
    let has_reserve = metadata.blocks().saturating_mul(BLOCK_BYTES) > MAX_FILE_BYTES.max(metadata.blksize());
    let is_of_owner = metadata.is_file() && metadata.uid() == owner.0;
    is_of_owner && (metadata.len() > MAX_FILE_BYTES || has_reserve)
}

/// Reduces the disk space that `file` takes. Empties a file of more than 4096 bytes, and returns true. Otherwise
/// gives back the space that is reserved behind the end of the file, and returns false. Does nothing if `file` is not
/// a regular file of the user `owner`.
fn shrink_opened(file: &File, owner: Uid) -> io::Result<bool> {
    // Another file may have been put in the place of the one that was checked.
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.uid() != owner.0 {
        return Ok(false);
    }
    let length = metadata.len();
    if length > MAX_FILE_BYTES {
        file.set_len(0)?;
        return Ok(true);
    }
    // A program may write another number at any time. A hole behind the first block takes nothing from that number.
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let _ = fallocate(file, flags, MAX_FILE_BYTES.cast_signed(), HOLE_BYTES);
    // Some file systems make no hole behind the end of a file.
    let metadata = file.metadata()?;
    if takes_much_space(&metadata, owner) && metadata.len() == length {
        file.set_len(length)?;
    }
    Ok(false)
}

/// Returns the text of the file `want` at `path`. The error is the reason as text.
///
/// # Errors
/// If the file can't be read, is not a regular file of the user `owner`, or has a second name (hard link). If it is
/// longer than a number can be, or is not UTF-8.
fn read_text(path: &Path, owner: Uid) -> Result<String, String> {
    let file = options().read(true).open(path).map_err(|error| error.to_string())?;
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    if !metadata.is_file() || metadata.uid() != owner.0 || metadata.nlink() != 1 {
        return Err(format!("it is not the file of user {}", owner.0));
    }
    if metadata.len() > MAX_BYTES {
        return Err(format!("it has {} bytes, and a number has less", metadata.len()));
    }
    let mut text = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(|error| error.to_string())?;
    String::from_utf8(text).map_err(|_| "it is no text".to_owned())
}

/// The number in a text. `None` if the text is empty.
fn parse(text: &str) -> Result<Option<u32>, String> {
    let text = text.trim_matches(|c: char| c.is_ascii_whitespace());
    if text.is_empty() {
        return Ok(None);
    }
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| is_number);
    number.map(Some).ok_or_else(|| format!("{text:?} is no number of cores"))
}

#[cfg(test)]
mod tests {
    use nix::unistd::geteuid;

    use super::*;

    #[test]
    fn a_number_with_blanks_around_it_is_read_and_everything_else_is_refused() {
        for (text, number) in
            [("4", Some(4)), (" 0\n", Some(0)), ("\t12 \r\n", Some(12)), ("", None), ("\n", None)]
        {
            assert_eq!(parse(text), Ok(number), "{text:?}");
        }
        for text in ["-1", "+3", "3.5", "four", "4 5", "99999999999", "\u{663}", "0x4"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn rubbish_leaves_the_last_number_in_force() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("want");
        let owner = Uid(geteuid().as_raw());
        let mut file = WantedFile::new(None);
        let mut read = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            (file.read(&path, owner), file.ignored_reason().map(str::to_owned))
        };
        assert_eq!(read(b"3"), (WantedFileReading::New(Some(3)), None));
        assert_eq!(read(b"3\n"), (WantedFileReading::Same, None));
        for (rubbish, why) in
            [(&b"many"[..], "is no number"), (&[0xff, 0xfe], "no text"), (&[b'7'; 40], "40 bytes")]
        {
            let (reading, fault) = read(rubbish);
            assert_eq!(reading, WantedFileReading::Same);
            assert!(fault.unwrap().contains(why), "{why}");
        }
        assert_eq!(read(b"3"), (WantedFileReading::Same, None), "the fault ends with the next number");
        assert_eq!(read(b""), (WantedFileReading::MayBeUnfinished, None));
        assert_eq!(read(b""), (WantedFileReading::New(None), None), "it stayed empty");
    }

    #[test]
    fn a_number_that_could_not_be_written_is_written_by_the_next_call() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("want");
        let mut file = WantedFile::new(Some(100));
        assert!(file.write_number(&path, Some(3), true).is_err(), "there is no file");
        std::fs::write(&path, "100\n").unwrap();
        assert_eq!(file.read(&path, Uid(geteuid().as_raw())), WantedFileReading::Same);
        file.write_number(&path, Some(3), true).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "3\n\n\n");
        assert_eq!(file.read(&path, Uid(geteuid().as_raw())), WantedFileReading::Same);
        file.write_number(&path, None, true).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
    }

    #[test]
    fn a_written_number_replaces_everything_and_cuts_only_what_is_too_long_for_a_number() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("want");
        let long = "7".repeat(40);
        for (former, length) in [("", 3), ("7", 3), ("128\n", 4), ("many words", 10), (long.as_str(), 32)] {
            std::fs::write(&path, former).unwrap();
            let mut file = WantedFile::new(Some(100));
            file.write_number(&path, Some(12), true).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().len(), length, "{former:?}");
            assert_eq!(file.read(&path, Uid(geteuid().as_raw())), WantedFileReading::Same, "{former:?}");
            assert_eq!(file.ignored_reason(), None, "{former:?}");
        }
    }

    #[test]
    fn a_long_file_is_truncated_because_it_takes_memory() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("want");
        std::fs::write(&path, vec![b'1'; 1_000_000]).unwrap();
        let mut file = WantedFile::new(Some(4));
        assert_eq!(file.read(&path, Uid(geteuid().as_raw())), WantedFileReading::Same);
        assert!(file.ignored_reason().unwrap().contains("1000000 bytes"));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        assert_eq!(file.read(&path, Uid(geteuid().as_raw())), WantedFileReading::Same);
        assert!(file.ignored_reason().is_some(), "the program did not empty it");
        std::fs::write(&path, "2").unwrap();
        assert_eq!(file.read(&path, Uid(geteuid().as_raw())), WantedFileReading::New(Some(2)));
    }

    #[test]
    fn a_long_file_with_a_second_name_is_truncated_if_it_belongs_to_the_owner_of_the_job() {
        let directory = tempfile::tempdir().unwrap();
        let (path, second) = (directory.path().join("want"), directory.path().join("second"));
        std::fs::write(&path, vec![b'1'; 1_000_000]).unwrap();
        std::fs::hard_link(&path, &second).unwrap();
        let length = || std::fs::metadata(&second).unwrap().len();
        let (owner, mut file) = (Uid(geteuid().as_raw()), WantedFile::new(Some(4)));
        let other = Uid(owner.0 + 1);
        file.give_back_space(&path, other);
        assert!(!shrink_opened(&OpenOptions::new().write(true).open(&path).unwrap(), other).unwrap());
        assert_eq!(length(), 1_000_000, "a file of another user");
        assert_eq!(file.read(&path, owner), WantedFileReading::Same);
        assert_eq!(length(), 0);
        std::fs::write(&path, vec![b'1'; 1_000_000]).unwrap();
        file.give_back_space(&path, owner);
        assert_eq!(length(), 0, "if the file system is full");
        assert!(file.ignored_reason().is_some());
    }

    #[test]
    fn space_that_is_reserved_behind_the_number_is_given_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("want");
        std::fs::write(&path, "3").unwrap();
        let opened = OpenOptions::new().write(true).open(&path).unwrap();
        if fallocate(&opened, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, 1 << 20).is_err() {
            // This file system can't reserve space.
            return;
        }
        assert!(std::fs::metadata(&path).unwrap().blocks() >= 2048);
        let mut file = WantedFile::new(None);
        assert_eq!(file.read(&path, Uid(geteuid().as_raw())), WantedFileReading::New(Some(3)));
        assert!(std::fs::metadata(&path).unwrap().blocks() <= 64);
        assert_eq!(std::fs::read(&path).unwrap(), b"3", "the number stays");
        assert_eq!(file.ignored_reason(), None);
    }

    #[test]
    fn a_number_that_a_program_writes_between_the_check_and_the_giving_back_stays_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("want");
        let owner = Uid(geteuid().as_raw());
        std::fs::write(&path, "3").unwrap();
        let opened = OpenOptions::new().write(true).open(&path).unwrap();
        // Where nothing can be reserved, nothing is given back either.
        let _ = fallocate(&opened, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, 1 << 20);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1, "what the daemon checks first");
        File::options().write(true).open(&path).unwrap().write_all(b"12").unwrap();
        assert!(!shrink_opened(&opened, owner).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), b"12");
        std::fs::write(&path, vec![b'1'; 5000]).unwrap();
        assert!(shrink_opened(&opened, owner).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    }

    #[test]
    fn links_and_files_of_others_are_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let (path, target) = (directory.path().join("want"), directory.path().join("target"));
        let owner = Uid(geteuid().as_raw());
        std::fs::write(&target, "5").unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert!(read_text(&path, owner).is_err());
        std::fs::remove_file(&path).unwrap();
        std::fs::hard_link(&target, &path).unwrap();
        assert!(read_text(&path, owner).is_err());
        std::fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(read_text(&path, owner).is_err(), "and a pipe does not block");
        assert!(read_text(&target, Uid(owner.0 + 1)).is_err());
    }
}
