//! The reader of the core map, which is the file `coremap` of a job. The reader maps the file into the memory of
//! its process. After that it reads the content without a system call.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use pjw_core::cpuset::Pu;
use thiserror::Error;

use crate::futex;
use crate::layout::{
    COREMAP_BYTES, COREMAP_WORDS, CoreMapContent, FLAGS_OFFSET, HEADER_WORDS, LIVE_FLAG, SEQUENCE_OFFSET,
    cpu_bit_position, cpu_set_word_ranges, has_known_header,
};

/// The number of times that a reader tries again without giving up its CPU, while pjwd writes. A write takes some
/// microseconds.
const SPINS: u32 = 200;
/// The time for which a reader then tries again, before it returns [`CoreMapError::Unfinished`]. A write can stay
/// incomplete for longer: if pjwd was killed during the write, until the next pjwd writes the core map, or while the
/// machine stands still.
const READ_TIMEOUT: Duration = Duration::from_millis(100);
/// A value that no sequence counter has, because the counter has 32 bits.
const NO_SEQUENCE: u64 = u64::MAX;

/// Error: a program can't read the core map of its job. The core map is the file `coremap` in which pjwd publishes
/// the CPUs of the job.
#[derive(Debug, Error)]
pub enum CoreMapError {
    /// The file `coremap` can't be opened or mapped.
    #[error("can't read the core map {path}: {source}", path = path.display())]
    OpenFailed {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// The file is no core map that this crate can read. Either it is no regular file, its size is not
    /// [`COREMAP_BYTES`], its first 8 bytes are not [`crate::layout::MAGIC`], or its layout has another version.
    #[error(
        "{path} is no core map of version 1: use the pjw-job of the same release as pjwd", path = path.display()
    )]
    Unknown {
        /// The path of the file.
        path: PathBuf,
    },
    /// pjwd was in the middle of a write of the core map for 100 ms. This happens if pjwd was killed during the write,
    /// and no pjwd has written the core map since. It also happens if the machine stands still during the write.
    #[error("the core map is unfinished: pjwd was killed while it wrote; start pjwd again")]
    Unfinished,
}

/// A reader of the core map of a job. The core map is the file `coremap` in which pjwd publishes the CPUs of the job.
/// The file is mapped into the memory of this process, so reading it makes no system call.
#[derive(Debug)]
pub struct CoreMapReader {
    page: NonNull<u64>,
    /// The device and the inode of the file. No other file has both while this one is mapped.
    file_id: (u64, u64),
    /// The sequence counter at the beginning of the last read that timed out. [`NO_SEQUENCE`] if none did.
    timed_out_sequence: AtomicU64,
}

// SAFETY: the memory is only read, and only by atomic loads.
unsafe impl Send for CoreMapReader {}
// SAFETY: as above.
unsafe impl Sync for CoreMapReader {}

