//! The writer of the core map, which is the file `coremap` of a job. pjwd has one writer for each job.
//!
//! The writer never touches the mapped memory itself: a file that somebody truncates, or a full file system, would end
//! the process by SIGBUS. The writer writes the content by pwrite(2), and lets the kernel change the sequence counter
//! (futex(2), `FUTEX_WAKE_OP`), which also wakes the readers.
//!
//! The writer opens the file for each write, and closes it afterwards. The files of many jobs would otherwise take all
//! descriptors of pjwd. The mapping needs no descriptor. By the mapping, the writer ends the core map also after the
//! file was removed.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use crate::directory::FILE_MODE;
use crate::futex::{self, Change};
use crate::layout::{
    COREMAP_BYTES, CoreMapContent, EPOCH_OFFSET, LEAVING_AT_OFFSET, LOW_EPOCH_OFFSET, RESERVED_OFFSET,
    SEQUENCE_OFFSET, SETS_OFFSET, has_known_header, sequence_of, to_words,
};
use crate::page::{map, unmap};

/// The writer of the core map of one job. The core map is the file `coremap`, which contains the CPUs of the job. The
/// programs of the job map the file into their memory. pjwd has one writer for each job. A writer maps the file too,
/// and keeps no descriptor of the file.
#[derive(Debug)]
pub struct CoreMapWriter {
    path: PathBuf,
    /// The device and the inode of the file. No other file has both while this one is mapped.
    file_id: (u64, u64),
    page: NonNull<u64>,
    /// The present content of the core map, as [`CoreMapWriter::content`] describes.
    last: CoreMapContent,
}

// SAFETY: the pointer is only passed to the kernel.
unsafe impl Send for CoreMapWriter {}

