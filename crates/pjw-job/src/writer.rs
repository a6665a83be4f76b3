//! The writer of the core map, which is the file `coremap` of a job. pjwd has one writer for each job.
//!
//! The writer never touches the mapped memory itself: a file that somebody truncates, or a full file system, would end
//! the process by SIGBUS. The writer writes the content by pwrite(2), and lets the kernel change the sequence counter
//! (futex(2), `FUTEX_WAKE_OP`), which also wakes the readers.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use crate::directory::FILE_MODE;
use crate::futex;
use crate::layout::{
    COREMAP_BYTES, CoreMapContent, EPOCH_OFFSET, RESERVED_OFFSET, SEQUENCE_OFFSET, has_known_header,
    sequence_of, to_words,
};
use crate::page::{map, unmap};

/// The writer of the core map of one job. The core map is the file `coremap`, which contains the CPUs of the job. The
/// programs of the job map the file into their memory. pjwd has one writer for each job.
#[derive(Debug)]
pub struct CoreMapWriter {
    file: File,
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
        Self::of_file(file, content.clone())
    }

    /// Opens the core map (the file `coremap`, which contains the CPUs of a job) that an earlier daemon of the same
    /// user left at `path`. Programs that have already mapped the file then see also what this daemon writes. The file
    /// must be a regular file of this user with a single hard link. It must have 4096 bytes and a known version of the
    /// layout. `None` if there is no such file, or if it can't be read or mapped.
    #[must_use]
    pub fn open(path: &Path) -> Option<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = options.open(path).ok()?;
        let metadata = file.metadata().ok()?;
        // SAFETY: the call has no arguments and can't fail.
        let user = unsafe { libc::geteuid() };
        let is_page = metadata.is_file() && metadata.len() == COREMAP_BYTES as u64;
        if !is_page || metadata.uid() != user || metadata.nlink() != 1 {
            return None;
        }
        file.set_permissions(PermissionsExt::from_mode(FILE_MODE)).ok()?;
        let mut page = [0; COREMAP_BYTES];
        file.read_exact_at(&mut page, 0).ok()?;
        let mut last = CoreMapContent::decode(&to_words(&page)).filter(|_| has_known_header(&page))?;
        // Only a write ends the state in which no program can read the core map. So no caller may find that the core
        // map has the wanted content already.
        last.is_live &= sequence_of(&page).is_multiple_of(2);
        Self::of_file(file, last).ok()
    }

    fn of_file(file: File, last: CoreMapContent) -> io::Result<Self> {
        let page = map(&file, libc::PROT_READ | libc::PROT_WRITE)?;
        Ok(Self { file, page, last })
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
    /// If the file was truncated, or if the file system refuses the write. The file can then stay marked as being
    /// written, so that no program can read it. The caller should replace the file by [`CoreMapWriter::create`].
    pub fn write(&mut self, content: &CoreMapContent) -> io::Result<()> {
        let mut old_page = [0; COREMAP_BYTES];
        self.file.read_exact_at(&mut old_page, 0)?;
        // If a daemon was killed while it wrote, the counter is odd already.
        if sequence_of(&old_page).is_multiple_of(2) {
            self.advance(RESERVED_OFFSET)?;
        }
        fence(Ordering::SeqCst);
        let page = content.encode(0);
        self.file.write_all_at(&page[EPOCH_OFFSET..], EPOCH_OFFSET as u64)?;
        fence(Ordering::SeqCst);
        self.advance(SEQUENCE_OFFSET)?;
        self.last = content.clone();
        Ok(())
    }

    /// Marks the core map (the file `coremap` of the job) as no longer kept up to date: sets
    /// [`CoreMapContent::is_live`] to false, and makes all sets of CPUs empty. Wakes the programs that wait for a
    /// change of the core map. Does not remove the file: this is left to the caller.
    ///
    /// # Errors
    /// The errors of [`CoreMapWriter::write`].
    pub fn mark_not_live(mut self) -> io::Result<()> {
        let content =
            CoreMapContent { is_live: false, epoch: self.last.epoch + 1, ..CoreMapContent::default() };
        self.write(&content)
    }

    /// Adds 1 to the sequence counter, and wakes all programs that wait for the word at the offset `waiters_offset`.
    fn advance(&self, waiters_offset: usize) -> io::Result<()> {
        let word = |offset: usize| self.page.as_ptr().cast::<u32>().wrapping_add(offset / 4);
        // SAFETY: both words are in the page, which is mapped until this value is dropped.
        unsafe { futex::add_one_and_wake(word(SEQUENCE_OFFSET), word(waiters_offset)) }
    }
}

impl Drop for CoreMapWriter {
    fn drop(&mut self) {
        unmap(self.page);
    }
}