impl CoreMapReader {
    /// Maps the core map (the file `coremap` of a job) at `path` into the memory of this process.
    ///
    /// # Errors
    /// [`CoreMapError::OpenFailed`] if the file can't be opened or mapped. [`CoreMapError::Unknown`] if the file is no
    /// core map, or has a layout of another version.
    pub fn open(path: &Path) -> Result<Self, CoreMapError> {
        let failed = |source| CoreMapError::OpenFailed { path: path.to_owned(), source };
        let options = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).clone();
        let mut file = options.open(path).map_err(failed)?;
        let mut page = [0; COREMAP_BYTES];
        let metadata = file.metadata().map_err(failed)?;
        let is_page = metadata.is_file() && metadata.len() == COREMAP_BYTES as u64;
        if !is_page || file.read_exact(&mut page).is_err() || !has_known_header(&page) {
            return Err(CoreMapError::Unknown { path: path.to_owned() });
        }
        let page = map(&file, libc::PROT_READ).map_err(failed)?;
        let file_id = (metadata.dev(), metadata.ino());
        Ok(Self { page, file_id, timed_out_sequence: AtomicU64::new(NO_SEQUENCE) })
    }

    /// Returns whether this reader and `other` have mapped the same file.
    pub(crate) fn has_same_file_as(&self, other: &Self) -> bool {
        self.file_id == other.file_id
    }

    /// Returns the content of the core map (the file `coremap` of a job). All fields are from the same write of pjwd.
    ///
    /// # Errors
    /// [`CoreMapError::Unfinished`] if a write of pjwd is still not complete after 100 ms, for example because pjwd was
    /// killed during the write. Also if the content of the file is invalid.
    pub fn read(&self) -> Result<CoreMapContent, CoreMapError> {
        self.read_complete(READ_TIMEOUT).map(|(content, _)| content)
    }

    /// Returns the content of the core map as [`CoreMapReader::read`] does, but waits only once for the end of one
    /// write: if a read timed out, and the sequence counter is the same since, this call fails at once.
    ///
    /// # Errors
    /// The errors of [`CoreMapReader::read`].
    pub(crate) fn read_with_one_wait(&self) -> Result<CoreMapContent, CoreMapError> {
        self.read_complete(self.remaining_timeout()).map(|(content, _)| content)
    }

    /// Returns how long a read waits for the end of a write if none is to wait twice for the same write.
    fn remaining_timeout(&self) -> Duration {
        let sequence = u64::from(self.sequence().load(Ordering::Relaxed));
        if self.timed_out_sequence.load(Ordering::Relaxed) == sequence {
            Duration::ZERO
        } else {
            READ_TIMEOUT
        }
    }

    /// Returns the content of the core map, and the sequence counter that belongs to it. While pjwd writes the core
    /// map, tries again: a fixed number of times, and then for `timeout`.
    ///
    /// # Errors
    /// [`CoreMapError::Unfinished`] if no complete content was read in this time.
    fn read_complete(&self, timeout: Duration) -> Result<(CoreMapContent, u32), CoreMapError> {
        let sequence = u64::from(self.sequence().load(Ordering::Relaxed));
        let mut begun = None;
        for attempt in 0_u32.. {
            if let Some(read) = self.try_read() {
                return Ok(read);
            }
            if attempt < SPINS {
                std::hint::spin_loop();
            } else if begun.get_or_insert_with(Instant::now).elapsed() < timeout {
                std::thread::yield_now();
            } else {
                break;
            }
        }
        // If another write has begun since, the next read waits for that one.
        if !timeout.is_zero() {
            self.timed_out_sequence.store(sequence, Ordering::Relaxed);
        }
        Err(CoreMapError::Unfinished)
    }

    /// Waits until the core map (the file `coremap` of a job) changes, and returns its new content. Each change gives
    /// the core map a new number, the epoch. `epoch` is [`CoreMapContent::epoch`] of the content that the caller
    /// already has. If the epoch in the core map already differs from `epoch`, the call returns at once. The call
    /// also returns when pjwd no longer keeps this file up to date ([`CoreMapContent::is_live`] is false). Returns
    /// `None` if the time `timeout` has passed. If `timeout` is `None`, waits without a limit.
    ///
    /// # Errors
    /// The errors of [`CoreMapReader::read`].
    pub fn wait_for_change(
        &self,
        epoch: u64,
        timeout: Option<Duration>,
    ) -> Result<Option<CoreMapContent>, CoreMapError> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let (content, sequence) = self.read_complete(READ_TIMEOUT)?;
            if content.epoch != epoch || !content.is_live {
                return Ok(Some(content));
            }
            let remaining = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if remaining.is_some_and(|remaining| remaining.is_zero()) {
                return Ok(None);
            }
            futex::wait_while_equal(self.sequence(), sequence, remaining);
        }
    }

    /// Returns whether the job may run on the CPU `cpu`, according to the core map (the file `coremap` of the job):
    /// the job owns the CPU, or borrows it from another job. Reads a few words of memory, and makes no system call.
    /// `None` in three cases:
    ///
    /// - pjwd is writing the core map at this moment.
    /// - pjwd no longer keeps this file up to date ([`CoreMapContent::is_live`] is false).
    /// - The number of the CPU is [`crate::layout::MAX_CPUS`] or more.
    #[must_use]
    pub fn has_cpu(&self, cpu: Pu) -> Option<bool> {
        let (words, bit) = cpu_bit_position(cpu)?;
        let before = self.sequence().load(Ordering::Acquire);
        let flags = self.word(FLAGS_OFFSET / 8).load(Ordering::Relaxed).to_ne_bytes();
        let has_cpu = words.iter().any(|&word| self.word(word).load(Ordering::Relaxed) & bit != 0);
        fence(Ordering::Acquire);
        let is_stable = before.is_multiple_of(2) && self.sequence().load(Ordering::Relaxed) == before;
        let is_live = u32::from_ne_bytes([flags[0], flags[1], flags[2], flags[3]]) & LIVE_FLAG != 0;
        (is_stable && is_live).then_some(has_cpu)
    }

    /// Returns the content of the core map, and the sequence counter that belongs to it. `None` if pjwd writes during
    /// the call, or if the content is malformed.
    fn try_read(&self) -> Option<(CoreMapContent, u32)> {
        let before = self.sequence().load(Ordering::Acquire);
        if !before.is_multiple_of(2) {
            return None;
        }
        let mut words = [0; COREMAP_WORDS];
        self.copy_words(0..HEADER_WORDS, &mut words);
        // The number of words in use may be half-written. The sequence counter then shows afterwards that pjwd wrote.
        for range in cpu_set_word_ranges(&words)? {
            self.copy_words(range, &mut words);
        }
        fence(Ordering::Acquire);
        if self.sequence().load(Ordering::Relaxed) != before {
            return None;
        }
        CoreMapContent::decode(&words).map(|content| (content, before))
    }

    /// Copies the words of the core map with the indices in `range` to the same indices of `words`.
    fn copy_words(&self, range: Range<usize>, words: &mut [u64; COREMAP_WORDS]) {
        range.for_each(|index| words[index] = self.word(index).load(Ordering::Relaxed));
    }

    fn sequence(&self) -> &AtomicU32 {
        // SAFETY: the page is mapped until this value is dropped, and the offset lies in it and is aligned.
        unsafe { AtomicU32::from_ptr(self.page.as_ptr().cast::<u32>().add(SEQUENCE_OFFSET / 4)) }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < COREMAP_WORDS);
        // SAFETY: the page is mapped until this value is dropped. All callers pass the index of a word in it.
        unsafe { AtomicU64::from_ptr(self.page.as_ptr().add(index)) }
    }
}