impl CoreMapWriter {
    /// Makes a core map (the file `coremap` of a job) with the content `content` at `path`, with mode 0644. An
    /// existing file at `path` is replaced. The core map is first written to `temporary_path` and then renamed, so no
    /// program finds an incomplete core map at `path`. Both paths must be in the same file system. An existing file
    /// at `temporary_path` is removed.
    ///
    /// # Errors
    /// If the file can't be made, for example because the file system is full.
    pub fn create(path: &Path, temporary_path: &Path, content: &CoreMapContent) -> io::Result<Self> {
        match std::fs::remove_file(temporary_path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(temporary_path)?;
        let written = file
            .write_all(&content.encode(0))
            .and_then(|()| file.set_permissions(PermissionsExt::from_mode(FILE_MODE)))
            .and_then(|()| std::fs::rename(temporary_path, path));
        if let Err(error) = written {
            let _ = std::fs::remove_file(temporary_path);
            return Err(error);
        }
        Self::of_file(path, &file, content.clone())
    }

    /// Opens the core map (the file `coremap`, which contains the CPUs of a job) that an earlier daemon of the same
    /// user left at `path`. Sets the mode of the file to 0644. Programs that have already mapped the file then see also
    /// what this daemon writes. The file must be a regular file of this user with a single hard link. It must have 4096
    /// bytes and a known version of the layout. `None` if there is no such file, or if it can't be read or mapped.
    ///
    /// # Errors
    /// If this process or the system has no free file descriptor. It is then not known whether there is such a file.
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        match open_file(path) {
            Ok((file, metadata)) => Ok(Self::of_earlier_daemon(path, &file, &metadata)),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// The writer of the opened file `file`, which is at `path` and has the metadata `metadata`. `None` if it is not
    /// the core map of an earlier daemon, as [`CoreMapWriter::open`] says.
    fn of_earlier_daemon(path: &Path, file: &File, metadata: &Metadata) -> Option<Self> {
        // SAFETY: the call has no arguments and can't fail.
        let user = unsafe { libc::geteuid() };
        if !has_size_of_page(metadata) || metadata.uid() != user || metadata.nlink() != 1 {
            return None;
        }
        file.set_permissions(PermissionsExt::from_mode(FILE_MODE)).ok()?;
        let mut page = [0; COREMAP_BYTES];
        file.read_exact_at(&mut page, 0).ok()?;
        let mut last = CoreMapContent::decode(&to_words(&page)).filter(|_| has_known_header(&page))?;
        // Only a write ends the state in which no program can read the core map. So no caller may find that the core
        // map has the wanted content already.
        last.is_live &= sequence_of(&page).is_multiple_of(2);
        Self::of_file(path, file, last).ok()
    }

    /// The writer of the opened file `file`, which is at `path` and has the content `last`.
    fn of_file(path: &Path, file: &File, last: CoreMapContent) -> io::Result<Self> {
        let file_id = id_of(&file.metadata()?);
        let page = map(file, libc::PROT_READ | libc::PROT_WRITE)?;
        Ok(Self { path: path.to_owned(), file_id, page, last })
    }

    /// Returns the present content of the core map: the content that this writer wrote last. Before the first write,
    /// this is the content with which the core map was made or opened. If an earlier daemon was killed while it wrote
    /// the core map, [`CoreMapContent::is_live`] is false until the first write.
    #[must_use]
    pub fn content(&self) -> &CoreMapContent {
        &self.last
    }

    /// Writes `content` into the core map (the file `coremap` of the job), and wakes the programs that wait for a
    /// change of the core map.
    ///
    /// # Errors
    /// If the file was truncated, removed or replaced, if it can't be opened, or if the file system refuses the write.
    /// The file can then stay marked as being written, so that no program can read it. The caller should replace the
    /// file by [`CoreMapWriter::create`], and then call [`CoreMapWriter::mark_not_live`] of this writer.
    ///
    /// If this process or the system has no free file descriptor (EMFILE, ENFILE), the file keeps its content. The
    /// caller should then call this function again later.
    pub fn write(&mut self, content: &CoreMapContent) -> io::Result<()> {
        let file = self.open_mapped_file()?;
        self.begin_write()?;
        fence(Ordering::SeqCst);
        let page = content.encode(0);
        file.write_all_at(&page[EPOCH_OFFSET..], EPOCH_OFFSET as u64)?;
        fence(Ordering::SeqCst);
        self.end_write()?;
        self.last = content.clone();
        Ok(())
    }

    /// Opens the file at the path of this writer.
    ///
    /// # Errors
    /// If there is no file or another one, or if the file was truncated.
    fn open_mapped_file(&self) -> io::Result<File> {
        let (file, metadata) = open_file(&self.path)?;
        if id_of(&metadata) != self.file_id || !has_size_of_page(&metadata) {
            return Err(io::Error::other("the file was replaced or truncated"));
        }
        Ok(file)
    }

    /// Marks the core map (the file `coremap` of the job) as no longer kept up to date: sets
    /// [`CoreMapContent::is_live`] to false, adds 1 to the epoch, and makes all sets of CPUs empty. Wakes the programs
    /// that wait for a change of the core map. Does not remove the file: this is left to the caller. The file may be
    /// removed or replaced already. Opens no file.
    ///
    /// # Errors
    /// If the file was truncated, or if its file system is full.
    pub fn mark_not_live(self) -> io::Result<()> {
        self.begin_write()?;
        self.change(Change::AddOne, LOW_EPOCH_OFFSET, RESERVED_OFFSET)?;
        // All fields between the epoch and the sets, such as the flags and the number of words in use of each set.
        for offset in (LEAVING_AT_OFFSET..SETS_OFFSET).step_by(4) {
            self.change(Change::SetToZero, offset, RESERVED_OFFSET)?;
        }
        self.end_write()
    }

    /// Makes the sequence counter odd. It is odd already if a write was not completed.
    fn begin_write(&self) -> io::Result<()> {
        self.change(Change::MakeOdd, SEQUENCE_OFFSET, RESERVED_OFFSET)
    }

    /// Makes the sequence counter even, and wakes all programs that wait for another value of it.
    fn end_write(&self) -> io::Result<()> {
        self.change(Change::AddOne, SEQUENCE_OFFSET, SEQUENCE_OFFSET)
    }

    /// Changes the 4-byte number at the offset `offset`, and wakes all programs that wait for the number at the offset
    /// `waiters_offset`.
    fn change(&self, change: Change, offset: usize, waiters_offset: usize) -> io::Result<()> {
        let word = |offset: usize| self.page.as_ptr().cast::<u32>().wrapping_add(offset / 4);
        // SAFETY: both words are in the page, which is mapped until this value is dropped.
        unsafe { futex::change_and_wake(change, word(offset), word(waiters_offset)) }
    }
}

/// Opens the file at `path` for reading and writing, and does not follow a link.
fn open_file(path: &Path) -> io::Result<(File, Metadata)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    Ok((file, metadata))
}

/// Whether the file is a regular one with the size of a core map.
fn has_size_of_page(metadata: &Metadata) -> bool {
    metadata.is_file() && metadata.len() == COREMAP_BYTES as u64
}

/// The device and the inode of a file.
fn id_of(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

impl Drop for CoreMapWriter {
    fn drop(&mut self) {
        unmap(self.page);
    }
}