impl Drop for CoreMapReader {
    fn drop(&mut self) {
        unmap(self.page);
    }
}

/// Maps the core map (the file `coremap` of a job) into the memory of this process, and returns the address. Other
/// processes that map `file` share the memory. `protection` has the values of mmap(2), such as `PROT_READ`.
pub(crate) fn map(file: &File, protection: libc::c_int) -> io::Result<NonNull<u64>> {
    // SAFETY: the kernel chooses the address, so no memory of this process is replaced.
    let page = unsafe {
        libc::mmap(std::ptr::null_mut(), COREMAP_BYTES, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(page.cast()).ok_or_else(|| io::Error::other("the page was mapped at address 0"))
}

/// Removes the core map at `page` from the memory of this process. `page` must be from [`map`].
pub(crate) fn unmap(page: NonNull<u64>) {
    // SAFETY: the caller got the page from `map` and does not use it any more.
    unsafe { libc::munmap(page.as_ptr().cast(), COREMAP_BYTES) };
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_reader_waits_once_for_the_end_of_a_write() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("coremap");
        let content = CoreMapContent { is_live: true, ..CoreMapContent::default() };
        std::fs::write(&path, content.encode(0)).unwrap();
        let reader = CoreMapReader::open(&path).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let set_sequence = |sequence: u32| {
            file.write_all_at(&sequence.to_ne_bytes(), SEQUENCE_OFFSET as u64).unwrap();
        };
        let is_unfinished = || matches!(reader.read_with_one_wait(), Err(CoreMapError::Unfinished));
        set_sequence(1);
        assert_eq!(reader.remaining_timeout(), READ_TIMEOUT);
        assert!(is_unfinished());
        assert_eq!(reader.remaining_timeout(), Duration::ZERO, "the reader has waited for this write");
        assert!(is_unfinished());
        set_sequence(3);
        assert_eq!(reader.remaining_timeout(), READ_TIMEOUT, "another write has begun");
        set_sequence(4);
        assert_eq!(reader.read_with_one_wait().unwrap(), content);
    }
}
